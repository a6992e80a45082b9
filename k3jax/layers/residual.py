"""Attention Residuals: a module reads a softmax over what came before it in depth."""

import jax
import jax.numpy as jnp

from k3jax.config import BlockAttnRes, FullAttnRes, ModelConfig, Plain


def opens(cfg: ModelConfig) -> tuple[tuple[bool, bool], ...]:
    """For each layer, whether its mixer and its channel mixer open a block.

    A module that opens one closes the block before it: the sum so far becomes a source. Under
    FullAttnRes every module is a block of its own.
    """
    match cfg.residual:
        case Plain():
            return ((False, False),) * cfg.depth
        case FullAttnRes():
            return ((True, True),) * cfg.depth
        case BlockAttnRes(opens=int(every)):
            return tuple((i % every == 0, False) for i in range(cfg.depth))
        case BlockAttnRes(opens=chosen):
            return tuple((i in chosen, False) for i in range(cfg.depth))


@jax.checkpoint
def read(sources_SBTD, partial_BTD, count, partial_open, query_D, gain_D, eps):
    """softmax_s(<w, RMSNorm(source_s)>) over the sources, applied to the sources (report, eqs. 8-10).

    Computed in float32 or more; nothing but the inputs is kept for the backward pass.

    Args:
      sources_SBTD: finished blocks, the embedding first; only the first `count` are read.
      partial_BTD: the current block's sum, read where `partial_open`.
      query_D: the pseudo-query w. gain_D: the norm's weight.

    Returns:
      (the mixture [B, T, D] in the sources' dtype, its weights [B, T, S + 1], the partial's last).
    """
    dtype = jnp.promote_types(partial_BTD.dtype, jnp.float32)
    sources_SBTD, partial_BTD, low = sources_SBTD.astype(dtype), partial_BTD.astype(dtype), partial_BTD.dtype
    reading_D = query_D.astype(dtype) * gain_D.astype(dtype)

    def score(x):  # <w, RMSNorm(x)>, with the norm taken out of the product
        square = jnp.mean(jnp.square(x), axis=-1)
        return jnp.einsum("...d,d->...", x, reading_D) * jax.lax.rsqrt(square + eps)

    finished_SBT = jnp.where(
        (jnp.arange(sources_SBTD.shape[0]) < count)[:, None, None], score(sources_SBTD), -jnp.inf
    )
    current_1BT = jnp.where(partial_open, score(partial_BTD), -jnp.inf)[None]
    weights_SBT = jax.nn.softmax(jnp.concatenate([finished_SBT, current_1BT]), axis=0)
    mixed_BTD = jnp.einsum("sbt,sbtd->btd", weights_SBT[:-1], sources_SBTD)
    mixed_BTD += weights_SBT[-1][..., None] * partial_BTD
    return mixed_BTD.astype(low), jnp.moveaxis(weights_SBT, 0, -1)
