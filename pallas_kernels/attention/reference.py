"""The definition: every pair at once."""

import jax.numpy as jnp


def attention(q_BTHK, k_BSHK, v_BSHV, query_index_BT, key_index_BS, scale):
    """softmax(scale q k^T) v over the keys at or before each query, of the same segment index.

    A negative index is padding: such a query gets 0, such a key is never read. Returns the output
    and, per head, the largest logit among the pairs that see each other (-inf if none).
    """
    T, S = q_BTHK.shape[1], k_BSHK.shape[1]
    dtype = jnp.promote_types(v_BSHV.dtype, jnp.float32)
    q, k, v = (x.astype(dtype) for x in (q_BTHK, k_BSHK, v_BSHV))
    past_TS = jnp.arange(S)[None, :] <= jnp.arange(T)[:, None] + S - T
    same_BTS = query_index_BT[:, :, None] == key_index_BS[:, None, :]
    seen_BTS = past_TS[None] & same_BTS & (key_index_BS >= 0)[:, None, :]
    logits_BHTS = scale * jnp.einsum("bthk,bshk->bhts", q, k)
    logits_BHTS = jnp.where(seen_BTS[:, None], logits_BHTS, -jnp.inf)
    top_BHT1 = jnp.max(logits_BHTS, axis=-1, keepdims=True)
    p_BHTS = jnp.exp(logits_BHTS - jnp.where(jnp.isfinite(top_BHT1), top_BHT1, 0))
    sum_BHT1 = jnp.sum(p_BHTS, axis=-1, keepdims=True)
    p_BHTS = p_BHTS / jnp.where(sum_BHT1 > 0, sum_BHT1, 1)
    return jnp.einsum("bhts,bshv->bthv", p_BHTS, v), jnp.max(top_BHT1[..., 0], axis=(0, 2))
