"""From gate logits to log-decays: K3's bounded map and Kimi Linear's unbounded one."""

import jax
import jax.numpy as jnp


@jax.custom_jvp
def _sigmoid(y):
    return jax.nn.sigmoid(y)


@_sigmoid.defjvp
def _sigmoid_jvp(primals, tangents):
    # s(y) s(-y), not s(y) (1 - s(y)): near the floor 1 - s(y) cancels and loses 1e-4.
    (y,), (dy,) = primals, tangents
    s = jax.nn.sigmoid(y)
    return s, s * jax.nn.sigmoid(-y) * dy


def log_decay(gate_logits, a_log, dt_bias, lower_bound: float | None = -5.0):
    """The log of one step's retention, per key channel.

    Bounded (K3 report, eq. 5): lower_bound * sigmoid(exp(a_log) * z), in (lower_bound, 0).
    Unbounded (Kimi Linear): -exp(a_log) * softplus(z). In both, z = gate_logits + dt_bias.

    Args:
      gate_logits: [B, T, H, K], any float dtype.
      a_log: [H], the log of each head's rate.
      dt_bias: [H, K].
      lower_bound: a negative floor in nats per token, or None for the unbounded map.

    Returns:
      g_BTHK, at least float32, never positive.

    Raises:
      ValueError: lower_bound is not negative.
    """
    if lower_bound is not None and not lower_bound < 0:
        raise ValueError(f"lower_bound={lower_bound} must be negative, or None for the unbounded gate")
    dtype = jnp.promote_types(gate_logits.dtype, jnp.float32)
    z_BTHK = gate_logits.astype(dtype) + dt_bias.astype(dtype)[None, None]
    rate_11H1 = jnp.exp(a_log.astype(dtype))[None, None, :, None]
    if lower_bound is None:
        return -rate_11H1 * jax.nn.softplus(z_BTHK)
    return lower_bound * _sigmoid(rate_11H1 * z_BTHK)
