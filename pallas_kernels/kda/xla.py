"""The chunkwise form in plain jax.numpy: dense tiles, a written backward that recomputes.

Notation is README.md's. A chunk of C tokens is cut into tiles of 16; N counts chunks, R the tiles
of one chunk, i and j tokens of a chunk (a row and a column of a pair matrix). Nothing of size
chunks x K x V lives from the forward to the backward pass: residuals are the inputs.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

CHUNK = 64
TILE = 16  # 16 steps of a decay floored at -5 stay above -80: exp(80) fits float32 and bfloat16
FORGOTTEN = -100.0  # e^-100 is nothing beside any other term, and sums of it stay exact
HIGHEST = jax.lax.Precision.HIGHEST


class Masks(NamedTuple):
    """Which tokens may see what, when rows hold several segments (None: one segment)."""

    pair_NB1CC: jax.Array  # i and j are of one segment
    enter_NB1C1: jax.Array  # i continues the segment that the chunk's incoming state belongs to
    leave_NB1C1: jax.Array  # i is of the segment that the chunk's outgoing state belongs to
    through_NB11: jax.Array  # the chunk holds one segment only, the incoming one


class Decays(NamedTuple):
    """Every exponential of the chunkwise form; each exponent is at most 75, most at most 0."""

    enter_NBHCK: jax.Array  # e^G: from the chunk's start through i
    leave_NBHCK: jax.Array  # e^(G_C - G): from after i through the chunk's end
    whole_NBHK: jax.Array  # e^(G_C)
    row_NBHRIK: jax.Array  # from the row tile's first token (its own decay included) to i
    column_NBHRJK: jax.Array  # from j to the row tile's first token; 0 where j is in a later tile
    within_NBHRIJK: jax.Array | None  # i to j inside a tile, where the dense form would overflow


def _split(x_BTHX, chunk):
    """[B, T, H, ...] -> [N, B, H, C, ...]."""
    B, T, *rest = x_BTHX.shape
    x = x_BTHX.reshape(B, T // chunk, chunk, *rest)
    x = jnp.moveaxis(x, 1, 0)
    return jnp.moveaxis(x, 3, 2) if rest else x


def _join(x_NBHCX):
    x = jnp.moveaxis(jnp.moveaxis(x_NBHCX, 2, 3), 0, 1)
    B, N, C, *rest = x.shape
    return x.reshape(B, N * C, *rest)


def _masks(index_NBC) -> Masks:
    last_NB = index_NBC[:, :, -1]
    entry_NB = jnp.concatenate([jnp.zeros_like(last_NB[:1]), last_NB[:-1]])
    return Masks(
        pair_NB1CC=(index_NBC[..., :, None] == index_NBC[..., None, :])[:, :, None],
        enter_NB1C1=(index_NBC == entry_NB[..., None])[:, :, None, :, None],
        leave_NB1C1=(index_NBC == last_NB[..., None])[:, :, None, :, None],
        through_NB11=(last_NB == entry_NB)[..., None, None],
    )


def _decays(g_NBHCK, bounded: bool, masks: Masks | None) -> Decays:
    """An exponent is the sum of the very steps it spans, never a difference of running sums.

    So a long or a violent past costs a later pair no accuracy, and no exponent depends on a token
    after the row's.
    """
    C, tile = g_NBHCK.shape[3], min(TILE, g_NBHCK.shape[3])
    R = C // tile
    g = g_NBHCK.reshape(*g_NBHCK.shape[:3], R, tile, -1)
    total = lambda subscripts, chosen, x: jnp.einsum(
        subscripts, chosen.astype(x.dtype), x, precision=HIGHEST
    )
    i, j = jnp.arange(tile)[:, None], jnp.arange(tile)[None, :]
    along = partial(total, "ij,...rjk->...rik")
    to_here, after_first, to_end = along(j <= i, g), along((0 < j) & (j <= i), g), along(j > i, g)
    whole = jnp.sum(g, axis=-2)  # of each tile
    r, s = jnp.arange(R)[:, None], jnp.arange(R)[None, :]
    over = partial(total, "rs,...sk->...rk")
    enter = to_here + over(s < r, whole)[..., None, :]
    leave = to_end + over(s > r, whole)[..., None, :]
    flat = lambda x: x.reshape(g_NBHCK.shape)
    enter, leave, whole_chunk = jnp.exp(flat(enter)), jnp.exp(flat(leave)), jnp.exp(jnp.sum(whole, axis=-2))
    if masks is not None:
        enter = jnp.where(masks.enter_NB1C1, enter, 0)
        leave = jnp.where(masks.leave_NB1C1, leave, 0)
        whole_chunk = jnp.where(masks.through_NB11, whole_chunk, 0)

    # From j to the first token of row tile r: the rest of j's tile, whole tiles, that token's own
    # step. In the row's own tile it runs backwards, from 0 to 75 where the gate is bounded and to
    # anything where it is not. The mask goes before the exp.
    m = jnp.arange(R)
    between = (s[:, :, None] < m[None, None, :]) & (m[None, None, :] < r[:, :, None])
    between = total("rsm,...mk->...rsk", between, whole) + g[..., :1, :]
    column = to_end[..., None, :, :, :] + between[..., None, :]  # [.., row tile, tile of j, j, K]
    here, past = (x[None, None, None, :, :, None, None] for x in (r == s, s < r))
    column = jnp.where(past, column, -jnp.inf)
    if bounded:
        column = jnp.where(here, -after_first[..., None, :, :], column)
    column = jnp.exp(column).reshape(*g.shape[:4], C, -1)
    within = None
    if not bounded:
        difference = after_first[..., :, None, :] - after_first[..., None, :, :]
        later = (i >= j)[None, None, None, None, :, :, None]
        within = jnp.exp(jnp.where(later, difference, -jnp.inf))
    return Decays(enter, leave, whole_chunk, jnp.exp(after_first), column, within)


class Pairs(NamedTuple):
    """Decayed inner products of rows x_i with keys k_j, and their transposes, tile by tile."""

    k_NBHCK: jax.Array
    decays: Decays
    dtype: jnp.dtype  # of matmul operands; accumulation is float32 or more

    @property
    def _tile(self):
        return self.decays.row_NBHRIK.shape[-2]

    def _tiles(self, x):
        """[.., C, X] -> [.., R, I, X]."""
        return x.reshape(*x.shape[:3], -1, self._tile, x.shape[-1])

    def _diagonal(self, x):
        """[.., R, I, C] -> the part of each row tile that meets its own columns, [.., R, I, J]."""
        R, tile = x.shape[3], self._tile
        x = x.reshape(*x.shape[:5], R, tile)
        return jnp.stack([x[..., r, :, r, :] for r in range(R)], axis=3)

    def _dot(self, subscripts, a, b):
        accumulate = jnp.promote_types(self.dtype, jnp.float32)
        return jnp.einsum(
            subscripts, a.astype(self.dtype), b.astype(self.dtype), preferred_element_type=accumulate
        )

    def scores(self, x_NBHCK):
        """sum_k x_i k_j e^(G_i - G_j) as [.., C, C]; entries with j > i mean nothing."""
        d = self.decays
        columns = self.k_NBHCK[..., None, :, :] * d.column_NBHRJK
        out = self._dot("...rik,...rjk->...rij", self._tiles(x_NBHCK) * d.row_NBHRIK, columns)
        if d.within_NBHRIJK is not None:
            x, k = self._tiles(x_NBHCK), self._tiles(self.k_NBHCK)
            diagonal = jnp.sum(x[..., :, None, :] * k[..., None, :, :] * d.within_NBHRIJK, axis=-1)
            R, tile = out.shape[3], self._tile
            here = jnp.eye(R, dtype=bool)[None, None, None, :, None, :, None]
            out = out.reshape(*out.shape[:5], R, tile)
            out = jnp.where(here, diagonal[..., None, :], out)
        return out.reshape(*x_NBHCK.shape[:3], x_NBHCK.shape[3], -1)

    def row_gradient(self, dA_NBHCC):
        """The gradient of `scores` with respect to x."""
        d, dA = self.decays, self._tiles(dA_NBHCC)
        columns = self.k_NBHCK[..., None, :, :] * d.column_NBHRJK
        out = d.row_NBHRIK * self._dot("...rij,...rjk->...rik", dA, columns)
        if d.within_NBHRIJK is not None:
            k = self._tiles(self.k_NBHCK)
            near = self._diagonal(dA)[..., None] * k[..., None, :, :] * d.within_NBHRIJK
            out = out + jnp.sum(near, axis=-2)
        return out.reshape(self.k_NBHCK.shape)

    def column_gradient(self, dA_NBHCC, x_NBHCK):
        """The gradient of `scores(x)` with respect to k."""
        d, dA, x = self.decays, self._tiles(dA_NBHCC), self._tiles(x_NBHCK)
        out = self._dot("...rij,...rik->...rjk", dA, x * d.row_NBHRIK)
        out = jnp.sum(d.column_NBHRJK * out, axis=3)
        if d.within_NBHRIJK is not None:
            near = self._diagonal(dA)[..., None] * x[..., :, None, :] * d.within_NBHRIJK
            out = out + jnp.sum(near, axis=-3).reshape(out.shape)
        return out


def unit_lower_inverse(A_XCC):
    """(I + A)^-1 for strictly lower triangular A: substitution in tiles of 16, then doubling.

    As exact as substitution throughout, and all but 16 steps of it are matrix products. (Neumann
    squaring of whole chunks cancels binomial coefficients: 1e-3 for equal keys.)
    """
    C = A_XCC.shape[-1]
    size = min(TILE, C)

    def block(x, size, row, column):  # the blocks (row, column) of every diagonal block of `size`
        n = C // size
        x = x.reshape(*x.shape[:-2], n, size, n, size)
        x = jnp.stack([x[..., i, :, i, :] for i in range(n)], axis=-3)
        return x[..., row, column]

    everything = slice(None)
    diagonal = block(A_XCC, size, everything, everything)

    def substitute(i, inverse):
        row = jax.lax.dynamic_index_in_dim(diagonal, i, axis=-2, keepdims=False)
        row = -jnp.einsum("...j,...jk->...k", row, inverse, precision=HIGHEST)
        row = row + jax.lax.dynamic_index_in_dim(inverse, i, axis=-2, keepdims=False)
        return jax.lax.dynamic_update_index_in_dim(inverse, row, i, axis=-2)

    identity = jnp.broadcast_to(jnp.eye(size, dtype=A_XCC.dtype), diagonal.shape)
    inverse = jax.lax.fori_loop(0, size, substitute, identity)
    while size < C:
        lower = block(A_XCC, 2 * size, slice(size, None), slice(size))
        inverse = inverse.reshape(*inverse.shape[:-3], -1, 2, size, size)
        upper_left, lower_right = inverse[..., 0, :, :], inverse[..., 1, :, :]
        lower = jnp.matmul(lower, upper_left, precision=HIGHEST)
        lower = -jnp.matmul(lower_right, lower, precision=HIGHEST)
        top = jnp.concatenate([upper_left, jnp.zeros_like(upper_left)], axis=-1)
        inverse = jnp.concatenate([top, jnp.concatenate([lower, lower_right], axis=-1)], axis=-2)
        size *= 2
    return inverse.reshape(A_XCC.shape)


class Chunks(NamedTuple):
    """What the chunk-parallel part hands to the recurrence over chunks."""

    pairs: Pairs
    seen_NBHCC: jax.Array  # lower triangle with diagonal, one segment
    before_NBHCC: jax.Array  # the same without diagonal
    Akk_NBHCC: jax.Array
    Aqk_NBHCC: jax.Array  # scale included
    T_NBHCC: jax.Array  # (I + beta Akk)^-1
    w_NBHCK: jax.Array
    u_NBHCV: jax.Array
    q_in_NBHCK: jax.Array  # scale q e^G
    k_in_NBHCK: jax.Array  # k e^G
    k_out_NBHCK: jax.Array  # k e^(G_C - G)


def _prepare(q, k, v, g, beta, masks, scale, bounded) -> Chunks:
    C, accumulate = q.shape[3], g.dtype
    decays = _decays(g, bounded, masks)
    pairs = Pairs(k, decays, q.dtype)
    i, j = jnp.arange(C)[:, None], jnp.arange(C)[None, :]
    shape = (*q.shape[:3], C, C)
    seen, before = jnp.broadcast_to(i >= j, shape), jnp.broadcast_to(i > j, shape)
    if masks is not None:
        seen, before = seen & masks.pair_NB1CC, before & masks.pair_NB1CC
    Akk = jnp.where(before, pairs.scores(k), 0)
    Aqk = jnp.where(seen, scale * pairs.scores(q), 0)
    T = unit_lower_inverse(beta[..., None] * Akk)
    k_in = k * decays.enter_NBHCK
    dot = partial(_dot, dtype=q.dtype)
    return Chunks(
        pairs, seen, before, Akk, Aqk, T,
        w_NBHCK=dot("...ij,...jk->...ik", T, beta[..., None] * k_in),
        u_NBHCV=dot("...ij,...jv->...iv", T, beta[..., None] * v.astype(accumulate)),
        q_in_NBHCK=scale * q * decays.enter_NBHCK,
        k_in_NBHCK=k_in,
        k_out_NBHCK=k * decays.leave_NBHCK,
    )  # fmt: skip


def _dot(subscripts, a, b, dtype):
    accumulate = jnp.promote_types(dtype, jnp.float32)
    return jnp.einsum(subscripts, a.astype(dtype), b.astype(dtype), preferred_element_type=accumulate)


def _recur(chunks: Chunks, S_BHKV, dtype):
    """Runs the state through the chunks; yields o and, per chunk, the state before it and v_new."""
    dot = partial(_dot, dtype=dtype)

    def chunk(S, x):
        w, u, q_in, k_out, Aqk, whole = x
        v_new = u - dot("bhck,bhkv->bhcv", w, S)
        o = dot("bhck,bhkv->bhcv", q_in, S) + dot("bhij,bhjv->bhiv", Aqk, v_new)
        return whole[..., None] * S + dot("bhck,bhcv->bhkv", k_out, v_new), (o, S, v_new)

    c = chunks
    xs = (c.w_NBHCK, c.u_NBHCV, c.q_in_NBHCK, c.k_out_NBHCK, c.Aqk_NBHCC, c.pairs.decays.whole_NBHK)
    S_BHKV, (o, S, v_new) = jax.lax.scan(chunk, S_BHKV, xs)
    return S_BHKV, o, S, v_new


def _chunked(q, k, v, g, beta, index_BT, chunk):
    """Pads time to whole chunks (beta = 0, g = 0: the state is left alone) and splits it."""
    T = q.shape[1]
    extra = -T % chunk
    pad = lambda x, mode: jnp.pad(x, [(0, 0), (0, extra), *[(0, 0)] * (x.ndim - 2)], mode=mode)
    accumulate = jnp.promote_types(v.dtype, jnp.float32)
    q, k, v, g, beta = (_split(pad(x, "constant"), chunk) for x in (q, k, v, g, beta))
    g = jnp.maximum(g, FORGOTTEN)
    masks = None if index_BT is None else _masks(_split(pad(index_BT, "edge"), chunk))
    return q, k, v, g.astype(accumulate), beta.astype(accumulate), masks


@partial(jax.custom_vjp, nondiff_argnums=(7, 8))
def kda(q_BTHK, k_BTHK, v_BTHV, g_BTHK, beta_BTH, S_BHKV, index_BT, scale, bounded):
    """The chunkwise form of SPEC's recurrence; arguments as in `reference.kda`.

    Padding is expected as beta = 0 and g = 0. `bounded` promises g >= -5 everywhere, which lets
    every tile be a dense product; without it the diagonal tiles are summed pair by pair.
    """
    return _forward(q_BTHK, k_BTHK, v_BTHV, g_BTHK, beta_BTH, S_BHKV, index_BT, scale, bounded)[0]


def _chunk_length(T):
    return min(CHUNK, TILE * -(-T // TILE))


def _forward(q, k, v, g, beta, S_BHKV, index_BT, scale, bounded):
    B, T, H, V = v.shape
    residuals = (q, k, v, g, beta, S_BHKV, index_BT)
    dtype = v.dtype
    q, k, v, g, beta, masks = _chunked(q, k, v, g, beta, index_BT, _chunk_length(T))
    chunks = _prepare(q, k, v, g, beta, masks, scale, bounded)
    S_out_BHKV, o, _, _ = _recur(chunks, S_BHKV.astype(g.dtype), q.dtype)
    return (_join(o)[:, :T].astype(dtype), S_out_BHKV), residuals


def _backward(scale, bounded, residuals, cotangents):
    q, k, v, g, beta, S_BHKV, index_BT = residuals
    do_BTHV, dS_BHKV = cotangents
    inputs, T, chunk = residuals[:6], q.shape[1], _chunk_length(q.shape[1])
    do = _split(jnp.pad(do_BTHV, [(0, 0), (0, -T % chunk), (0, 0), (0, 0)]), chunk)
    q, k, v, g, beta, masks = _chunked(q, k, v, g, beta, index_BT, chunk)
    dot = partial(_dot, dtype=q.dtype)
    c = _prepare(q, k, v, g, beta, masks, scale, bounded)
    decays = c.pairs.decays
    _, _, S, v_new = _recur(c, S_BHKV.astype(g.dtype), q.dtype)

    dv_new_local = dot("...ij,...iv->...jv", c.Aqk_NBHCC, do)
    dS_local = dot("...ck,...cv->...kv", c.q_in_NBHCK, do)

    def chunk_back(dS, x):  # dS: the cotangent of the state after this chunk
        w, k_out, whole, dv_new, dS_here = x
        dv_new = dv_new + dot("bhck,bhkv->bhcv", k_out, dS)
        dS_before = whole[..., None] * dS + dS_here - dot("bhck,bhcv->bhkv", w, dv_new)
        return dS_before, (dv_new, dS)

    xs = (c.w_NBHCK, c.k_out_NBHCK, decays.whole_NBHK, dv_new_local, dS_local)
    dS_BHKV, (dv_new, dS) = jax.lax.scan(chunk_back, dS_BHKV.astype(g.dtype), xs, reverse=True)

    # v_new = T r with r = beta (v - k_in S), hence dA = -(T^t dv_new) v_new^t.
    dr = dot("...ij,...iv->...jv", c.T_NBHCC, dv_new)
    miss = v.astype(g.dtype) - dot("...ck,...kv->...cv", c.k_in_NBHCK, S)
    dA = -jnp.where(c.before_NBHCC, dot("...iv,...jv->...ij", dr, v_new), 0)
    dAkk = beta[..., None] * dA
    dAqk = scale * dot("...iv,...jv->...ij", do, v_new)
    dAqk_ii = jnp.diagonal(dAqk, axis1=-2, axis2=-1)[..., None]
    dAqk = jnp.where(c.before_NBHCC, dAqk, 0)
    dbeta = jnp.sum(dr * miss, axis=-1) + jnp.sum(dA * c.Akk_NBHCC, axis=-1)
    dv = beta[..., None] * dr

    dq_in = scale * dot("...cv,...kv->...ck", do, S) * decays.enter_NBHCK
    dk_in = -beta[..., None] * dot("...cv,...kv->...ck", dr, S) * decays.enter_NBHCK
    dk_out = dot("...cv,...kv->...ck", v_new, dS) * decays.leave_NBHCK
    dq_row, dk_row = c.pairs.row_gradient(dAqk), c.pairs.row_gradient(dAkk)
    dk_column = c.pairs.column_gradient(dAqk, q) + c.pairs.column_gradient(dAkk, k)

    # A pair (i, j) decays by g_(j+1) .. g_i: its gradient is x dx at i and -k dk at j, summed from
    # the end. What enters at i is decayed by g_1 .. g_i, what leaves from i by g_(i+1) .. g_C. The
    # three sums are kept apart, and the diagonal (no decay) out of them: at the floor the decayed
    # terms are e^-5 of the others and would drown in their rounding.
    through = q * (dq_in + dq_row) + k * (dk_in + dk_row - dk_column)
    leaving = jnp.pad((k * dk_out)[..., :-1, :], [(0, 0)] * 3 + [(1, 0), (0, 0)])
    dg = jax.lax.cumsum(through, axis=3, reverse=True) + jax.lax.cumsum(leaving, axis=3)
    dg = dg + (decays.whole_NBHK * jnp.sum(S * dS, axis=-1))[..., None, :]

    dq = dq_in + dq_row + dAqk_ii * k
    dk = dk_in + dk_row + dk_column + dk_out + dAqk_ii * q
    back = [_join(x)[:, :T] for x in (dq, dk, dv, dg, dbeta)]
    return *(x.astype(y.dtype) for x, y in zip([*back, dS_BHKV], inputs, strict=True)), None


kda.defvjp(_forward, _backward)
