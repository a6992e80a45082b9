import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from k3jax.axes import Constant, Normal, is_weight, make_weight
from k3jax.config import AdamW, Cosine, Muon, OptimConfig, Wsd
from k3jax.optim.build import build, describe, labels

SIZES = {"D": 16, "H": 2, "K": 8, "V": 8, "E": 4, "L": 8, "F": 12, "Y": 32, "N": 3, "W": 4}
STEADY = Wsd(warmup=0.0, decay=0.0)
STEPS = 100

# name: (spec, rule, decayed, stacked)
MODEL = {
    "embedding": ("YD", "adamw", True, False),
    "norm": ("D", "adamw", False, True),
    "query": ("D->[H]K", None, False, True),
    "beta": ("D->H", "adamw", False, True),
    "taps": ("HK:W->", "adamw", False, True),
    "out": ("HV->D", None, False, True),
    "up": ("E:L->F", None, False, True),
    "head": ("D->Y", "adamw", True, False),
    "bias": ("E", "balance", False, True),
}
DECAYED = {"embedding", "query", "out", "up", "head"}


def declare(name):
    spec, rule, decayed, many = MODEL[name]
    make = lambda key: make_weight(key, spec, SIZES, Normal(0.02), rule, decayed=decayed)
    w = jax.eval_shape(make, jax.random.key(0))
    if many:
        shape = jax.ShapeDtypeStruct((SIZES["N"], *w.value.shape), w.value.dtype)
        w = w.replace(value=shape, names=("layers", *w.names))
    return w


# The boxed weights of a toy model, as jax.eval_shape returns them.
WEIGHTS = {"stack": {name: declare(name) for name in MODEL}}


def values(seed):
    """A tree of arrays like the parameters."""
    rng = np.random.default_rng(seed)
    normal = lambda w: rng.normal(size=w.value.shape).astype(np.float32)
    return jax.tree.map(normal, WEIGHTS, is_leaf=is_weight)


def first_update(cfg, gradients, params):
    transform = build(cfg, WEIGHTS, STEPS)
    updates = jax.jit(lambda g, p: transform.update(g, transform.init(p), p)[0])(gradients, params)
    return jax.tree.map(np.asarray, updates)


def test_labels():
    assert labels(OptimConfig(), WEIGHTS)["stack"] == {
        "embedding": "adamw decayed",
        "norm": "adamw",
        "query": "muon 16x8 x [3, 2]",
        "beta": "adamw",
        "taps": "adamw",
        "out": "muon 16x16 x [3]",
        "up": "muon 8x12 x [3, 4]",
        "head": "adamw decayed",
        "bias": "balance",
    }


def test_labels_follow_the_split_and_the_rule_for_matrices():
    whole, every = (OptimConfig(matrices=Muon(split=split)) for split in ("matrix", "every_head"))
    query, out = WEIGHTS["stack"]["query"], WEIGHTS["stack"]["out"]
    assert [describe(cfg, w) for cfg in (whole, every) for w in (query, out)] == [
        "muon 16x16 x [3]",
        "muon 16x16 x [3]",
        "muon 16x8 x [3, 2]",
        "muon 8x16 x [3, 2]",
    ]
    assert describe(OptimConfig(matrices=AdamW()), query) == "adamw decayed"
    single = jax.eval_shape(lambda k: make_weight(k, "D->L", SIZES, Constant(0.0)), jax.random.key(0))
    assert describe(OptimConfig(), single) == "muon 16x8"


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (jax.ShapeDtypeStruct((3,), jnp.float32), r"stack\.odd: a ShapeDtypeStruct, not a Weight"),
        (WEIGHTS["stack"]["query"].replace(rule=None), r"stack\.odd: rule None"),
        (WEIGHTS["stack"]["query"].replace(rule="sgd"), r"stack\.odd: rule 'sgd'"),
        (WEIGHTS["stack"]["beta"].replace(rule="muon", apart=("heads",)), r"stack\.odd: .*empty"),
        (
            WEIGHTS["stack"]["norm"].replace(value=jax.ShapeDtypeStruct((16,), jnp.bfloat16)),
            r"stack\.odd: a bfloat16 parameter",
        ),
    ],
    ids=["bare", "unlabelled", "unknown", "no_matrix", "bfloat16"],
)
def test_a_leaf_that_nothing_moves_is_an_error_with_its_path(leaf, message):
    with pytest.raises(ValueError, match=message):
        build(OptimConfig(), {"stack": {**WEIGHTS["stack"], "odd": leaf}}, STEPS)


@pytest.mark.parametrize("matrices", [Muon(), Muon(split="matrix"), AdamW()], ids=repr)
def test_one_step_goes_down(matrices):
    """Every leaf that anything moves goes down its own gradient."""
    gradients, params = values(1), values(0)
    updates = first_update(OptimConfig(matrices=matrices, weight_decay=0.0), gradients, params)["stack"]
    for name, update in updates.items():
        slope = np.sum(update * gradients["stack"][name])
        assert slope < 0 if name != "bias" else slope == 0, name


@pytest.mark.parametrize("matrices", [Muon(), AdamW()], ids=repr)
def test_decay_reaches_exactly_the_right_leaves(matrices):
    cfg = OptimConfig(lr=0.5, weight_decay=0.1, matrices=matrices, schedule=STEADY)
    params = values(0)
    updates = first_update(cfg, jax.tree.map(np.zeros_like, params), params)["stack"]
    for name, update in updates.items():
        factor = -0.5 * 0.1 if name in DECAYED else 0.0
        np.testing.assert_allclose(update, factor * params["stack"][name], rtol=1e-6, atol=0)


def test_every_rule_has_the_same_rate_and_the_schedules():
    """In a first step AdamW's entries are 1 in size, and a Muon matrix's RMS is near its scale."""
    cfg = OptimConfig(lr=1e-2, weight_decay=0.0, schedule=Cosine(warmup=0.04))
    updates = first_update(cfg, values(1), values(0))["stack"]
    rms = {name: np.sqrt(np.mean(x**2)) for name, x in updates.items()}
    np.testing.assert_allclose([rms["embedding"], rms["norm"]], 1e-2 / 4, rtol=1e-3)
    np.testing.assert_allclose([rms["query"], rms["up"]], 0.2 * 1e-2 / 4, rtol=0.15)


def test_adamw_for_matrices_has_its_own_settings():
    rule = AdamW(b1=0.8, b2=0.9, eps=1e-3)
    cfg = OptimConfig(lr=1e-2, weight_decay=0.3, matrices=rule, schedule=STEADY, clip=None)
    transform = build(cfg, WEIGHTS, STEPS)
    whole = optax.adamw(1e-2, 0.8, 0.9, 1e-3, weight_decay=0.3)
    rest = optax.adamw(1e-2, 0.9, 0.95, 1e-8, weight_decay=0.3)

    pick = lambda name, seed: values(seed)["stack"][name] if name else values(seed)

    def two_steps(transform, name=None):
        params = pick(name, 0)
        state = transform.init(params)
        update = jax.jit(transform.update)
        for seed in (1, 2):
            updates, state = update(pick(name, seed), state, params)
            params = jax.tree.map(lambda p, u: p + np.asarray(u), params, updates)
        return params

    ours = two_steps(transform)["stack"]
    chex.assert_trees_all_close(ours["query"], two_steps(whole, "query"), rtol=1e-5, atol=1e-7)
    chex.assert_trees_all_close(ours["head"], two_steps(rest, "head"), rtol=1e-5, atol=1e-7)


def test_what_a_balancing_rule_moves_stays_put_and_out_of_the_norm():
    quiet, params = values(1), values(0)
    loud = {"stack": {**quiet["stack"], "bias": np.full_like(quiet["stack"]["bias"], 1e6)}}
    expected = first_update(OptimConfig(), quiet, params)
    actual = first_update(OptimConfig(), loud, params)
    chex.assert_trees_all_equal(actual, expected)
    assert not np.any(actual["stack"]["bias"])


def test_gradients_are_clipped_together():
    """Under a bound of 1, gradients of norm 10 leave the moments of gradients a tenth their size."""
    gradients, params = values(1), values(0)
    squares = sum(np.sum(x**2) for name, x in gradients["stack"].items() if name != "bias")
    large = jax.tree.map(lambda g: g * 10 / np.sqrt(squares), gradients)
    small = jax.tree.map(lambda g: g / 10, large)
    below = jax.tree.map(lambda g: g / 20, large)

    def state(clip, gradients):
        transform = build(OptimConfig(clip=clip), WEIGHTS, STEPS)
        return jax.jit(lambda g, p: transform.update(g, transform.init(p), p)[1])(gradients, params)

    leaves = lambda *args: jax.tree.leaves(state(*args))
    chex.assert_trees_all_close(leaves(1.0, large), leaves(None, small), rtol=1e-4)
    chex.assert_trees_all_equal(leaves(1.0, below), leaves(1e9, below))


def test_small_steps_survive_in_float32():
    """At a rate of 1e-5 a parameter near 1 moves by what it should, which bfloat16 would round away."""
    cfg = OptimConfig(lr=1e-5, weight_decay=0.0, schedule=STEADY)
    params = jax.tree.map(np.ones_like, values(0))
    gradients = values(1)
    transform = build(cfg, WEIGHTS, STEPS)
    state = transform.init(params)
    assert {x.dtype.name for x in jax.tree.leaves(state)} == {"float32", "int32"}

    @jax.jit
    def step(params, state):
        updates, state = transform.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(10):
        params, state = step(params, state)
    moved = {name: np.sqrt(np.mean((np.asarray(x) - 1) ** 2)) for name, x in params["stack"].items()}
    np.testing.assert_allclose([moved["norm"], moved["embedding"]], 1e-4, rtol=0.05)
    np.testing.assert_allclose([moved["query"], moved["up"]], 0.2e-4, rtol=0.2)


def test_moments_can_be_placed_like_their_parameters():
    """optax knows which parts of the state mirror the parameters; other rules' leaves are holes."""
    transform = build(OptimConfig(), WEIGHTS, STEPS)
    shapes = jax.tree.map(lambda w: w.value, WEIGHTS, is_leaf=is_weight)
    state = jax.eval_shape(transform.init, shapes)
    hole = lambda x: isinstance(x, optax.MaskedNode)
    names = lambda x, w: x if hole(x) else w.names
    placed = optax.tree_map_params(
        transform, names, state, WEIGHTS, transform_non_params=lambda _: (), is_leaf=hole
    )
    ranks = jax.tree.map(lambda x, names: x.ndim - len(names), state, placed)
    assert len(jax.tree.leaves(ranks)) == 3 + 2 * 5 + 3
    assert not any(jax.tree.leaves(ranks))
