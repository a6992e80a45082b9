"""QK-Clip: heads whose attention logits grew too large get smaller query and key weights (K2)."""

import jax
import jax.numpy as jnp


def clip_queries_and_keys(
    query: jax.Array, key_up: jax.Array, max_logit_H: jax.Array, tau: float, own_dims: int
) -> tuple[jax.Array, jax.Array]:
    """Scales MLA's weights after a step so that the same batch's largest logit would be tau.

    A head above tau has both parts of its logit multiplied by r = tau / max: the own dims' through
    sqrt(r) on query and key each, the shared dims' through r on the query alone, since all heads have
    one shared key (Kimi K2 report, section 2.1). Any other head is left exactly as it was, and so is
    one whose maximum is not finite: that step went wrong elsewhere.

    Args:
      query: [..., D or R, H, K + P] float32 masters; leading axes are stacked layers.
      key_up: [..., C, H, K] likewise.
      max_logit_H: [..., H], the largest scaled logit of the whole step, over every micro-batch and
        device; may be negative or -inf.
      tau: the bound.
      own_dims: K, where the query's shared dims start.

    Returns:
      The new (query, key_up), of the same shapes and dtypes.

    Raises:
      ValueError: shapes that do not belong together.
    """
    *layers, heads, dims = query.shape[:-3] + query.shape[-2:]
    if key_up.shape[-2:] != (heads, own_dims) or max_logit_H.shape != (*layers, heads) or own_dims > dims:
        shapes = f"query {query.shape}, key_up {key_up.shape}, max_logit_H {max_logit_H.shape}"
        raise ValueError(f"{shapes} with {own_dims} own dims do not make one layer's heads")
    over_H = (max_logit_H > tau) & jnp.isfinite(max_logit_H)
    # tau / tau is exactly 1, and no head divides by what it should not.
    ratio_H1 = (tau / jnp.where(over_H, max_logit_H, tau))[..., None]
    root_H1 = jnp.sqrt(ratio_H1)
    own = jnp.arange(dims).reshape(*(1 for _ in layers), 1, dims) < own_dims
    scale_HK = jnp.where(own, root_H1, ratio_H1)
    new_query = (query * scale_HK[..., None, :, :]).astype(query.dtype)
    return new_query, (key_up * root_H1[..., None, :, :]).astype(key_up.dtype)
