"""The Hopper kernels: they lower without a GPU, and agree and keep the op's laws, interpreted or on one."""

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agreement import assert_agree, assert_finite, relative_error, to_numpy
from flax.linen import meta
from hopper import HOPPER, NEW, abstract_hopper, interpreter, needs_new

from k3jax.axes import MESH_AXES
from k3jax.config import replace
from k3jax.parameters import shapes
from k3jax.train.loss import loss_sums
from pallas_kernels.kda import accuracy, api, kda, kda_gated, mosaic_gpu
from pallas_kernels.kda.cases import SMALL, Case, draw, draw_gated
from pallas_kernels.kda.mosaic_gpu import op, scan
from tests.small import rows, small

INPUTS = {
    kda_gated: accuracy.INPUTS,
    kda: ("query", "key", "value", "log_decay", "beta", "initial_state"),
}
PACKED = Case(1, 100, 2, 64, 64, ((1, 30), (0, 3), (2, 40), (3, 20), (0, 7)))


def inputs(case, logits=None, seed=0):
    """bfloat16, but for A_log, dt_bias and the state."""
    kinds = [jnp.bfloat16] * 5 + [jnp.float32] * 3
    return [np.asarray(x, kind) for x, kind in zip(draw_gated(case, logits, seed), kinds, strict=True)]


def finished(case, decay="random", seed=0):
    """bfloat16, but for log-decays, beta and the state."""
    kinds = [jnp.bfloat16] * 3 + [jnp.float32] * 3
    return [np.asarray(x, kind) for x, kind in zip(draw(case, decay, seed), kinds, strict=True)]


KINDS = {
    "random": inputs,
    "floor": partial(inputs, logits=1e4),
    "long_memory": partial(inputs, logits=-6.0),
    "finished": finished,
    "finished_floor": partial(finished, decay="at_the_floor"),
    "finished_long_memory": partial(finished, decay="long_memory"),
    "finished_at_once": partial(finished, decay="all_at_25"),
    "finished_all_scales": partial(finished, decay="all_scales"),
}


def op_of(args):
    """The op that such inputs are of."""
    return next(op for op, names in INPUTS.items() if len(names) == len(args))


def cotangents(args):
    normal = np.random.default_rng(1).normal
    return normal(size=args[2].shape).astype(jnp.bfloat16), normal(size=args[-1].shape).astype(np.float32)


# ---- agreement ----


@jax.jit
def definition(args, segment_ids, cots):
    """(values, gradients)"""
    call = lambda *x: op_of(args)(
        *x[:-1], initial_state=x[-1], segment_ids=segment_ids, implementation="reference"
    )
    values, pull = jax.vjp(call, *args)
    return values, pull(cots)


def expected(args, segment_ids, cots):
    """The definition's in float32, from the same rounded inputs."""
    args, cots = jax.tree.map(lambda x: x.astype(np.float32), (tuple(args), cots))
    return to_numpy(definition(args, segment_ids, cots))


# Operands are rounded to 8 bits, 2e-3 each: once or twice on the way to a value, up to four times on the way
# to a gradient. That of dt_bias is a sum whose terms mostly cancel.
VALUES, GRADIENTS = 6e-3, 1e-2
CANCELLING = {"dt_bias": 2e-2}


def uncancelled(args, gradients):
    """How large A_log's gradients are where their terms, one a token and channel, do not cancel by chance."""
    terms = dict(zip(accuracy.INPUTS, gradients, strict=True))["gate_logits"] * (args[3] + args[6])
    return np.sqrt(np.sum(np.square(terms), (0, 1, 3)))


def assert_close(actual, args, segment_ids, cots):
    """To the definition's values and gradients."""
    wanted = expected(args, segment_ids, cots)
    assert_finite(actual)
    assert_agree(actual[0], wanted[0], VALUES, ("output", "final_state"))
    # Where the gate is flat, 0 is its gradient, and any rounding is more than that.
    flat = {"gate_logits", "a_log", "dt_bias"} if np.all(args[3] == 1e4) else set()
    for name, got, right in zip(INPUTS[op_of(args)], actual[1], wanted[1], strict=True):
        if name in flat:
            continue
        if name == "a_log" and np.linalg.norm(size := uncancelled(args, wanted[1])) > np.linalg.norm(right):
            got, right = size + (got - right), size
        assert_agree([got], [right], CANCELLING.get(name, GRADIENTS), [name])


SIZES = [2.0**-20, 2.0**13]  # of cotangents. Those of a mean over many tokens are small


def assert_scaled(run, args, size: float):
    """Gradients are as large as cotangents: factors of pairs must leave room down and up."""
    cots = cotangents(args)
    others = jax.tree.map(lambda x: (x * size).astype(x.dtype), cots)
    _, found = to_numpy(run(others))
    _, wanted = to_numpy(run(cots))
    for x, y in zip(found, wanted, strict=True):
        x, y = np.float64(x) / size, np.float64(y)
        np.testing.assert_allclose(x, y, atol=1e-3 * np.abs(y).max(), rtol=0)


# ---- which calls they take ----


CALL: dict[str, Any] = {"key": 128, "value": 128, "dtypes": [jnp.bfloat16] * 4}


def on(device):
    """`api.why_not` as if this were the device."""
    return lambda name, **call: mosaic_gpu.why_not(device, **call) if name == "mosaic_gpu" else None


@needs_new
def test_a_hopper_takes_the_layers_call():
    assert mosaic_gpu.why_not(HOPPER, **CALL) is None


@needs_new
@pytest.mark.parametrize(
    ("device", "change", "why"),
    [
        (SimpleNamespace(platform="tpu"), {}, "and this is tpu"),
        (SimpleNamespace(platform="gpu", compute_capability="8.0"), {}, "and this is 8.0"),
        (SimpleNamespace(platform="gpu", compute_capability="10.0"), {}, "and this is 10.0"),
        (HOPPER, {"dtypes": [jnp.bfloat16, jnp.float32]}, "bfloat16 inputs, not float32"),
        (HOPPER, {"key": 256}, "up to 128 channels, not 256 for keys"),
    ],
    ids=str,
)
def test_other_calls_are_refused_with_the_reason(device, change, why):
    assert why in mosaic_gpu.why_not(device, **(CALL | change))


@needs_new
@pytest.mark.parametrize(
    ("device", "change", "chosen"),
    [
        (HOPPER, {}, "mosaic_gpu"),
        (HOPPER, {"dtypes": [jnp.float32] * 4}, "xla"),
        (HOPPER, {"value": 129}, "xla"),
        (SimpleNamespace(platform="gpu", compute_capability="8.0"), {}, "xla"),
    ],
    ids=str,
)
def test_they_are_the_best_where_they_can_run(device, change, chosen, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(api, "why_not", on(device))
    assert api.choose(None, **(CALL | change)) == chosen


@pytest.mark.skipif(NEW, reason="this is newer")
def test_an_old_jax_is_refused():
    assert f"and this is {jax.__version__}" in mosaic_gpu.why_not(HOPPER, **CALL)


@pytest.mark.parametrize("op", [kda, kda_gated])
def test_asking_for_them_elsewhere_is_an_error(op):
    args = [jnp.asarray(x) for x in inputs(Case(1, 1, 1, 64, 64))]
    args = [*args[:5], *args[5:7]] if op is kda_gated else args[:5]
    with pytest.raises(ValueError, match=r"'mosaic_gpu' cannot run here: .* this is cpu"):
        op(*args, implementation="mosaic_gpu")


@needs_new
@pytest.mark.parametrize("at", range(4))
def test_one_input_of_another_dtype_is_refused(at, monkeypatch):
    monkeypatch.setattr(api, "why_not", on(HOPPER))
    args = [jnp.asarray(x) for x in inputs(Case(1, 1, 1, 64, 64))][:7]
    args[at] = args[at].astype(np.float32)
    with pytest.raises(ValueError, match="it takes bfloat16 inputs, not float32"):
        kda_gated(*args, implementation="mosaic_gpu")


# ---- lowering ----


def gradients(args, segment_ids, cotangents, interpret=None):
    """(values, gradients)"""

    def run(*x):
        scale = x[0].shape[3] ** -0.5
        if op_of(args) is kda:
            return mosaic_gpu.kda(*x, segment_ids, scale, interpret)
        return mosaic_gpu.kda_gated(*x, segment_ids, scale, -5.0, interpret)

    values, pull = jax.vjp(run, *args)
    return values, pull(cotangents)


@needs_new
@pytest.mark.parametrize(
    ("T", "K", "V", "packed", "kind"),
    [
        (1, 128, 128, False, "random"),
        (63, 64, 128, True, "random"),
        (65, 128, 64, False, "random"),
        (65, 20, 12, True, "random"),
        (4096, 128, 128, False, "random"),
        (4096, 128, 128, True, "random"),
        (65, 128, 128, True, "finished"),
        (65, 64, 64, False, "finished"),
    ],
)
def test_every_kernel_lowers(T, K, V, packed, kind):
    """Two of the forward pass, and three of the backward pass.

    Rows in pieces go through each piece for its transition and its own part first, backwards for the latter
    alone: the transition and the state before each piece are kept.
    """
    abstract = partial(jax.tree.map, lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype))
    args = KINDS[kind](Case(2, 1, 3, K, V))
    args = [np.broadcast_to(x, (2, T, *x.shape[2:])) if x.shape[:2] == (2, 1) else x for x in args]
    ids = np.ones((2, T), np.int32) if packed else None
    with jax.sharding.use_abstract_mesh(abstract_hopper()):
        traced = jax.jit(gradients).trace(*abstract((args, ids, cotangents(args))))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @mosaic_gpu") == (5 if T < 4096 else 8)


@needs_new
@pytest.mark.parametrize("lower_bound", [-5.0, -6.0, None, "finished"])
def test_any_gate_runs_on_them(lower_bound, monkeypatch):
    """Finished log-decays too; of other gates than those bounded at -5, these are made before."""
    monkeypatch.setattr(api, "why_not", on(HOPPER))
    case = Case(1, 65, 2, 64, 64)
    of_kda = lower_bound == "finished"
    args = finished(case) if of_kda else inputs(case)
    run = partial(kda if of_kda else partial(kda_gated, lower_bound=lower_bound), implementation="mosaic_gpu")
    with jax.sharding.use_abstract_mesh(abstract_hopper()):
        abstract = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in args[:-1]]
        text = jax.jit(run).trace(*abstract).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @mosaic_gpu") == 2


@needs_new
@pytest.mark.parametrize(("remat", "kernels"), [("none", 5), ("ops", 6)])
def test_the_model_gives_them_what_they_take(remat, kernels, monkeypatch):
    """Also where only the parameters' shapes are asked for: its layers work in bfloat16 throughout.

    What `prepare` made is kept, or it runs once more: that alone of the forward pass, if outputs are kept.
    """
    monkeypatch.setattr(api, "why_not", on(HOPPER))
    cfg = small().model
    linear = replace(cfg.linear, implementation="mosaic_gpu")
    cfg = replace(cfg, dtype="bfloat16", linear=linear, remat=remat)
    abstract = lambda tree: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
    with jax.sharding.use_abstract_mesh(abstract_hopper(MESH_AXES)):
        loss = jax.jit(jax.grad(lambda params, batch: loss_sums(cfg, params, batch)[0].loss))
        params = abstract(meta.unbox(shapes(cfg)))
        text = loss.trace(params, abstract(rows(small()))).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @mosaic_gpu") == kernels


@needs_new
def test_under_a_checkpoint_only_inputs_are_kept():
    args = inputs(Case(1, 256, 2, 64, 64))
    run = lambda *x: mosaic_gpu.kda_gated(*x, None, 0.125, -5.0)
    size = lambda tree: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
    kept = lambda run: size(jax.eval_shape(lambda *x: jax.vjp(run, *x)[1], *args))
    with jax.sharding.use_abstract_mesh(abstract_hopper()):
        assert kept(jax.checkpoint(run)) <= size(args)
        assert kept(run) > 1.5 * size(args)


# ---- on the device ----


compiled = jax.jit(gradients)


def here() -> str | None:
    """Why they cannot run on this process's device."""
    return mosaic_gpu.why_not(jax.devices()[0], **CALL)


@pytest.mark.skipif(here() is not None, reason=str(here()))
@pytest.mark.parametrize(
    ("T", "K", "V"),
    [(1, 128, 128), (63, 128, 128), (65, 128, 128), (4096, 128, 128), (65, 64, 128), (65, 100, 64)],
)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_device_agrees_with_the_definition(T, K, V, packed, kind):
    """Several blocks along every grid axis; and the same bits at each run, as a race would not give."""
    cuts = T // 3, T // 5
    runs = ((1, cuts[0]), (2, cuts[1]), (0, T // 7), (3, T - sum(cuts) - T // 7))
    case = Case(3, T, 4, K, V, runs if packed else None)
    args = KINDS[kind](case)
    cots = cotangents(args)
    actual, *again = (to_numpy(compiled(args, case.segment_ids, cots)) for _ in range(3))
    for other in again:
        jax.tree.map(np.testing.assert_array_equal, other, actual)
    assert_close(actual, args, case.segment_ids, cots)


@pytest.mark.skipif(here() is not None, reason=str(here()))
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_size_of_cotangents_does_not_matter_on_the_device(kind, size):
    args = KINDS[kind](Case(1, 130, 4, 128, 128))
    assert_scaled(lambda cots: compiled(args, None, cots), args, size)


# ---- interpreted ----


@pytest.fixture
def interpret(monkeypatch):
    """Pallas's own interpreter, taught left operands in registers: it knows those in shared memory."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks as gpu
    from jax._src.pallas.mosaic_gpu.interpret import shared_memory

    def wgmma(*, token, mesh_location, thread, source_info=None, **operands):
        memory = gpu._get_shared_memory()
        info = shared_memory.GPULoggingInfo(mesh_location, thread, source_info)

        def place(name):
            key = gpu.HostAllocationKey.from_array(operands[f"{name}_allocation_key_as_array"])
            transforms = gpu._remove_noop_transforms(operands[f"{name}_transforms"])
            return key, memory.access(key, jax.tree.map(int, transforms))

        read = lambda name: memory.get_buffer_content(*place(name), thread, logging_info=info)[0]
        a = np.asarray(operands["a_allocation_key_as_array"])
        a = read("a") if np.issubdtype(a.dtype, np.integer) else a
        with np.errstate(all="ignore"):  # what is masked out may overflow
            total = read("acc") + np.matmul(a.astype(np.float32), read("b").astype(np.float32))
        memory.store_buffer_content(*place("acc"), total, thread, logging_info=info)
        return token

    monkeypatch.setattr(gpu, "wgmma", gpu.fail_on_exception(wgmma))
    with interpreter(monkeypatch) as params:
        yield params


def interpreted(interpret, args, segment_ids, cots):
    return to_numpy(gradients(args, segment_ids, cots, interpret))


@needs_new
@pytest.mark.parametrize(
    ("case", "kind"),
    [
        (SMALL["over_a_chunk"], "random"),
        (PACKED, "floor"),
        (PACKED, "long_memory"),
        (Case(1, 64, 2, 128, 128), "random"),
        (Case(1, 320, 2, 64, 64), "long_memory"),
        (SMALL["over_a_chunk"], "finished_all_scales"),
        (Case(1, 64, 1, 128, 128), "finished"),
        (PACKED, "finished_at_once"),
        (Case(1, 64, 1, 64, 128), "random"),
        (Case(1, 64, 1, 128, 64), "finished"),
    ],
    ids=str,
)
def test_agrees_with_the_definition(case, kind, interpret):
    args = KINDS[kind](case)
    cots = cotangents(args)
    assert_close(interpreted(interpret, args, case.segment_ids, cots), args, case.segment_ids, cots)


@needs_new
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["floor", "finished_floor"])
def test_the_size_of_cotangents_does_not_matter(kind, size, interpret):
    args = KINDS[kind](Case(1, 64, 1, 128, 128))
    assert_scaled(lambda cots: interpreted(interpret, args, None, cots), args, size)


@needs_new
@pytest.mark.slow
def test_errors_are_less_than_those_of_another_librarys_kernels(interpret, monkeypatch):
    """Of one draw and four heads, beside what the benchmark stored of more."""
    monkeypatch.setattr(accuracy, "CASE", Case(1, 1024, 4, 128, 128))
    monkeypatch.setattr(accuracy, "DRAWS", 1)

    def run(args, cots):
        return interpreted(interpret, args, None, (cots[0].astype(jnp.bfloat16), cots[1]))

    of_ours = accuracy.errors({"ours": run}, lambda args, cots: definition(args, None, cots))["ours"]
    found = of_ours.pooled
    print({name: f"{error:.2e}" for name, error in found.items()})
    stored = (Path(accuracy.__file__).parent / "results" / "errors.jsonl").read_text().splitlines()
    theirs = next(x["pooled"] for x in map(json.loads, stored) if x["implementation"] == "fla")
    assert {name: error for name, error in found.items() if error > theirs[name]} == {}


def without_states(args):
    """(inputs, cotangents) where nothing comes from a state or is asked of one."""
    args = [*args[:7], 0 * args[7]]
    return args, (cotangents(args)[0], np.zeros_like(args[7]))


@needs_new
def test_what_a_token_does_to_itself_is_not_rounded_on_the_way(interpret):
    """With strong decays that is all: beta v, read by q . k. Three roundings of 1.65e-3 are left."""
    args, cots = without_states(inputs(Case(1, 128, 2, 128, 128), 1e4))
    actual, wanted = interpreted(interpret, args, None, cots), expected(args, None, cots)
    some = lambda values, gradients: [values[0], gradients[2], gradients[4]]
    assert_agree(some(*actual), some(*wanted), 2.95e-3, ["output", "d value", "d beta_logits"])


@needs_new
def test_columns_of_pairs_keep_sixteen_bits(interpret):
    """In one chunk alone the gates' gradients owe a tenth of their error to these if they have eight."""
    args, cots = without_states(inputs(Case(1, 64, 2, 128, 128), 0.0))
    actual, wanted = interpreted(interpret, args, None, cots), expected(args, None, cots)
    assert_agree([actual[1][3]], [wanted[1][3]], 3.6e-3, ["d gate_logits"])


@needs_new
def test_pairs_behind_a_decay_say_nothing_of_it(interpret):
    """They cancel in its gradient, unless they are rounded one way as rows and another as columns."""
    args = inputs(Case(1, 64, 1, 64, 64))
    args[1][:, :40], args[7] = 0, 0 * args[7]  # nothing is there to be read or forgotten
    d_logits = np.float32(interpreted(interpret, args, None, cotangents(args))[1][3])
    assert np.abs(d_logits[:, :40]).max() < 1e-4 * np.abs(d_logits).max()


@needs_new
def test_rows_are_cut_where_heads_are_few():
    assert [scan.pieces(*call) for call in ((96, 128), (32, 1024), (16, 512), (16, 6), (4, 3), (1, 1))] == [
        1, 4, 8, 1, 1, 1,
    ]  # fmt: skip


@needs_new
@pytest.mark.parametrize("count", [2, 4])
def test_pieces_of_a_row_may_run_side_by_side(count, interpret, monkeypatch):
    """Each from the state that the ones before lead to, and its cotangent from those after."""
    monkeypatch.setattr(scan, "pieces", lambda heads, chunks: count)
    for traced in (op._forward, op._backward):
        traced.clear_cache()  # of another number of pieces
    case = Case(1, 256, 3, 64, 64, ((1, 150), (0, 4), (2, 102)))
    args = inputs(case, -6.0)
    cots = cotangents(args)
    assert_close(interpreted(interpret, args, case.segment_ids, cots), args, case.segment_ids, cots)


@needs_new
def test_documents_and_the_future_change_nothing(interpret):
    """To the bit: a document's outputs and gradients are its own, and an output knows no later token."""
    args, others = inputs(PACKED), inputs(PACKED, seed=7)
    cots = cotangents(args)
    before = interpreted(interpret, args, PACKED.segment_ids, cots)
    mine = PACKED.segment_ids == 2
    timed = lambda x: x.shape[:2] == mine.shape

    def with_others_at(mine):
        at = lambda x: mine.reshape(mine.shape + (1,) * (x.ndim - 2))
        pairs = zip(args, others, strict=True)
        changed = [np.where(at(x), y, x).astype(x.dtype) if timed(x) else x for x, y in pairs]
        return interpreted(interpret, changed, PACKED.segment_ids, cots)

    after = with_others_at(mine)
    for x, y in zip((before[0][0], *before[1]), (after[0][0], *after[1]), strict=True):
        if timed(x):
            assert relative_error(x, y) > 0
            np.testing.assert_array_equal(x[~mine], y[~mine])
    np.testing.assert_array_equal(before[0][1], after[0][1])

    mine &= np.arange(100)[None] >= 45  # from the middle of the document
    after = with_others_at(mine)
    np.testing.assert_array_equal(before[0][0][~mine], after[0][0][~mine])
