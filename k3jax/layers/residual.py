"""Attention Residuals: a module reads a softmax over what came before it in depth."""

import jax
import jax.numpy as jnp


@jax.custom_vjp
def read(bank_SBTD, query_D, gain_D, count, eps):
    """softmax_s(<w, RMSNorm(x_s)>) over the sources, applied to the sources (report, eqs. 8-10).

    Computed in float32 or more. Only the inputs are kept for the backward pass.

    Args:
      bank_SBTD: the sources, the embedding first; only the first `count` are read.
      query_D: the pseudo-query w. gain_D: the norm's weight.

    Returns:
      (the mixture [B, T, D] in the bank's dtype, its weights [S, B, T], which take no gradient).
    """
    x_SBTD, _, _, _, p_SBT = _weigh(bank_SBTD, query_D, gain_D, count, eps)
    return jnp.einsum("sbt,sbtd->btd", p_SBT, x_SBTD).astype(bank_SBTD.dtype), p_SBT


def _weigh(bank_SBTD, query_D, gain_D, count, eps):
    dtype = jnp.promote_types(bank_SBTD.dtype, jnp.float32)
    x_SBTD = bank_SBTD.astype(dtype)
    reading_D = query_D.astype(dtype) * gain_D.astype(dtype)
    scale_SBT = jax.lax.rsqrt(jnp.mean(jnp.square(x_SBTD), axis=-1) + eps)
    # The norm is a scalar per source: it is taken out of the product.
    raw_SBT = jnp.einsum("sbtd,d->sbt", x_SBTD, reading_D)
    there_S11 = (jnp.arange(x_SBTD.shape[0]) < count)[:, None, None]
    p_SBT = jax.nn.softmax(jnp.where(there_S11, raw_SBT * scale_SBT, -jnp.inf), axis=0)
    return x_SBTD, reading_D, scale_SBT, raw_SBT, p_SBT


def _read_forward(bank_SBTD, query_D, gain_D, count, eps):
    return read(bank_SBTD, query_D, gain_D, count, eps), (bank_SBTD, query_D, gain_D, count, eps)


def _read_backward(residuals, cotangents):
    bank_SBTD, query_D, gain_D, count, eps = residuals
    x_SBTD, reading_D, scale_SBT, raw_SBT, p_SBT = _weigh(bank_SBTD, query_D, gain_D, count, eps)
    d_BTD = cotangents[0].astype(x_SBTD.dtype)
    d_p_SBT = jnp.einsum("btd,sbtd->sbt", d_BTD, x_SBTD)
    d_score_SBT = p_SBT * (d_p_SBT - jnp.sum(p_SBT * d_p_SBT, axis=0, keepdims=True)) * scale_SBT
    shrink_SBT = d_score_SBT * raw_SBT * jnp.square(scale_SBT) / x_SBTD.shape[-1]
    d_bank_SBTD = p_SBT[..., None] * d_BTD[None] - shrink_SBT[..., None] * x_SBTD
    d_bank_SBTD += d_score_SBT[..., None] * reading_D[None, None, None]
    d_reading_D = jnp.einsum("sbt,sbtd->d", d_score_SBT, x_SBTD)
    d_query_D, d_gain_D = d_reading_D * gain_D, d_reading_D * query_D
    return (
        d_bank_SBTD.astype(bank_SBTD.dtype),
        d_query_D.astype(query_D.dtype),
        d_gain_D.astype(gain_D.dtype),
        None,
        None,
    )


read.defvjp(_read_forward, _read_backward)
