"""Blocks of rows, each with its group's matrix: a batch of dense products of static shape.

Groups start at multiples of the block, so a block has one matrix. The work is that of the rows,
whatever the number of groups; the cost beside it is one copy of a matrix per block.
"""

from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.products import wide_einsum


def _block_groups(rows_MX, group_sizes_E, block):
    """(the group of each block, whether it lies in any)."""
    starts_N = jnp.arange(rows_MX.shape[0] // block) * block
    ends_E = jnp.cumsum(group_sizes_E)
    groups_N = jnp.searchsorted(ends_E, starts_N, side="right", method="compare_all")
    inside_N = groups_N < group_sizes_E.shape[0]
    return jnp.where(inside_N, groups_N, 0), inside_N


def _product(rows_MX, weights_EXY, groups_N, inside_N):
    rows_NBX = rows_MX.reshape(groups_N.shape[0], -1, rows_MX.shape[-1])
    out_NBY = jnp.einsum("nbx,nxy->nby", rows_NBX, weights_EXY[groups_N])
    return jnp.where(inside_N[:, None, None], out_NBY, 0).reshape(rows_MX.shape[0], -1)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def grouped_matmul(rows_MX, weights_EXY, group_sizes_E, block):
    """As `reference.grouped_matmul`; every group size is a multiple of `block`, as is M."""
    return _forward(rows_MX, weights_EXY, group_sizes_E, block)[0]


def _forward(rows_MX, weights_EXY, group_sizes_E, block):
    groups_N, inside_N = _block_groups(rows_MX, group_sizes_E, block)
    out_MY = _product(rows_MX, weights_EXY, groups_N, inside_N)
    return out_MY, (rows_MX, weights_EXY, groups_N, inside_N)


def _backward(block, residuals, d_MY):
    rows_MX, weights_EXY, groups_N, inside_N = residuals
    d_rows_MX = _product(d_MY, jnp.swapaxes(weights_EXY, 1, 2), groups_N, inside_N)
    d_NBY = jnp.where(inside_N[:, None, None], d_MY.reshape(groups_N.shape[0], block, -1), 0)
    rows_NBX = rows_MX.reshape(groups_N.shape[0], block, -1)
    rows_NBX = jnp.where(inside_N[:, None, None], rows_NBX, 0)  # 0 x NaN is not 0
    per_block_NXY = wide_einsum("nbx,nby->nxy", rows_NBX, d_NBY)
    d_weights_EXY = jax.ops.segment_sum(per_block_NXY, groups_N, weights_EXY.shape[0])
    return d_rows_MX.astype(rows_MX.dtype), d_weights_EXY.astype(weights_EXY.dtype), None


grouped_matmul.defvjp(_forward, _backward)
