"""Gated MLA against dense attention in numpy, with and without rotary positions, and its cache."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen import meta

from k3jax.axes import make_mesh
from k3jax.config import FullRank, LowRank, MeshConfig, MlaConfig, NoGate, RoPE
from k3jax.layers.mla import MLA, MlaState, rotate
from k3jax.segments import compact

B, T, D = 2, 13, 10
ROPE = RoPE(100.0)
CONFIGS = {
    "k3": MlaConfig(heads=3, key=4, shared=2, value=5, latent=6, query_rank=7),
    "kimi_linear": MlaConfig(heads=2, key=3, shared=1, value=4, latent=6, query_rank=None, gate=NoGate()),
    "k2": MlaConfig(
        heads=2, key=4, shared=6, value=5, latent=6, query_rank=7, gate=LowRank(3), positions=ROPE
    ),
}
PACKED = np.array([[1] * 4 + [2] * 1 + [3] * 5 + [0] * 3, [1] * 13])
WHOLE = np.ones((B, T), int)


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


@cache
def params(name):
    init = lambda: MLA(CONFIGS[name], D, 0.02).init(jax.random.key(0), jnp.zeros((1, 1, D)), None, None)[
        "params"
    ]
    shapes = meta.unbox(jax.eval_shape(init))
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: jnp.asarray(0.7 * rng.normal(size=x.shape)), shapes)


def draw(seed=0):
    return np.random.default_rng(seed).normal(size=(B, T, D))


@cache
def runner(cfg):
    return jax.jit(
        lambda params, x, state, segments: MLA(cfg, D, 0.02).apply({"params": params}, x, state, segments)
    )


def run(name, x, ids=None, state=None, last_id=None):
    """(y, next state, largest logit per head) from ids whose padding is last."""
    segments = None if ids is None else compact(jnp.asarray(ids, jnp.int32), last_id)[1]
    y, state, report = runner(CONFIGS[name])(params(name), x, state, segments)
    return y, state, report.maxima["max_logit_H"]


def empty(name):
    return MlaState.empty(CONFIGS[name], B, jnp.float64)


def rms(x, gain):
    return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-6) * gain


def turn(x, position, theta):
    """Channels 2i and 2i + 1 as a complex number, turned by position * theta^(-2i / dims)."""
    dims = x.shape[-1]
    angle = position[..., None] * theta ** (-np.arange(0, dims, 2) / dims)
    turned = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * angle)
    return np.stack([turned.real, turned.imag], axis=-1).reshape(x.shape)


def direct(cfg, p, x, ids):
    """(y, the largest logit per head), pair by pair."""
    p = {name: np.asarray(w) for name, w in p.items()}
    if cfg.query_rank is None:
        q = np.einsum("btd,dhk->bthk", x, p["query"])
    else:
        q = np.einsum("btr,rhk->bthk", rms(x @ p["query_down"], p["query_norm"]), p["query_up"])
    latent, shared = np.split(x @ p["latent"], [cfg.latent], axis=-1)
    latent = rms(latent, p["latent_norm"])
    k = np.einsum("btc,chk->bthk", latent, p["key_up"])
    v = np.einsum("btc,chv->bthv", latent, p["value_up"])
    if isinstance(cfg.positions, RoPE):
        position = np.arange(x.shape[1])[None]
        shared = turn(shared, position, cfg.positions.theta)
        turned = turn(q[..., cfg.key :], position[..., None], cfg.positions.theta)
        q = np.concatenate([q[..., : cfg.key], turned], axis=-1)
    logits = np.einsum("bthk,bshk->bhts", q[..., : cfg.key], k)
    logits += np.einsum("bthk,bsk->bhts", q[..., cfg.key :], shared)
    logits *= (cfg.key + cfg.shared) ** -0.5
    t = np.arange(x.shape[1])
    seen = (t[None] <= t[:, None])[None] & (ids[:, :, None] == ids[:, None]) & (ids > 0)[:, None]
    logits = np.where(seen[:, None], logits, -np.inf)
    p_bhts = np.exp(logits - np.max(logits, -1, keepdims=True, initial=-1e30))
    o = np.einsum("bhts,bshv->bthv", p_bhts / np.maximum(p_bhts.sum(-1, keepdims=True), 1e-30), v)
    sigmoid = lambda z: 1 / (1 + np.exp(-z))
    match cfg.gate:
        case FullRank():
            o = o * sigmoid(np.einsum("btd,dhv->bthv", x, p["gate"]))
        case LowRank():
            o = o * sigmoid(np.einsum("btd,dr,rhv->bthv", x, p["gate_down"], p["gate_up"]))
    return np.einsum("bthv,hvd->btd", o, p["out"]), logits.max((0, 2, 3))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_is_dense_attention_over_expanded_keys(name, packed):
    ids = PACKED if packed else WHOLE
    y, state, top = run(name, draw(), PACKED if packed else None)
    expected, expected_top = direct(CONFIGS[name], params(name), draw(), ids)
    np.testing.assert_allclose(np.asarray(y)[ids > 0], expected[ids > 0], rtol=1e-9, atol=1e-11)
    np.testing.assert_allclose(top, expected_top, rtol=1e-10)
    assert state is None


def test_the_largest_logit_is_that_of_all_devices():
    """A row on each of two, and either row may have it."""
    cfg, own = CONFIGS["k3"], params("k3")
    report = jax.jit(lambda x: MLA(cfg, D, 0.02).apply({"params": own}, x, None, None)[2])
    with jax.set_mesh(make_mesh(MeshConfig().sizes(2), jax.devices()[:2])):
        for x in (draw(), draw()[::-1]):
            _, expected_H = direct(cfg, own, x, WHOLE)
            np.testing.assert_allclose(report(x).maxima["max_logit_H"], expected_H, rtol=1e-10)


@pytest.mark.parametrize(("name", "cut"), [("k3", 1), ("k3", 7), ("k2", 5), ("k2", 12)])
def test_a_row_may_be_cut_anywhere(name, cut):
    """The cache carries the open segment, and under RoPE its positions; nothing else is read."""
    expected, top = direct(CONFIGS[name], params(name), draw(), PACKED)
    first, state, top_1 = run(name, draw()[:, :cut], PACKED[:, :cut], empty(name), jnp.zeros(B, int))
    last_id = np.array([row[row > 0][-1] for row in PACKED[:, :cut]])
    second, state, top_2 = run(name, draw()[:, cut:], PACKED[:, cut:], state, jnp.asarray(last_id))
    pieces = np.concatenate([first, second], axis=1)
    np.testing.assert_allclose(pieces[PACKED > 0], expected[PACKED > 0], rtol=1e-9, atol=1e-11)
    np.testing.assert_allclose(np.maximum(top_1, top_2), top, rtol=1e-10)
    np.testing.assert_array_equal(state.count_B, (PACKED > 0).sum(1))
    open_segment = (np.array([[3], [1]]) == PACKED) & (PACKED > 0)
    np.testing.assert_array_equal(state.open_BS, open_segment)


def test_three_pieces_whose_middle_is_padding():
    expected, _ = direct(CONFIGS["k2"], params("k2"), draw()[:, :8], WHOLE[:, :8])
    state, out, last_id = empty("k2"), [], jnp.zeros(B, int)
    for x, ids in ((draw()[:, :5], WHOLE[:, :5]), (draw(3), 0 * WHOLE), (draw()[:, 5:8], WHOLE[:, :3])):
        y, state, top = run("k2", x, ids, state, last_id)
        out, last_id = [*out, y], jnp.ones(B, int)
        assert np.all(np.isneginf(top)) == (not np.any(ids))
    np.testing.assert_allclose(np.concatenate([out[0], out[2]], 1), expected, rtol=1e-9, atol=1e-11)


def test_another_segment_does_not_read_the_cache():
    _, state, _ = run("k3", draw(), WHOLE, empty("k3"), jnp.zeros(B, int))
    poisoned = state.replace(latent_BSC=state.latent_BSC + 1e3, shared_BSK=state.shared_BSK - 1e3)
    results = [run("k3", draw(1), 2 * WHOLE, before, jnp.ones(B, int)) for before in (state, poisoned)]
    np.testing.assert_array_equal(results[0][0], results[1][0])
    np.testing.assert_array_equal(results[0][2], results[1][2])
    expected, top = direct(CONFIGS["k3"], params("k3"), draw(1), WHOLE)
    np.testing.assert_allclose(results[0][0], expected, rtol=1e-9, atol=1e-11)
    np.testing.assert_allclose(results[0][2], top, rtol=1e-10)


def test_the_cache_holds_latents_alone():
    """Per token: the latent and the shared key, nothing per head."""
    cfg = CONFIGS["k3"]
    _, state, _ = run("k3", draw(), state=empty("k3"))
    shapes = {name: x.shape for name, x in vars(state).items()}
    assert shapes == dict(
        latent_BSC=(B, T, cfg.latent), shared_BSK=(B, T, cfg.shared), open_BS=(B, T), count_B=(B,)
    )  # fmt: skip


def test_rotary_logits_know_distances_alone():
    x = np.random.default_rng(0).normal(size=(1, 5, 2, 8))
    logits = lambda shift: np.einsum("bthk,bshk->bhts", *(rotate(x, shift + np.arange(5)[None], 100.0),) * 2)
    np.testing.assert_allclose(logits(0), logits(1000), rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(rotate(x, np.zeros((1, 5)), 100.0), x, rtol=1e-12)
    assert not np.allclose(logits(0), np.einsum("bthk,bshk->bhts", x, x))


def test_without_positions_a_segment_may_be_reordered_before_its_last_token():
    """NoPE: the past is a set."""
    order = np.r_[np.arange(T - 1)[::-1], T - 1]
    y, _, _ = run("k3", draw())
    shuffled, _, _ = run("k3", draw()[:, order])
    np.testing.assert_allclose(y[:, -1], shuffled[:, -1], rtol=1e-9)
    assert not np.allclose(run("k2", draw())[0][:, -1], run("k2", draw()[:, order])[0][:, -1])


def test_bfloat16_layers_gate_what_attention_gives_unrounded():
    """The layer's error is that of its last rounding."""
    cfg = MlaConfig(heads=2, key=4, shared=2, value=5, latent=6, query_rank=7)
    init = lambda: MLA(cfg, D, 0.02).init(jax.random.key(0), jnp.zeros((1, 1, D)), None, None)["params"]
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), meta.unbox(jax.eval_shape(init))
    )
    x = jax.ShapeDtypeStruct((B, T, D), jnp.bfloat16)
    jaxpr = jax.make_jaxpr(lambda p, x: MLA(cfg, D, 0.02).apply({"params": p}, x, None, None)[0])(shapes, x)
    made_by = {out: equation for equation in jaxpr.eqns for out in equation.outvars}
    product = next(
        e for e in reversed(jaxpr.eqns) if e.primitive.name == "mul" and e.outvars[0].aval.ndim == 4
    )
    assert {v.aval.dtype for v in product.invars} == {jnp.dtype("float32")}
    attended = made_by[product.invars[0]]
    assert attended.primitive.name == "custom_vjp_call", "what is gated comes from the op itself"
    assert jaxpr.out_avals[0].dtype == jnp.bfloat16
