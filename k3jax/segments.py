"""Packed documents inside the stack: padding last, and one number that says who belongs together.

The model moves padding to the end of each row before its first layer and back after its last one.
So every layer may count on this: real tokens of one segment are neighbours, padding is a suffix.
"""

import jax
import jax.numpy as jnp
from flax import struct

from pallas_kernels.segments import segment_index


@struct.dataclass
class Segments:
    """Who belongs together in a row, for a mixer.

    Attributes:
      index_BT: int32, equal exactly within a segment, rising by one at each boundary; 0 for the
        tokens that continue the segment a carried state belongs to. Padding, a suffix of the row,
        repeats the last real token's.
      real_BT: bool, False for padding.
    """

    index_BT: jax.Array
    real_BT: jax.Array

    @property
    def ids_BT(self):
        """Segment ids as ops take them: positive, 0 for padding."""
        return jnp.where(self.real_BT, self.index_BT + 1, 0)

    @property
    def continues_B(self):
        """Whether a row's first token continues the carried segment."""
        return self.index_BT[:, 0] == 0

    @property
    def last_B(self):
        """The index of the segment that a state carried on from here belongs to."""
        return self.index_BT[:, -1]

    @property
    def count_B(self):
        """How many real tokens a row holds."""
        return jnp.sum(self.real_BT, axis=1, dtype=jnp.int32)


def compact(segment_ids_BT, last_id_B=None):
    """The order that puts padding last, and the segments of the tokens so ordered.

    Args:
      segment_ids_BT: integers; a segment is a maximal run of one positive id, zeros skipped.
      last_id_B: the last real id before this piece, 0 for none. The first real segment continues
        the carried one exactly if it has this id. None: there is no carried state.

    Returns:
      (order_BT, Segments of the reordered row, the last real id now).
    """
    order_BT = jnp.argsort(segment_ids_BT <= 0, axis=1, stable=True)
    ids_BT = jnp.take_along_axis(segment_ids_BT, order_BT, axis=1)
    index_BT, real_BT = segment_index(ids_BT)
    if last_id_B is None:
        last_id_B = jnp.zeros_like(ids_BT[:, 0])
        opens_B = jnp.zeros_like(last_id_B, bool)
    else:
        opens_B = real_BT[:, 0] & (ids_BT[:, 0] != last_id_B)
    count_B = jnp.sum(real_BT, axis=1)
    end_B = jnp.take_along_axis(ids_BT, jnp.maximum(count_B - 1, 0)[:, None], axis=1)[:, 0]
    segments = Segments(index_BT + opens_B[:, None].astype(jnp.int32), real_BT)
    return order_BT, segments, jnp.where(count_B > 0, end_B, last_id_B)


@jax.custom_vjp
def reorder(x_BTX, order_BT, inverse_BT):
    """x_BTX[b, order_BT[b, t]]; both orders are given, so that the gradient is a gather too."""
    return jnp.take_along_axis(x_BTX, order_BT[..., None], axis=1)


def _reorder_forward(x_BTX, order_BT, inverse_BT):
    return reorder(x_BTX, order_BT, inverse_BT), inverse_BT


def _reorder_backward(inverse_BT, d_BTX):
    return jnp.take_along_axis(d_BTX, inverse_BT[..., None], axis=1), None, None


reorder.defvjp(_reorder_forward, _reorder_backward)
