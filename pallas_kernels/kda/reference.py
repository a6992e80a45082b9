"""The definition: one token after the other. Slow, obvious, and the only thing tests trust."""

import jax
import jax.numpy as jnp


def token(q_BHK, k_BHK, v_BHV, g_BHK, beta_BH, S_BHKV, scale):
    """(output [B, H, V], new state) of one token, all in one dtype."""
    S = jnp.exp(g_BHK)[..., None] * S_BHKV  # forget
    miss_BHV = v_BHV - jnp.einsum("bhk,bhkv->bhv", k_BHK, S)  # what memory gets wrong
    S = S + jnp.einsum("bh,bhk,bhv->bhkv", beta_BH, k_BHK, miss_BHV)  # correct
    return scale * jnp.einsum("bhk,bhkv->bhv", q_BHK, S), S  # read


def kda(q_BTHK, k_BTHK, v_BTHV, g_BTHK, beta_BTH, S_BHKV, real_BT, index_BT, scale):
    """S <- Diag(e^g) S;  S <- S + beta k (v - S^T k)^T;  o = scale S^T q  (K3 report, eq. 1).

    Where `index_BT` differs from the last real token's, S starts from zero; where `real_BT` is
    false, the output is zero and S is left alone. All at least float32.
    """
    dtype = jnp.promote_types(v_BTHV.dtype, jnp.float32)

    def one(carry, x):
        S_BHKV, last_B = carry
        q_BHK, k_BHK, v_BHV, g_BHK, beta_BH, real_B, index_B = x
        per_row = lambda x_B: x_B[:, None, None, None]
        S = jnp.where(per_row(index_B == last_B), S_BHKV, 0)
        o_BHV, S = token(q_BHK, k_BHK, v_BHV, g_BHK, beta_BH, S, scale)
        o_BHV = jnp.where(real_B[:, None, None], o_BHV, 0)
        return (jnp.where(per_row(real_B), S, S_BHKV), jnp.where(real_B, index_B, last_B)), o_BHV

    time_first = lambda x: jnp.moveaxis(x, 1, 0)
    inputs = [x.astype(dtype) for x in (q_BTHK, k_BTHK, v_BTHV, g_BTHK, beta_BTH)]
    start = (S_BHKV.astype(dtype), jnp.zeros(v_BTHV.shape[0], jnp.int32))
    xs = jax.tree.map(time_first, (*inputs, real_BT, index_BT))
    (S_BHKV, _), o_TBHV = jax.lax.scan(one, start, xs)
    return jnp.moveaxis(o_TBHV, 0, 1), S_BHKV
