"""The built-in mixers and rules obey the laws, and so do ones from outside the package, end to end."""

import jax
import numpy as np
import pytest

from k3jax.config import (
    Auxiliary,
    Config,
    ConfigError,
    KdaConfig,
    LowRank,
    MlaConfig,
    NoGate,
    Quantile,
    RoPE,
    Sign,
    Unbalanced,
    Unbounded,
    replace,
)
from k3jax.testing import check_balance, check_mixer
from tests.own_mechanisms import Proportional, RunningMean
from tests.small import small, steps

MIXERS = [
    KdaConfig(heads=2, key=4, value=8),
    KdaConfig(heads=1, key=5, value=3, taps=1, decay=Unbounded(), gate=LowRank(2)),
    MlaConfig(heads=2, key=4, shared=2, value=4, latent=6, query_rank=5),
    MlaConfig(heads=2, key=4, shared=2, value=4, latent=6, query_rank=None, gate=NoGate(), positions=RoPE()),
    RunningMean(),
]


@pytest.mark.parametrize("part", MIXERS, ids=lambda part: type(part).__name__)
def test_mixers_obey_the_laws(part):
    check_mixer(part)


@pytest.mark.parametrize(
    "rule", [Quantile(50), Quantile(50, ema=0.5), Sign(), Auxiliary(), Unbalanced(), Proportional()], ids=repr
)
def test_balancing_rules_obey_the_laws(rule):
    check_balance(rule)


def test_the_laws_catch_a_mixer_that_looks_ahead():
    class Ahead(RunningMean):
        def apply(self, params, x_BTD, state, segments):
            return super().apply(params, x_BTD[:, ::-1], state, segments)

    with pytest.raises(AssertionError, match="later input"):
        check_mixer(Ahead())


def test_a_stack_of_ones_own_mixer_and_rule_trains():
    """Both go the whole way: parameters, optimiser, balancing, a falling loss."""
    cfg = small()
    model = replace(cfg.model, linear=RunningMean(), moe=replace(cfg.model.moe, balance=Proportional()))
    cfg = replace(cfg, model=model)
    before, after, reports = steps(cfg, 4)
    name = next(name for name in after.params if "mean_moe" in name)
    bias = after.params[name]["channel"]["moe"]["router_bias"]
    assert np.any(np.asarray(bias)), "the rule must have moved the bias"
    assert int(np.asarray(after.balance[name]["updates"]).flat[0]) == 4
    into = lambda state: state.params[name]["mixer"]["mean"]["params"]["into"]
    assert np.any(np.asarray(into(before) != into(after))), "the optimiser must have moved the mixer"
    losses = [float(report["loss"]) for report in reports]
    assert losses[-1] < losses[0]


def test_what_is_no_mixer_is_refused_at_once():
    with pytest.raises(ConfigError, match="linear='kda'"):
        replace(small().model, linear="kda")
    with pytest.raises(ConfigError, match="balance='sign'"):
        replace(small().model.moe, balance="sign")


def test_config_types_stay_hashable():
    """Layers that are alike are found by equality, and compiled programs by hash."""
    assert isinstance(hash(small()), int)
    assert isinstance(small(), Config)
    assert jax.tree.leaves(small()) == [small()]
