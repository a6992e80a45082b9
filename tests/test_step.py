"""One training step: what it computes, over whom it sums, and what it leaves alone."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.axes import Constant, is_weight, make_mesh, weight_cuts
from k3jax.config import (
    AdamW,
    Auxiliary,
    BlockAttnRes,
    Cosine,
    DenseConfig,
    FullAttnRes,
    KdaConfig,
    LowRank,
    MeshConfig,
    MlaConfig,
    MoeConfig,
    Muon,
    NoGate,
    Plain,
    RoPE,
    Sign,
    Swiglu,
    Unbalanced,
    Unbounded,
    Wsd,
    replace,
)
from k3jax.layers import balance
from k3jax.model import K3
from k3jax.optim.build import build
from k3jax.parameters import leaves, shapes
from k3jax.train.loss import loss_sums
from k3jax.train.metrics import by_layer, loads
from k3jax.train.state import initial
from k3jax.train.step import _clip_logits, _gradients, evaluate_step
from tests.small import begin, rows, small, steps

CLOSE = {"rtol": 2e-4, "atol": 2e-6}


def test_the_loss_is_one_sum_over_one_count():
    """11 and 101 tokens: a mean of means would say 1.5 where the tokens say 1.098."""
    cfg = small()
    params = values(cfg)
    batch = rows(cfg)
    sums, _ = jax.jit(lambda p, b: loss_sums(cfg.model, p, b))(params, batch)
    half = lambda part: {name: x[part] for name, x in batch.items()}
    parts = [
        jax.jit(lambda p, b: loss_sums(cfg.model, p, b))(params, half(p))[0]
        for p in (slice(0, 2), slice(2, 8))
    ]
    np.testing.assert_allclose(sum(p.loss for p in parts), sums.loss, rtol=1e-5)
    assert float(sums.tokens) == batch["weights"].sum()


def values(cfg):
    mesh = make_mesh(cfg.mesh.sizes(1), jax.devices()[:1])
    return initial(cfg, build(cfg.optim, shapes(cfg.model), 10), mesh).params


@pytest.fixture(scope="module")
def plain_steps():
    return steps(small(), 3)


def change(model=None, optim=None):
    """A small config with other parts."""
    cfg = small()
    return replace(cfg, model=replace(cfg.model, **(model or {})), optim=replace(cfg.optim, **(optim or {})))


def one_layer(model=None, optim=None):
    """MLA and experts, which compile in no time."""
    alone = {"depth": 1, "linear": None, "dense": None, "full_layers": 1, "dense_layers": 0}
    return change({**alone, "residual": Plain(), **(model or {})}, optim)


# Both heads' logits are above tau; and without an eps, Adam's first step is the rate itself.
EVENTFUL = one_layer(
    {"moe": replace(small().model.moe, balance=Sign(0.01))},
    {"qk_clip": 0.01, "schedule": Cosine(warmup=1.0), "adam": AdamW(eps=1e-12)},
)


@pytest.fixture(scope="module")
def eventful():
    """(the state before, the step)"""
    return begin(EVENTFUL)


def test_accumulation_changes_nothing(plain_steps):
    """Four micro-batches and one: the same loss, parameters, loads, largest logits and biases."""
    cfg = small()
    one = plain_steps
    four = steps(replace(cfg, optim=replace(cfg.optim, accumulate=4)), 3)
    for a, b in zip(one[2], four[2], strict=True):
        np.testing.assert_allclose(a["loss"], b["loss"], rtol=1e-5)
        np.testing.assert_allclose(a["gradient_norm"], b["gradient_norm"], rtol=1e-4)
    # The first step's choices of experts are the same, token for token.
    np.testing.assert_array_equal(*(loads(cfg.model, run[2][0]["layers"]) for run in (one, four)))
    mixers = (run[2][0]["layers"]["3_mla_moe"]["mixer"] for run in (one, four))
    np.testing.assert_allclose(*(mixer.maxima["max_logit_H"] for mixer in mixers), rtol=1e-5)
    close(one[1].params, four[1].params)


def test_eight_devices_equal_one(plain_steps, capfd):
    """Rows over data and fsdp, parameters over fsdp: the same numbers."""
    cfg = replace(small(), mesh=MeshConfig(data=4, fsdp=2))
    before, after, reports = steps(cfg, 3, devices=jax.devices()[:8])
    assert "Involuntary" not in capfd.readouterr().err, "the compiler had to copy a whole array everywhere"
    for a, b in zip(plain_steps[2], reports, strict=True):
        np.testing.assert_allclose(a["loss"], b["loss"], rtol=1e-5)
    np.testing.assert_array_equal(*(loads(cfg.model, run[0]["layers"]) for run in (plain_steps[2], reports)))
    jax.tree.map(np.testing.assert_array_equal, before.params, plain_steps[0].params)
    close(after.params, plain_steps[1].params)
    # Matrices and their moments are really cut: a device holds half of each.
    boxes = dict(leaves(shapes(cfg.model)))
    for (path, x), w in zip(jax.tree_util.tree_leaves_with_path(after.params), boxes.values(), strict=True):
        cut = any("fsdp" in axes for axes in weight_cuts(w))
        assert x.addressable_shards[0].data.size == x.size // (2 if cut else 1), path
    moments = [x for x in jax.tree.leaves(after.opt_state) if x.size >= 1024]
    assert moments
    assert all(x.addressable_shards[0].data.size == x.size // 2 for x in moments)


def close(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **CLOSE), a, b)


def test_the_first_loss_is_that_of_knowing_nothing():
    """ln Y + 0.0002 D within 2%, whatever the size, and finite steps after it."""
    cfg = small()
    for width, vocabulary in ((16, 257), (64, 1000)):
        model = replace(cfg.model, width=width, vocabulary=vocabulary)
        _, _, reports = steps(replace(cfg, model=model), 2)
        expected = np.log(vocabulary) + 2e-4 * width
        assert abs(float(reports[0]["loss"]) / expected - 1) < 0.02
        assert all(bool(report["finite"]) for report in reports)


def test_every_weight_starts_as_it_says():
    """The spread of each leaf is its initialiser's, whatever its fan-in."""
    cfg = replace(small().model, width=64, moe=replace(small().model.moe, latent=32, hidden=32))
    params = values(replace(small(), model=cfg))
    for (path, w), x in zip(leaves(shapes(cfg)), jax.tree.leaves(params), strict=True):
        assert x.shape == w.value.shape
        text = str(w.init)
        if text.startswith("N(0, 0.02"):
            assert abs(float(jnp.std(x)) / 0.02 - 1) < 3 / x.size**0.5, path
            assert abs(float(jnp.mean(x)) / 0.02) < 4 / x.size**0.5, path
        elif text.startswith("U("):
            assert float(jnp.max(jnp.abs(x))) <= 0.5
            assert abs(float(jnp.std(x)) / (0.5 / 3**0.5) - 1) < 0.2, path
        elif text in ("0", "1"):
            np.testing.assert_array_equal(x, float(text))
        elif "dt_bias" in path:
            step = jax.nn.softplus(x)
            assert float(jnp.min(step)) >= 1e-3 * 0.99
            assert float(jnp.max(step)) <= 0.1 * 1.01
        else:
            raise AssertionError(f"{path} starts from {text}, which is not looked at here")


def test_stacked_layers_start_apart():
    model = replace(small().model, depth=4, full_layers=(4,), residual=Plain())
    params = values(replace(small(), model=model))
    query = params["2_kda_moe"]["mixer"]["kda"]["query"]
    assert query.shape[0] == 2
    assert np.any(np.asarray(query[0] != query[1]))


def test_another_seed_is_another_start():
    cfg = small()
    one, other = (values(replace(cfg, run=replace(cfg.run, seed=seed))) for seed in (0, 1))
    names = leaves(shapes(cfg.model))
    for (path, w), x, y in zip(names, *map(jax.tree.leaves, (one, other)), strict=True):
        assert isinstance(w.init, Constant) or np.any(np.asarray(x != y)), path


def test_balancing_moves_biases_in_training_alone():
    cfg = small()
    before, after, reports = steps(cfg, 1)
    bias = lambda state: np.asarray(state.params["2_kda_moe"]["channel"]["moe"]["router_bias"])
    assert not bias(before).any()
    assert bias(after).any()
    np.testing.assert_allclose(bias(after).mean(), 0, atol=1e-6)
    sums = jax.jit(lambda p, b: evaluate_step(cfg.model, p, b))(after.params, rows(cfg))
    assert float(sums.tokens) > 0, "evaluation returns sums and no parameters: there is nothing to move"
    # A batch is routed by the bias of the step before: the first step's loads are those of bias 0.
    out = jax.jit(lambda p, b: K3(cfg.model).apply({"params": p}, b["tokens"], b["segment_ids"]).reports)
    fresh = jax.device_get(out(before.params, rows(cfg)))
    np.testing.assert_array_equal(loads(cfg.model, fresh), loads(cfg.model, reports[0]["layers"]))


def test_a_rule_goes_on_from_the_bias_in_use(eventful):
    state, step = eventful
    rule, bias_E = EVENTFUL.model.moe.balance, np.zeros(8, np.float32)
    for at in range(2):
        state, report = step(state, rows(EVENTFUL, at))
        (load_E,) = loads(EVENTFUL.model, jax.device_get(report["layers"]))
        bias_E, _ = balance.update(rule, bias_E, None, load_E, None)
    np.testing.assert_array_equal(state.params["1_mla_moe"]["channel"]["moe"]["router_bias"], bias_E)


def test_the_gradient_is_that_of_the_loss_and_of_what_is_added_to_it():
    """A combination of the gradients of the three sums, with the weights 1, z_loss and 1."""
    cfg = one_layer({"moe": replace(small().model.moe, balance=Auxiliary(0.5))}, {"z_loss": 0.25})
    params, batch = values(cfg), rows(cfg)

    @jax.jit
    @jax.grad
    def part(params, weight_3):
        sums, _ = loss_sums(cfg.model, params, batch)
        return weight_3 @ jnp.stack([sums.loss, sums.z, sums.penalty]) / sums.tokens

    flat = lambda tree: np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)], dtype=np.float64)
    parts = np.stack([flat(part(params, weight_3)) for weight_3 in np.eye(3, dtype=np.float32)], axis=1)
    whole = flat(jax.jit(partial(_gradients, cfg))(params, batch)[1])
    weight_3, *_ = np.linalg.lstsq(parts, whole)
    np.testing.assert_allclose(weight_3, [1, 0.25, 1], rtol=1e-5)
    assert np.linalg.norm(whole - parts @ weight_3) <= 1e-6 * np.linalg.norm(whole)


def test_a_tied_embedding_takes_the_gradient_of_both_its_ends():
    """That of the table and that of the head of a model where they are two."""
    tied, apart = one_layer({"tie_embeddings": True}), one_layer()
    params = values(tied)

    def gradient(cfg, params):
        return jax.jit(jax.grad(lambda p: loss_sums(cfg.model, p, rows(cfg))[0].loss))(params)

    one, two = gradient(tied, params), gradient(apart, params | {"head": params["embedding"].T})
    expected = two["embedding"] + two["head"].T  # up to 17, in float32
    np.testing.assert_allclose(one["embedding"], expected, rtol=1e-5, atol=1e-5)


def test_no_gradient_reaches_a_bias():
    cfg = small()
    gradient = jax.jit(jax.grad(lambda p: loss_sums(cfg.model, p, rows(cfg))[0].loss))(values(cfg))
    for name in ("2_kda_moe", "3_mla_moe"):
        np.testing.assert_array_equal(gradient[name]["channel"]["moe"]["router_bias"], 0)
        assert gradient[name]["channel"]["moe"]["router_bias"].dtype == jnp.float32


def test_logits_above_tau_are_clipped_back():
    """After a step that saw logits above tau, the same rows give at most tau; other weights are left."""
    cfg = small()
    params = values(cfg)
    mla = params["3_mla_moe"]["mixer"]["mla"]
    loud = jax.tree.map(lambda x: x, params)
    loud["3_mla_moe"]["mixer"]["mla"] = mla | {"query_up": 60 * mla["query_up"], "key_up": 60 * mla["key_up"]}

    def largest(params):
        out = K3(cfg.model).apply({"params": params}, rows(cfg)["tokens"], rows(cfg)["segment_ids"])
        return np.asarray(out.reports["3_mla_moe"]["mixer"].maxima["max_logit_H"])

    read = lambda p: K3(cfg.model).apply({"params": p}, rows(cfg)["tokens"], rows(cfg)["segment_ids"])
    seen = jax.jit(lambda p: read(p).reports)(loud)
    tau = float(largest(loud).max()) / 3
    clipped = _clip_logits(cfg.model, loud, seen, tau)
    assert largest(clipped).max() <= tau * 1.001
    assert moved(loud, clipped) == {("3_mla_moe", "mixer", "mla", name) for name in ("key_up", "query_up")}
    assert not moved(loud, _clip_logits(cfg.model, loud, seen, 1e9))


def test_a_step_clips_by_the_largest_logits_that_it_saw(eventful):
    """It ends where the same step without a tau does, but for the queries and keys of each head."""
    before, step = eventful
    after, report = step(before, rows(EVENTFUL))
    _, unclipped_step = begin(replace(EVENTFUL, optim=replace(EVENTFUL.optim, qk_clip=None)))
    expected, _ = unclipped_step(before, rows(EVENTFUL))
    top_H = np.asarray(report["layers"]["1_mla_moe"]["mixer"].maxima["max_logit_H"])
    assert np.all(top_H > EVENTFUL.optim.qk_clip)
    ratio_H1 = (EVENTFUL.optim.qk_clip / top_H)[:, None]
    mla = expected.params["1_mla_moe"]["mixer"]["mla"]
    own = np.arange(mla["query_up"].shape[-1]) < EVENTFUL.model.full.key
    mla["query_up"] *= np.where(own[None], np.sqrt(ratio_H1), ratio_H1)[None]
    mla["key_up"] *= np.sqrt(ratio_H1)[None]
    close(after.params, expected.params)


def test_the_logged_rate_is_the_one_that_moved_the_parameters(eventful):
    """Adam's first step moves a parameter by the rate, whatever its gradient."""
    before, step = eventful
    after, first = step(before, rows(EVENTFUL))
    _, second = step(after, rows(EVENTFUL, 1))
    moved_D = np.abs(after.params["norm"] - before.params["norm"])
    np.testing.assert_allclose(moved_D, first["lr"], rtol=2e-4)  # 6e-4 from 1, in float32
    peak, steps = EVENTFUL.optim.lr, EVENTFUL.run.steps
    np.testing.assert_allclose([first["lr"], second["lr"]], [peak / steps, 2 * peak / steps], rtol=1e-6)


def moved(before, after):
    """The paths of the parameters that differ."""
    pairs = zip(jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(after), strict=True)
    return {
        tuple(key.key for key in path) for (path, x), y in pairs if np.any(np.asarray(x) != np.asarray(y))
    }


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_a_step_that_is_not_finite_leaves_the_state(what, eventful):
    start, step = eventful
    norm, head, embedding = (start.params[name] for name in ("norm", "head", "embedding"))
    # The logits stay, but the head's gradient is too large to be squared.
    poison = {
        "loss": {"embedding": np.nan * embedding},
        "gradient": {"norm": 1e25 * norm, "head": 1e-25 * head},
    }
    before = start.replace(params=start.params | poison[what])
    after, report = step(before, rows(EVENTFUL))
    assert bool(np.isfinite(report["loss"])) == (what == "gradient")
    assert not bool(report["finite"])
    jax.tree.map(np.testing.assert_array_equal, after, before)
    after, report = step(start, rows(EVENTFUL))
    assert bool(report["finite"])
    assert int(after.step) == 1


# Every choice of every switch stands in one of these, so that each trains in few compilations.
MIXTURES = {
    "kimi_linear_like": lambda: change(
        {
            "linear": KdaConfig(
                heads=3, key=8, value=4, decay=Unbounded(), gate=LowRank(4), rate_init="uniform"
            ),
            "full": MlaConfig(heads=2, key=8, shared=4, value=8, latent=16, query_rank=None, gate=NoGate()),
            "moe": MoeConfig(
                experts=8, active=2, hidden=16, activation=Swiglu(), balance=Sign(0.01), scale=2.4
            ),
            "dense": DenseConfig(32, Swiglu()),
            "residual": Plain(),
            "remat": "none",
        },
        {"matrices": AdamW(), "schedule": Wsd(), "qk_clip": None, "clip": None},
    ),
    "k2_like": lambda: change(
        {
            "linear": None,
            "full_layers": 1,
            "full": MlaConfig(heads=2, key=8, shared=4, value=8, latent=16, query_rank=16, positions=RoPE()),
            "moe": MoeConfig(experts=8, active=2, hidden=16, shared=0, normalise=False, balance=Auxiliary()),
            "residual": FullAttnRes(),
            "tie_embeddings": True,
            "remat": "products",
        },
        {"matrices": Muon(split="matrix", precision="bfloat16"), "z_loss": 1e-3, "accumulate": 2},
    ),
    "linear_alone": lambda: change(
        {
            "full": None,
            "full_layers": (),
            "linear": KdaConfig(heads=2, key=8, value=8, taps=1, gate=NoGate()),
            "dense": None,
            "dense_layers": 0,
            "residual": BlockAttnRes(2),
            "dtype": "bfloat16",
            "remat": "module",
        },
        {"matrices": Muon(split="every_head")},
    ),
    "no_latent_norm": lambda: change(
        {
            "moe": replace(small().model.moe, norm="none", balance=Unbalanced()),
            "remat": "ops",
        }
    ),
}


@pytest.mark.parametrize("name", MIXTURES)
def test_every_switch_trains(name):
    cfg = MIXTURES[name]()
    before, after, reports = steps(cfg, 3, same_rows=True)
    losses = [float(report["loss"]) for report in reports]
    assert losses[-1] < losses[0]
    for (path, w), old, new in zip(
        leaves(shapes(cfg.model)), jax.tree.leaves(before.params), jax.tree.leaves(after.params), strict=True
    ):
        assert new.dtype == jnp.float32, path
        still = w.rule == "balance" or (path[0].startswith("1_") and "read" in path[-1])
        moved = np.any(np.asarray(old != new))
        assert moved or still, f"{path} did not move"


@pytest.mark.parametrize("remat", ["none", "products", "module"])
def test_remat_changes_no_number(remat, plain_steps):
    """Values to rounding: what is kept for the backward pass is no matter of arithmetic."""
    _, after, _ = steps(replace(small(), model=replace(small().model, remat=remat)), 3)
    close(after.params, plain_steps[1].params)


def test_reports_come_in_order_of_depth(plain_steps):
    found = list(by_layer(small().model, plain_steps[2][0]["layers"], "means", "read_S"))
    assert [(layer, part) for layer, part, _ in found] == [
        (layer, part) for layer in (1, 2, 3) for part in ("mixer", "channel")
    ]
    for _, _, weights_S in found:
        np.testing.assert_allclose(np.sum(weights_S), 1, rtol=1e-5)


def test_boxes_are_weights():
    assert all(is_weight(w) for _, w in leaves(shapes(small().model)))
