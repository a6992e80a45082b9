"""Shapes, defaults and the choice of implementation: the only module of the folder others import."""

from functools import partial
from typing import Literal

import chex
import jax
import jax.numpy as jnp

from pallas_kernels import choice
from pallas_kernels.attention import reference, xla

Implementation = Literal["reference", "xla"]
BUILT = ("reference", "xla")
BEST = {"cpu": ("xla",), "gpu": ("xla",), "tpu": ("xla",)}
choose = partial(choice.choose, "attention", best=BEST, built=BUILT)


def attention(
    query,
    key,
    value,
    *,
    scale: float | None = None,
    query_index=None,
    key_index=None,
    implementation: Implementation | None = None,
):
    """Causal softmax attention; queries are the last T of S positions.

    Differentiable in query, key and value. Memory is linear in T and S ("reference": not).

    Args:
      query: [B, T, H, K]; key: [B, S, H, K]; value: [B, S, H, V], S >= T.
      scale: a factor on the logits; K^-1/2 by default.
      query_index: [B, T], key_index: [B, S]: a pair counts only where the two are equal; negative
        for padding. All of one segment by default.
      implementation: a name, which runs or raises; None takes the best for the platform.

    Returns:
      (output [B, T, H, V], at least float32, 0 where nothing is seen; the largest logit per head
      [H], -inf where nothing is seen, without gradient).

    Raises:
      ValueError: an unknown implementation, or fewer keys than queries. AssertionError: shapes that
      do not fit (chex).
    """
    chosen = choose(implementation)
    B, T, H, K = query.shape
    S, V = value.shape[1], value.shape[-1]
    chex.assert_shape(key, (B, S, H, K))
    chex.assert_shape(value, (B, S, H, V))
    if S < T:
        raise ValueError(f"attention: {T} queries are the last of {S} keys' positions: S >= T is needed")
    query_index = jnp.zeros((B, T), jnp.int32) if query_index is None else query_index
    key_index = jnp.zeros((B, S), jnp.int32) if key_index is None else key_index
    chex.assert_shape(query_index, (B, T))
    chex.assert_shape(key_index, (B, S))
    scale = K**-0.5 if scale is None else scale
    if 0 in (B, T, H):
        dtype = jnp.promote_types(value.dtype, jnp.float32)
        return jnp.zeros((B, T, H, V), dtype), jnp.full((H,), -jnp.inf, dtype)
    run = {"reference": reference.attention, "xla": xla.attention}[chosen]
    o_BTHV, top_H = run(query, key, value, query_index, key_index, scale)
    return o_BTHV, jax.lax.stop_gradient(top_H)
