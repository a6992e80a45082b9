"""Gated activations."""

import jax
import jax.numpy as jnp

from k3jax.config import Activation, Situ, Swiglu


def glu(activation: Activation, gate, up):
    """The product of a gated unit's two branches, computed in float32 or more, in gate's dtype.

    Situ (K3 report, eq. 12): b1 tanh(g / b1) sigmoid(g) * b2 tanh(u / b2). Swiglu: g sigmoid(g) u.
    Only the two inputs are kept for the backward pass: float32 intermediates would be four times
    their size in bfloat16.
    """

    @jax.checkpoint
    def product(gate, up):
        g, u = (x.astype(jnp.promote_types(x.dtype, jnp.float32)) for x in (gate, up))
        match activation:
            case Situ(b1, b2):
                y = b1 * jnp.tanh(g / b1) * jax.nn.sigmoid(g) * b2 * jnp.tanh(u / b2)
            case Swiglu():
                y = g * jax.nn.sigmoid(g) * u
        return y.astype(gate.dtype)

    return product(gate, up)
