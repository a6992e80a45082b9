import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.config import ConfigError, Situ, Swiglu
from k3jax.layers.activations import glu

SITU = Situ(4.0, 25.0)


def draw(seed, shape=(64, 16), scale=1.0, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    return tuple(jnp.asarray(scale * rng.normal(size=shape), dtype) for _ in range(2))


def both(activation):
    """Value and gradients of the sum, under jit."""
    total = lambda gate, up: jnp.sum(glu(activation, gate, up).astype(jnp.float32))
    return jax.jit(jax.value_and_grad(total, argnums=(0, 1)))


@pytest.mark.parametrize("activation", [SITU, Situ(1.0, 2.0), Swiglu()], ids=repr)
def test_values_are_the_definition(activation):
    gate, up = draw(0, scale=6.0)
    g, u = np.asarray(gate, np.float64), np.asarray(up, np.float64)
    sigmoid = 1 / (1 + np.exp(-g))
    if isinstance(activation, Situ):
        b1, b2 = activation.gate, activation.up
        expected = b1 * np.tanh(g / b1) * sigmoid * b2 * np.tanh(u / b2)
    else:
        expected = g * sigmoid * u
    chex.assert_trees_all_close(np.asarray(glu(activation, gate, up)), expected, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("scale", [10.0, 1e3, 1e30])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_situ_is_bounded_by_the_product_of_its_caps(scale, dtype):
    y = glu(SITU, *draw(1, scale=scale, dtype=dtype))
    assert jnp.max(jnp.abs(y)) <= 100


def test_the_bound_is_reached():
    assert glu(SITU, jnp.float32(1e6), jnp.float32(1e6)) == 100
    assert glu(SITU, jnp.float32(1e6), jnp.float32(-1e6)) == -100
    assert abs(glu(SITU, jnp.float32(-1e6), jnp.float32(1e6))) == 0  # the gate closes: no lower plateau


def test_near_zero_it_is_swiglu():
    """They differ by the caps' third-order terms: a share of (g / b1)^2 / 3 + (u / b2)^2 / 3."""
    for size in (0.5, 0.1):
        gate, up = (jnp.clip(size * x, -size, size) for x in draw(2))
        situ, swiglu = glu(SITU, gate, up), glu(Swiglu(), gate, up)
        share = (size / 4) ** 2 / 3 + (size / 25) ** 2 / 3
        assert jnp.all(jnp.abs(situ - swiglu) <= share * jnp.abs(swiglu) + 1e-7)
        assert jnp.any(situ != swiglu)


def test_wide_caps_are_swiglu():
    gate, up = draw(3, scale=5.0)
    wide = both(Situ(1e6, 1e6))(gate, up)
    chex.assert_trees_all_close(wide, both(Swiglu())(gate, up), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("size", [0.0, 50.0, 1e4, 1e30])
def test_saturation_leaves_finite_gradients(size, dtype):
    signs = jnp.asarray([-1.0, 1.0], dtype)
    gate, up = size * signs[:, None] + jnp.zeros((1, 2), dtype), size * signs[None] + jnp.zeros((2, 1), dtype)
    value, gradients = both(SITU)(gate, up)
    chex.assert_tree_all_finite((value, gradients))
    if size > 1e3:
        chex.assert_trees_all_equal(gradients, jax.tree.map(jnp.zeros_like, gradients))


@pytest.mark.parametrize("activation", [SITU, Swiglu()], ids=repr)
def test_gradients_are_those_of_float64(activation):
    gate, up = draw(4, shape=(16,), scale=3.0)
    actual = both(activation)(gate, up)[1]
    step = 1e-6
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(x), jnp.float64) for x in (gate, up)]
        f = lambda g, u: np.asarray(glu(activation, g, u))
        assert f(*wide).dtype == np.float64
        expected = (
            (f(wide[0] + step, wide[1]) - f(wide[0] - step, wide[1])) / (2 * step),
            (f(wide[0], wide[1] + step) - f(wide[0], wide[1] - step)) / (2 * step),
        )
    chex.assert_trees_all_close(jax.tree.map(np.asarray, actual), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("activation", [SITU, Swiglu()], ids=repr)
def test_only_the_inputs_wait_for_the_backward_pass(activation):
    """Float32 intermediates would be eight times what two bfloat16 inputs take."""
    gate, up = draw(5, dtype=jnp.bfloat16)
    y, pull = jax.vjp(lambda gate, up: glu(activation, gate, up), gate, up)
    kept = [x for x in jax.tree.leaves(pull) if jnp.size(x) > 1]
    assert y.dtype == jnp.bfloat16
    assert {x.dtype for x in kept} == {jnp.dtype(jnp.bfloat16)}
    assert sum(x.nbytes for x in kept) == gate.nbytes + up.nbytes


def test_bfloat16_is_rounded_once():
    """The product is made in float32: its error is that of the last rounding, 2^-8."""
    gate, up = draw(6, scale=4.0, dtype=jnp.bfloat16)
    y = glu(SITU, gate, up).astype(jnp.float32)
    exact = glu(SITU, gate.astype(jnp.float32), up.astype(jnp.float32))
    assert jnp.all(jnp.abs(y - exact) <= jnp.abs(exact) * 2.0**-8 + 1e-30)


@pytest.mark.parametrize("caps", [(0.0, 25.0), (4.0, -1.0), ("4", 25.0)])
def test_caps_must_be_positive_numbers(caps):
    with pytest.raises(ConfigError, match=r"Situ\.(gate|up)"):
        Situ(*caps)
