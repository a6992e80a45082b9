"""The ops of whole rows: inputs to the kernels' shapes, and what they give back to the inputs'."""

from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.kda.mosaic_gpu.form import Finished, Form, Raw
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


def _inputs(form: Form, given, segment_ids) -> Inputs:
    q, k, v, *gates = given
    B, T, H, K = q.shape
    T1, K1, V1 = _whole(T), up(K), up(v.shape[3])
    z, beta, rate_H, bias_HK = form.gates(*gates)
    beta_BHT = beta.transpose(0, 2, 1)
    index_BT = real_BT = None
    if segment_ids is not None or T1 != T:
        ids_BT = jnp.ones((B, T), jnp.int32) if segment_ids is None else segment_ids
        index_BT, real_BT = segment_index(pad(ids_BT, B, T1))
        beta_BHT = jnp.where(real_BT[:, None], pad(beta_BHT, B, H, T1), 0)
        real_BT = real_BT.astype(jnp.float32)
    keys, values = (B, T1, H, K1), (B, T1, H, V1)
    return Inputs(
        pad(q, *keys), pad(k, *keys), pad(v, *values), pad(z, *keys), beta_BHT,
        rate_H, pad(bias_HK, H, K1), index_BT, real_BT,
    )  # fmt: skip


def _turned_state(S_BHKV):
    """[B, H, V, K] with both up to whole tiles."""
    B, H, K, V = S_BHKV.shape
    return pad(S_BHKV.astype(jnp.float32).transpose(0, 1, 3, 2), B, H, up(V), up(K))


def kda_gated(q, k, v, z, beta_logits, a_log, dt_bias, S, segment_ids, scale, lower_bound, interpret=None):
    """`pallas_kernels.kda.kda_gated` with every argument given, bfloat16 but for a_log, dt_bias and S.

    `interpret` is what Pallas takes under this name, to run without a GPU.
    """
    given = q, k, v, z, beta_logits, a_log, dt_bias
    return _op(Raw(lower_bound), given, S, segment_ids, scale, interpret)


def kda(q, k, v, g, beta, S, segment_ids, scale, interpret=None):
    """`pallas_kernels.kda.kda` with every argument given; q, k and v bfloat16, and of no more than 1e4.

    Log-decays are read in float16, good to 11 bits, and those below -26.7 as that; their gradient is made in
    bfloat16. `interpret` as above.
    """
    return _op(Finished(), (q, k, v, g, beta), S, segment_ids, scale, interpret)


@partial(jax.custom_vjp, nondiff_argnums=(0, 4, 5))
def _op(form: Form, given, S_BHKV, segment_ids, scale, interpret):
    return _forward(form, given, S_BHKV, segment_ids, scale, interpret)[0]


# Compiled apart, so that equal layers of a model share the lowering of their kernels, half a second each.
@partial(jax.jit, static_argnums=(0, 4, 5))
def _forward(form: Form, given, S_BHKV, segment_ids, scale, interpret):
    x = _inputs(form, given, segment_ids)
    p = prepare(x, scale, form, interpret)
    before, transition = starts(p, _turned_state(S_BHKV), interpret)
    o, S = outputs(p, before, interpret)
    T, (K, V) = given[0].shape[1], S_BHKV.shape[2:]
    values = o[:, :T, :, :V], S[:, :, :V, :K].transpose(0, 1, 3, 2)
    return values, (given, S_BHKV, segment_ids, p, before[:, :, 1:], transition)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _backward(form: Form, scale, interpret, residuals, d_outputs):
    given, S_BHKV, segment_ids, p, others, transition = residuals
    do, dS_BHKV = d_outputs
    T, (K, V) = given[0].shape[1], S_BHKV.shape[2:]
    x = _inputs(form, given, segment_ids)
    do = pad(do, *x.v_BTHV.shape)
    kept = states(p, jnp.concatenate([_turned_state(S_BHKV)[:, :, None], others], 2), interpret)
    d = cotangents(p, do, _turned_state(dS_BHKV), transition, interpret)
    g = gradients(x, p, kept, d, do, scale, form, interpret)
    by_token = lambda x_BHT: x_BHT.transpose(0, 2, 1)[:, :T]
    of_gates = form.gradients(
        g.z_BTHK[:, :T, :, :K],
        by_token(jnp.sum(g.beta_BHNXC, axis=3).reshape(x.beta_BHT.shape)),
        by_token(x.beta_BHT),
        jnp.sum(g.rate_BHNXC, axis=(0, 2, 3, 4)),
    )
    back = (g.q_BTHK[:, :T, :, :K], g.k_BTHK[:, :T, :, :K], g.v_BTHV[:, :T, :, :V], *of_gates)
    back = tuple(y.astype(z.dtype) for y, z in zip(back, given, strict=True))
    return back, d.first_BHGVK[:, :, 0, :V, :K].transpose(0, 1, 3, 2).astype(S_BHKV.dtype), None


_op.defvjp(_forward, _backward)
