"""What a run tells of itself: how busy its experts are, what it is measured by, and which code ran."""

import math
from typing import Any

import jax
import numpy as np
import pytest

from k3jax.axes import MESH_AXES, make_mesh
from k3jax.config import KdaConfig, replace
from k3jax.data.corpus import Manifest
from k3jax.evaluate import mean_loss
from k3jax.layout import plan
from k3jax.report import Report, merge
from k3jax.train import setup
from k3jax.train.loss import Sums
from k3jax.train.metrics import scalars
from k3jax.train.setup import implementations
from tests.small import small


def step_report(loads):
    """What a step returns, with tokens per expert of each MoE layer, [layers][devices, E]."""
    layers, loads = {}, iter(loads)
    for leaf in (leaf for group in plan(small().model) for leaf in group.leaves):
        channel = Report(sums={"load_E": next(loads)}) if leaf.channel.kind == "moe" else Report()
        layers[leaf.name] = {"mixer": Report(), "channel": channel}
    numbers = dict.fromkeys(("loss", "penalty", "z", "gradient_norm", "lr"), 1.0)
    return {**numbers, "tokens": 64, "layers": layers}


def test_dead_and_crowded_experts_show_in_the_record():
    """Most experts may be dead while the router's own probabilities look healthy."""
    one = np.array([[40, 0, 8, 0, 0, 0, 0, 16], [56, 0, 8, 0, 0, 0, 0, 0]])  # two devices: 96, 16 and 16
    even = np.full((2, 8), 8)
    out = scalars(small().model, step_report([one, even]))
    assert (out["dead_experts"], out["dead_share"]) == (5, 5 / 16)
    assert out["max_vio"] == pytest.approx(96 / 16 - 1)
    assert out["mean_vio"] == pytest.approx((96 / 16 - 1) / 2)


def test_a_step_without_tokens_has_no_violation():
    out = scalars(small().model, step_report([np.zeros((1, 8), int)] * 2))
    assert (out["max_vio"], out["dead_share"]) == (0, 1)


def test_means_of_micro_batches_weigh_by_their_tokens():
    """11 tokens at 2 and 101 at 1: the mean of the means would be 1.5."""
    two, one = (Report(means={"read_S": np.float32([x, 0])}) for x in (2, 1))
    np.testing.assert_allclose(merge(two, one, 11, 101).means["read_S"], [123 / 112, 0], rtol=1e-6)


def test_of_two_micro_batches_the_larger_maximum_stays():
    maxima = np.float32([[3, -np.inf], [1, 2]])
    for first, second in (maxima, maxima[::-1]):
        reports = (Report(maxima={"max_logit_H": top_H}) for top_H in (first, second))
        np.testing.assert_array_equal(merge(*reports, 11, 101).maxima["max_logit_H"], [3, 2])


def test_every_op_says_what_runs_and_who_chose_it():
    cfg = small()
    best = f"xla (best for {jax.default_backend()})"
    assert implementations(cfg) == dict.fromkeys(("attention", "grouped_matmul", "kda"), best)
    slow = replace(cfg, model=replace(cfg.model, moe=replace(cfg.model.moe, implementation="reference")))
    assert implementations(slow)["grouped_matmul"] == "reference (asked for)"


def test_rows_that_a_kernel_cuts_are_announced(monkeypatch):
    """Two heads of a row of 2048 tokens on each device: 32 chunks in pieces of 4. With 64 rows it is full."""
    monkeypatch.setattr(setup, "implementations", lambda cfg: {"kda": "mosaic_gpu (asked for)"})
    devices = jax.device_count()
    mesh = make_mesh(dict.fromkeys(MESH_AXES, 1) | {"data": devices})

    def said(rows, **mixers):
        data = replace(small().data, length=2048, batch=rows * devices)
        cfg = replace(small(), data=data, model=replace(small().model, **mixers))
        nothing: Any = None
        return setup.Setup(cfg, mesh, Manifest("", (), ()), nothing, nothing).facts()["implementations"]

    assert said(1) == ["kda: mosaic_gpu, each row in 8 pieces side by side (asked for)"]
    assert said(64) == ["kda: mosaic_gpu (asked for)"]
    both = said(1, full=KdaConfig(heads=32, key=8, value=8))
    assert both == ["kda: mosaic_gpu, each row in 4 or 8 pieces side by side (asked for)"]


def test_a_validation_loss_is_one_sum_over_one_count():
    """11 tokens at 2 nats and 101 at 1: the mean of the batches' means would be 1.5."""
    batches = [(2.0, 11.0), (1.0, 101.0), (0.0, 0.0)]
    step = lambda _, batch: Sums(np.float32(batch[0] * batch[1]), np.float32(batch[1]), 0.0, 0.0)
    assert mean_loss(step, None, batches) == pytest.approx(123 / 112)
    assert math.isnan(mean_loss(step, None, batches[2:]))
