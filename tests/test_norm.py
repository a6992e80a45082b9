"""The RMS norm where a narrow or careless one goes wrong: small inputs, zeros, bfloat16."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.layers.norm import rms_norm

EPS = 1e-5


def draw(scale, dtype):
    normal = np.random.default_rng(0).normal
    return jnp.asarray(scale * normal(size=(3, 5, 48)), dtype), jnp.asarray(1 + 0.1 * normal(size=48), dtype)


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e-20])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_is_its_formula_and_is_rounded_once(dtype, scale):
    """Squares of 1e-20 underflow; eps is inside the root, and what is left is x / sqrt(eps)."""
    x, gain = draw(scale, dtype)
    y = rms_norm(x, gain, EPS)
    assert y.dtype == dtype
    wide, gain = np.asarray(x, np.float64), np.asarray(gain, np.float64)
    expected = wide / np.sqrt(np.mean(wide**2, axis=-1, keepdims=True) + EPS) * gain
    half = {"float32": 5e-7, "bfloat16": 2.0**-8 + 1e-6}[
        dtype
    ]  # of the last place; float32 rounds more often
    np.testing.assert_allclose(np.asarray(y, np.float64), expected, rtol=half, atol=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_zeros_give_zeros_and_finite_gradients(dtype):
    """As padding does."""
    x, gain = draw(1.0, dtype)
    x = x.at[0].set(0)
    total = lambda x, gain: jnp.sum(rms_norm(x, gain, EPS).astype(jnp.float32) ** 2)
    assert not np.any(rms_norm(x, gain, EPS)[0])
    d_x, d_gain = jax.grad(total, argnums=(0, 1))(x, gain)
    assert not np.any(d_x[0])
    assert np.all(np.isfinite(np.float32(d_x)))
    assert np.all(np.isfinite(np.float32(d_gain)))
