"""Decays inside a chunk, in registers: exponents as sums of the very steps that they span.

A sum over tokens is a product with a matrix of 0 and one unit. Log-decays enter it in float16, good to 11
bits. Tokens of other segments have weight 0, so that nothing depends on them.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.kda.mosaic_gpu.warpgroup import CHUNK, COLUMNS, LOG2E, ROWS, columns, rows

HALF, QUARTER = 32, 16  # tokens


class Segments(NamedTuple):
    """What tokens of packed rows may see of each other; all None where a row is one segment."""

    same: Any  # row and column are of one segment
    enters_C: Any  # 1 where the token goes on with the segment that the incoming state is of, else 0
    leaves_C: Any  # 1 where it is of the segment that the outgoing state is of
    through: Any  # 1 if the chunk holds the incoming segment only
    real_C: Any  # 0 at padding


NONE = Segments(None, None, None, None, None)


def segments(index_g, ids_s, b, n) -> Segments:
    """From the segments' indexes in device memory [B, T], and this chunk's in shared memory."""
    index_s, real_s = ids_s
    row, column = (plgpu.layout_cast(index_s[...], layout) for layout in (ROWS, COLUMNS))
    first = jnp.where(n == 0, 0, index_g[b, jnp.maximum(n * CHUNK - 1, 0)])
    last = index_g[b, n * CHUNK + CHUNK - 1]
    one = lambda chosen: chosen.astype(jnp.float32)
    real_C = plgpu.layout_cast(real_s[...], ROWS)
    return Segments(
        rows(row, CHUNK) == columns(column), one(row == first), one(row == last), one(first == last), real_C
    )


class Sums:
    """The matrices that sum log-decays g_m over tokens m, for rows i; `one` is what they are made of.

    `at` is (row, column) of every entry, and `same` which are of one segment, or None for all.

    Pairs of tokens i > j factor at a token between them. Where they are in the second and the first of a pair
    of blocks, that is the end of the first (`joined`), for halves of the chunk, quarters of a half and so on;
    both exponents are sums to that end, at most 0. In one of the smallest blocks both are sums from its
    beginning (`own`), and the column's is negated. So no exponent depends on a later token than the row's.
    Where one may (in gradients), blocks of twice the size do with sums from their middle (`around`). Rows
    with these serve for columns of the block before, too, which have sums to that middle (`ahead`).
    """

    def __init__(self, at, same, one: float = 1.0, dtype=jnp.bfloat16):
        (self.i, self.j), self.same, self._one, self._dtype = at, same, one, dtype

    def _matrix(self, chosen):
        chosen = chosen if self.same is None else chosen & self.same
        return jnp.where(chosen, self._one, 0.0).astype(self._dtype)

    def upto(self):
        """From the chunk's start to i."""
        return self._matrix(self.j <= self.i)

    def before(self):
        """From the chunk's start to i, which is not counted."""
        return self._matrix(self.j < self.i)

    def after(self):
        """From i to the chunk's end."""
        return self._matrix(self.j > self.i)

    def joined(self, size: int):
        """Between i and the end of the first block, where i is in one of a pair of blocks of this size."""
        end = (self.i & (-2 * size)) + size
        return self._matrix((self.j <= self.i) != (self.j < end))

    def own(self, size: int):
        """From the first token of i's block of this size, which is not counted, to i."""
        return self._matrix((self.j > (self.i & -size)) & (self.j <= self.i))

    def around(self, size: int):
        """From the middle of i's block of this size to i; before the middle from i to it, negated.

        The middle is the last token before the second half: rows' factors are largest at the first token, and
        with one step less there they have more room.
        """
        middle = (self.i & -size) + size // 2 - 1
        after = self._matrix((self.j > middle) & (self.j <= self.i))
        return after - self._matrix((self.j > self.i) & (self.j <= middle))

    def ahead(self, size: int):
        """From i in the first of a pair of blocks of this size to the middle of the second."""
        middle = (self.i & (-2 * size)) + size + size // 2 - 1
        return self._matrix(((self.i & size) == 0) & (self.j > self.i) & (self.j <= middle))


def bounded(z, rate, lower_bound: float):
    """The bounded log-decay's logarithm to base 2, from logits with their bias."""
    # 1 / x as the square of rsqrt(x): one instruction where a division is eight.
    return (lower_bound * LOG2E) * jnp.square(lax.rsqrt(1.0 + jnp.exp2(z * (rate * -LOG2E))))


def unbounded(z, rate):
    """The same of the unbounded one, -rate softplus(z)."""
    z = z * LOG2E
    return -rate * (jnp.maximum(z, 0.0) + jnp.log2(1.0 + jnp.exp2(-jnp.abs(z))))
