"""Residual streams: reads against their formula, scanned stacks against a plain loop, and what is kept."""

from dataclasses import dataclass
from functools import cache, partial
from typing import get_args

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen import meta

from configs.k3 import model as full_size
from k3jax.axes import Normal, make_weight
from k3jax.config import (
    BlockAttnRes,
    DenseConfig,
    FullAttnRes,
    KdaConfig,
    LatentMoeConfig,
    MlaConfig,
    ModelConfig,
    Plain,
    Remat,
    replace,
)
from k3jax.depth import run_stack
from k3jax.layers.residual import read
from k3jax.layout import bank_size, describe, opens, plan
from k3jax.model import K3
from k3jax.report import Report
from k3jax.unit import Unit

B, T, D = 2, 5, 6
EIGHT_BLOCKS = (0, 1, 3, 4, 6, 7, 9, 10)  # of twelve layers; most open in the middle of a cycle
EPS = 1e-5


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


@dataclass(frozen=True)
class Toy:
    """A mixer whose body costs nothing to compile: a small map of a token and the one before it."""

    kind: str

    def init(self, key, width, std):
        return {"w": make_weight(key, "D->L", {"D": width, "L": 3}, Normal(std))}

    def apply(self, params, x_BTD, state, segments):
        past_BTD = jnp.pad(x_BTD, ((0, 0), (1, 0), (0, 0)))[:, :-1]
        w = params["w"].astype(x_BTD.dtype)
        return jnp.tanh((x_BTD + 0.5 * past_BTD) @ w) @ w.T, state, Report()

    def empty_state(self, batch, width, dtype):
        return ()

    def flops(self, width, length):
        return 0.0

    def context_rule(self):
        return "none"


def toy(residual, depth=12, **changes):
    """a a b a a b ..., or whatever `full_layers` says."""
    settings = {"full_layers": 3, "dense_layers": depth, "remat": "module"} | changes
    parts = {"linear": Toy("a"), "full": Toy("b"), "dense": DenseConfig(4)}
    return ModelConfig(
        width=D, vocabulary=11, depth=depth, residual=residual, norm_eps=EPS, **parts, **settings
    )


def drawn(cfg):
    """Parameters of the whole model in float64, none of them zero or one."""
    shapes = meta.unbox(jax.eval_shape(K3(cfg).init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32)))[
        "params"
    ]
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape)), shapes)


def draw(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape))


# ---- one read ----


def formula(x, query, gain, count=None):
    """Equations 8 to 10 of the report, over the first `count` of the sources x."""
    keys = x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + EPS) * gain[None, None, None]
    scores = jnp.einsum("sbtd,d->sbt", keys, query)
    there = jnp.arange(len(x)) < (len(x) if count is None else count)
    weights = jax.nn.softmax(jnp.where(there[:, None, None], scores, -jnp.inf), axis=0)
    return jnp.einsum("sbt,sbtd->btd", weights, x), weights


@pytest.mark.parametrize("count", [1, 3])
def test_a_read_is_its_formula_and_so_is_its_gradient(count):
    bank, query, gain, d = draw(4, B, T, D), draw(D, seed=1), draw(D, seed=2), draw(B, T, D, seed=3)
    bank = bank.at[count:].set(1e6)  # not there yet: whatever it holds is not read

    def both(run):
        (y, weights), pull = jax.vjp(run, bank, query, gain)
        return y, weights[:count], pull((d, jnp.zeros_like(weights)))

    y, weights, (d_bank, *rest) = jax.jit(lambda: both(lambda *args: read(*args, count, EPS)))()
    expected, expected_weights, expected_gradients = jax.jit(
        lambda: both(lambda x, *rest: formula(x[:count], *rest))
    )()
    chex.assert_trees_all_close((y, weights), (expected, expected_weights), rtol=1e-12)
    chex.assert_trees_all_close((d_bank, *rest), expected_gradients, rtol=1e-10, atol=1e-13)
    assert not np.any(d_bank[count:])


def test_a_pseudo_query_of_zero_reads_the_plain_mean():
    bank = draw(4, B, T, D)
    y, weights = read(bank, jnp.zeros(D), draw(D, seed=2), 3, EPS)
    np.testing.assert_allclose(y, np.mean(bank[:3], axis=0), rtol=1e-12)
    np.testing.assert_allclose(weights[:3], np.full((3, B, T), 1 / 3), rtol=1e-12)


def test_a_read_of_bfloat16_sources_is_made_in_float32():
    with jax.enable_x64(False):
        bank = jnp.asarray(draw(3, B, T, D), jnp.bfloat16)
        query, gain = (jnp.asarray(draw(D, seed=i), jnp.float32) for i in (1, 2))
        y, weights = read(bank, query, gain, 3, EPS)
        expected, _ = formula(bank.astype(jnp.float32), query, gain)
    assert (y.dtype, weights.dtype) == (jnp.bfloat16, jnp.float32)
    np.testing.assert_array_equal(y, expected.astype(jnp.bfloat16))


# ---- blocks ----


def test_full_size_blocks_count_layers():
    cfg = full_size()
    assert [i for i, (mixer, _) in enumerate(opens(cfg)) if mixer] == list(range(0, 93, 12))
    assert not any(channel for _, channel in opens(cfg))
    assert bank_size(cfg) == 9


@pytest.mark.parametrize(
    ("residual", "sums"),
    [
        (Plain(), 1),
        (FullAttnRes(), 25),
        (BlockAttnRes(12), 2),
        (BlockAttnRes(5), 4),
        (BlockAttnRes(EIGHT_BLOCKS), 9),
    ],
)
def test_the_bank_holds_the_embedding_and_one_sum_per_block(residual, sums):
    assert bank_size(toy(residual)) == sums


def test_fresh_reads_are_plain_means_of_their_sources():
    """The reported weights say so for every module, and for the last read."""
    cfg = toy(BlockAttnRes(EIGHT_BLOCKS))
    with jax.enable_x64(False):
        params = meta.unbox(K3(cfg).init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32)))["params"]
        reports = jax.jit(lambda: K3(cfg).apply({"params": params}, jnp.zeros((B, T), jnp.int32)).reports)()
    sources = np.cumsum([[i in EIGHT_BLOCKS, 0] for i in range(12)]).reshape(
        12, 2
    )  # the sums before this block's
    for group in plan(cfg):
        for leaf in group.leaves:
            for at, part in enumerate(("mixer", "channel")):
                for index in np.ndindex(*leaf.repeats):
                    layer = leaf.layers[index]
                    count = sources[layer, at] + (at == 1 or layer not in EIGHT_BLOCKS)
                    expected = np.where(np.arange(9) < count, 1 / count, 0)
                    weights = reports[leaf.name][part].means["read_S"][index]
                    np.testing.assert_allclose(weights, expected, rtol=1e-5)
    np.testing.assert_allclose(reports["final"].means["read_S"], np.full(9, 1 / 9), rtol=1e-5)


# ---- stacks ----


def by_layer(cfg, params):
    """The parameters of the two modules of each layer, in order, and their configs."""
    layers, parts = [None] * cfg.depth, [None] * cfg.depth
    for group in plan(cfg):
        for leaf in group.leaves:
            for index in np.ndindex(*leaf.repeats):
                own = jax.tree.map(lambda x, index=index: np.asarray(x)[index], params[leaf.name])
                layers[leaf.layers[index]] = (own["mixer"], own["channel"])
                parts[leaf.layers[index]] = (leaf.mixer, leaf.channel)
    return layers, parts


@partial(jax.jit, static_argnames="part")
def module(part, own, sources, count):
    """One module's output: its read of the first `count` sources, if it has one, its norm and its body."""
    x = sources[0]
    if "read_query" in own:
        x, _ = formula(sources, own["read_query"], own["read_norm"], count)
    own = {name: w for name, w in own.items() if not name.startswith("read")}
    return Unit(part, toy(Plain())).apply({"params": own}, x[None], True, 0, None, None)[0][0]


def loop(cfg, parts, layers, embedded):
    """The stack as the report tells it: a list of finished sources, and a running sum."""
    most, finished, running = 2 * 12 + 1, [], embedded
    for i, layer in enumerate(layers):
        for j, own in enumerate(layer):
            match cfg.residual:
                case Plain():
                    opens_block = False
                case FullAttnRes():
                    opens_block = True
                case BlockAttnRes(opens=int(every)):
                    opens_block = j == 0 and i % every == 0
                case BlockAttnRes(opens=chosen):
                    opens_block = j == 0 and i in chosen
            sources = [*finished, running]
            rest = [jnp.zeros_like(embedded)] * (most - len(sources))
            y = module(parts[i][j], own, jnp.stack(sources + rest), len(sources))
            if opens_block:
                finished, running = sources, y
            else:
                running = running + y
    return jnp.stack([*finished, running])


LAYOUTS = {
    "plain": toy(Plain(), depth=6),
    "full": toy(FullAttnRes(), depth=4),
    "blocks": toy(BlockAttnRes(2), depth=6),
    "blocks that open in the middle of a cycle": toy(BlockAttnRes((0, 1, 3, 4)), depth=6),
    "a partial cycle": toy(BlockAttnRes(3), depth=5, full_layers=(2, 4, 5)),
    "one layer": toy(BlockAttnRes(12), depth=1),
}
MORE = {
    "no two alike": toy(BlockAttnRes((0, 2)), depth=3, full_layers=(1, 3)),
    "one kind": toy(FullAttnRes(), depth=3, full_layers=(1, 2, 3)),
    "eight blocks of twelve layers": toy(BlockAttnRes(EIGHT_BLOCKS)),
    "every module a block": toy(FullAttnRes()),
    "blocks of a cycle": toy(BlockAttnRes(3)),
}


def check_against_the_loop(cfg):
    """Every sum, and every gradient of a random combination of them."""
    params, embedded, d = drawn(cfg), draw(B, T, D), draw(bank_size(cfg), B, T, D, seed=1)

    @jax.jit
    def scanned(params, embedded, d):
        run = lambda params, x: run_stack(cfg, params, x, None, None)[0].bank_SBTD
        sums, pull = jax.vjp(run, params, embedded)
        return sums, pull(d)

    sums, (d_params, d_embedded) = scanned(params, embedded, d)
    layers, parts = by_layer(cfg, params)
    expected, pull = jax.vjp(partial(loop, cfg, parts), layers, embedded)
    actual = (sums, by_layer(cfg, d_params)[0], d_embedded)
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves((expected, *pull(d))), strict=True):
        assert np.linalg.norm(x - y) <= 1e-11 * np.linalg.norm(y)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_scanned_stack_is_the_plain_loop(name):
    check_against_the_loop(LAYOUTS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_other_stacks_are_the_plain_loop(name):
    check_against_the_loop(MORE[name])


def test_the_layouts_are_scanned():
    assert describe(LAYOUTS["blocks"]) == "2 x (2 a dense, b dense)"
    assert describe(LAYOUTS["a partial cycle"]) == "2 x (a dense, b dense) | b dense"
    assert describe(MORE["one kind"]) == "3 b dense"


# ---- K3's own modules ----


def small(depth=2, **changes):
    settings = {
        "linear": KdaConfig(heads=2, key=4, value=6),
        "full": MlaConfig(heads=2, key=4, shared=2, value=6, latent=8, query_rank=8),
        "dense": DenseConfig(24),
        "moe": LatentMoeConfig(experts=6, active=2, hidden=8, shared=1, latent=8),
        "full_layers": 2,
        "residual": BlockAttnRes(1),
    }
    return ModelConfig(width=16, vocabulary=32, depth=depth, **(settings | changes))


@cache
def gradients(remat, dense_layers):
    cfg = small(remat=remat, dense_layers=dense_layers)
    tokens = np.random.default_rng(1).integers(0, 32, size=(2, 9))
    loss = lambda params: jnp.sum(jnp.sin(K3(cfg).apply({"params": params}, tokens).logits))
    return jax.jit(jax.grad(loss))(drawn(cfg))


@pytest.mark.parametrize("remat", ["module", "ops"])
def test_gated_norms_recompute_what_they_had(remat):
    """A norm whose backward read the ungated value would differ as soon as it is recomputed."""
    check_recomputation(remat, dense_layers=2)


@pytest.mark.slow
@pytest.mark.parametrize("remat", sorted(set(get_args(Remat)) - {"none"}))
def test_experts_recompute_what_they_had(remat):
    check_recomputation(remat, dense_layers=0)


def check_recomputation(remat, dense_layers):
    recomputed, kept = (gradients(which, dense_layers) for which in (remat, "none"))
    chex.assert_trees_all_close(recomputed, kept, rtol=1e-9, atol=1e-11)


def kept(cfg):
    """Bytes kept from the forward to the backward pass for 64 more tokens, in units of one [B, 64, D]."""

    def total(T):
        shapes = jax.eval_shape(lambda: drawn(cfg))
        x = jax.ShapeDtypeStruct((B, T, cfg.width), jnp.float64)
        run = lambda params, x: run_stack(cfg, params, x, None, None)[0]
        leaves = jax.tree.leaves(jax.eval_shape(lambda *args: jax.vjp(run, *args)[1], shapes, x))
        return sum(x.size * x.dtype.itemsize for x in leaves)

    return (total(128) - total(64)) / (B * 64 * cfg.width * 8)


@pytest.mark.parametrize("residual", [Plain(), BlockAttnRes(2), FullAttnRes()], ids=repr)
def test_each_source_is_kept_once(residual):
    """The bank of sums, and of each module the sum it adds to: no bank per layer."""
    cfg = small(8, residual=residual, remat="module")
    assert kept(cfg) <= 2 * 8 + bank_size(cfg) + 0.01


def test_the_usual_policy_adds_what_ops_return():
    cfg = small(8, remat="ops")
    per_layer = max(cfg.linear.heads * cfg.linear.value, cfg.full.heads * cfg.full.value) / cfg.width
    least = kept(replace(cfg, remat="module"))
    assert least < kept(cfg) <= least + 8 * (per_layer + 0.2)


def test_compiled_memory_grows_by_two_sums_a_layer():
    def memory(depth):
        cfg = toy(BlockAttnRes(depth // 4), depth=depth)
        shapes = jax.eval_shape(lambda: drawn(cfg))
        x = jax.ShapeDtypeStruct((4, 256, D), jnp.float64)
        loss = lambda params, x: jnp.sum(run_stack(cfg, params, x, None, None)[0].bank_SBTD)
        return jax.jit(jax.grad(loss)).lower(shapes, x).compile().memory_analysis().temp_size_in_bytes

    assert memory(48) - memory(24) <= 24 * 2.25 * (4 * 256 * D * 8)
