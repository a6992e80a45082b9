from itertools import pairwise

import numpy as np
import pytest

from configs import k3, kimi_linear, tiny
from k3jax.config import BlockAttnRes, FullAttnRes, Plain, replace
from k3jax.layout import bank_size, block_facts, describe, plan


def runs(cfg):
    """(leaf, its layers of one recurrence) in the order in which they run."""
    for group in plan(cfg):
        for time in range(group.times):
            for leaf in group.leaves:
                first = leaf.first + time * leaf.stride
                yield leaf, list(range(first, first + leaf.count))


def slots(cfg):
    """(opens, slot) of each module in order, put together from the leaves' arrays."""
    opens = np.full((cfg.depth, 2), -1)
    slot = np.full((cfg.depth, 2), -1)
    for leaf in (leaf for group in plan(cfg) for leaf in group.leaves):
        facts = block_facts(cfg, leaf)
        opens[leaf.layers], slot[leaf.layers] = facts.opens, facts.slot
    return opens, slot


def random_model(seed):
    """Any layer list: mixers at random, some dense layers first, blocks that open anywhere."""
    rng = np.random.default_rng(seed)
    depth = int(rng.integers(1, 30))
    full = tuple(int(i) for i in range(1, depth + 1) if rng.random() < rng.choice([0.1, 0.3, 0.9]))
    opens = (0, *(int(i) for i in range(1, depth) if rng.random() < 0.3))
    residual = [BlockAttnRes(opens), BlockAttnRes(int(rng.integers(1, 9))), Plain(), FullAttnRes()][seed % 4]
    dense = int(rng.integers(0, min(depth, 4) + 1))
    return replace(tiny.model(), depth=depth, full_layers=full, dense_layers=dense, residual=residual)


KNOWN = [k3.model(), kimi_linear.model(), tiny.model()]
RANDOM = [random_model(seed) for seed in range(60)]


@pytest.mark.parametrize("cfg", KNOWN + RANDOM, ids=lambda cfg: f"{cfg.depth}_layers")
def test_a_plan_runs_every_layer_once_and_in_order(cfg):
    order = [i for _, layers in runs(cfg) for i in layers]
    assert order == list(range(cfg.depth))
    for leaf, layers in runs(cfg):
        assert all(cfg.layers[i] == (leaf.mixer, leaf.channel) for i in layers)
    leaves = [leaf for group in plan(cfg) for leaf in group.leaves]
    assert len({leaf.name for leaf in leaves}) == len(leaves)
    stacked = np.concatenate([leaf.layers.reshape(-1) for leaf in leaves])
    assert sorted(stacked) == list(range(cfg.depth))
    assert all(leaf.layers.shape == leaf.repeats and 1 not in leaf.repeats for leaf in leaves)


@pytest.mark.parametrize("cfg", KNOWN + RANDOM, ids=lambda cfg: f"{cfg.depth}_layers")
def test_equal_neighbours_are_one_run_and_no_plan_compiles_more_than_the_runs(cfg):
    for group in plan(cfg):
        kinds = [(leaf.mixer, leaf.channel) for leaf in group.leaves]
        assert all(a != b for a, b in pairwise(kinds))
    changes_of_kind = 1 + sum(a != b for a, b in pairwise(cfg.layers))
    assert sum(len(group.leaves) for group in plan(cfg)) <= changes_of_kind


@pytest.mark.parametrize("cfg", KNOWN + RANDOM, ids=lambda cfg: f"{cfg.depth}_layers")
def test_a_module_adds_to_the_block_that_last_opened(cfg):
    opens, slot = slots(cfg)
    match cfg.residual:
        case Plain():
            expected = np.zeros((cfg.depth, 2), int)
        case FullAttnRes():
            expected = np.ones((cfg.depth, 2), int)
        case BlockAttnRes(opens=every):
            starts = range(0, cfg.depth, every) if isinstance(every, int) else every
            expected = np.array([(i in starts, 0) for i in range(cfg.depth)], int)
    np.testing.assert_array_equal(opens, expected)
    np.testing.assert_array_equal(slot.reshape(-1), np.cumsum(expected.reshape(-1)))
    assert bank_size(cfg) == 1 + expected.sum()


def test_k3_is_five_bodies_and_nine_sources():
    cfg = k3.model()
    assert describe(cfg) == "kda dense | 2 kda moe | 22 x (mla moe, 3 kda moe) | 2 mla moe"
    assert sum(len(group.leaves) for group in plan(cfg)) == 5
    opens, slot = slots(cfg)
    assert np.flatnonzero(opens[:, 0]).tolist() == [0, 12, 24, 36, 48, 60, 72, 84]
    assert not opens[:, 1].any()
    assert slot[-1].tolist() == [8, 8]
    assert bank_size(cfg) == 9
    kinds = [mixer.kind for mixer, _ in cfg.layers]
    assert (kinds.count("kda"), kinds.count("mla"), kinds[-2:]) == (69, 24, ["mla", "mla"])


def test_kimi_linear_ends_in_a_partial_cycle():
    cfg = kimi_linear.model()
    full = [i for i, (mixer, _) in enumerate(cfg.layers, 1) if mixer.kind == "mla"]
    assert full == [4, 8, 12, 16, 20, 24, 27]
    assert describe(cfg) == "kda dense | 5 x (2 kda moe, mla moe, kda moe) | 2 x (2 kda moe, mla moe)"


def test_equal_layers_are_one_body():
    cfg = replace(tiny.model(), full_layers=(), dense_layers=0, dense=None, full=None)
    assert describe(cfg) == "9 kda moe"
    alternating = replace(cfg, full=tiny.model().full, full_layers=(2, 4, 6, 8), depth=8)
    assert describe(alternating) == "4 x (kda moe, mla moe)"
