"""Keeping experts equally busy: what each rule counts, and how it moves the router's bias.

A bias b enters the choice of experts alone, never a mixture weight or a gradient. Statistics are
sums over real tokens, so micro-batches, devices and processes only ever add.
"""

import jax
import jax.numpy as jnp

from k3jax.config import Auxiliary, Quantile, Sign, Unbalanced


def local_stats(rule, scores_ME, cutoff_M, bias_E, real_M):
    """What `rule` counts over M tokens; None if nothing but the loads.

    Args:
      scores_ME: sigmoid scores, float32. cutoff_M: the (k+1)-th largest biased score of each token.
      bias_E: the bias in use. real_M: bool, False for padding.
    """
    match rule:
        case Quantile(bins=bins):
            return _histogram(scores_ME, cutoff_M, bias_E, real_M, bins)
        case Sign() | Auxiliary() | Unbalanced():
            return None
        case own:
            return own.local_stats(scores_ME, cutoff_M, bias_E, real_M)


def update(rule, bias_E, stats, load_E, memory):
    """The bias for the next step and the rule's memory, from one whole step's sums.

    Args:
      bias_E: the bias that the step used. stats: the sum of its `local_stats`.
      load_E: int32, real tokens that chose each expert. memory: from `empty_memory` or the last call.
    """
    match rule:
        case Quantile(bins=bins, ema=ema):
            target_E = _quantile(stats, load_E, bias_E, bins)
            some = jnp.sum(load_E) > 0  # a step without tokens moves nothing and is not remembered
            if memory is not None:
                past = jnp.where(memory["steps"] > 0, ema, 0.0)
                target_E = past * memory["quantile_E"] + (1 - past) * target_E
                after = {"quantile_E": target_E, "steps": memory["steps"] + 1}
                memory = jax.tree.map(lambda new, old: jnp.where(some, new, old), after, memory)
            return jnp.where(some, target_E - jnp.mean(target_E), bias_E), memory
        case Sign(step):
            short_E = jnp.sign(jnp.mean(load_E.astype(jnp.float32)) - load_E)
            return bias_E + step * short_E, memory
        case Auxiliary() | Unbalanced():
            return bias_E, memory
        case own:
            return own.update(bias_E, stats, load_E, memory)


def empty_memory(rule, experts: int):
    """What `rule` keeps between steps; None if nothing."""
    match rule:
        case Quantile(ema=ema) if ema > 0:
            return {"quantile_E": jnp.zeros(experts, jnp.float32), "steps": jnp.zeros((), jnp.int32)}
        case Quantile() | Sign() | Auxiliary() | Unbalanced():
            return None
        case own:
            return own.empty_memory(experts)


def penalty(rule, scores_BTE, chosen_BTk, real_BT):
    """The rule's loss, summed over real tokens: row by row, so that any split of rows adds up."""
    match rule:
        case Auxiliary(weight):
            E, k = scores_BTE.shape[-1], chosen_BTk.shape[-1]
            real_BT1 = real_BT[..., None].astype(scores_BTE.dtype)
            count_B1 = jnp.maximum(jnp.sum(real_BT1, axis=1), 1)
            hits_BTE = jnp.sum(jax.nn.one_hot(chosen_BTk, E, dtype=scores_BTE.dtype), axis=2)
            load_BE = jnp.sum(hits_BTE * real_BT1, axis=1) * E / (k * count_B1)
            share_BTE = scores_BTE / jnp.maximum(jnp.sum(scores_BTE, axis=-1, keepdims=True), 1e-15)
            return weight * jnp.sum(load_BE * jnp.sum(share_BTE * real_BT1, axis=1))
        case _:
            return jnp.zeros((), scores_BTE.dtype)


def _edges(bias_E, bins):
    """Every required bias lies in [min b - 1, max b + 1]: (that range's start, the bin width)."""
    low = jnp.min(bias_E) - 1
    return low, (jnp.max(bias_E) + 1 - low) / bins


def _histogram(scores_ME, cutoff_M, bias_E, real_M, bins):
    """Counts [E, bins] of r = cutoff - score, the bias that would put an expert at the cutoff."""
    E = scores_ME.shape[-1]
    low, width = _edges(bias_E, bins)
    required_ME = cutoff_M[:, None] - scores_ME
    bin_ME = jnp.clip(jnp.floor((required_ME - low) / width).astype(jnp.int32), 0, bins - 1)
    place_ME = jnp.arange(E, dtype=jnp.int32)[None] * bins + bin_ME
    ones_ME = jnp.broadcast_to(real_M[:, None], place_ME.shape).astype(jnp.int32)
    return jnp.zeros(E * bins, jnp.int32).at[place_ME].add(ones_ME).reshape(E, bins)


def _quantile(histogram, load_E, bias_E, bins):
    """The ceil(q)-th smallest required bias of each expert, q = m k / E, to within a bin."""
    low, width = _edges(bias_E, bins)
    E = load_E.shape[0]
    total = jnp.sum(load_E)  # m k
    reached = jnp.cumsum(histogram, axis=1)
    first_E1 = jnp.argmax(reached >= -(-total // E), axis=1)[:, None]
    inside_E = jnp.take_along_axis(histogram, first_E1, axis=1)[:, 0]
    before_E = jnp.take_along_axis(reached, first_E1, axis=1)[:, 0] - inside_E
    within_E = jnp.clip((total / E - before_E) / jnp.maximum(inside_E, 1), 0, 1)
    return low + (first_E1[:, 0] + within_E) * width
