"""The KDA mixer against its equations, token by token in numpy, and what it carries."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen import meta

from k3jax.config import Bounded, FullRank, KdaConfig, LowRank, NoGate, Unbounded
from k3jax.layers.kda import KDA, KdaState, LogUniformRate, StepBias
from k3jax.segments import compact

B, T, D = 2, 21, 10
EPS = 1e-5
CONFIGS = {
    "k3": KdaConfig(heads=2, key=4, value=6),
    "kimi_linear": KdaConfig(heads=3, key=4, value=4, taps=2, decay=Unbounded(), gate=LowRank(3)),
    "ungated": KdaConfig(heads=1, key=5, value=3, taps=1, decay=Bounded(-2.0), gate=NoGate()),
}
PACKED = np.array([[1] * 7 + [2] * 1 + [3] * 9 + [0] * 4, [1] * 21])


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def layer(cfg):
    return KDA(cfg, D, 0.02, EPS)


@cache
def params(name):
    init = lambda: layer(CONFIGS[name]).init(jax.random.key(0), jnp.zeros((1, 1, D)), None, None)["params"]
    shapes = meta.unbox(jax.eval_shape(init))
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: jnp.asarray(0.5 * rng.normal(size=x.shape)), shapes)


def draw(seed=0):
    return np.random.default_rng(seed).normal(size=(B, T, D))


@cache
def runner(cfg):
    return jax.jit(
        lambda params, x, state, segments: layer(cfg).apply({"params": params}, x, state, segments)
    )


def run(name, x, ids=None, state=None, last_id=None, **changes):
    """(y, next state) from ids whose padding is last."""
    segments = None if ids is None else compact(jnp.asarray(ids, jnp.int32), last_id)[1]
    y, state, _ = runner(CONFIGS[name])(params(name), x, state, segments)
    return y, state


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def direct(cfg, p, x, ids):
    """Equations of the report's section 2.1.1, segment by segment, head by head."""
    p = {name: np.asarray(w) for name, w in p.items()}
    out = np.zeros((*x.shape[:2], cfg.heads, cfg.value))
    for b in range(x.shape[0]):
        for name in dict.fromkeys(ids[b][ids[b] > 0]):
            mine = np.flatnonzero(ids[b] == name)
            for h in range(cfg.heads):
                out[b, mine, h] = direct_head(cfg, p, x[b, mine], h)
    out = out / np.sqrt(np.mean(out**2, -1, keepdims=True) + EPS) * p["norm"]
    match cfg.gate:
        case FullRank():
            out = out * sigmoid(np.einsum("btd,dhv->bthv", x, p["gate"]))
        case LowRank():
            out = out * sigmoid(np.einsum("btd,dr,rhv->bthv", x, p["gate_down"], p["gate_up"]))
    return np.einsum("bthv,hvd->btd", out, p["out"])


def direct_head(cfg, p, x, h):
    def mixed(name):
        raw, taps = x @ p[name][:, h], p[f"{name}_taps"][h]
        padded = np.concatenate([np.zeros((cfg.taps - 1, raw.shape[1])), raw])
        y = sum(taps[:, w] * padded[w : w + len(x)] for w in range(cfg.taps))
        return y * sigmoid(y)

    unit = lambda y: y / np.sqrt(np.sum(y**2, -1, keepdims=True) + 1e-6)
    q, k, v = unit(mixed("query")), unit(mixed("key")), mixed("value")
    z = x @ p["decay_down"] @ p["decay_up"][:, h] + p["dt_bias"][h]
    rate = np.exp(p["a_log"][h])
    match cfg.decay:
        case Bounded(floor):
            g = floor * sigmoid(rate * z)
        case Unbounded():
            g = -rate * np.log1p(np.exp(z))
    beta = sigmoid(x @ p["beta"][:, h])
    S, out = np.zeros((cfg.key, cfg.value)), np.zeros((len(x), cfg.value))
    for t in range(len(x)):
        S = np.exp(g[t])[:, None] * S
        S = S + beta[t] * np.outer(k[t], v[t] - S.T @ k[t])
        out[t] = cfg.key**-0.5 * S.T @ q[t]
    return out


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_is_its_equations(name, packed):
    ids = PACKED if packed else np.ones((B, T), int)
    y, state = run(name, draw(), PACKED if packed else None)
    expected = direct(CONFIGS[name], params(name), draw(), ids)
    np.testing.assert_allclose(np.asarray(y)[ids > 0], expected[ids > 0], rtol=1e-9, atol=1e-11)
    assert state is None


@pytest.mark.parametrize("cut", [1, 3, 8, 20])
def test_a_row_may_be_cut_anywhere(cut):
    whole, end = run("k3", draw(), PACKED, KdaState.empty(CONFIGS["k3"], B, jnp.float64), jnp.zeros(B, int))
    states = KdaState.empty(CONFIGS["k3"], B, jnp.float64)
    first, states = run("k3", draw()[:, :cut], PACKED[:, :cut], states, jnp.zeros(B, int))
    second, states = run("k3", draw()[:, cut:], PACKED[:, cut:], states, jnp.asarray(PACKED[:, cut - 1]))
    pieces = np.concatenate([first, second], axis=1)
    np.testing.assert_allclose(pieces[PACKED > 0], np.asarray(whole)[PACKED > 0], rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(states.S_BHKV, end.S_BHKV, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(states.tail_BWHX, end.tail_BWHX, rtol=1e-10, atol=1e-12)


def test_a_state_knows_no_length():
    cfg = CONFIGS["k3"]
    for length in (1, 21):
        _, state = run("k3", draw()[:, :length], state=KdaState.empty(cfg, B, jnp.float64))
        shapes = {name: x.shape for name, x in vars(state).items()}
        assert shapes == {"tail_BWHX": (B, 3, 2, 14), "S_BHKV": (B, 2, 4, 6)}


def test_another_segment_does_not_read_the_carried_state():
    state = KdaState.empty(CONFIGS["k3"], B, jnp.float64)
    poisoned = jax.tree.map(lambda x: x + 1e3, state)
    expected, end = run("k3", draw(), PACKED, state, jnp.full(B, 9))
    actual, end_poisoned = run("k3", draw(), PACKED, poisoned, jnp.full(B, 9))
    np.testing.assert_array_equal(actual, expected)
    np.testing.assert_array_equal(end_poisoned.S_BHKV, end.S_BHKV)


def test_implementations_can_be_exchanged():
    outputs = []
    for implementation in ("reference", "xla"):
        cfg = KdaConfig(heads=2, key=4, value=6, implementation=implementation)
        outputs.append(runner(cfg)(params("k3"), draw(), None, None)[0])
    np.testing.assert_allclose(*outputs, rtol=1e-9, atol=1e-11)


def test_bfloat16_inputs_keep_a_float32_memory():
    cfg = CONFIGS["k3"]
    x = jax.ShapeDtypeStruct((B, T, D), jnp.bfloat16)
    state = jax.eval_shape(lambda: KdaState.empty(cfg, B, jnp.bfloat16))
    low = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), params("k3"))
    y, after, _ = jax.eval_shape(runner(cfg), low, x, state, None)
    assert y.dtype == jnp.bfloat16
    assert after.S_BHKV.dtype == jnp.float32
    assert jax.tree.map(lambda x: x.dtype, after) == jax.tree.map(lambda x: x.dtype, state)


def test_bfloat16_layers_gate_what_the_norm_gives_unrounded():
    low = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), params("k3"))
    x = jax.ShapeDtypeStruct((B, T, D), jnp.bfloat16)
    run = lambda p, x: layer(CONFIGS["k3"]).apply({"params": p}, x, None, None)[0]
    equations = jax.make_jaxpr(run)(low, x).jaxpr.eqns
    made_by = {out: equation for equation in equations for out in equation.outvars}
    product = next(
        e for e in reversed(equations) if e.primitive.name == "mul" and e.outvars[0].aval.ndim == 4
    )
    normed = made_by[product.invars[0]]
    assert {v.aval.dtype for v in product.invars} == {jnp.dtype("float32")}
    assert normed.primitive.name == "mul", "by the norm's weight, and nothing after it"
    assert {v.aval.dtype for v in normed.invars} == {jnp.dtype("float32")}


def test_every_weight_says_what_it_is_drawn_from():
    boxes = lambda cfg: jax.eval_shape(
        lambda: layer(cfg).init(jax.random.key(0), jnp.zeros((1, 1, D)), None, None)["params"]
    )
    k3 = {name: str(w.init) for name, w in boxes(CONFIGS["k3"]).items()}
    own = {
        "a_log": "0",
        "dt_bias": "softplus^-1(log-uniform [0.001, 0.1])",
        "norm": "1",
        **dict.fromkeys(("query_taps", "key_taps", "value_taps"), "U(-0.5, 0.5)"),
    }
    assert {name: own.get(name, "N(0, 0.02^2)") for name in k3} == k3
    released = boxes(KdaConfig(heads=2, key=4, value=6, rate_init="uniform"))
    assert str(released["a_log"].init) == "log U(1, 16)"


def test_gates_start_where_the_report_and_the_released_code_say():
    """dt_bias is the inverse softplus of a log-uniform step, e^A uniform in [1, 16]."""
    draw = lambda init: np.float64(init(jax.random.key(0), (4000,), jnp.float32))
    step = np.log(np.logaddexp(0, draw(StepBias())))
    assert np.log(1e-3) - 1e-4 <= step.min() < np.log(1.1e-3)
    assert np.log(9e-2) < step.max() <= np.log(0.1) + 1e-4
    np.testing.assert_allclose(np.mean(step), np.log(1e-2), atol=0.1)
    rate = np.exp(draw(LogUniformRate()))
    assert 1 <= rate.min() < 1.1
    assert 15.9 < rate.max() < 16
    np.testing.assert_allclose(np.mean(rate), 8.5, atol=0.3)
