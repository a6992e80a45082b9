"""Named shapes and inputs, shared by tests and benchmarks."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Case:
    """A shape, and how its rows are packed.

    `runs` are the (segment id, length) of the first row, in order; every other row is the one
    before it, turned by five places. None: rows of one segment.
    """

    B: int
    T: int
    H: int
    K: int
    V: int
    runs: tuple[tuple[int, int], ...] | None = None

    @property
    def segment_ids(self) -> np.ndarray | None:
        if self.runs is None:
            return None
        row_T = np.concatenate([np.full(length, name, np.int32) for name, length in self.runs])
        return np.stack([np.roll(row_T, 5 * row) for row in range(self.B)]).reshape(self.B, self.T)


SMALL = {  # around the tile (16) and the chunk (64), odd dims, padding anywhere
    "one_token": Case(2, 1, 2, 12, 20),
    "under_a_tile": Case(2, 15, 2, 12, 20, ((0, 1), (1, 3), (0, 1), (1, 2), (2, 8))),
    "one_tile": Case(2, 16, 2, 12, 20),
    "over_a_tile": Case(2, 17, 2, 12, 20, ((1, 16), (2, 1))),
    "under_a_chunk": Case(2, 63, 2, 12, 20, ((3, 17), (1, 15), (0, 15), (1, 16))),
    "one_chunk": Case(2, 64, 2, 12, 20),
    "over_a_chunk": Case(2, 65, 2, 12, 20, ((0, 3), (4, 20), (5, 1), (0, 2), (5, 25), (4, 9), (0, 5))),
    "odd_dims": Case(1, 33, 3, 5, 7),
    "wide_head": Case(1, 33, 1, 100, 60, ((1, 10), (2, 23))),
    "three_chunks": Case(3, 130, 1, 20, 12, ((1, 64), (2, 30), (1, 31), (2, 5))),
}

REAL = {
    "k3_layer": Case(1, 8192, 96, 128, 128),
    "k3_layer_packed": Case(1, 8192, 96, 128, 128, ((1, 3000), (2, 17), (3, 4000), (4, 1100), (0, 75))),
    "rows": Case(8, 4096, 16, 128, 128),
    "pair": Case(2, 8192, 32, 128, 128),
    "long": Case(1, 32768, 16, 128, 128),
    "longest": Case(1, 65536, 32, 128, 128),
    "ladder": Case(8, 512, 8, 64, 64),
    "decode_prompt": Case(64, 16, 8, 64, 64),
}


def _at_half(value: float) -> Callable:
    """Mild decays, and `value` in the middle token."""

    def gate(rng, shape):
        g = -0.1 * np.abs(rng.normal(size=shape))
        g[:, shape[1] // 2] = value
        return g

    return gate


def _bursts(rng, shape):
    """In each tile twelve violent tokens, then four that forget nearly nothing."""
    g = -1e-3 * np.abs(rng.normal(size=shape))
    g[:, np.arange(shape[1]) % 16 < 12] = -81.7
    return g


DECAYS: dict[str, Callable] = {  # of log-decays [B, T, H, K]
    "random": lambda rng, shape: -np.abs(rng.normal(size=shape)),
    "at_the_floor": lambda rng, shape: np.full(shape, -5.0),
    "long_memory": lambda rng, shape: -1e-4 * np.abs(rng.normal(size=shape)),
    "no_decay": lambda rng, shape: np.zeros(shape),
    "one_at_25": _at_half(-25.0),
    "one_at_1e4": _at_half(-1e4),
    "one_at_infinity": _at_half(-np.inf),
    "all_at_25": lambda rng, shape: np.full(shape, -25.0),
    "bursts": _bursts,
    "all_scales": lambda rng, shape: -np.exp(4 * rng.normal(size=shape)),
}


def _normal(seed: int) -> tuple[np.random.Generator, Callable]:
    rng = np.random.default_rng(seed)
    return rng, lambda *shape: rng.normal(size=shape)


def draw(case: Case, decay: str = "random", seed: int = 0) -> tuple[np.ndarray, ...]:
    """(q, k, v, log_decay, beta, initial_state) in float64; q and k have unit length."""
    rng, normal = _normal(seed)
    B, T, H, K, V = case.B, case.T, case.H, case.K, case.V
    q, k = (x / np.sqrt(np.sum(x * x, -1, keepdims=True)) for x in (normal(B, T, H, K), normal(B, T, H, K)))
    beta = 1 / (1 + np.exp(-normal(B, T, H)))
    return q, k, normal(B, T, H, V), DECAYS[decay](rng, (B, T, H, K)), beta, normal(B, H, K, V)


def draw_gated(case: Case, gate_logits: float | None = None, seed: int = 0) -> tuple[np.ndarray, ...]:
    """(q, k, v, gate_logits, beta_logits, a_log, dt_bias, initial_state) in float64.

    A number as `gate_logits` is what all of them are.
    """
    _, normal = _normal(seed)
    B, T, H, K, V = case.B, case.T, case.H, case.K, case.V
    z = normal(B, T, H, K) if gate_logits is None else np.full((B, T, H, K), gate_logits)
    return (
        normal(B, T, H, K), normal(B, T, H, K), normal(B, T, H, V), z, normal(B, T, H),
        0.5 * normal(H), normal(H, K), normal(B, H, K, V),
    )  # fmt: skip
