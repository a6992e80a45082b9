"""Named shapes and inputs, shared by tests and benchmarks."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Case:
    """A shape, and the segments of its rows: lengths of the S positions' segments, -1 for padding.

    `segments` are (index, length); every other row is the one before it, turned by three places.
    None: all of one segment.
    """

    B: int
    T: int
    S: int
    H: int
    K: int
    V: int
    segments: tuple[tuple[int, int], ...] | None = None

    @property
    def key_index(self) -> np.ndarray | None:
        if self.segments is None:
            return None
        row_S = np.concatenate([np.full(length, index, np.int32) for index, length in self.segments])
        return np.stack([np.roll(row_S, 3 * row) for row in range(self.B)]).reshape(self.B, self.S)

    @property
    def query_index(self) -> np.ndarray | None:
        key_index = self.key_index
        return None if key_index is None else key_index[:, self.S - self.T :]


SMALL = {  # around a block of 8
    "one_token": Case(2, 1, 1, 2, 5, 3),
    "one_query": Case(2, 1, 19, 2, 5, 3, ((0, 10), (-1, 2), (0, 7))),
    "under_a_block": Case(1, 7, 7, 1, 6, 4),
    "one_block": Case(2, 8, 8, 2, 6, 4, ((0, 3), (1, 5))),
    "packed": Case(2, 21, 21, 2, 6, 4, ((-1, 2), (0, 5), (1, 8), (-1, 3), (1, 1), (2, 2))),
    "cache": Case(2, 9, 22, 2, 6, 4, ((-1, 4), (0, 12), (1, 3), (-1, 3))),
    "cache_of_blocks": Case(1, 16, 40, 3, 4, 6),
}

REAL = {
    "k3_layer": Case(1, 8192, 8192, 96, 192, 128),
    "k3_layer_packed": Case(
        1, 8192, 8192, 96, 192, 128, ((0, 3000), (1, 17), (2, 4000), (3, 1100), (-1, 75))
    ),
    "ladder": Case(8, 512, 512, 8, 96, 64),
    "decode": Case(16, 1, 4096, 96, 192, 128),
}


def draw(case: Case, scale: float = 1.0, seed: int = 0) -> tuple[np.ndarray, ...]:
    """(query, key, value) in float64, queries multiplied by `scale`."""
    normal = np.random.default_rng(seed).normal
    B, H = case.B, case.H
    query, key = scale * normal(size=(B, case.T, H, case.K)), normal(size=(B, case.S, H, case.K))
    return query, key, normal(size=(B, case.S, H, case.V))
