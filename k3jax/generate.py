"""Sampling by whole forward passes: slow, simple, and right."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.config import ModelConfig
from k3jax.model import K3


def sample(
    cfg: ModelConfig,
    params: Any,
    prompt_T: np.ndarray,
    count: int,
    *,
    temperature: float = 1.0,
    seed: int = 0,
) -> np.ndarray:
    """`count` tokens after a prompt, one full pass each.

    Args:
      prompt_T: token ids, at least one. temperature: 0 takes the likeliest token every time.

    Returns:
      [count] int32 token ids.

    Raises:
      ValueError: an empty prompt, a negative temperature, or ids outside the vocabulary.
    """
    if len(prompt_T) == 0:
        raise ValueError("a prompt of at least one token is needed")
    if temperature < 0:
        raise ValueError(f"temperature={temperature}: 0 or more")
    if min(prompt_T) < 0 or max(prompt_T) >= cfg.vocabulary:
        raise ValueError(f"prompt ids must lie in 0..{cfg.vocabulary - 1}")
    length = len(prompt_T) + count
    tokens_1T = jnp.zeros((1, length), jnp.int32).at[0, : len(prompt_T)].set(jnp.asarray(prompt_T, jnp.int32))
    step = jax.jit(partial(_next, cfg, temperature))
    key = jax.random.key(seed)
    for at in range(len(prompt_T), length):
        tokens_1T = step(params, tokens_1T, at, jax.random.fold_in(key, at))
    return np.asarray(tokens_1T[0, len(prompt_T) :])


def _next(cfg: ModelConfig, temperature: float, params: Any, tokens_1T, at, key):
    """The row with its token `at` drawn from what the ones before it say; the rest is padding."""
    real_1T = (jnp.arange(tokens_1T.shape[1]) < at)[None].astype(jnp.int32)
    out: Any = K3(cfg).apply({"params": params}, tokens_1T, real_1T)
    logits_Y = jax.lax.dynamic_index_in_dim(out.logits[0], at - 1, keepdims=False)
    drawn = jnp.argmax(logits_Y) if temperature == 0 else jax.random.categorical(key, logits_Y / temperature)
    return tokens_1T.at[0, at].set(drawn.astype(jnp.int32))
