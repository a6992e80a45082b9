"""The definition: every row times every matrix, then the right one is kept."""

import jax.numpy as jnp


def grouped_matmul(rows_MX, weights_EXY, group_sizes_E):
    """Row m times the matrix of the group it falls in; rows beyond all groups give 0."""
    ends_E = jnp.cumsum(group_sizes_E)
    position_M1 = jnp.arange(rows_MX.shape[0])[:, None]
    mine_ME = (position_M1 >= (ends_E - group_sizes_E)[None]) & (position_M1 < ends_E[None])
    rows_MX = jnp.where(jnp.any(mine_ME, axis=1, keepdims=True), rows_MX, 0)  # 0 x NaN is not 0
    all_MEY = jnp.einsum("mx,exy->mey", rows_MX, weights_EXY)
    return jnp.sum(jnp.where(mine_ME[..., None], all_MEY, 0), axis=1)
