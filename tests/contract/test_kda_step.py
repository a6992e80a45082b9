"""One token at a time: every implementation against `kda_gated`, and what the kernel promises."""

import re
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agreement import assert_agree, assert_finite, cast, to_numpy
from hopper import HOPPER, NEW, abstract_hopper, interpreter, needs_new

from pallas_kernels.kda import kda_gated, kda_step, mosaic_gpu
from pallas_kernels.kda.cases import Case, draw_gated

PLAIN = ("reference", "xla")
NAMES = ("output", "state")
WIDE = {5, 6, 7}  # a_log, dt_bias and the state: float32 whatever the others are
SIZES = [(2, 2, 12, 20), (1, 3, 5, 7), (2, 1, 128, 64), (3, 2, 1, 1)]  # B, H, K, V
# The plain forms round unit keys to bfloat16, as the op of whole rows does; all round the output.
TOLERANCES = {"float32": 1e-6, "bfloat16": 6e-3}
GATES = pytest.mark.parametrize("logits", [None, 1e4, -1e4], ids=["random", "at_the_floor", "no_decay"])
BOUNDS = pytest.mark.parametrize("bound", [-5.0, -60.0, None])


@pytest.fixture(autouse=True)
def exact():
    """A GPU would round the operands of the definition's products."""
    with jax.default_matmul_precision("highest"):
        yield


def inputs(B, H, K, V, dtype=np.float32, logits=None, T=1):
    """Raw ones with T, and the state."""
    return cast(draw_gated(Case(B, T, H, K, V), logits), dtype, WIDE)


def token(args, t=0):
    """The inputs of `kda_step` at t."""
    return [*(x[:, t] for x in args[:5]), *args[5:]]


def whole(args, bound=-5.0, dtype=np.float32):
    """What the definition gives over whole rows, from the same rounded inputs."""
    args = cast(args, dtype, WIDE)
    return kda_gated(*args[:7], lower_bound=bound, initial_state=args[7], implementation="reference")


def expected(args, bound=-5.0, dtype=np.float32):
    o_BTHV, S = whole(args, bound, dtype)
    return to_numpy((o_BTHV[:, 0], S))


# ---- the plain forms ----


@pytest.mark.parametrize("implementation", PLAIN)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sizes", SIZES)
@BOUNDS
def test_agrees_with_the_op_of_whole_rows(implementation, dtype, sizes, bound):
    args = inputs(*sizes, jnp.dtype(dtype))
    actual = kda_step(*token(args), lower_bound=bound, implementation=implementation)
    assert actual[0].dtype == dtype
    assert actual[1].dtype == np.float32
    assert_agree(actual, expected(args, bound), TOLERANCES[dtype], NAMES)


@pytest.mark.parametrize("implementation", PLAIN)
@BOUNDS
def test_agrees_in_float64(implementation, bound):
    with jax.enable_x64(True):
        args = inputs(2, 2, 12, 20, np.float64)
        actual = kda_step(*token(args), lower_bound=bound, implementation=implementation)
        assert {x.dtype for x in actual} == {np.dtype(np.float64)}
        assert_agree(actual, expected(args, bound, np.float64), 1e-14, NAMES)


@pytest.mark.parametrize("implementation", PLAIN)
@GATES
@BOUNDS
def test_any_gate_gives_finite_numbers(implementation, logits, bound):
    args = inputs(2, 2, 12, 20, logits=logits)
    actual = kda_step(*token(args), lower_bound=bound, implementation=implementation)
    assert_finite(actual)
    assert_agree(actual, expected(args, bound), TOLERANCES["float32"], NAMES)


@pytest.mark.parametrize("implementation", PLAIN)
def test_step_after_step_is_the_whole_row(implementation):
    args = inputs(2, 3, 12, 20, T=50)
    wanted = whole(args)
    step = jax.jit(partial(kda_step, scale=12**-0.5, implementation=implementation))
    S, outputs = args[7], []
    for t in range(50):
        o, S = step(*token(args, t)[:7], S)
        outputs.append(o)
    assert_agree((np.stack(outputs, 1), S), wanted, TOLERANCES["float32"], NAMES)


@pytest.mark.parametrize("implementation", PLAIN)
def test_plain_forms_have_gradients(implementation):
    args = inputs(1, 2, 5, 7)
    row = lambda *x: kda_gated(*x[:7], initial_state=x[7], implementation="reference")
    step = lambda *x: kda_step(*token(x), implementation=implementation)
    actual, wanted = (
        jax.grad(lambda *x, run=run: sum(jnp.sum(jnp.sin(y)) for y in run(*x)), range(8))(*args)
        for run in (step, row)
    )
    assert_agree(actual, wanted, 1e-5, range(8))


def test_none_takes_the_best_that_can_run():
    args = token(inputs(1, 1, 4, 4))
    call = {"key": 4, "value": 4, "dtypes": [np.float32]}
    best = "mosaic_gpu" if mosaic_gpu.why_not_step(jax.devices()[0], **call) is None else "xla"
    jax.tree.map(np.testing.assert_array_equal, kda_step(*args), kda_step(*args, implementation=best))


def test_no_rows_give_nothing():
    o, S = kda_step(*token(inputs(0, 2, 4, 6)))
    assert (o.shape, S.shape) == ((0, 2, 6), (0, 2, 4, 6))


# ---- which calls are refused ----


@pytest.mark.parametrize(
    ("at", "change", "why"),
    [
        (0, lambda x: x[:, None], r"query \(2, 1, 2, 4\) and value \(2, 2, 6\) must be \[B, H, K\]"),
        (1, lambda x: x[:, :1], r"key \(2, 1, 4\) must be \(2, 2, 4\)"),
        (2, lambda x: x[:1], r"value \(1, 2, 6\) must be \(2, 2, 6\)"),
        (3, lambda x: x[..., :1], r"gate_logits \(2, 2, 1\) must be \(2, 2, 4\)"),
        (4, lambda x: x[..., None], r"beta_logits \(2, 2, 1\) must be \(2, 2\)"),
        (5, lambda x: x[:1], r"a_log \(1,\) must be \(2,\)"),
        (6, lambda x: x[:, :1], r"dt_bias \(2, 1\) must be \(2, 4\)"),
        (7, lambda x: x.swapaxes(2, 3), r"state \(2, 2, 6, 4\) must be \(2, 2, 4, 6\)"),
        (7, lambda x: x.astype(np.float16), "state of float16 must be of float32, for a value of float32"),
    ],
)
def test_inputs_that_do_not_fit_are_named(at, change, why):
    args = token(inputs(2, 2, 4, 6))
    args[at] = change(args[at])
    with pytest.raises(ValueError, match=f"kda_step: {why}"):
        kda_step(*args)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"lower_bound": 0.0}, "lower_bound=0.0 must be negative, or None"),
        (
            {"implementation": "fast"},
            "implementation='fast' is not built for cpu; allowed: 'reference', 'xla'",
        ),
        ({"implementation": "mosaic_gpu"}, "'mosaic_gpu' cannot run here: .* this is cpu"),
    ],
)
def test_options_that_do_not_fit_are_named(options, why):
    with pytest.raises(ValueError, match=f"kda_step: .*{why}"):
        kda_step(*token(inputs(1, 1, 4, 6)), **options)


CALL = {"key": 128, "value": 128, "dtypes": [jnp.bfloat16, np.float32]}


@needs_new
def test_a_hopper_takes_the_layers_call():
    assert mosaic_gpu.why_not_step(HOPPER, **CALL) is None


@needs_new
@pytest.mark.parametrize(
    ("device", "change", "why"),
    [
        (SimpleNamespace(platform="gpu", compute_capability="8.0"), {}, "and this is 8.0"),
        (HOPPER, {"dtypes": [np.float32, np.float64]}, "bfloat16 and float32 inputs, not float64"),
        (HOPPER, {"value": 256}, "up to 128 channels, not 128 for keys and 256 for values"),
    ],
    ids=str,
)
def test_other_calls_are_refused_with_the_reason(device, change, why):
    assert why in mosaic_gpu.why_not_step(device, **(CALL | change))


@pytest.mark.skipif(NEW, reason="this is newer")
def test_an_old_jax_is_refused():
    assert f"and this is {jax.__version__}" in mosaic_gpu.why_not_step(HOPPER, **CALL)


# ---- the kernel ----


def kernel(*args, bound=-5.0, interpret=None):
    return mosaic_gpu.kda_step(*args, args[0].shape[2] ** -0.5, bound, interpret)


def lowered(sizes, dtype, bound) -> str:
    """The program of a step whose state is given away, for a card that is not there."""
    args = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in token(inputs(*sizes, dtype))]
    step = jax.jit(partial(kernel, bound=bound), donate_argnums=7)
    with jax.sharding.use_abstract_mesh(abstract_hopper()):
        return step.trace(*args).lower(lowering_platforms=("cuda",)).as_text()


@needs_new
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sizes", [(2, 3, 128, 128), (1, 1, 64, 128), (3, 2, 128, 64), (2, 2, 20, 12)])
@BOUNDS
def test_lowers(sizes, dtype, bound):
    assert lowered(sizes, jnp.dtype(dtype), bound).count("stablehlo.custom_call @mosaic_gpu") == 1


@needs_new
def test_the_new_state_is_written_where_the_old_one_was():
    """The kernel's operand is its result, and of what is given away: nothing else touches a state."""
    text = lowered((2, 3, 128, 128), jnp.bfloat16, -5.0)
    assert re.search(r"%arg7: tensor<2x3x128x128xf32> \{tf.aliasing_output = 1", text)
    alias = r"output_operand_alias<output_tuple_indices = \[1\], operand_index = 7,"
    operations = [line for line in text.splitlines() if "stablehlo." in line and "2x3x128x128xf32" in line]
    assert len(operations) == 1
    assert re.search(alias, operations[0])


@pytest.fixture
def interpret(monkeypatch):
    with interpreter(monkeypatch) as params:
        yield params


@needs_new
@pytest.mark.parametrize(
    ("sizes", "dtype", "bound", "logits"),
    [
        ((2, 2, 128, 128), "bfloat16", -5.0, None),
        ((1, 2, 64, 128), "float32", None, None),
        ((2, 1, 20, 12), "float32", -5.0, 1e4),
        ((1, 1, 64, 64), "float32", -60.0, -1e4),
        ((1, 1, 64, 64), "float32", None, 1e4),
        ((1, 1, 64, 64), "float32", None, -1e4),
    ],
)
def test_the_kernel_agrees(sizes, dtype, bound, logits, interpret):
    args = inputs(*sizes, jnp.dtype(dtype), logits)
    before = jnp.asarray(args[7])
    actual = kernel(*token(args)[:7], before, bound=bound, interpret=interpret)
    assert actual[0].dtype == dtype
    assert_finite(actual)
    assert_agree(actual, expected(args, bound), (TOLERANCES[dtype], TOLERANCES["float32"]), NAMES)
    np.testing.assert_array_equal(before, args[7])  # the caller has kept it


@needs_new
def test_step_after_step_of_the_kernel(interpret):
    args = inputs(1, 1, 64, 64, T=5)
    S, outputs = args[7], []
    for t in range(5):
        o, S = kernel(*token(args, t)[:7], S, interpret=interpret)
        outputs.append(o)
    assert_agree((np.stack(outputs, 1), S), whole(args), TOLERANCES["float32"], NAMES)


@needs_new
@pytest.mark.parametrize("at", range(8))
def test_the_kernel_has_no_derivative_and_says_so(at):
    args = token(inputs(1, 1, 64, 64))
    with pytest.raises(NotImplementedError, match="'mosaic_gpu' has no derivative; 'xla' has one"):
        jax.grad(lambda *x: jnp.sum(kernel(*x)[1]), at)(*args)


def here() -> str | None:
    """Why it cannot run on this process's device."""
    return mosaic_gpu.why_not_step(jax.devices()[0], **CALL)


@pytest.mark.skipif(here() is not None, reason=str(here()))
@GATES
@BOUNDS
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sizes", [(1, 96, 128, 128), (33, 7, 128, 128), (5, 3, 64, 128), (3, 4, 20, 12)])
def test_the_device_agrees(sizes, dtype, bound, logits):
    """And the same bits in three runs, each with a state given away."""
    args = inputs(*sizes, jnp.dtype(dtype), logits)
    run = jax.jit(partial(kda_step, lower_bound=bound, implementation="mosaic_gpu"), donate_argnums=7)
    actual, *again = (to_numpy(run(*token(args)[:7], jnp.array(args[7]))) for _ in range(3))
    for other in again:
        jax.tree.map(np.testing.assert_array_equal, other, actual)
    assert_finite(actual)
    # Exponentials and roots are the card's approximate ones.
    assert_agree(actual, expected(args, bound), (max(TOLERANCES[dtype], 1e-5), 1e-5), NAMES)
