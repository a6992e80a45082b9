"""RMS normalisation."""

import jax
import jax.numpy as jnp


def rms_norm(x, gain, eps):
    """x / sqrt(mean x^2 + eps) * gain over the last axis, computed in float32 or more."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    gain = jnp.expand_dims(gain.astype(wide.dtype), range(x.ndim - 1))
    return (wide * scale * gain).astype(x.dtype)
