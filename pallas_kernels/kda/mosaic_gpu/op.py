"""The gated op of whole rows: inputs to the kernels' shapes, and what they give back to the inputs'."""

from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.kda.mosaic_gpu.gradients import gradients
from pallas_kernels.kda.mosaic_gpu.prepare import CHUNKS, Inputs, prepare
from pallas_kernels.kda.mosaic_gpu.scan import cotangents, outputs, pieces, starts, states
from pallas_kernels.kda.mosaic_gpu.warpgroup import CHUNK, pad, up
from pallas_kernels.segments import segment_index


def _whole(T: int) -> int:
    """T up to whole blocks of chunks."""
    return up(T, CHUNKS * CHUNK)


def row_pieces(B: int, T: int, H: int) -> int:
    """How many pieces the rows of a call are cut into: `scan.pieces`."""
    return pieces(B * H, _whole(T) // CHUNK)


def _inputs(raw, segment_ids) -> Inputs:
    q, k, v, z, beta_logits, a_log, dt_bias = raw
    B, T, H, K = q.shape
    T1, K1, V1 = _whole(T), up(K), up(v.shape[3])
    beta_BHT = jax.nn.sigmoid(beta_logits.astype(jnp.float32)).transpose(0, 2, 1)
    index_BT = real_BT = None
    if segment_ids is not None or T1 != T:
        ids_BT = jnp.ones((B, T), jnp.int32) if segment_ids is None else segment_ids
        index_BT, real_BT = segment_index(pad(ids_BT, B, T1))
        beta_BHT = jnp.where(real_BT[:, None], pad(beta_BHT, B, H, T1), 0)
        real_BT = real_BT.astype(jnp.float32)
    keys, values = (B, T1, H, K1), (B, T1, H, V1)
    return Inputs(
        pad(q, *keys), pad(k, *keys), pad(v, *values), pad(z, *keys), beta_BHT,
        jnp.exp(a_log.astype(jnp.float32)), pad(dt_bias.astype(jnp.float32), H, K1), index_BT, real_BT,
    )  # fmt: skip


def _turned_state(S_BHKV):
    """[B, H, V, K] with both up to whole tiles."""
    B, H, K, V = S_BHKV.shape
    return pad(S_BHKV.astype(jnp.float32).transpose(0, 1, 3, 2), B, H, up(V), up(K))


def kda_gated(q, k, v, z, beta_logits, a_log, dt_bias, S, segment_ids, scale, lower_bound, interpret=None):
    """`pallas_kernels.kda.kda_gated` with every argument given, bfloat16 but for a_log, dt_bias and S.

    `interpret` is what Pallas takes under this name, to run without a GPU.
    """
    raw = q, k, v, z, beta_logits, a_log, dt_bias
    return _gated(raw, S, segment_ids, scale, lower_bound, interpret)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _gated(raw, S_BHKV, segment_ids, scale, lower_bound, interpret):
    return _forward(raw, S_BHKV, segment_ids, scale, lower_bound, interpret)[0]


# Compiled apart, so that equal layers of a model share the lowering of their kernels, half a second each.
@partial(jax.jit, static_argnums=(3, 4, 5))
def _forward(raw, S_BHKV, segment_ids, scale, lower_bound, interpret):
    x = _inputs(raw, segment_ids)
    o, S = outputs(prepare(x, scale, lower_bound, interpret), _turned_state(S_BHKV), interpret)
    T, (K, V) = raw[0].shape[1], S_BHKV.shape[2:]
    return (o[:, :T, :, :V], S[:, :, :V, :K].transpose(0, 1, 3, 2)), (raw, S_BHKV, segment_ids)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _backward(scale, lower_bound, interpret, residuals, d_outputs):
    raw, S_BHKV, segment_ids = residuals
    do, dS_BHKV = d_outputs
    T, (K, V) = raw[0].shape[1], S_BHKV.shape[2:]
    x = _inputs(raw, segment_ids)
    p = prepare(x, scale, lower_bound, interpret)
    do, count = pad(do, *x.v_BTHV.shape), pieces(S_BHKV.shape[0] * S_BHKV.shape[1], x.chunks)
    before, transition = starts(p, _turned_state(S_BHKV), count, interpret)
    kept = states(p, before, interpret)
    d = cotangents(p, do, _turned_state(dS_BHKV), count, transition, interpret)
    g = gradients(x, p, kept, d, do, scale, lower_bound, interpret)
    # beta's logit moves it by beta (1 - beta), and `g.beta_BHT` is beta squared times its gradient: nothing
    # where beta squared is, and its inverse overflows.
    moved = jnp.where(x.beta_BHT > 1e-18, (1 - x.beta_BHT) / x.beta_BHT, 0)
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
