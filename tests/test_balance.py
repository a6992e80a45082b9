import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from k3jax.axes import make_mesh, partition
from k3jax.config import Auxiliary, MeshConfig, MoeConfig, Quantile, Sign, Unbalanced
from k3jax.layers import balance
from k3jax.layers.moe import route

RULES = [Quantile(), Quantile(ema=0.9), Sign(), Auxiliary(), Unbalanced()]


def config(experts, active):
    return MoeConfig(experts=experts, active=active, hidden=8)


def random_scores(seed, tokens, experts, spread=0.85):
    """Sigmoid scores of tokens that like some experts better than others."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(tokens, experts)) + spread * rng.normal(size=experts)
    return jnp.asarray(1 / (1 + np.exp(-logits)), jnp.float32)


@functools.partial(jax.jit, static_argnums=(0, 1))
def count(rule, active, scores_ME, bias_E, real_M=None):
    """(the rule's statistics, loads, cutoffs) of one batch, routed as the layer routes it."""
    M, E = scores_ME.shape
    real_M = jnp.ones(M, bool) if real_M is None else real_M
    chosen_BTk, _, cutoff_BT = route(config(E, active), scores_ME[None], bias_E)
    load_E = jnp.zeros(E, jnp.int32).at[chosen_BTk[0]].add(real_M[:, None].astype(jnp.int32))
    return balance.local_stats(rule, scores_ME, cutoff_BT[0], bias_E, real_M), load_E, cutoff_BT[0]


update = jax.jit(balance.update, static_argnums=0)


def next_bias(rule, active, scores_ME, bias_E, memory=None):
    stats, load_E, _ = count(rule, active, scores_ME, bias_E)
    return update(rule, bias_E, stats, load_E, memory)


def max_vio(load_E):
    return float(jnp.max(load_E) / jnp.mean(load_E) - 1)


def exact_quantile(scores_ME, cutoff_M, active):
    """The ceil(q)-th smallest required bias of each expert, sorted in float64."""
    required_ME = np.sort(
        np.asarray(cutoff_M, np.float64)[:, None] - np.asarray(scores_ME, np.float64), axis=0
    )
    tokens, experts = required_ME.shape
    return required_ME[-(-tokens * active // experts) - 1]


@pytest.mark.parametrize("bins", [40, 1000])
@pytest.mark.parametrize(("tokens", "experts", "active"), [(1024, 16, 4), (101, 7, 3), (64, 5, 4), (9, 4, 1)])
@pytest.mark.parametrize("reach", [0.0, 0.3, 4.0])
def test_the_quantile_is_within_a_bin_of_the_sorted_one(tokens, experts, active, bins, reach):
    """Whatever the bias's reach: the bins span [min b - 1, max b + 1], not [-1, 1]."""
    rule = Quantile(bins=bins, ema=0.5)  # its memory is the quantile before it is centred
    scores_ME = random_scores(1, tokens, experts)
    bias_E = jnp.asarray(np.linspace(-reach, reach, experts), jnp.float32)
    stats, load_E, cutoff_M = count(rule, active, scores_ME, bias_E)
    _, memory = update(rule, bias_E, stats, load_E, balance.empty_memory(rule, experts))
    bin_width = (2 * reach + 2) / bins
    error_E = np.abs(memory["quantile_E"] - exact_quantile(scores_ME, cutoff_M, active))
    assert np.max(error_E) <= bin_width * (1 + 1e-4)
    chex.assert_trees_all_equal(jnp.sum(stats, axis=1), jnp.full(experts, tokens))


@pytest.mark.parametrize("rule", [Quantile(), Quantile(ema=0.9)], ids=repr)
def test_biases_are_centred_on_zero(rule):
    bias_E, _ = next_bias(
        rule, 3, random_scores(2, 200, 12), jnp.arange(12.0), balance.empty_memory(rule, 12)
    )
    assert abs(float(jnp.mean(bias_E))) < 1e-6


def test_five_updates_level_the_loads():
    """8192 tokens, 32 experts, k = 4: a MaxVio of 3.5 falls to about 0.24, 0.13, 0.08, 0.06, 0.03."""
    scores_ME, bias_E, seen = random_scores(3, 8192, 32), jnp.zeros(32), []
    for _ in range(6):
        stats, load_E, _ = count(Quantile(), 4, scores_ME, bias_E)
        seen.append(max_vio(load_E))
        bias_E, _ = update(Quantile(), bias_E, stats, load_E, None)
    assert 3.0 < seen[0] < 4.0
    np.testing.assert_array_less(seen[1:], [0.32, 0.17, 0.10, 0.07, 0.04])


def test_one_update_balances_eight_tokens_exactly():
    """As in the report's figure 5: loads (4, 3, 1, 0) become (2, 2, 2, 2) and stay so."""
    scores_ME = jnp.asarray([
        [0.99, 0.69, 0.39, 0.02],
        [0.74, 0.64, 0.43, 0.39],
        [0.69, 0.99, 0.20, 0.01],
        [0.36, 0.46, 0.49, 0.05],
        [0.42, 0.76, 0.35, 0.01],
        [0.86, 0.82, 0.42, 0.01],
        [0.40, 0.62, 0.45, 0.01],
        [0.78, 0.39, 0.21, 0.31],
    ])  # fmt: skip
    bias_E, loads = jnp.zeros(4), []
    for _ in range(4):
        loads.append(count(Quantile(), 1, scores_ME, bias_E)[1].tolist())
        bias_E, _ = next_bias(Quantile(), 1, scores_ME, bias_E)
    assert loads == [[4, 3, 1, 0], [2, 2, 2, 2], [2, 2, 2, 2], [2, 2, 2, 2]]


def test_padding_is_not_counted():
    scores_ME, junk_ME = random_scores(5, 96, 8), random_scores(6, 32, 8, spread=3.0)
    bias_E = jnp.linspace(-0.2, 0.2, 8)
    stats, load_E, _ = count(Quantile(), 2, scores_ME, bias_E)
    mixed_ME = jnp.concatenate([junk_ME[:16], scores_ME, junk_ME[16:]])
    real_M = (jnp.arange(128) >= 16) & (jnp.arange(128) < 112)
    padded_stats, padded_load_E, _ = count(Quantile(), 2, mixed_ME, bias_E, real_M)
    chex.assert_trees_all_equal((padded_stats, padded_load_E), (stats, load_E))


@pytest.mark.parametrize("parts", [2, 8])
def test_counts_add_up_over_micro_batches(parts):
    scores_ME, bias_E = random_scores(7, 512, 16), 0.1 * jnp.arange(16.0)
    whole = count(Quantile(), 4, scores_ME, bias_E)[:2]
    pieces = [count(Quantile(), 4, piece, bias_E)[:2] for piece in jnp.split(scores_ME, parts)]
    total = jax.tree.map(lambda *x: sum(x[1:], x[0]), *pieces)
    assert whole[0].dtype == whole[1].dtype == jnp.int32
    chex.assert_trees_all_equal(total, whole)


def test_counts_do_not_depend_on_sharding():
    scores_ME, bias_E = random_scores(8, 512, 16), 0.1 * jnp.arange(16.0)
    whole = count(Quantile(), 4, scores_ME, bias_E)
    mesh = make_mesh(MeshConfig(fsdp=2).sizes(8))
    with jax.set_mesh(mesh):
        spread_ME = jax.device_put(scores_ME, NamedSharding(mesh, partition("B_")))
        assert spread_ME.sharding.shard_shape(spread_ME.shape) == (64, 16)
        sharded = count(Quantile(), 4, spread_ME, bias_E)
        bias, _ = update(Quantile(), bias_E, sharded[0], sharded[1], None)
    chex.assert_trees_all_equal(jax.tree.map(np.asarray, sharded), jax.tree.map(np.asarray, whole))
    expected, _ = update(Quantile(), bias_E, whole[0], whole[1], None)
    chex.assert_trees_all_close(np.asarray(bias), np.asarray(expected), rtol=1e-6, atol=1e-6)


def test_the_average_is_over_the_steps_quantiles():
    """The first step's quantile counts in full; the past's weight then falls by `ema` a step."""
    rule, plain = Quantile(ema=0.75), Quantile()
    memory, bias_E, mean_E = balance.empty_memory(rule, 8), jnp.zeros(8), None
    for step in range(4):
        scores_ME = random_scores(20 + step, 256, 8)
        centred_E, _ = next_bias(plain, 2, scores_ME, bias_E)
        mean_E = centred_E if mean_E is None else 0.75 * mean_E + 0.25 * centred_E
        bias_E, memory = next_bias(rule, 2, scores_ME, bias_E, memory)
        # Centring is linear: the average of centred quantiles is the centred average.
        chex.assert_trees_all_close(bias_E, mean_E, rtol=1e-5, atol=1e-6)
    assert memory["steps"] == 4


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_without_a_real_token_nothing_moves(rule):
    bias_E = jnp.asarray([0.5, -0.25, 0.25, -0.5])
    stats, load_E, _ = count(rule, 2, random_scores(9, 32, 4), bias_E, jnp.zeros(32, bool))
    memory = balance.empty_memory(rule, 4)
    after, memory_after = update(rule, bias_E, stats, load_E, memory)
    chex.assert_trees_all_equal(after, bias_E)
    chex.assert_trees_all_equal(memory_after, memory)


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_biases_stay_float32(rule):
    """1e-4 apart is what some differ by, and what bfloat16 cannot tell."""
    bias_E, _ = next_bias(rule, 2, random_scores(10, 64, 8), jnp.zeros(8), balance.empty_memory(rule, 8))
    assert bias_E.dtype == jnp.float32


def test_the_sign_rule_moves_each_bias_by_its_step():
    load_E = jnp.asarray([10, 2, 6, 6], jnp.int32)
    bias_E, memory = update(Sign(0.125), jnp.asarray([0.5, 0.5, 0.5, -0.5]), None, load_E, None)
    chex.assert_trees_all_equal(bias_E, jnp.asarray([0.375, 0.625, 0.5, -0.5]))
    assert memory is None


def test_the_sign_rule_levels_the_loads_step_by_step():
    scores_ME, bias_E, seen = random_scores(11, 2048, 16), jnp.zeros(16), []
    for _ in range(60):
        _, load_E, _ = count(Sign(0.01), 4, scores_ME, bias_E)
        seen.append(max_vio(load_E))
        bias_E, _ = update(Sign(0.01), bias_E, None, load_E, None)
    assert seen[-1] < 0.25 * seen[0]
    assert seen[1] > 0.8 * seen[0]  # a step of its own size, not a jump


@jax.jit
def penalty(logits_BTE, real_BT):
    scores_BTE = jax.nn.sigmoid(logits_BTE)
    chosen_BTk, _, _ = route(config(logits_BTE.shape[-1], 2), scores_BTE, jnp.zeros(logits_BTE.shape[-1]))
    return balance.penalty(Auxiliary(0.5), scores_BTE, chosen_BTk, real_BT)


def logits_and_real(seed):
    rng = np.random.default_rng(seed)
    logits_BTE = jnp.asarray(rng.normal(size=(4, 16, 8)) + np.linspace(-1, 1, 8), jnp.float32)
    return logits_BTE, jnp.asarray(np.arange(16)[None] < np.array([16, 12, 3, 0])[:, None])


def test_the_penalty_is_its_formula_row_by_row():
    logits_BTE, real_BT = logits_and_real(12)
    total = 0.0
    for logits_TE, real_T in zip(np.asarray(logits_BTE, np.float64), np.asarray(real_BT), strict=True):
        if not real_T.any():
            continue
        scores = 1 / (1 + np.exp(-logits_TE[real_T]))
        chosen = np.argsort(-scores, axis=1)[:, :2]
        load_share = np.bincount(chosen.ravel(), minlength=8) / chosen.size
        score_share = np.mean(scores / scores.sum(axis=1, keepdims=True), axis=0)
        total += 0.5 * 8 * np.sum(load_share * score_share) * real_T.sum()
    assert float(penalty(logits_BTE, real_BT)) == pytest.approx(total, rel=1e-5)


def test_the_penalty_adds_up_over_rows_and_ignores_padding():
    logits_BTE, real_BT = logits_and_real(13)
    whole = penalty(logits_BTE, real_BT)
    rows = sum(penalty(logits_BTE[i : i + 1], real_BT[i : i + 1]) for i in range(4))
    assert float(rows) == pytest.approx(float(whole), rel=1e-6)
    junk_BTE = jnp.where(real_BT[..., None], logits_BTE, 7.0)
    value, gradient = jax.value_and_grad(penalty)(junk_BTE, real_BT)
    assert float(value) == pytest.approx(float(whole), rel=1e-6)
    assert not jnp.any(jnp.where(real_BT[..., None], 0, gradient))


def test_descending_the_penalty_relieves_busy_experts():
    logits_BTE, real_BT = logits_and_real(14)
    gradient_E = jnp.sum(jax.grad(penalty)(logits_BTE, real_BT), axis=(0, 1))
    assert gradient_E[-1] > 0 > gradient_E[0]  # the busiest is pushed down, the idlest up


@pytest.mark.parametrize("rule", [Quantile(), Sign(), Unbalanced()], ids=repr)
def test_other_rules_have_no_penalty(rule):
    logits_BTE, real_BT = logits_and_real(15)
    assert balance.penalty(rule, logits_BTE, jnp.zeros((4, 16, 2), jnp.int32), real_BT) == 0


class Halves:
    """A rule of one's own: counts tokens whose score is above a half."""

    def local_stats(self, scores_ME, cutoff_M, bias_E, real_M):
        return jnp.sum((scores_ME > 0.5) & real_M[:, None], axis=0)

    def update(self, bias_E, stats, load_E, memory):
        return bias_E - stats, memory + 1

    def empty_memory(self, experts):
        return jnp.zeros(experts)


def test_a_rule_of_ones_own_is_called_with_what_it_asks_for():
    rule, scores_ME = Halves(), random_scores(16, 32, 4)
    real_M = jnp.arange(32) < 20
    stats = balance.local_stats(rule, scores_ME, jnp.zeros(32), jnp.zeros(4), real_M)
    chex.assert_trees_all_equal(stats, jnp.sum(scores_ME[:20] > 0.5, axis=0))
    bias_E, memory = update(rule, jnp.ones(4), stats, stats, balance.empty_memory(rule, 4))
    chex.assert_trees_all_equal((bias_E, memory), (1.0 - stats, jnp.ones(4)))
