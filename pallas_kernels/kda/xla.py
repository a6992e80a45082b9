"""The chunkwise form in plain jax.numpy: dense tiles, a written backward that recomputes.

Notation is README.md's; N counts chunks of C tokens. Nothing of size chunks x K x V lives from the
forward to the backward pass: residuals are the inputs.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.kda.tiles import TILE, Decays, Masks, Pairs, decays, masks, sums, unit_lower_inverse
from pallas_kernels.products import wide_einsum

CHUNK = 64
FORGOTTEN = -100.0  # e^-100 is nothing beside any other term, and sums of it stay exact


class Chunks(NamedTuple):
    """Inputs cut into chunks, [N, B, H, C, .]; g and beta in float32 or more."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    g: jax.Array
    beta: jax.Array
    mask: Masks | None


class Prepared(NamedTuple):
    """What can be made of all chunks at once, before the recurrence."""

    pairs: Pairs
    decay: Decays
    seen_NBHCC: jax.Array  # j <= i, of one segment
    before_NBHCC: jax.Array  # j < i, of one segment
    Akk_NBHCC: jax.Array
    Aqk_NBHCC: jax.Array  # scale included
    T_NBHCC: jax.Array  # (I + beta Akk)^-1
    w_NBHCK: jax.Array  # T beta k e^G
    u_NBHCV: jax.Array  # T beta v
    q_in_NBHCK: jax.Array  # scale q e^G
    k_in_NBHCK: jax.Array  # k e^G
    k_out_NBHCK: jax.Array  # k e^(G_C - G)


def _length(T):
    return min(CHUNK, TILE * -(-T // TILE))


def _split(x_BTHX, mode="constant"):
    """[B, T, H, ...] -> [N, B, H, C, ...], or [B, T] -> [N, B, C]; the end is padded."""
    B, T, *rest = x_BTHX.shape
    chunk = _length(T)
    x = jnp.pad(x_BTHX, [(0, 0), (0, -T % chunk), *[(0, 0)] * len(rest)], mode=mode)
    x = jnp.moveaxis(x.reshape(B, -1, chunk, *rest), 1, 0)
    return jnp.moveaxis(x, 3, 2) if rest else x


def _join(x_NBHCX, T):
    """The inverse of `_split`."""
    x = jnp.moveaxis(jnp.moveaxis(x_NBHCX, 2, 3), 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :T]


def _chunks(q, k, v, g, beta, index_BT) -> Chunks:
    """Padding of the last chunk has beta = 0 and g = 0, and leaves the state alone."""
    wide = jnp.promote_types(v.dtype, jnp.float32)
    mask = None if index_BT is None else masks(_split(index_BT, "edge"))
    g = jnp.maximum(g.astype(wide), FORGOTTEN)
    return Chunks(_split(q), _split(k), _split(v), _split(g), _split(beta.astype(wide)), mask)


def _prepare(x: Chunks, scale, bounded) -> Prepared:
    dot = partial(wide_einsum, dtype=x.q.dtype)
    K, C = x.q.shape[-1], x.q.shape[3]
    decay = decays(x.g, bounded, x.mask)
    pairs = Pairs(x.k, x.q, decay, x.q.dtype)
    i, j = jnp.arange(C)[:, None], jnp.arange(C)[None, :]
    shape = (*x.q.shape[:3], C, C)
    seen, before = jnp.broadcast_to(i >= j, shape), jnp.broadcast_to(i > j, shape)
    if x.mask is not None:
        seen, before = seen & x.mask.pair_NB1CC, before & x.mask.pair_NB1CC
    Akk, Aqk = pairs.scores()
    Akk, Aqk = jnp.where(before, Akk, 0), jnp.where(seen, scale * Aqk, 0)
    beta = x.beta[..., None]
    T = unit_lower_inverse(beta * Akk)
    k_in = x.k * decay.enter_NBHCK
    wu = dot("...ij,...jx->...ix", T, beta * jnp.concatenate([k_in, x.v.astype(T.dtype)], axis=-1))
    return Prepared(
        pairs, decay, seen, before, Akk, Aqk, T, wu[..., :K], wu[..., K:],
        q_in_NBHCK=scale * x.q * decay.enter_NBHCK, k_in_NBHCK=k_in, k_out_NBHCK=x.k * decay.leave_NBHCK,
    )  # fmt: skip


@partial(jax.custom_vjp, nondiff_argnums=(7, 8))
def kda(q_BTHK, k_BTHK, v_BTHV, g_BTHK, beta_BTH, S_BHKV, index_BT, scale, bounded):
    """The chunkwise form of `reference.kda`, with its arguments and results.

    Padding is expected as beta = 0 and g = 0; `index_BT` is None for rows of one segment.
    `bounded` promises g >= -5 everywhere, which lets every tile be a dense product; without it the
    diagonal tiles are summed pair by pair.
    """
    return _forward(q_BTHK, k_BTHK, v_BTHV, g_BTHK, beta_BTH, S_BHKV, index_BT, scale, bounded)[0]


def _forward(q_BTHK, k_BTHK, v_BTHV, g_BTHK, beta_BTH, S_BHKV, index_BT, scale, bounded):
    residuals = (q_BTHK, k_BTHK, v_BTHV, g_BTHK, beta_BTH, S_BHKV, index_BT)
    x = _chunks(*residuals[:5], index_BT)
    p, dot = _prepare(x, scale, bounded), partial(wide_einsum, dtype=x.q.dtype)
    C = x.q.shape[3]

    def chunk(S, xs):
        w_and_q, u, Aqk, k_out, whole = xs
        read = dot("bhck,bhkv->bhcv", w_and_q, S)
        v_new = u - read[..., :C, :]
        o = read[..., C:, :] + dot("bhij,bhjv->bhiv", Aqk, v_new)
        return whole[..., None] * S + dot("bhck,bhcv->bhkv", k_out, v_new), o

    w_and_q = jnp.concatenate([p.w_NBHCK, p.q_in_NBHCK], axis=-2)
    xs = (w_and_q, p.u_NBHCV, p.Aqk_NBHCC, p.k_out_NBHCK, p.decay.whole_NBHK)
    S_BHKV, o = jax.lax.scan(chunk, S_BHKV.astype(x.g.dtype), xs)
    return (_join(o, v_BTHV.shape[1]).astype(v_BTHV.dtype), S_BHKV), residuals


def _states(p: Prepared, S_BHKV, dtype):
    """The state before each chunk, and v_new = u - w S, once more."""
    dot = partial(wide_einsum, dtype=dtype)

    def chunk(S, xs):
        w, u, k_out, whole = xs
        v_new = u - dot("bhck,bhkv->bhcv", w, S)
        return whole[..., None] * S + dot("bhck,bhcv->bhkv", k_out, v_new), (S, v_new)

    xs = (p.w_NBHCK, p.u_NBHCV, p.k_out_NBHCK, p.decay.whole_NBHK)
    return jax.lax.scan(chunk, S_BHKV, xs)[1]


def _state_cotangents(p: Prepared, do, dS_BHKV, dtype):
    """The cotangents of v_new, of the state after each chunk, and of the initial state."""
    dot = partial(wide_einsum, dtype=dtype)
    C = do.shape[3]
    local = dot("...ix,...iv->...xv", jnp.concatenate([p.Aqk_NBHCC, p.q_in_NBHCK], axis=-1), do)

    def chunk(dS, xs):  # dS: of the state after this chunk
        w, k_out, whole, local = xs
        dv_new = local[..., :C, :] + dot("bhck,bhkv->bhcv", k_out, dS)
        dS_before = whole[..., None] * dS + local[..., C:, :] - dot("bhck,bhcv->bhkv", w, dv_new)
        return dS_before, (dv_new, dS)

    xs = (p.w_NBHCK, p.k_out_NBHCK, p.decay.whole_NBHK, local)
    dS_BHKV, (dv_new, dS) = jax.lax.scan(chunk, dS_BHKV, xs, reverse=True)
    return dv_new, dS, dS_BHKV


def _backward(scale, bounded, residuals, cotangents):
    q_BTHK, k_BTHK, v_BTHV, g_BTHK, beta_BTH, S_BHKV, index_BT = residuals
    do_BTHV, dS_BHKV = cotangents
    x = _chunks(q_BTHK, k_BTHK, v_BTHV, g_BTHK, beta_BTH, index_BT)
    p, dot = _prepare(x, scale, bounded), partial(wide_einsum, dtype=x.q.dtype)
    wide, C, beta, decay = x.g.dtype, x.q.shape[3], x.beta[..., None], p.decay
    do = _split(do_BTHV)
    S, v_new = _states(p, S_BHKV.astype(wide), x.q.dtype)
    dv_new, dS, dS_BHKV = _state_cotangents(p, do, dS_BHKV.astype(wide), x.q.dtype)

    # v_new = T r with r = beta (v - k_in S), hence dA = -(T^t dv_new) v_new^t.
    dr = dot("...ij,...iv->...jv", p.T_NBHCC, dv_new)
    r_and_o = jnp.concatenate([dr, do.astype(wide)], axis=-2)
    to_pairs_and_state = jnp.concatenate([v_new, S], axis=-2)
    d = dot("...xv,...yv->...xy", r_and_o, to_pairs_and_state)
    dA, dAqk, dr_S, do_S = d[..., :C, :C], scale * d[..., C:, :C], d[..., :C, C:], d[..., C:, C:]
    dA = -jnp.where(p.before_NBHCC, dA, 0)
    dAqk_ii = jnp.diagonal(dAqk, axis1=-2, axis2=-1)[..., None]
    dAqk = jnp.where(p.before_NBHCC, dAqk, 0)
    miss = x.v.astype(wide) - dot("...ck,...kv->...cv", p.k_in_NBHCK, S)
    dbeta = jnp.sum(dr * miss, axis=-1) + jnp.sum(dA * p.Akk_NBHCC, axis=-1)

    dq_in, dk_in = scale * do_S * decay.enter_NBHCK, -beta * dr_S * decay.enter_NBHCK
    dk_out = dot("...cv,...kv->...ck", v_new, dS) * decay.leave_NBHCK
    dk_row, dq_row, dk_column, through_pairs = p.pairs.gradients(beta * dA, dAqk)

    # A pair (i, j) decays by g_(j+1) .. g_i: its gradient is x dx at i and -k dk at j, summed from
    # the end. What enters at i is decayed by g_1 .. g_i, what leaves from i by g_(i+1) .. g_C. The
    # sums are kept apart, and the diagonal (no decay) out of them: at the floor the decayed terms
    # are e^-5 of the others and would drown in their rounding.
    through = x.q * dq_in + x.k * dk_in + through_pairs
    i, j = np.arange(C)[:, None], np.arange(C)[None, :]
    # Another segment's terms add up to 0, but for their rounding: they are left out.
    later = j >= i if x.mask is None else (j >= i)[None, None, None] & x.mask.pair_NB1CC
    dg = sums(later, through) + sums(j < i, x.k * dk_out)
    dg = dg + (decay.whole_NBHK * jnp.sum(S * dS, axis=-1))[..., None, :]

    dq = dq_in + dq_row + dAqk_ii * x.k
    dk = dk_in + dk_row + dk_column + dk_out + dAqk_ii * x.q
    back = [_join(y, v_BTHV.shape[1]) for y in (dq, dk, beta * dr, dg, dbeta)]
    return *(y.astype(z.dtype) for y, z in zip([*back, dS_BHKV], residuals[:6], strict=True)), None


kda.defvjp(_forward, _backward)
