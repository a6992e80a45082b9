"""A saved state comes back whole: every array of it, bit for bit, on as many devices as there are now."""

import jax
import numpy as np
import pytest

from k3jax.axes import make_mesh
from k3jax.config import MeshConfig, Quantile, replace
from k3jax.optim.build import build
from k3jax.parameters import shapes
from k3jax.train.checkpoint import Checkpoints
from k3jax.train.state import abstract
from tests.small import small


def remembering():
    """A small config whose balancing rule keeps something between steps."""
    cfg = small()
    return replace(cfg, model=replace(cfg.model, moe=replace(cfg.model.moe, balance=Quantile(ema=0.9))))


def places(cfg, data, fsdp):
    """The shapes and places of a state on a mesh of so many devices."""
    mesh = make_mesh(MeshConfig(data=data, fsdp=fsdp).sizes(data * fsdp), jax.devices()[: data * fsdp])
    return abstract(cfg, build(cfg.optim, shapes(cfg.model), cfg.run.steps), mesh)


def filled(like):
    """A state of random numbers, no two alike."""
    rng = np.random.default_rng(0)

    def fill(x):
        random = rng.normal(size=x.shape) if x.dtype.kind == "f" else rng.integers(1, 1000, x.shape)
        return jax.device_put(np.asarray(random, x.dtype), x.sharding)

    return jax.tree.map(fill, like)


@pytest.mark.parametrize("now", [(1, 4), (1, 1)], ids=str)
def test_every_array_comes_back_wherever_it_belongs_now(now, tmp_path):
    cfg = remembering()
    before = filled(places(cfg, 4, 2))
    assert {"params", "opt_state", "balance", "step"} <= vars(before).keys()
    assert len(jax.tree.leaves(before.balance)) == 4, "two layers remember a quantile and a count"
    position = {"step": 5, "stream": {"position": {"next": 7}}}
    checkpoints = Checkpoints(tmp_path / "checkpoints", 2)
    checkpoints.save(5, before, position)
    checkpoints.wait()
    like = places(cfg, *now)
    after, found = checkpoints.restore(5, like)
    checkpoints.close()
    assert found == position
    for x, y, place in zip(*map(jax.tree.leaves, (before, after, like)), strict=True):
        assert (y.dtype, y.sharding) == (place.dtype, place.sharding)
        np.testing.assert_array_equal(x, y)
