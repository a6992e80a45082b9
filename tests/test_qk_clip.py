import chex
import jax
import numpy as np
import pytest

from k3jax.optim.qk_clip import clip_queries_and_keys

TAU = 100.0
HEADS, OWN, SHARED, LATENT, WIDTH = 3, 8, 4, 6, 10

clip = jax.jit(clip_queries_and_keys, static_argnames=("tau", "own_dims"))


def draw(*shape, seed):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def weights(layers=()):
    query = draw(*layers, WIDTH, HEADS, OWN + SHARED, seed=0)
    return query, draw(*layers, LATENT, HEADS, OWN, seed=1)


def logits(query, key_up):
    """[heads, queries, keys] of a toy layer, whose shared key does not come from key_up."""
    x, latent, shared = 20 * draw(20, WIDTH, seed=2), draw(20, LATENT, seed=3), draw(20, SHARED, seed=4)
    q = np.einsum("td,dha->tha", x, query)
    own = np.einsum("thk,shk->hts", q[..., :OWN], np.einsum("sc,chk->shk", latent, key_up))
    return (own + np.einsum("thp,sp->hts", q[..., OWN:], shared)) * (OWN + SHARED) ** -0.5


def test_a_toy_layers_logits_come_down_to_tau():
    query, key_up = weights()
    query *= np.array([1, 0.5, 2], np.float32)[:, None]
    before = logits(query, key_up)
    largest = before.max((1, 2))
    tau = float(np.sort(largest)[1])  # one head below, one at it, one above
    after = logits(*clip(query, key_up, largest, tau=tau, own_dims=OWN))
    ratio = np.minimum(1.0, tau / largest)
    assert ratio.min() < 0.7
    np.testing.assert_allclose(after.max((1, 2)), np.minimum(largest, tau), rtol=1e-5)
    np.testing.assert_allclose(after, before * ratio[:, None, None], rtol=1e-3, atol=1e-3)


def test_the_parts_are_scaled_as_k2_says():
    query, key_up = weights()
    clipped = clip(query, key_up, np.array([400, 100, 50], np.float32), tau=TAU, own_dims=OWN)
    new_query, new_key = map(np.asarray, clipped)
    np.testing.assert_allclose(new_query[:, 0, :OWN], query[:, 0, :OWN] / 2, rtol=1e-6)
    np.testing.assert_allclose(new_query[:, 0, OWN:], query[:, 0, OWN:] / 4, rtol=1e-6)
    np.testing.assert_allclose(new_key[:, 0], key_up[:, 0] / 2, rtol=1e-6)
    chex.assert_trees_all_equal((new_query[:, 1:], new_key[:, 1:]), (query[:, 1:], key_up[:, 1:]))


@pytest.mark.parametrize("largest", [-3.0, 0.0, 99.999, TAU, -np.inf, np.inf, np.nan])
def test_other_heads_are_left_exactly_as_they_were(largest):
    query, key_up = weights()
    clipped = clip(query, key_up, np.full(HEADS, largest, np.float32), tau=TAU, own_dims=OWN)
    chex.assert_trees_all_equal(clipped, (query, key_up))


def test_stacked_layers_are_clipped_each_by_its_own_heads():
    query, key_up = weights((2, 4))
    largest = 150 * draw(2, 4, HEADS, seed=5)
    together = jax.tree.map(np.asarray, clip(query, key_up, largest, tau=TAU, own_dims=OWN))
    for i, j in np.ndindex(2, 4):
        alone = clip(query[i, j], key_up[i, j], largest[i, j], tau=TAU, own_dims=OWN)
        chex.assert_trees_all_close((together[0][i, j], together[1][i, j]), alone, rtol=1e-6)


def test_a_head_without_shared_dims():
    query, key_up = weights()
    new_query, _ = clip(query[..., :OWN], key_up, np.full(HEADS, 400.0, np.float32), tau=TAU, own_dims=OWN)
    np.testing.assert_allclose(new_query, query[..., :OWN] / 2, rtol=1e-6)


def test_shapes_that_do_not_belong_together():
    query, key_up = weights((2,))
    with pytest.raises(ValueError, match="max_logit_H"):
        clip(query, key_up, np.zeros(HEADS), tau=TAU, own_dims=OWN)
    with pytest.raises(ValueError, match="own dims"):
        clip(query, key_up, np.zeros((2, HEADS)), tau=TAU, own_dims=OWN + 1)
