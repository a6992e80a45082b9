"""Named shapes and inputs, shared by tests and benchmarks."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Case:
    """Rows of X channels, one X x Y matrix per group, and the groups' sizes.

    `rows` may be more than the sizes' sum: the rest belongs to no group.
    """

    rows: int
    X: int
    Y: int
    sizes: tuple[int, ...]
    alignment: int


SMALL = {
    "one_group": Case(8, 5, 3, (8,), 4),
    "empty_groups": Case(32, 5, 3, (0, 8, 0, 0, 16, 0), 4),
    "rows_of_no_group": Case(40, 6, 7, (4, 12, 0, 4), 4),
    "all_empty": Case(16, 6, 7, (0, 0, 0), 8),
    "no_alignment": Case(11, 5, 3, (3, 0, 1, 5), 1),
    "full": Case(24, 4, 6, (8, 8, 8), 8),
}

REAL = {  # tokens x active experts, spread evenly
    "k3_layer": Case(8192 * 16 + 896 * 256, 3584, 3072, (146 * 256,) * 14 + (0,) * 882, 256),
    "ladder": Case(8192 * 4, 256, 256, (1024,) * 32, 256),
}


def draw(case: Case, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(rows, weights, group sizes), the first two in float64."""
    normal = np.random.default_rng(seed).normal
    E = len(case.sizes)
    return normal(size=(case.rows, case.X)), normal(size=(E, case.X, case.Y)), np.array(case.sizes, np.int32)
