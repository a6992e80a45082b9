"""Sampling: what is drawn is what the model says at each token, and by whose luck."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen import meta

from k3jax.config import DenseConfig, MlaConfig, ModelConfig, Plain
from k3jax.generate import sample
from k3jax.model import K3

COUNT = 12
PROMPT_T = np.array([3, 1, 4])
CFG = ModelConfig(
    width=16,
    vocabulary=40,
    depth=1,
    full=MlaConfig(heads=2, key=8, shared=4, value=8, latent=16, query_rank=None),
    dense=DenseConfig(16),
    full_layers=1,
    residual=Plain(),
    init_std=0.5,
)


@pytest.fixture(scope="module")
def params():
    return meta.unbox(K3(CFG).init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"])


@pytest.fixture(scope="module")
def likeliest_T(params):
    return sample(CFG, params, PROMPT_T, COUNT, temperature=0)


def test_the_likeliest_token_is_that_of_the_model_at_every_step(params, likeliest_T):
    """In one pass over the finished row, which has neither padding nor segment ids."""
    row_T = np.concatenate([PROMPT_T, likeliest_T])
    logits_TY = jax.jit(K3(CFG).apply)({"params": params}, row_T[None]).logits[0]
    np.testing.assert_array_equal(likeliest_T, np.argmax(logits_TY, axis=1)[len(PROMPT_T) - 1 : -1])
    assert len(set(likeliest_T)) > COUNT / 2, "a row that repeats itself would hide a shift"


def test_the_likeliest_tokens_know_no_seed(params, likeliest_T):
    again_T = sample(CFG, params, PROMPT_T, COUNT, temperature=0, seed=1)
    np.testing.assert_array_equal(again_T, likeliest_T)


def test_a_seed_decides_what_is_drawn(params):
    first_T, again_T, other_T = (sample(CFG, params, PROMPT_T, COUNT, seed=seed) for seed in (5, 5, 6))
    assert (first_T.shape, first_T.dtype) == ((COUNT,), np.int32)
    np.testing.assert_array_equal(first_T, again_T)
    assert np.any(first_T != other_T)


@pytest.mark.parametrize(
    ("prompt_T", "temperature", "why"),
    [
        ([], 1.0, "at least one token"),
        ([3], -0.5, r"temperature=-0\.5: 0 or more"),
        ([3, -1], 1.0, r"0\.\.39"),
        ([3, 40], 1.0, r"0\.\.39"),
    ],
)
def test_what_cannot_be_sampled_is_refused(prompt_T, temperature, why):
    with pytest.raises(ValueError, match=why):
        sample(CFG, {}, np.array(prompt_T, int), COUNT, temperature=temperature)
