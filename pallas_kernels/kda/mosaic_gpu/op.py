"""The gated op of whole rows: inputs to the kernels' shapes, and what they give back to the inputs'."""

from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.kda.mosaic_gpu.gradients import gradients
from pallas_kernels.kda.mosaic_gpu.prepare import Inputs, prepare
from pallas_kernels.kda.mosaic_gpu.scan import cotangents, outputs, pieces, starts, states
from pallas_kernels.kda.mosaic_gpu.warpgroup import CHUNK, TILE
from pallas_kernels.segments import segment_index


def _up(size: int) -> int:
    return -(-size // TILE) * TILE


def _pad(x, *sizes: int):
    """Zeros behind x, up to `sizes`."""
    return jnp.pad(x, [(0, size - now) for now, size in zip(x.shape, sizes, strict=True)])


def _inputs(raw, segment_ids) -> Inputs:
    q, k, v, z, beta_logits, a_log, dt_bias = raw
    B, T, H, K = q.shape
    T1, K1, V1 = -(-T // CHUNK) * CHUNK, _up(K), _up(v.shape[3])
    beta_BHT = jax.nn.sigmoid(beta_logits.astype(jnp.float32)).transpose(0, 2, 1)
    index_BT = real_BT = None
    if segment_ids is not None or T1 != T:
        ids_BT = jnp.ones((B, T), jnp.int32) if segment_ids is None else segment_ids
        index_BT, real_BT = segment_index(_pad(ids_BT, B, T1))
        beta_BHT = jnp.where(real_BT[:, None], _pad(beta_BHT, B, H, T1), 0)
        real_BT = real_BT.astype(jnp.float32)
    keys, values = (B, T1, H, K1), (B, T1, H, V1)
    return Inputs(
        _pad(q, *keys), _pad(k, *keys), _pad(v, *values), _pad(z, *keys), beta_BHT,
        jnp.exp(a_log.astype(jnp.float32)), _pad(dt_bias.astype(jnp.float32), H, K1), index_BT, real_BT,
    )  # fmt: skip


def _turned_state(S_BHKV):
    """[B, H, V, K] with both up to whole tiles."""
    B, H, K, V = S_BHKV.shape
    return _pad(S_BHKV.astype(jnp.float32).transpose(0, 1, 3, 2), B, H, _up(V), _up(K))


def kda_gated(q, k, v, z, beta_logits, a_log, dt_bias, S, segment_ids, scale, lower_bound, interpret=None):
    """`pallas_kernels.kda.kda_gated` with every argument given, bfloat16 but for a_log, dt_bias and S.

    `interpret` is what Pallas takes under this name, to run without a GPU.

    Raises:
      ValueError: another dtype.
    """
    raw = q, k, v, z, beta_logits, a_log, dt_bias
    if {x.dtype for x in raw[:4]} != {jnp.dtype("bfloat16")}:
        kinds = ", ".join(x.dtype.name for x in raw[:4])
        raise ValueError(
            f"kda: 'mosaic_gpu' takes query, key, value and gate logits in bfloat16, not {kinds}"
        )
    return _gated(raw, S, segment_ids, scale, lower_bound, interpret)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _gated(raw, S_BHKV, segment_ids, scale, lower_bound, interpret):
    return _forward(raw, S_BHKV, segment_ids, scale, lower_bound, interpret)[0]


def _forward(raw, S_BHKV, segment_ids, scale, lower_bound, interpret):
    x = _inputs(raw, segment_ids)
    o, S = outputs(prepare(x, scale, lower_bound, interpret), _turned_state(S_BHKV), interpret)
    T, (K, V) = raw[0].shape[1], S_BHKV.shape[2:]
    return (o[:, :T, :, :V], S[:, :, :V, :K].transpose(0, 1, 3, 2)), (raw, S_BHKV, segment_ids)


def _backward(scale, lower_bound, interpret, residuals, d_outputs):
    raw, S_BHKV, segment_ids = residuals
    do, dS_BHKV = d_outputs
    T, (K, V) = raw[0].shape[1], S_BHKV.shape[2:]
    x = _inputs(raw, segment_ids)
    p = prepare(x, scale, lower_bound, interpret)
    do, count = _pad(do, *x.v_BTHV.shape), pieces(S_BHKV.shape[0] * S_BHKV.shape[1], x.chunks)
    before, transition = starts(p, _turned_state(S_BHKV), count, interpret)
    kept = states(p, before, count, interpret)
    d = cotangents(p, do, _turned_state(dS_BHKV), transition, interpret)
    g = gradients(x, p, kept, d, do, scale, lower_bound, interpret)
    # beta's logit moves it by beta (1 - beta), and `g.beta_BHT` is beta squared times its gradient.
    moved = jnp.where(x.beta_BHT > 0, (1 - x.beta_BHT) / x.beta_BHT, 0)
    back = (
        g.q_BTHK[:, :T, :, :K],
        g.k_BTHK[:, :T, :, :K],
        g.v_BTHV[:, :T, :, :V],
        g.z_BTHK[:, :T, :, :K],
        (g.beta_BHT * moved).transpose(0, 2, 1)[:, :T],
        jnp.sum(g.rate_BHNXC, axis=(0, 2, 3, 4)),
        jnp.sum(g.z_BTHK, axis=(0, 1), dtype=jnp.float32)[:, :K],
    )
    back = tuple(y.astype(z.dtype) for y, z in zip(back, raw, strict=True))
    return back, d.first_BHGVK[:, :, 0, :V, :K].transpose(0, 1, 3, 2).astype(S_BHKV.dtype), None


_gated.defvjp(_forward, _backward)
