"""What every implementation of attention owes: the reference's values and gradients, and the op's laws."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agreement import assert_agree, assert_finite, cast, to_numpy

from pallas_kernels.attention import attention, xla
from pallas_kernels.attention.cases import SMALL, Case, draw

IMPLEMENTATIONS = ("xla",)  # a kernel joins by adding its name

# Relative L2 of one array, (values, gradients).
# float32: a running softmax rescales its sums once per block: a few roundings of 6e-8.
# bfloat16: the reference multiplies in float32; probabilities, and gradients of logits, are rounded
#   to 8 bits (2e-3) before their products.
# float64: as float32, in 1e-16.
TOLERANCES = {"float32": (1e-5, 2e-5), "bfloat16": (1e-2, 2e-2), "float64": (1e-13, 1e-13)}
INPUTS = ("query", "key", "value")
AGREEMENT = [(name, dtype) for name in SMALL for dtype in TOLERANCES]

each_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(xla, "BLOCK", 8)


@partial(jax.jit, static_argnames=("implementation", "scale"))
def program(implementation, args, query_index, key_index, cotangent, scale=None):
    """((output, largest logits), gradients)."""
    settings = {"query_index": query_index, "key_index": key_index, "implementation": implementation}
    run = lambda *args: attention(*args, scale=scale, **settings)
    (o, top), pull = jax.vjp(run, *args)
    return (o, top), pull((cotangent, jnp.ones_like(top)))


def pullback(*args):
    return to_numpy(program(*args))


def cotangent(case, dtype):
    x = np.random.default_rng(1).normal(size=(case.B, case.T, case.H, case.V))
    return x.astype(jnp.promote_types(dtype, np.float32))


def run(implementation, case, dtype="float32", args=None, scale=None):
    args = cast(draw(case), dtype) if args is None else args
    return pullback(implementation, args, case.query_index, case.key_index, cotangent(case, dtype), scale)


def dense(case, q, k, v, scale):
    """Query by query in numpy: (output, largest logit per head)."""
    out, top = np.zeros((case.B, case.T, case.H, case.V)), np.full(case.H, -np.inf)
    key_index = np.zeros((case.B, case.S), int) if case.segments is None else case.key_index
    for b, t, h in np.ndindex(case.B, case.T, case.H):
        here = case.S - case.T + t
        seen = (np.arange(case.S) <= here) & (key_index[b] == key_index[b, here]) & (key_index[b] >= 0)
        if not seen.any():
            continue
        logits = scale * k[b, seen, h] @ q[b, t, h]
        p = np.exp(logits - logits.max())
        out[b, t, h] = (p / p.sum()) @ v[b, seen, h]
        top[h] = max(top[h], logits.max())
    return out, top


@pytest.mark.parametrize("name", SMALL)
def test_the_reference_is_dense_attention(name):
    case = SMALL[name]
    with jax.enable_x64(True):
        actual = run("reference", case, "float64")[0]
    assert_agree(actual, dense(case, *draw(case), case.K**-0.5), 1e-13, ("output", "top"))


@each_implementation
@pytest.mark.parametrize(("name", "dtype"), AGREEMENT)
def test_agrees_with_the_definition(name, dtype, implementation):
    case = SMALL[name]
    with jax.enable_x64(dtype == "float64"):
        expected, actual = (run(which, case, dtype) for which in ("reference", implementation))
    values, gradients = TOLERANCES[dtype]
    assert_finite((expected, actual))
    chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)
    assert_agree(actual[0], expected[0], values, ("output", "top"))
    assert_agree(actual[1], expected[1], gradients, INPUTS)


@each_implementation
@pytest.mark.parametrize("size", [1e3, 1e8])
def test_violent_logits_stay_finite_and_exact(size, implementation):
    """A softmax that is one-hot: nothing may overflow, no block may be left out."""
    case = SMALL["packed"]
    args = cast(draw(case, size), "float32")
    expected, actual = (run(which, case, args=args) for which in ("reference", implementation))
    assert_finite(actual)
    assert_agree(actual[0], expected[0], 1e-4, ("output", "top"))


@each_implementation
def test_the_largest_logit_may_be_negative_or_missing(implementation):
    """Per head, over the pairs that see each other, after the scale; -inf where there is none."""
    case = SMALL["packed"]
    q, k, v = draw(case)
    k[:, :, 1] = -np.abs(k[:, :, 1])
    q[:, :, 1] = np.abs(q[:, :, 1]) + 1
    args = cast((q, k, v), "float32")
    top = run(implementation, case, args=args, scale=0.25)[0][1]
    expected = dense(case, q, k, v, 0.25)[1]
    assert expected[1] < 0 < expected[0]
    np.testing.assert_allclose(top, expected, rtol=1e-5)
    none = np.full((case.B, case.S), -1, np.int32)
    (o, top), gradients = pullback(implementation, args, none, none, cotangent(case, "float32"))
    np.testing.assert_array_equal(top, np.full(case.H, -np.inf))
    assert not any(np.any(x) for x in (o, *gradients))


@each_implementation
def test_padding_gives_zero_and_is_never_read(implementation):
    case = SMALL["packed"]
    padding = case.key_index < 0
    args = cast(draw(case), "float32")
    before = run(implementation, case, args=args)
    assert not np.any(np.asarray(before[0][0])[padding])
    assert not any(np.any(np.asarray(x)[padding]) for x in before[1])
    args = tuple(np.where(padding[..., None, None], np.float32(1e6), x) for x in args)
    after = run(implementation, case, args=args)
    chex.assert_trees_all_equal(after[0], before[0])


@each_implementation
def test_nothing_flows_from_the_future_or_another_segment(implementation):
    """By gradient, exactly: output t moves with keys at or before t, of t's segment."""
    case = SMALL["packed"]
    args = cast(draw(case), "float32")
    for t in (3, 9, 20):
        one = np.where(
            (np.arange(case.T) == t)[None, :, None, None], cotangent(case, "float32"), np.float32(0)
        )
        for x in pullback(implementation, args, case.query_index, case.key_index, one)[1]:
            index = case.key_index
            reached = (np.arange(case.S) <= t)[None] & (index == index[:, t : t + 1]) & (index >= 0)
            assert not np.any(np.asarray(x)[~reached])


@each_implementation
def test_rows_and_segments_are_bitwise_independent(implementation):
    case = SMALL["packed"]
    mine = case.key_index == 1
    mine[1] = True
    args, others = (cast(draw(case, seed=seed), "float32") for seed in (0, 7))
    changed = tuple(np.where(mine[..., None, None], y, x) for x, y in zip(args, others, strict=True))
    before, after = (run(implementation, case, args=x) for x in (args, changed))
    for x, y in zip((before[0][0], *before[1]), (after[0][0], *after[1]), strict=True):
        np.testing.assert_array_equal(np.asarray(x)[~mine], np.asarray(y)[~mine])


@each_implementation
def test_a_cache_and_its_new_tokens_are_one_pass(implementation):
    case = SMALL["packed"]
    q, k, v = cast(draw(case), "float32")
    (whole, _), _ = run(implementation, case, args=(q, k, v))
    for cut in (1, 8, 13):
        query_index = case.query_index[:, cut:]
        o, _ = jax.jit(partial(attention, implementation=implementation))(
            q[:, cut:], k, v, query_index=query_index, key_index=case.key_index
        )
        assert_agree([o], [whole[:, cut:]], 1e-6, ["output"])


@each_implementation
@pytest.mark.parametrize("shape", [(0, 3, 3), (2, 0, 0), (2, 0, 5)])
def test_nothing_in_nothing_out(shape, implementation):
    case = Case(*shape, 2, 4, 3)
    (o, top), gradients = run(implementation, case)
    assert o.shape == (case.B, case.T, case.H, case.V)
    np.testing.assert_array_equal(top, np.full(2, -np.inf))
    assert not any(np.any(x) for x in gradients)


@each_implementation
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_outputs_are_at_least_float32(dtype, implementation):
    """Rounding the output before the gate biases training."""
    with jax.enable_x64(dtype == "float64"):
        args = cast(draw(SMALL["one_block"]), dtype)
        o, top = jax.eval_shape(partial(attention, implementation=implementation), *args)
        assert o.dtype == top.dtype == jnp.promote_types(dtype, np.float32)


@each_implementation
def test_the_largest_logits_take_no_gradient(implementation):
    q, k, v = cast(draw(SMALL["one_block"]), "float32")
    top = lambda q, k: jnp.sum(attention(q, k, v, implementation=implementation)[1])
    assert not any(np.any(x) for x in jax.jit(jax.grad(top, argnums=(0, 1)))(q, k))


@each_implementation
def test_temporary_memory_is_linear_in_length(implementation, monkeypatch):
    monkeypatch.setattr(xla, "BLOCK", 32)

    def memory(T):
        shape = lambda X: jax.ShapeDtypeStruct((1, T, 2, X), jnp.float32)
        args = (shape(8), shape(8), shape(4))
        lowered = program.lower(implementation, args, None, None, shape(4))
        return lowered.compile().memory_analysis().temp_size_in_bytes

    small, middle, large = map(memory, (512, 1024, 2048))
    assert large - middle <= 2.2 * (middle - small)
    assert large < 4 * 2048 * 2048  # one [T, T] array of one head


def test_an_implementation_that_is_not_built_is_refused_by_name():
    args = cast(draw(SMALL["one_block"]), "float32")
    with pytest.raises(ValueError, match=r"attention.*mosaic_gpu.*'reference'.*'xla'"):
        attention(*args, implementation="mosaic_gpu")


def test_more_queries_than_keys_are_refused():
    q, k, v = cast(draw(SMALL["one_block"]), "float32")
    with pytest.raises(ValueError, match="8 queries are the last of 7"):
        attention(q, k[:, :7], v[:, :7])


@pytest.mark.parametrize("which", range(3))
def test_shapes_that_do_not_fit_are_refused(which):
    args = list(cast(draw(SMALL["one_block"]), "float32"))
    args[which] = args[which][:, :, :1]
    with pytest.raises(AssertionError):
        attention(*args)
    args = cast(draw(SMALL["one_block"]), "float32")
    with pytest.raises(AssertionError):
        attention(*args, key_index=np.zeros((2, 9), np.int32))
