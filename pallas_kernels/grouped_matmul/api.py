"""Shapes, defaults and the choice of implementation: the only module of the folder others import."""

from functools import partial
from typing import Literal

import chex
import jax
import jax.numpy as jnp

from pallas_kernels import choice
from pallas_kernels.grouped_matmul import reference, xla

Implementation = Literal["reference", "xla"]
BUILT = ("reference", "xla")
# Never `ragged_dot`: it multiplies by every matrix on CPU, and on GPU is 40 times below the card.
BEST = {"cpu": ("xla",), "gpu": ("xla",), "tpu": ("xla",)}
BLOCKS = {"cpu": (8, 32), "gpu": (16, 256), "tpu": (16, 256)}  # the smallest and largest worth having
choose = partial(choice.choose, "grouped_matmul", best=BEST, built=BUILT)


def alignment(rows: int, groups: int) -> int:
    """The number of rows that groups should start at multiples of, on this process's devices.

    About the size of a group, so that rounding groups up adds about as many rows again at worst.
    """
    low, high = BLOCKS[jax.default_backend()]
    return max(low, min(high, 1 << max(rows // groups, 1).bit_length() - 1))


def grouped_matmul(
    rows, weights, group_sizes, *, alignment: int, implementation: Implementation | None = None
):
    """Each row times the matrix of its group, for rows sorted by group.

    Differentiable in rows and weights; an empty group's gradient is 0.

    Args:
      rows: [M, X]; the groups' rows come first, in order. M is a multiple of `alignment`.
      weights: [E, X, Y].
      group_sizes: [E] integers, each a multiple of `alignment`, with a sum of at most M.
      alignment: what sizes are promised to be multiples of.
      implementation: a name, which runs or raises; None takes the best for the platform.

    Returns:
      [M, Y] in the rows' dtype; 0 for the rows beyond all groups.

    Raises:
      ValueError: an unknown implementation, or M not a multiple of `alignment`. AssertionError:
      shapes that do not fit (chex).
    """
    chosen = choose(implementation)
    M, X = rows.shape
    E, _, Y = weights.shape
    chex.assert_shape(weights, (E, X, Y))
    chex.assert_shape(group_sizes, (E,))
    if M % alignment:
        raise ValueError(f"grouped_matmul: {M} rows are no multiple of alignment={alignment}")
    if M == 0:
        return jnp.zeros((0, Y), rows.dtype)
    weights = weights.astype(rows.dtype)
    if chosen == "reference":
        return reference.grouped_matmul(rows, weights, group_sizes)
    return xla.grouped_matmul(rows, weights, group_sizes, alignment)
