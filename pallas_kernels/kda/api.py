"""Shapes, defaults and the choice of implementation: the only module of the folder others import."""

from collections.abc import Iterable
from functools import partial
from typing import Any, Literal

import chex
import jax
import jax.numpy as jnp

from pallas_kernels import choice
from pallas_kernels.kda import mosaic_gpu, reference, xla
from pallas_kernels.kda.gate import log_decay
from pallas_kernels.segments import segment_index

Implementation = Literal["reference", "xla", "mosaic_tpu", "mosaic_gpu", "triton"]
BUILT = ("reference", "xla", "mosaic_gpu")
BEST = {"cpu": ("xla",), "gpu": ("mosaic_gpu", "xla"), "tpu": ("xla",)}

DENSE_FLOOR = -5.0  # the lowest log-decay for which 16-token tiles are dense products


def why_not(name: str, *, key: int, value: int, dtypes: Iterable[Any]) -> str | None:
    """Why an implementation cannot run `kda` or `kda_gated` on this process's devices; None if it can.

    Args:
      name: the implementation's. key, value: channels of a head. dtypes: of query, key, value and logits.
    """
    if name != "mosaic_gpu":
        return None
    return mosaic_gpu.why_not(jax.devices()[0], key=key, value=value, dtypes=dtypes)


def choose(requested: Implementation | None, **call: Any) -> str:
    """The implementation that runs `kda` or `kda_gated` on this process's devices.

    Args:
      requested: a name, or None for the best. call: what `why_not` wants to know.

    Raises:
      ValueError: one that is not built, or cannot run this here; it says why.
    """
    return choice.choose("kda", requested, BEST, BUILT, partial(why_not, **call))


def pieces(chosen: str, rows: int, length: int, heads: int) -> int:
    """Into how many pieces an implementation cuts each row of a device's, to run them side by side."""
    return mosaic_gpu.row_pieces(rows, length, heads) if chosen == "mosaic_gpu" else 1


def unit(x_BTHK):
    """x / sqrt(sum x^2 + 1e-6) over the last axis, in float32 or more; finite gradient at x = 0."""
    x = x_BTHK.astype(jnp.promote_types(x_BTHK.dtype, jnp.float32))
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + 1e-6)


@jax.named_scope("kda")
def kda(
    query,
    key,
    value,
    log_decay,
    beta,
    *,
    scale: float | None = None,
    initial_state=None,
    segment_ids=None,
    implementation: Implementation | None = None,
):
    """Kimi Delta Attention over finished inputs (K3 report, eq. 1).

    S <- Diag(e^g) S;  S <- S + beta k (v - S^T k)^T;  o = scale S^T q, per head.

    Differentiable in query, key, value, log_decay, beta and initial_state; the final state takes a
    cotangent. Any T >= 0, any K and V. Log-decays may be arbitrarily low. For the backward pass `xla` keeps
    the inputs, `mosaic_gpu` also 1.3 times as much as these (K = V = 128), but under `jax.checkpoint`.

    Args:
      query, key: [B, T, H, K] float32, bfloat16 or float64; not normalised here.
      value: [B, T, H, V], whose dtype the output has.
      log_decay: [B, T, H, K], nats per token, never positive; used in float32 or more, but by `mosaic_gpu`
        in float16, good to 11 bits, and as -26.7 where it is below that.
      beta: [B, T, H], the write strength in (0, 1); used in float32 or more.
      scale: a factor on the output; K^-1/2 by default.
      initial_state: [B, H, K, V], float32 or more, which each row's first segment continues; zero
        by default.
      segment_ids: [B, T] integers. A segment is a maximal run of one positive id, zeros skipped;
        the state restarts at each. Id 0 is padding: output 0, state untouched.
      implementation: a name, which runs or raises; None takes the best for the platform.

    Returns:
      (output [B, T, H, V] in value's dtype, final_state [B, H, K, V], at least float32).

    Raises:
      ValueError: an unknown implementation, or one that cannot run this here. AssertionError:
        shapes that do not fit (chex).
    """
    chosen = _chosen(implementation, query, key, value)
    S = _checked(query, key, value, log_decay, beta, initial_state, segment_ids)
    return _composed(chosen, query, key, value, log_decay, beta, S, segment_ids, scale, bounded=False)


@jax.named_scope("kda_gated")
def kda_gated(
    query,
    key,
    value,
    gate_logits,
    beta_logits,
    a_log,
    dt_bias,
    *,
    lower_bound: float | None = -5.0,
    scale: float | None = None,
    initial_state=None,
    segment_ids=None,
    implementation: Implementation | None = None,
):
    """`kda` on raw inputs: L2-normalised query and key, sigmoid beta, log-decay from its logits.

    Args:
      query, key: [B, T, H, K], normalised here (x / sqrt(sum x^2 + 1e-6)).
      gate_logits: [B, T, H, K]; beta_logits: [B, T, H].
      a_log: [H]; dt_bias: [H, K]; lower_bound: as in `log_decay`. A bound of -5 or higher lets
        every tile be a dense product.
      The others as in `kda`, whose returns and errors these are.
    """
    chosen = _chosen(implementation, query, key, value, gate_logits)
    S = _checked(query, key, value, gate_logits, beta_logits, initial_state, segment_ids)
    raw = query, key, value, gate_logits, beta_logits, a_log, dt_bias
    bounded = lower_bound is not None and lower_bound >= DENSE_FLOOR
    if chosen == "mosaic_gpu" and bounded and S.size and query.size:
        return mosaic_gpu.kda_gated(*raw, S, segment_ids, _scale(query, scale), lower_bound)
    dtype = jnp.promote_types(beta_logits.dtype, jnp.float32)
    return _composed(
        chosen,
        unit(query).astype(query.dtype),
        unit(key).astype(key.dtype),
        value,
        log_decay(gate_logits, a_log, dt_bias, lower_bound),
        jax.nn.sigmoid(beta_logits.astype(dtype)),
        S,
        segment_ids,
        scale,
        bounded=bounded,
    )


def _chosen(implementation, q, k, v, *logits) -> str:
    if q.ndim != 4 or v.ndim != 4:
        raise ValueError(f"kda: query {q.shape} and value {v.shape} must be [B, T, H, K] and [B, T, H, V]")
    dtypes = [x.dtype for x in (q, k, v, *logits)]
    return choose(implementation, key=q.shape[3], value=v.shape[3], dtypes=dtypes)


def _scale(q, scale: float | None) -> float:
    return q.shape[3] ** -0.5 if scale is None else scale


def _checked(q, k, v, gate, beta, S, segment_ids):
    """The initial state, of inputs whose shapes fit."""
    B, T, H, K = q.shape
    V = v.shape[-1]
    chex.assert_shape([k, gate], (B, T, H, K))
    chex.assert_shape(v, (B, T, H, V))
    chex.assert_shape(beta, (B, T, H))
    S = jnp.zeros((B, H, K, V), jnp.promote_types(v.dtype, jnp.float32)) if S is None else S
    chex.assert_shape(S, (B, H, K, V))
    if segment_ids is not None:
        chex.assert_shape(segment_ids, (B, T))
    return S


def _composed(chosen, q, k, v, g, beta, S, segment_ids, scale, bounded):
    """The forms that take prepared inputs."""
    scale = _scale(q, scale)
    if 0 in (*q.shape, v.shape[-1]):
        return jnp.zeros(v.shape, v.dtype), S.astype(jnp.promote_types(v.dtype, jnp.float32))

    if chosen == "mosaic_gpu":
        return mosaic_gpu.kda(q, k, v, g, beta, S, segment_ids, scale)
    ids_BT = jnp.ones(q.shape[:2], jnp.int32) if segment_ids is None else segment_ids
    index_BT, real_BT = segment_index(ids_BT)
    if chosen == "reference":
        o, S = reference.kda(q, k, v, g, beta, S, real_BT, index_BT, scale)
        return o.astype(v.dtype), S
    if segment_ids is None:
        return xla.kda(q, k, v, g, beta, S, None, scale, bounded)
    # Padding writes nothing (beta = 0), forgets nothing (g = 0) and reads nothing.
    real = real_BT[..., None]
    g, beta = jnp.where(real[..., None], g, 0), jnp.where(real, beta, 0)
    result: Any = xla.kda(q, k, v, g, beta, S, index_BT, scale, bounded)
    return jnp.where(real[..., None], result[0], 0), result[1]
