"""One token of every row: what generation does between two words."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import choice
from pallas_kernels.kda import mosaic_gpu, reference
from pallas_kernels.kda.api import BEST, BUILT, Implementation, unit
from pallas_kernels.kda.gate import log_decay


def why_not(name: str, **call: Any) -> str | None:
    """Why an implementation cannot run `kda_step` on this process's devices; None if it can.

    Args:
      name: the implementation's. call: what `mosaic_gpu.why_not_step` wants to know.
    """
    return mosaic_gpu.why_not_step(jax.devices()[0], **call) if name == "mosaic_gpu" else None


def kda_step(
    query,
    key,
    value,
    gate_logits,
    beta_logits,
    a_log,
    dt_bias,
    state,
    *,
    lower_bound: float | None = -5.0,
    scale: float | None = None,
    implementation: Implementation | None = None,
):
    """`kda_gated` of one token: the same raw inputs without T, and the state they meet.

    Forward only: "mosaic_gpu" raises where a derivative is asked for; the others have one. Give the
    state away (`jax.jit(.., donate_argnums=..)`), and the new one is written where it was; "mosaic_gpu"
    then reads and writes each of its entries once, and "xla" reads it twice.

    Args:
      query, key: [B, H, K], normalised here (x / sqrt(sum x^2 + 1e-6)).
      value: [B, H, V], whose dtype the output has.
      gate_logits: [B, H, K]; beta_logits: [B, H].
      a_log: [H]; dt_bias: [H, K]; lower_bound: as in `log_decay`.
      state: [B, H, K, V], float32, or float64 with a value of that dtype.
      scale: a factor on the output; K^-1/2 by default.
      implementation: a name, which runs or raises; None takes the best for the platform. "mosaic_gpu"
        takes bfloat16 and float32 inputs and up to 128 channels, of which all but 64 and 128 are padded,
        at the cost of copying the state.

    Returns:
      (output [B, H, V] in value's dtype, new state).

    Raises:
      ValueError: shapes that do not fit, a state of another dtype, a bound that is not negative, an unknown
        implementation, or one that cannot run this here. NotImplementedError: a derivative of "mosaic_gpu".
    """
    raw = query, key, value, gate_logits, beta_logits, a_log, dt_bias
    _check(*raw, state)
    if lower_bound is not None and not lower_bound < 0:
        raise ValueError(
            f"kda_step: lower_bound={lower_bound} must be negative, or None for the unbounded gate"
        )
    K, V = state.shape[2:]
    call = {"key": K, "value": V, "dtypes": [x.dtype for x in raw]}
    chosen = choice.choose("kda_step", implementation, BEST, BUILT, partial(why_not, **call))
    scale = K**-0.5 if scale is None else scale
    if chosen == "mosaic_gpu" and state.size:
        return mosaic_gpu.kda_step(*raw, state, scale, lower_bound)
    q, k = unit(query).astype(query.dtype), unit(key).astype(key.dtype)
    g_BHK = log_decay(gate_logits[:, None], a_log, dt_bias, lower_bound)[:, 0]
    wide = lambda x: x.astype(state.dtype)
    run = reference.token if chosen == "reference" else _two_readings
    o_BHV, S_BHKV = run(
        wide(q), wide(k), wide(value), wide(g_BHK), jax.nn.sigmoid(wide(beta_logits)), state, scale
    )
    return o_BHV.astype(value.dtype), S_BHKV


def _two_readings(q_BHK, k_BHK, v_BHV, g_BHK, beta_BH, S_BHKV, scale):
    """`reference.token` where the output needs the decayed state, not the new one.

    So one reading serves both sums over K, and another the new state.
    """
    S = jnp.exp(g_BHK)[..., None] * S_BHKV
    said_BHV, read_BHV = (jnp.sum(x[..., None] * S, axis=2) for x in (k_BHK, q_BHK))
    written_BHV = beta_BH[..., None] * (v_BHV - said_BHV)
    o_BHV = scale * (read_BHV + jnp.sum(q_BHK * k_BHK, axis=2, keepdims=True) * written_BHV)
    return o_BHV, S + k_BHK[..., None] * written_BHV[:, :, None]


def _check(query, key, value, gate_logits, beta_logits, a_log, dt_bias, state) -> None:
    """Shapes that fit, and a state that can be replaced by the new one."""
    if query.ndim != 3 or value.ndim != 3:
        raise ValueError(
            f"kda_step: query {query.shape} and value {value.shape} must be [B, H, K] and [B, H, V]"
        )
    (B, H, K), V = query.shape, value.shape[2]
    for name, x, shape in (
        ("key", key, (B, H, K)),
        ("value", value, (B, H, V)),
        ("gate_logits", gate_logits, (B, H, K)),
        ("beta_logits", beta_logits, (B, H)),
        ("a_log", a_log, (H,)),
        ("dt_bias", dt_bias, (H, K)),
        ("state", state, (B, H, K, V)),
    ):
        if x.shape != shape:
            raise ValueError(
                f"kda_step: {name} {x.shape} must be {shape}, for query {query.shape} and value {value.shape}"
            )
    dtype = jnp.promote_types(value.dtype, jnp.float32)
    if state.dtype != dtype:
        raise ValueError(f"kda_step: state of {state.dtype} must be of {dtype}, for a value of {value.dtype}")
