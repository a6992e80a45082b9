"""The inverse of a chunk's triangular matrix, in registers and on the matrix units."""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.kda.mosaic_gpu.decay import HALF
from pallas_kernels.kda.mosaic_gpu.warpgroup import CHUNK, columns, products, rows


def joins(places, size: int):
    """Rows of the second block of a pair of blocks, columns of the first."""
    i_C, j_C = places
    first = jnp.where((i_C & size) != 0, i_C & (-2 * size), -1)
    return rows(first, CHUNK) == columns(j_C & -size)


def _added(T, left, right):
    """T + left right."""
    return T + products([(left, right)])[0]


def inverse_of(A, a16, t16, places):
    """(I + A)^-1 of a strictly lower triangular A, by doubling; `a16` and `t16` are free memory.

    From blocks of size s, T <- T - T A T gives those of 2 s, with T A in the lower left of each pair only.
    Keys are unit vectors and beta < 1, so no entry of T is above 1: float16 holds it.
    """
    a16[...] = (-A).astype(jnp.float16)
    plgpu.commit_smem()
    T = jnp.where(joins(places, 1), -A, 0.0)
    T = jnp.where(rows(places[0], CHUNK) == columns(places[1]), 1.0, T)
    # Left to itself, the compiler would choose among float16 numbers, one by one.
    narrow = lambda x: lax.optimization_barrier(x).astype(jnp.float16)

    def by_A(T16, a16):
        """What was written becomes visible to the next product while this one is under way."""

        def run(total):
            plgpu.wgmma(total, T16, a16)
            plgpu.commit_smem()
            return total[...]

        return pl.run_scoped(run, plgpu.WGMMAAccumulatorRef((CHUNK, a16.shape[1])))

    for size in (2, 4, 8, 16):
        T16 = narrow(T)
        plgpu.commit_smem()
        t16[...] = T16
        x = jnp.where(joins(places, size), by_A(T16, a16), 0.0)
        T = _added(T, narrow(x), t16)
    # The last step needs no mask: the right half of T has nothing in the upper rows.
    early, late = pl.ds(0, HALF), pl.ds(HALF, HALF)
    left, right = (lax.slice(T, (0, at), (CHUNK, at + HALF)) for at in (0, HALF))
    T16 = narrow(left)
    plgpu.commit_smem()
    t16[:, early] = T16
    left = _added(left, narrow(by_A(narrow(right), a16.at[late, early])), t16.at[early, early])
    return lax.concatenate([left, right], 1)
