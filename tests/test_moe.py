import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from k3jax.axes import make_mesh, shard, weight_shardings
from k3jax.config import Auxiliary, LatentMoeConfig, MeshConfig, MoeConfig, Situ, Swiglu, replace
from k3jax.layers.moe import MoE, dispatch_plan
from k3jax.segments import Segments

WIDTH, EPS = 16, 1e-5
LATENT = LatentMoeConfig(experts=8, active=2, hidden=12, latent=8, shared=1)
CASES = {
    "latent": LATENT,
    "without_norm": replace(LATENT, norm="none", experts=5, active=4, shared=2),
    "full_width": MoeConfig(experts=8, active=2, hidden=12, shared=1, balance=Auxiliary(0.1)),
    "raw_weights": replace(LATENT, active=1, shared=0, normalise=False, scale=2.446, activation=Swiglu()),
    "by_definition": replace(LATENT, implementation="reference"),
}


def layer(cfg, width=WIDTH):
    return MoE(cfg, width, 0.3, EPS)


@functools.lru_cache
def boxes(cfg, width=WIDTH):
    """Boxed weights with a bias and gains that are not at their start."""
    init = jax.jit(layer(cfg, width).init)
    params = dict(init(jax.random.key(0), jnp.zeros((1, 1, width)), None)["params"])
    rng = np.random.default_rng(0)
    for name in set(params) & {"router_bias", "norm"}:
        noise = jnp.asarray(0.2 * rng.normal(size=params[name].value.shape), jnp.float32)
        params[name] = params[name].replace(value=params[name].value + noise)
    return params


def weights(cfg, width=WIDTH):
    return nn.meta.unbox(boxes(cfg, width))


def inputs(seed, batch=2, length=40, width=WIDTH, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.normal(size=(batch, length, width)), dtype)


def padded(*counts, length=40):
    """Rows with so many real tokens each, of one segment."""
    real_BT = jnp.arange(length)[None] < jnp.asarray(counts)[:, None]
    return Segments(real_BT.astype(jnp.int32), real_BT)


WHOLE = padded(40, 40)


def objective(cfg, params, x_BTD, segments, target_BTD):
    y_BTD, penalty, report = layer(cfg, x_BTD.shape[-1]).apply({"params": params}, x_BTD, segments)
    value = jnp.sum(y_BTD.astype(target_BTD.dtype) * target_BTD) + penalty
    return value, (y_BTD, report.sums["load_E"].sum(axis=0))


@functools.partial(jax.jit, static_argnums=0)
def differentiate(cfg, params, x_BTD, segments, target_BTD):
    """((the objective, (y, loads)), gradients of parameters and x)."""
    return jax.value_and_grad(objective, (1, 2), has_aux=True)(cfg, params, x_BTD, segments, target_BTD)


def directly(cfg, params, x_BTD, real_BT, target_BTD):
    """The layer written without dispatch: every expert sees every token, and most weights are zero."""

    def act(g, u):
        if isinstance(cfg.activation, Situ):
            b1, b2 = cfg.activation.gate, cfg.activation.up
            return b1 * jnp.tanh(g / b1) * jax.nn.sigmoid(g) * b2 * jnp.tanh(u / b2)
        return g * jax.nn.sigmoid(g) * u

    scores = jax.nn.sigmoid(x_BTD @ params["router"])
    _, chosen = jax.lax.top_k(scores + params["router_bias"][None, None], cfg.active)
    mask = jnp.sum(jax.nn.one_hot(chosen, cfg.experts, dtype=x_BTD.dtype), axis=2)
    p = jnp.where(mask > 0, scores, 0)
    if cfg.normalise:
        p = p / jnp.sum(p, axis=-1, keepdims=True)
    p = cfg.scale * jnp.where(real_BT[..., None], p, 0)
    latent = isinstance(cfg, LatentMoeConfig)
    inner = x_BTD @ params["down"] if latent else x_BTD
    gate, up = (jnp.einsum("btl,elf->btef", inner, params[f"experts_{name}"]) for name in ("gate", "up"))
    u = jnp.einsum("bte,btef,efl->btl", p, act(gate, up), params["experts_down"])
    if latent and cfg.norm == "rms":
        u = u / jnp.sqrt(jnp.mean(u**2, axis=-1, keepdims=True) + EPS) * params["norm"][None, None]
    y = u @ params["up"] if latent else u
    if cfg.shared:
        shared = params["shared"]
        y = y + act(x_BTD @ shared["gate"], x_BTD @ shared["up"]) @ shared["down"]
    penalty = 0.0
    if isinstance(cfg.balance, Auxiliary):
        real = real_BT[..., None]
        load = jnp.sum(mask * real, axis=1) / (cfg.active * jnp.sum(real, axis=1))
        share = jnp.sum(scores / jnp.sum(scores, axis=-1, keepdims=True) * real, axis=1)
        penalty = cfg.balance.weight * cfg.experts * jnp.sum(load * share)
    return jnp.sum(y * target_BTD) + penalty, y


@functools.partial(jax.jit, static_argnums=0)
def differentiate_directly(cfg, params, x_BTD, real_BT, target_BTD):
    return jax.value_and_grad(directly, (1, 2), has_aux=True)(cfg, params, x_BTD, real_BT, target_BTD)


def run(cfg, params, x_BTD):
    """(output, loads); by the same program as the gradients, so that it is compiled once."""
    return differentiate(cfg, params, x_BTD, WHOLE, jnp.ones(x_BTD.shape))[0][1]


def error(actual, expected):
    """Relative L2 of the worst leaf; the absolute one where nothing is expected."""

    def one(a, b):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        return np.linalg.norm(a - b) / (np.linalg.norm(b) or 1)

    return max(jax.tree.leaves(jax.tree.map(one, actual, expected)))


@pytest.mark.parametrize("case", CASES)
def test_it_is_the_direct_computation(case):
    """Output and every gradient, in float64, with padding in one row."""
    cfg, segments = CASES[case], padded(40, 29)
    with jax.enable_x64(True):
        wide = lambda tree: jax.tree.map(lambda x: jnp.asarray(np.asarray(x), jnp.float64), tree)
        params, x, target = wide((weights(cfg), inputs(1), inputs(2)))
        (value, (y, _)), gradients = differentiate(cfg, params, x, segments, target)
        (expected, y_expected), expected_gradients = differentiate_directly(
            cfg, params, x, segments.real_BT, target
        )
        assert y.dtype == jnp.float64
    assert error((value, y, gradients), (expected, y_expected, expected_gradients)) < 1e-10


@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 2e-6), (jnp.bfloat16, 2e-2)])
def test_it_is_the_direct_computation_in_low_precision(dtype, tolerance):
    """bfloat16 rounds five intermediate arrays to 2^-8 each; choices are made in float32."""
    cfg, params, x = LATENT, weights(LATENT), inputs(3, dtype=dtype)
    rounded = {
        k: v if k.startswith("router") else jax.tree.map(lambda w: w.astype(dtype), v)
        for k, v in params.items()
    }
    (_, (y, _)), gradients = differentiate(cfg, params, x, WHOLE, inputs(4))
    wide = lambda tree: jax.tree.map(lambda w: w.astype(jnp.float32), tree)
    real_BT = jnp.ones(x.shape[:2], bool)
    (_, y_expected), expected = differentiate_directly(cfg, wide(rounded), wide(x), real_BT, inputs(4))
    assert y.dtype == dtype
    assert error((y, gradients), (y_expected, expected)) < tolerance
    chex.assert_trees_all_equal_dtypes(gradients[0], params)


def forced(cfg, experts):
    """Weights with a bias that sends every token to these experts."""
    params = weights(cfg)
    return params | {"router_bias": jnp.zeros(cfg.experts).at[jnp.asarray(experts)].set(10.0)}


def test_no_token_is_dropped_however_crowded_an_expert():
    params, x, target = forced(LATENT, [2, 5]), inputs(5), inputs(6)
    (_, (y, load_E)), gradients = differentiate(LATENT, params, x, WHOLE, target)
    (_, expected), expected_gradients = differentiate_directly(
        LATENT, params, x, jnp.ones((2, 40), bool), target
    )
    assert load_E.tolist() == [0, 0, 80, 0, 0, 80, 0, 0]
    assert error((y, gradients), (expected, expected_gradients)) < 5e-6


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_an_expert_without_tokens_has_no_gradient(implementation):
    cfg = replace(LATENT, implementation=implementation)
    _, (gradients, _) = differentiate(cfg, forced(cfg, [1, 7]), inputs(7), WHOLE, inputs(8))
    for name in ("gate", "up", "down"):
        busy_E = jnp.any(gradients[f"experts_{name}"] != 0, axis=(1, 2))
        assert busy_E.tolist() == [e in (1, 7) for e in range(8)]


def test_padding_reaches_no_expert():
    params, segments = weights(LATENT), padded(40, 11)
    x, real_BT1 = inputs(9), segments.real_BT[..., None]
    target = jnp.where(real_BT1, inputs(10), 0)
    before = differentiate(LATENT, params, x, segments, target)
    after = differentiate(LATENT, params, jnp.where(real_BT1, x, 1e4), segments, target)
    only_real = lambda result: (jnp.where(real_BT1, result[0][1][0], 0), result[0][1][1], result[1])
    chex.assert_trees_all_equal(only_real(before), only_real(after))
    assert before[0][1][1].sum() == 2 * 51


def test_a_batch_of_padding_alone():
    (value, (y, load_E)), gradients = differentiate(
        LATENT, weights(LATENT), inputs(11), padded(0, 0), inputs(12)
    )
    chex.assert_tree_all_finite((value, y, gradients))
    assert not jnp.any(load_E)
    assert not any(jnp.any(gradients[0][f"experts_{name}"]) for name in ("gate", "up", "down"))


@pytest.mark.parametrize("case", ["latent", "full_width"])
def test_the_bias_chooses_and_does_nothing_else(case):
    """An equal shift changes nothing, and no gradient reaches it."""
    cfg, params, x = CASES[case], weights(CASES[case]), inputs(13)
    (_, (y, load_E)), (gradients, _) = differentiate(cfg, params, x, WHOLE, inputs(14))
    shifted = params | {"router_bias": params["router_bias"] + 0.25}
    chex.assert_trees_all_close(run(cfg, shifted, x)[0], y, rtol=1e-6, atol=1e-6)
    turned = params | {"router_bias": -4 * params["router_bias"]}
    assert jnp.any(run(cfg, turned, x)[1] != load_E)
    assert not jnp.any(gradients["router_bias"])
    assert jnp.any(gradients["router"])


def test_experts_have_no_order():
    params, x = weights(LATENT), inputs(15)
    order = jnp.asarray(np.random.default_rng(15).permutation(8))
    moved = dict(params)
    for name in ("experts_gate", "experts_up", "experts_down", "router_bias"):
        moved[name] = params[name][order]
    moved["router"] = params["router"][:, order]
    y, load_E = run(LATENT, params, x)
    y_moved, load_moved_E = run(LATENT, moved, x)
    chex.assert_trees_all_close(y_moved, y, rtol=1e-5, atol=1e-6)
    chex.assert_trees_all_equal(load_moved_E, load_E[order])


def test_the_router_is_in_float32_under_bfloat16():
    """Logits 2^-12 apart, which bfloat16 would round to a tie and give to the first expert."""
    x = jnp.zeros((2, 40, WIDTH), jnp.bfloat16).at[..., 0].set(1.0)
    router = jnp.zeros((WIDTH, 8)).at[0].set(1.0 + jnp.arange(8) * 2.0**-12)
    assert jnp.all(router[0].astype(jnp.bfloat16) == 1.0)
    params = weights(LATENT) | {"router": router, "router_bias": jnp.zeros(8)}
    assert run(LATENT, params, x)[1].tolist() == [0, 0, 0, 0, 0, 0, 80, 80]


def test_biases_count_in_float32_under_bfloat16():
    """1e-4 apart near 0.7, where bfloat16 has steps of 4e-3."""
    params = weights(LATENT) | {"router": jnp.zeros((WIDTH, 8)), "router_bias": 0.7 + 1e-4 * jnp.arange(8)}
    x = inputs(24, dtype=jnp.bfloat16)
    assert run(LATENT, params, x)[1].tolist() == [0, 0, 0, 0, 0, 0, 80, 80]


def test_the_router_asks_for_all_of_float32():
    """By default GPUs round float32 operands to TF32, and 2 tokens in 1000 go elsewhere."""
    cfg = replace(LATENT, experts=11)
    x_BTD = jnp.zeros((2, 40, WIDTH), jnp.bfloat16)
    apply = jax.jit(lambda params, x_BTD: layer(cfg).apply({"params": params}, x_BTD, WHOLE)[0])
    lines = apply.lower(weights(cfg), x_BTD).as_text().splitlines()
    (router,) = [line for line in lines if "dot_general" in line and line.endswith("tensor<2x40x11xf32>")]
    assert "precision = [HIGHEST, HIGHEST]" in router


@pytest.mark.parametrize("case", ["latent", "raw_weights"])
def test_scores_may_vanish(case):
    """Logits of -112, whose sigmoids are 0: no expert is better than another, and nothing is 0 / 0."""
    cfg = CASES[case]
    params = weights(cfg) | {"router": jnp.full((WIDTH, 8), -7.0), "router_bias": jnp.zeros(8)}
    result = differentiate(cfg, params, jnp.ones((2, 40, WIDTH)), WHOLE, inputs(23))
    chex.assert_tree_all_finite(result)


@pytest.mark.parametrize("shape", [(0, 4), (2, 0)])
def test_no_tokens_at_all(shape):
    x, segments = jnp.zeros((*shape, WIDTH)), Segments(jnp.zeros(shape, jnp.int32), jnp.zeros(shape, bool))
    (_, (y, load_E)), (gradients, _) = differentiate(LATENT, weights(LATENT), x, segments, x)
    assert y.shape == x.shape
    assert not jnp.any(load_E)
    assert not any(jnp.any(g) for g in jax.tree.leaves(gradients))


def test_ties_go_to_the_first_experts():
    """So a router of zeros is no benchmark: its load is as uneven as can be."""
    params = weights(LATENT) | {"router": jnp.zeros((WIDTH, 8)), "router_bias": jnp.zeros(8)}
    assert run(LATENT, params, inputs(17))[1].tolist() == [80, 80, 0, 0, 0, 0, 0, 0]


def test_no_shape_depends_on_the_routing():
    """One program serves any routing, and it has no branches to take."""
    arguments = (weights(LATENT), inputs(18), WHOLE, inputs(19))
    jaxpr = str(jax.make_jaxpr(functools.partial(differentiate, LATENT))(*arguments))
    assert "cond[" not in jaxpr
    assert "while[" not in jaxpr
    differentiate(LATENT, *arguments)
    compiled = differentiate._cache_size()
    for experts in ([0, 1], [6, 7]):
        differentiate(LATENT, forced(LATENT, experts), *arguments[1:])
    assert differentiate._cache_size() == compiled


def test_work_goes_with_tokens_and_not_with_experts():
    def flops(experts, batch):
        cfg = replace(LATENT, experts=experts, active=4, hidden=32, latent=32)
        shapes = jax.eval_shape(lambda: weights(cfg, width=64))
        x, segments = jax.ShapeDtypeStruct((batch, 1024, 64), jnp.float32), None
        return differentiate.lower(cfg, shapes, x, segments, x).cost_analysis()["flops"]

    router = 6 * 8192 * 64 * (64 - 8)
    assert flops(64, 8) - router < 1.25 * flops(8, 8)
    assert 1.8 < flops(8, 8) / flops(8, 4) < 2.1


@pytest.mark.parametrize("block", [1, 8])
def test_the_plan_gives_every_choice_a_row_of_its_own(block):
    rng = np.random.default_rng(20)
    chosen_Mk = np.stack([rng.permutation(6)[:3] for _ in range(50)]) % 6  # 5 sends a choice nowhere
    place_Mk, source_R, sizes_E = map(np.asarray, dispatch_plan(jnp.asarray(chosen_Mk), 5, block))
    rows = source_R.size
    assert rows % block == 0
    assert np.all(sizes_E % block == 0)
    ends_E = np.cumsum(sizes_E)
    somewhere = chosen_Mk < 5
    assert np.all(place_Mk[~somewhere] == rows)
    placed = place_Mk[somewhere]
    assert len(set(placed.tolist())) == placed.size
    assert np.array_equal(np.searchsorted(ends_E, placed, side="right"), chosen_Mk[somewhere])
    assert np.array_equal(source_R[placed], np.flatnonzero(somewhere.reshape(-1)))
    assert np.all(source_R[np.setdiff1d(np.arange(rows), placed)] == chosen_Mk.size)


@functools.lru_cache
def over_eight_devices(case):
    """(the result on eight devices, their program, the result on one)."""
    cfg = replace(CASES[case], balance=Auxiliary(0.1))
    batch = (inputs(21, batch=16), padded(*range(25, 41)), inputs(22, batch=16))
    params, boxed = weights(cfg), boxes(cfg)
    alone = differentiate(cfg, params, *batch)
    mesh = make_mesh(MeshConfig(data=4, fsdp=2).sizes(8))
    with jax.set_mesh(mesh):
        params = jax.device_put(params, weight_shardings(boxed, mesh))
        assert params["experts_up"].sharding.shard_shape(params["experts_up"].shape)[0] == 4
        rows = jax.jit(lambda tree: jax.tree.map(lambda x: shard(x, "BTD"[: x.ndim]), tree))(batch)
        program = differentiate.lower(cfg, params, *rows).compile()
        together = program(params, *rows)
    return *jax.tree.map(np.asarray, (together, alone)), program.as_text()


@pytest.mark.parametrize("case", ["latent", "full_width"])
def test_eight_devices_equal_one(case):
    actual, expected, _ = over_eight_devices(case)
    chex.assert_trees_all_equal(actual[0][1][1], expected[0][1][1])
    assert error(actual, expected) < 5e-6


@pytest.mark.parametrize("case", ["latent", "full_width"])
def test_tokens_stay_on_their_device(case):
    """Weights are gathered; tokens and their scores are not, nor routed more than once."""
    gathered = re.findall(r"= \(?\w+\[([\d,]*)\]\S* all-gather", over_eight_devices(case)[2])
    assert gathered
    assert not [shape for shape in gathered if shape.startswith("16,40")]
