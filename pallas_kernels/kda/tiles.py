"""Inside one chunk: decays, decayed inner products of token pairs, and the triangular inverse.

A chunk of C tokens is cut into R tiles of 16. i and j are tokens (a row and a column of a pair
matrix); every array leads with [chunks, batch, heads].
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.products import wide_einsum

TILE = 16  # 16 steps of a decay floored at -5 stay above -80: exp(80) fits float32 and bfloat16
HIGHEST = jax.lax.Precision.HIGHEST
LEAD = (None, None, None)  # chunks, batch, heads


class Masks(NamedTuple):
    """Which tokens of a chunk may see what, when rows hold several segments."""

    pair_NB1CC: jax.Array  # i and j are of one segment
    enter_NB1C1: jax.Array  # i continues the segment that the chunk's incoming state belongs to
    leave_NB1C1: jax.Array  # i is of the segment that the chunk's outgoing state belongs to
    through_NB11: jax.Array  # the chunk holds one segment only, the incoming one
    index_NB1C: jax.Array  # the segments themselves


def masks(index_NBC) -> Masks:
    """From the segment index of each token; the state before the first chunk is of segment 0."""
    last_NB = index_NBC[:, :, -1]
    entry_NB = jnp.concatenate([jnp.zeros_like(last_NB[:1]), last_NB[:-1]])
    return Masks(
        pair_NB1CC=(index_NBC[..., :, None] == index_NBC[..., None, :])[:, :, None],
        enter_NB1C1=(index_NBC == entry_NB[..., None])[:, :, None, :, None],
        leave_NB1C1=(index_NBC == last_NB[..., None])[:, :, None, :, None],
        through_NB11=(last_NB == entry_NB)[..., None, None],
        index_NB1C=index_NBC[:, :, None],
    )


class Decays(NamedTuple):
    """Every exponential of the chunkwise form; each exponent is at most 75, most at most 0."""

    enter_NBHCK: jax.Array  # from the chunk's start through i
    leave_NBHCK: jax.Array  # from after i through the chunk's end
    whole_NBHK: jax.Array  # the whole chunk
    row_NBHRIK: jax.Array  # from the row tile's first token (its own decay included) to i
    column_NBHRCK: jax.Array  # from j to the row tile's first token; 0 where j is in a later tile
    within_NBHRIJK: jax.Array | None  # i to j inside a tile, where the dense form would overflow


def sums(chosen, x):
    """Sums of x's next-to-last axis: row r of the result adds the entries that chosen[.., r] marks."""
    return jnp.einsum("...rs,...sk->...rk", chosen.astype(x.dtype), x, precision=HIGHEST)


def decays(g_NBHCK, bounded: bool, mask: Masks | None) -> Decays:
    """An exponent is the sum of the very steps it spans, never a difference of running sums.

    So a long or a violent past costs a later pair no accuracy, and no exponent that counts depends
    on a token after the row's, or on another segment.
    """
    C, tile = g_NBHCK.shape[3], min(TILE, g_NBHCK.shape[3])
    R = C // tile
    g = g_NBHCK.reshape(*g_NBHCK.shape[:3], R, tile, -1)
    i, j = np.arange(tile)[:, None], np.arange(tile)[None, :]
    to_here, to_end = jnp.split(sums(np.concatenate([j <= i, j > i]), g), 2, axis=-2)
    # From the tile's first token, or the first of i's own segment if that comes later.
    counted, near = (j > 0) & (j <= i), (j <= i)[(*LEAD, None)]
    if mask is not None:
        index = mask.index_NB1C.reshape(*mask.index_NB1C.shape[:3], R, tile)
        begins = jnp.pad(jnp.diff(index, axis=-1) != 0, [(0, 0)] * 4 + [(1, 0)])
        near = near & (index[..., :, None] == index[..., None, :])
        counted = counted[(*LEAD, None)] & near & ~begins[..., None, :]
    after_first = sums(counted, g)
    before, after, gap = _between_tiles(to_here[..., -1, :], g[..., 0, :])

    flat = lambda x: x.reshape(g_NBHCK.shape)
    enter, leave = jnp.exp(flat(to_here + before[..., None, :])), jnp.exp(flat(to_end + after[..., None, :]))
    whole = jnp.exp(before[..., -1, :] + to_here[..., -1, -1, :])
    if mask is not None:
        enter = jnp.where(mask.enter_NB1C1, enter, 0)
        leave = jnp.where(mask.leave_NB1C1, leave, 0)
        whole = jnp.where(mask.through_NB11, whole, 0)

    # In the row's own tile a column's exponent runs backwards, from 0 to 75 where the gate is
    # bounded and to anything where it is not. The mask goes before the exp.
    r, s = np.arange(R)[:, None], np.arange(R)[None, :]
    tiles = lambda x: x[(*LEAD, ..., None, None)]
    column = jnp.where(tiles(s < r), to_end[..., None, :, :, :] + gap[..., None, :], -jnp.inf)
    if bounded:
        column = jnp.where(tiles(s == r), -after_first[..., None, :, :, :], column)
    column = jnp.exp(column).reshape(*g.shape[:4], C, -1)
    within = None if bounded else _within_tiles(g, near)
    return Decays(enter, leave, whole, jnp.exp(after_first), column, within)


def _between_tiles(total, first):
    """Sums over whole tiles, from each tile's total and first step, [.., R, K].

    Returns:
      (of the tiles before r; of those after r; of those between s and r, and r's first step
      [.., R, R, K]).
    """
    R = total.shape[-2]
    r, s, m = np.arange(R)[:, None, None], np.arange(R)[None, :, None], np.arange(R)
    none = np.zeros((R, R), bool)
    rows = lambda of_total, of_first: np.concatenate([of_total, of_first], axis=1)
    chosen = np.concatenate([
        rows(m < r[:, 0], none),
        rows(m > r[:, 0], none),
        rows(((s < m) & (m < r)).reshape(R * R, R), np.repeat(np.eye(R, dtype=bool), R, axis=0)),
    ])  # fmt: skip
    found = sums(chosen, jnp.concatenate([total, first], axis=-2))
    before, after, gap = jnp.split(found, [R, 2 * R], axis=-2)
    return before, after, gap.reshape(*gap.shape[:-2], R, R, gap.shape[-1])


def _within_tiles(g, near):
    """e^(the steps after j through i) for each pair of one tile and segment, [.., R, I, J, K]."""
    tile = g.shape[-2]
    i, j, m = np.arange(tile)[:, None, None], np.arange(tile)[None, :, None], np.arange(tile)
    steps = sums(((j < m) & (m <= i)).reshape(tile * tile, tile), g)
    steps = steps.reshape(*g.shape[:-2], tile, tile, g.shape[-1])
    return jnp.exp(jnp.where(near[..., None], steps, -jnp.inf))


class Pairs(NamedTuple):
    """Decayed inner products of rows x_i with keys k_j, for x = k and x = q at once.

    `x_NBHXCK` stacks the rows, X = 2 of them, on a new axis before tokens.
    """

    k_NBHCK: jax.Array
    q_NBHCK: jax.Array
    decay: Decays
    dtype: jnp.dtype  # of matmul operands; accumulation is float32 or more

    def _dot(self, subscripts, a, b):
        return wide_einsum(subscripts, a, b, self.dtype)

    def _tiles(self, x):
        """[.., C, X] -> [.., R, I, X]."""
        return x.reshape(*x.shape[:3], -1, self.decay.row_NBHRIK.shape[-2], x.shape[-1])

    def _rows(self):
        """The rows of both matrices, [.., R, 2, I, K]."""
        return jnp.stack([self._tiles(self.k_NBHCK), self._tiles(self.q_NBHCK)], axis=-3)

    def _columns(self):
        return self.k_NBHCK[..., None, :, :] * self.decay.column_NBHRCK

    def _diagonal(self, dA):
        """[.., R, 2, I, C] -> the part of each row tile that meets its own columns, [.., R, 2, I, J]."""
        R, tile = dA.shape[3], self.decay.row_NBHRIK.shape[-2]
        dA = dA.reshape(*dA.shape[:6], R, tile)
        return jnp.stack([dA[..., r, :, :, r, :] for r in range(R)], axis=3)

    def scores(self):
        """sum_k x_i k_j e^(decay from j to i), [.., C, C], for x = k and x = q.

        Entries with j > i mean nothing (and are finite).
        """
        d, rows = self.decay, self._rows()
        out = self._dot("...rxik,...rck->...rxic", rows * d.row_NBHRIK[..., None, :, :], self._columns())
        R, tile = out.shape[3], out.shape[-2]
        if d.within_NBHRIJK is not None:
            k = self._tiles(self.k_NBHCK)[..., None, None, :, :]
            near = jnp.sum(rows[..., :, None, :] * k * d.within_NBHRIJK[..., None, :, :, :], axis=-1)
            here = np.eye(R, dtype=bool)[(*LEAD, slice(None), None, None, slice(None), None)]
            out = jnp.where(here, near[..., None, :], out.reshape(*out.shape[:-1], R, tile)).reshape(
                out.shape
            )
        out = jnp.moveaxis(out, -3, 3).reshape(*out.shape[:3], 2, R * tile, R * tile)
        return out[..., 0, :, :], out[..., 1, :, :]

    def gradients(self, dAkk_NBHCC, dAqk_NBHCC):
        """The cotangents of `scores`, pulled back: to k as a row, to q, to k as a column; and `through`.

        `through` is what comes to a token as a row, less what goes from it as a column: x dx - k dk. The
        gradients of log-decays are sums of it over many tokens, in which a pair that lies on one side of the
        decay cancels. So a pair must come in and go out as the same number: made of the very operands that
        the products have, rounded as they are.
        """
        d, rows, columns = self.decay, self._rows(), self._columns()
        dA = jnp.stack([self._tiles(dAkk_NBHCC), self._tiles(dAqk_NBHCC)], axis=-3)
        row_factor = d.row_NBHRIK[..., None, :, :]
        of_rows = self._dot("...rxic,...rck->...rxik", dA, columns)
        of_columns = self._dot("...rxic,...rxik->...rck", dA, rows * row_factor)
        # Not jnp.sum over the two: XLA's CPU code for it crashes (jax 0.10.2).
        both = lambda x: x[..., 0, :, :] + x[..., 1, :, :]
        through_rows = both(self._rounded(rows * row_factor) * of_rows)
        through_columns = jnp.sum(self._rounded(columns) * of_columns, axis=3)
        to_rows = row_factor * of_rows
        to_columns = jnp.sum(d.column_NBHRCK * of_columns, axis=3)
        if d.within_NBHRIJK is not None:
            near = self._diagonal(dA)[..., None] * d.within_NBHRIJK[..., None, :, :, :]
            near_rows = jnp.sum(near * self._tiles(self.k_NBHCK)[..., None, None, :, :], axis=-2)
            near_columns = jnp.sum(near * rows[..., :, None, :], axis=(-4, -3)).reshape(to_columns.shape)
            to_rows, to_columns = to_rows + near_rows, to_columns + near_columns
            through_rows += both(rows * near_rows)
            through_columns += self.k_NBHCK * near_columns
        to_k, to_q = (to_rows[..., x, :, :].reshape(self.k_NBHCK.shape) for x in range(2))
        return to_k, to_q, to_columns, through_rows.reshape(self.k_NBHCK.shape) - through_columns

    def _rounded(self, x):
        """As operands of products are; a cast there and back may be optimised away."""
        kind = jnp.finfo(self.dtype)
        return jax.lax.reduce_precision(x, kind.nexp, kind.nmant)


def unit_lower_inverse(A_NBHCC):
    """(I + A)^-1 for strictly lower triangular A: substitution in tiles of 16, then doubling.

    As exact as substitution throughout, and all but 16 steps of it are matrix products. (Neumann
    squaring of whole chunks cancels binomial coefficients: 1e-3 for equal keys.)
    """
    C = A_NBHCC.shape[-1]
    size = min(TILE, C)
    block = lambda size: np.arange(C) // size
    inside = lambda size: (block(size)[:, None] == block(size)[None, :])[LEAD]
    # Row i of every tile at once: tiles are independent, so their rows may be added up.
    diagonal = jnp.where(inside(size), A_NBHCC, 0)
    rows = diagonal.reshape(*A_NBHCC.shape[:3], C // size, size, C)

    def substitute(i, inverse):
        row = jax.lax.dynamic_index_in_dim(rows, i, axis=-2)
        row = jnp.einsum("...rxc,...cd->...rxd", row, inverse.reshape(A_NBHCC.shape), precision=HIGHEST)
        row = jax.lax.dynamic_index_in_dim(inverse, i, axis=-2) - row
        return jax.lax.dynamic_update_slice_in_dim(inverse, row, i, axis=-2)

    identity = jnp.broadcast_to(jnp.eye(C, dtype=A_NBHCC.dtype), A_NBHCC.shape).reshape(rows.shape)
    inverse = jax.lax.fori_loop(0, size, substitute, identity).reshape(A_NBHCC.shape)
    while size < C:
        # [[P, 0], [L, Q]]^-1 = [[P^-1, 0], [-Q^-1 L P^-1, Q^-1]], for every pair of blocks at once.
        lower = jnp.where(inside(2 * size) & ~inside(size), A_NBHCC, 0)
        step = jnp.matmul(inverse, jnp.matmul(lower, inverse, precision=HIGHEST), precision=HIGHEST)
        inverse, size = inverse - step, 2 * size
    return inverse
