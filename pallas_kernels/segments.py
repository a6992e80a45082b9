"""Packed documents: what a row of segment ids means, said once for every op.

A segment is a maximal run of one positive id, zeros skipped: 1,0,1 is one segment and 1,2,1 are
three. Id 0 is padding.
"""

import jax
import jax.numpy as jnp


def segment_index(segment_ids_BT):
    """How many segments began after the row's first real token, up to each position.

    Two real tokens share a segment exactly when their indexes are equal. Padding repeats the
    index of the real token before it.

    Args:
      segment_ids_BT: integers, 0 for padding.

    Returns:
      (index_BT int32, real_BT bool).
    """
    real_BT = segment_ids_BT > 0
    T = segment_ids_BT.shape[1]
    position_T = jnp.arange(T, dtype=jnp.int32)
    last_real_BT = jax.lax.cummax(jnp.where(real_BT, position_T, -1), axis=1)
    before_BT = jnp.pad(last_real_BT, ((0, 0), (1, 0)), constant_values=-1)[:, :T]
    before_id_BT = jnp.take_along_axis(segment_ids_BT, jnp.maximum(before_BT, 0), axis=1)
    starts_BT = real_BT & (before_BT >= 0) & (before_id_BT != segment_ids_BT)
    return jnp.cumsum(starts_BT, axis=1, dtype=jnp.int32), real_BT
