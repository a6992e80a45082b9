"""What these kernels have in common: 64 x 64 tiles in a warpgroup's registers and in shared memory."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

CHUNK = 64  # tokens of a chunk: the rows of a warpgroup's matrix product
TILE = 64  # channels of a tile: what 128 bytes of bfloat16 hold
LOG2E = math.log2(math.e)
MATRIX: Any = plgpu.Layout.WGMMA
ROWS, COLUMNS = MATRIX.reduce(1), MATRIX.reduce(0)

# Barriers are placed by hand. Loads and stores in a product's layout are a warp's own, so what needs one is
# shared memory that a product or a copy reads: after it is written, and before it is written over (one
# warp's wait for a product does not speak for another's). `plgpu.commit_smem` is such a barrier.
PARAMS = plgpu.CompilerParams(
    approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
)


def tiles(*shape: int, dtype: Any = jnp.bfloat16, columns: int = TILE) -> Any:
    """Shared memory that tensor cores read; 64 or 32 `columns` of it can be written alone."""
    swizzle = columns * jnp.dtype(dtype).itemsize
    transforms = plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(swizzle)
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def channels(c) -> Any:
    """The c-th tile of an axis."""
    return pl.ds(c * TILE, TILE)


def up(size: int, unit: int = TILE) -> int:
    """To whole tiles, or units."""
    return -(-size // unit) * unit


def pad(x, *sizes: int):
    """Zeros behind x, up to `sizes`; x itself where it has them."""
    if x.shape == sizes:
        return x
    return jnp.pad(x, [(0, size - now) for now, size in zip(x.shape, sizes, strict=True)])


def turned(ref):
    """A tile with rows and columns exchanged, for a product or a store."""
    return ref.transpose((1, 0))


def load(ref, layout=MATRIX):
    """From shared memory into registers, in float32."""
    return plgpu.layout_cast(ref[...], layout).astype(jnp.float32)


def rows(x_C, width: int = TILE):
    """A value per row, over all columns."""
    return lax.broadcast_in_dim(x_C, (x_C.shape[0], width), (0,))


def columns(x_K):
    """A value per column, over all rows of a chunk."""
    return lax.broadcast_in_dim(x_K, (CHUNK, x_K.shape[0]), (1,))


def products(*sums):
    """For each list of pairs (a [64, k], b [k, n]) the float32 sum of a b, all in flight at once."""

    def run(*refs):
        for ref, pairs in zip(refs, sums, strict=True):
            for a, b in pairs:
                plgpu.wgmma(ref, a, b)
        return [ref[...] for ref in refs]

    return pl.run_scoped(run, *(plgpu.WGMMAAccumulatorRef((CHUNK, pairs[0][1].shape[1])) for pairs in sums))


def replace(*results):
    """Of each (operand in shared memory, its product, target): the product in its place, and out."""
    plgpu.commit_smem()
    for ref, product, _ in results:
        ref[...] = product.astype(jnp.bfloat16)
    plgpu.commit_smem()
    for ref, _, target in results:
        plgpu.copy_smem_to_gmem(ref, target)


def positions(opaque):
    """(row, column) of every entry of a 64 x 64 matrix.

    `opaque` is 0, which the compiler must not know: matrices made of positions are left operands in
    registers, and where such an operand has constant parts, ptxas (13.0) writes a constant again while a
    product is still reading it.
    """
    line = lambda layout: plgpu.broadcasted_iota(jnp.int32, (CHUNK,), 0, layout=layout) + opaque
    return rows(line(ROWS), CHUNK), columns(line(COLUMNS))


def zero(rate, stage: int):
    """0 at run time, as rates are positive; the compiler must not know that it is that of another stage.

    What depends on it is made anew. Else the compiler would keep addresses, masks and factors of all stages,
    and there are no registers for them.
    """
    return (rate < -1.0 * stage).astype(jnp.int32)


def rounded(x):
    """To bfloat16, as what a product reads."""
    return x.astype(jnp.bfloat16).astype(jnp.float32)


def split(x):
    """x as the sum of two bfloat16 matrices, good to 16 bits."""
    high = x.astype(jnp.bfloat16)
    return high, (x - high.astype(jnp.float32)).astype(jnp.bfloat16)


def bfloat16(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def float32(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.float32)
