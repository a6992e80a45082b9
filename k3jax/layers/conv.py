"""The short causal depthwise convolution before a linear mixer."""

import jax.numpy as jnp


def _extended(x_BTHK, tail_BWHK, taps, segments):
    """The tail and x in a row, with the segment index of each; a missing tail is zeros."""
    B, _, H, K = x_BTHK.shape
    reach = taps - 1
    if tail_BWHK is None:
        tail_BWHK = jnp.zeros((B, reach, H, K), x_BTHK.dtype)
    x_BSHK = jnp.concatenate([tail_BWHK.astype(x_BTHK.dtype), x_BTHK], axis=1)
    if segments is None:
        return x_BSHK, None
    return x_BSHK, jnp.pad(segments.index_BT, ((0, 0), (reach, 0)))


def short_conv(x_BTHK, taps_HKW, tail_BWHK, segments):
    """sum_j taps[W-1-j] x_(t-j) over the last W tokens of t's own segment, in float32 or more.

    Args:
      x_BTHK: the inputs. taps_HKW: the last tap meets the token itself.
      tail_BWHK: the last W - 1 inputs of the carried segment (0 where it has fewer), or None.
      segments: `k3jax.segments.Segments`, or None for one segment that continues the tail's.
    """
    T, W = x_BTHK.shape[1], taps_HKW.shape[-1]
    x_BSHK, index_BS = _extended(x_BTHK, tail_BWHK, W, segments)
    dtype = jnp.promote_types(x_BTHK.dtype, jnp.float32)
    taps_HKW = taps_HKW.astype(dtype)
    y_BTHK = jnp.zeros(x_BTHK.shape, dtype)
    for w in range(W):
        term = x_BSHK[:, w : w + T].astype(dtype) * taps_HKW[None, None, :, :, w]
        if index_BS is not None and w < W - 1:
            same_BT = index_BS[:, w : w + T] == segments.index_BT
            term = jnp.where(same_BT[..., None, None], term, 0)
        y_BTHK += term
    return y_BTHK


def conv_tail(x_BTHK, taps, tail_BWHK, segments):
    """The last `taps` - 1 real inputs of the segment that the row ends in, zeros before its start."""
    T = x_BTHK.shape[1]
    dtype = x_BTHK.dtype if tail_BWHK is None else tail_BWHK.dtype
    x_BSHK, index_BS = _extended(x_BTHK, tail_BWHK, taps, segments)
    if segments is None or index_BS is None:
        return x_BSHK[:, T:].astype(dtype)
    at_BW = segments.count_B[:, None] + jnp.arange(taps - 1)[None, :]
    tail_BWHK = jnp.take_along_axis(x_BSHK, at_BW[..., None, None], axis=1)
    same_BW = jnp.take_along_axis(index_BS, at_BW, axis=1) == segments.last_B[:, None]
    return jnp.where(same_BW[..., None, None], tail_BWHK, 0).astype(dtype)
