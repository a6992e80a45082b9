"""Numbers of independent programs: the ops, the whole model and its gradients against them."""

from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from k3jax.interop.huggingface import load
from k3jax.interop.released_names import tensors
from k3jax.model import K3
from pallas_kernels.kda import kda_gated, log_decay

GOLDEN = Path(__file__).parent / "golden"
KDA_CASES = sorted(path.stem for path in (GOLDEN / "kda").glob("*.npz"))
INPUTS = ("q", "k", "v", "gate_logits", "beta_logits", "a_log", "dt_bias", "initial_state")
WIDE = 1e-6  # under float64: what is left is the rounding of the stored numbers to float32

# Relative L2 of one array: (values, gradients, a_log's gradient, a sum over tokens that cancels).
KDA_TOLERANCES = {"reference": (2e-5, 1e-4, 3e-4), "xla": (1e-4, 3e-4, 3e-4)}


def relative_error(actual, expected) -> float:
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


def assert_within(tolerances, actual, expected) -> None:
    """Named arrays, each within its own tolerance, or all within one number."""
    errors = {name: relative_error(actual[name], expected[name]) for name in actual}
    allowed = tolerances if isinstance(tolerances, dict) else dict.fromkeys(errors, tolerances)
    wrong = {name: error for name, error in errors.items() if not error <= allowed[name]}
    assert not wrong


@cache
def kda_case(name):
    with np.load(GOLDEN / "kda" / f"{name}.npz") as stored:
        case = dict(stored)
    bound = float(case["gate_lower_bound"])
    return case, None if np.isnan(bound) else bound


@partial(jax.jit, static_argnames=("implementation", "lower_bound"))
def kda_results(inputs, cotangents, segment_ids, implementation, lower_bound):
    def run(*args):
        settings = {"lower_bound": lower_bound, "segment_ids": segment_ids, "implementation": implementation}
        return kda_gated(*args[:-1], initial_state=args[-1], **settings)

    values, pull = jax.vjp(run, *inputs)
    decay = log_decay(inputs[3], inputs[5], inputs[6], lower_bound)
    gradients = {f"grad_{name}": x for name, x in zip(INPUTS, pull(cotangents), strict=True)}
    return dict(zip(("o", "final_state"), values, strict=True)) | {"log_decay": decay}, gradients


def check_kda(name, implementation, dtype, values, gradients, a_log):
    case, lower_bound = kda_case(name)
    inputs = tuple(jnp.asarray(case[key], dtype) for key in INPUTS)
    cotangents = tuple(jnp.asarray(case[f"cotangent_{key}"], dtype) for key in ("o", "state"))
    got = kda_results(inputs, cotangents, case.get("segment_ids"), implementation, lower_bound)
    assert_within(values, got[0], case)
    assert_within(dict.fromkeys(got[1], gradients) | {"grad_a_log": a_log}, got[1], case)


FLOAT32 = [
    pytest.param(name, which, marks=() if which != "reference" or "packed" in name else pytest.mark.slow)
    for name in KDA_CASES
    for which in KDA_TOLERANCES
]


@pytest.mark.parametrize(("name", "implementation"), FLOAT32)
def test_kda_in_float32(name, implementation):
    check_kda(name, implementation, "float32", *KDA_TOLERANCES[implementation])


@pytest.mark.parametrize("implementation", KDA_TOLERANCES)
@pytest.mark.parametrize("name", KDA_CASES)
def test_kda_in_float64(name, implementation):
    with jax.enable_x64(True):
        check_kda(name, implementation, "float64", WIDE, WIDE, WIDE)


# ---- models ----


@cache
def model(name):
    cfg, params = load(GOLDEN / name)
    with np.load(GOLDEN / name / "expected.npz") as stored:
        return cfg, params, dict(stored)


def losses(cfg, params, inputs, targets):
    """(mean cross-entropy, logits)."""
    logits = K3(cfg).apply({"params": params}, inputs).logits
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)
    return -jnp.mean(chosen), logits


def k3_results(dtype):
    """(loss, logits, stored name -> gradient) of k3_tiny, computed in `dtype`."""
    cfg, params, expected = model("k3_tiny")
    params = jax.tree.map(lambda x: jnp.asarray(x, dtype), params)
    run = jax.jit(jax.value_and_grad(partial(losses, cfg), has_aux=True))
    (loss, logits), gradient = run(params, expected["input_ids"], expected["targets"])
    gradient = jax.tree.map(np.asarray, gradient)

    def part(path, index):
        leaf = gradient
        for key in path:
            leaf = leaf[key]
        return leaf[index]

    stored = {t.name: t.to_stored([part(p.path, p.index) for p in t.parts]) for t in tensors(cfg)}
    return loss, logits, stored


def unread(name) -> bool:
    """Layer 1's mixer reads the embedding alone, so that its read weights move nothing."""
    return name.startswith("model.layers.0.self_attention_res")


def check_gradients(actual, tolerance):
    expected = load_file(GOLDEN / "k3_tiny" / "expected_grads.safetensors")
    for name in set(actual) - set(expected):
        assert name.endswith("e_score_correction_bias") or unread(name)
        assert not np.any(actual[name])
    assert set(expected) <= set(actual)
    some = {name for name, x in expected.items() if np.any(x)}
    for name in set(expected) - some:
        assert np.max(np.abs(actual[name])) < 1e-9
    assert_within(tolerance, {name: actual[name] for name in some}, expected)


def test_k3_in_float64():
    expected = model("k3_tiny")[2]
    with jax.enable_x64(True):
        loss, logits, gradients = k3_results("float64")
    assert relative_error(logits, expected["logits"]) < 1e-6
    np.testing.assert_allclose(loss, expected["loss"], rtol=1e-6)
    check_gradients(gradients, 1e-5)


def test_k3_in_float32():
    expected = model("k3_tiny")[2]
    loss, logits, gradients = k3_results("float32")
    assert np.max(np.abs(logits - expected["logits"])) < 1e-3
    np.testing.assert_allclose(loss, expected["loss"], atol=1e-5)
    check_gradients(gradients, 1e-2)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("float64", marks=pytest.mark.slow)])
def test_kimi_linear(dtype):
    """Its numbers come from another library, parts of which round to float32."""
    cfg, params, expected = model("kimi_linear_tiny")
    with jax.enable_x64(dtype == "float64"):
        params = jax.tree.map(lambda x: jnp.asarray(x, dtype), params)
        loss, logits = jax.jit(partial(losses, cfg))(params, expected["input_ids"], expected["targets"])
    assert relative_error(logits, expected["logits"]) < 1e-4
    np.testing.assert_allclose(loss, expected["loss"], rtol=1e-5)
