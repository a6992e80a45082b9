"""The first kernel: everything that a chunk needs besides the state, all chunks at once (README.md)."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.kda.mosaic_gpu import decay
from pallas_kernels.kda.mosaic_gpu.decay import HALF, QUARTER
from pallas_kernels.kda.mosaic_gpu.form import UNIT, Form
from pallas_kernels.kda.mosaic_gpu.inverse import inverse_of, joins
from pallas_kernels.kda.mosaic_gpu.warpgroup import (
    CHUNK,
    COLUMNS,
    MATRIX,
    PARAMS,
    ROWS,
    TILE,
    bfloat16,
    channels,
    columns,
    float32,
    load,
    positions,
    products,
    replace,
    rounded,
    rows,
    tiles,
    turned,
    zero,
)

SPLIT = 2  # warpgroups of a chunk: each has half of the channels
CHUNKS = 2  # of a block: with four warpgroups the compiler keeps to 128 registers a thread
SLICE = 8  # columns that registers can be cut at
TINY = 1e-30  # padding has no beta
WIDTH = 32  # channels in a warpgroup's registers at a time


def _regained(beta, rounded):
    """beta over what T Diag(beta) has of it, 0 for 0.

    Rows of what that is multiplied by are multiplied by this: their largest terms then have beta itself.
    """
    return beta / jnp.maximum(rounded, TINY)


class Inputs(NamedTuple):
    """What both directions read, T a multiple of 128, K and V of 64.

    `z_BTHK`, `rate_H` and `bias_HK` are what decays are made of: see `form`.
    `beta_BHT` is 0 at padding. `index_BT` and `real_BT` (1 or 0) say where segments and padding are;
    both are None where every row is one segment without padding.
    """

    q_BTHK: jax.Array
    k_BTHK: jax.Array
    v_BTHV: jax.Array
    z_BTHK: jax.Array
    beta_BHT: jax.Array
    rate_H: jax.Array
    bias_HK: jax.Array
    index_BT: jax.Array | None
    real_BT: jax.Array | None

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """(B, T, H, K, V)"""
        B, T, H, K = self.q_BTHK.shape
        return B, T, H, K, self.v_BTHV.shape[3]

    @property
    def regained_BHT(self) -> jax.Array:
        """See `_regained`. Of a conversion there and back XLA may leave nothing."""
        return _regained(self.beta_BHT, lax.reduce_precision(self.beta_BHT, 8, 7))


class Prepared(NamedTuple):
    """Of every chunk, in the letters of README.md. The backward pass has it from the forward one."""

    read_BHNRK: jax.Array  # [2 x 64, K]: w above q_in
    out_BHNCK: jax.Array  # k_out
    pair_BHNCC: jax.Array  # Aqk
    u_BHNVC: jax.Array
    whole_BHNK: jax.Array
    inverse_BHNCC: jax.Array  # T Diag(beta), of beta in bfloat16: the diagonal is that itself
    norm_BHNXC: jax.Array  # 1 / |q| (with the scale) and 1 / |k| of the rows


class _Chunk(NamedTuple):
    """What a warpgroup works on: half of the channels of one chunk."""

    at: Any  # which chunk of the block
    me: Any  # which warpgroup of the chunk
    nk: int
    rate: Any
    tiles_s: Any  # queries and keys, later their unit vectors; logits, later near keys, later values
    factors_s: Any  # of keys and of queries
    factors16_s: Any  # the same memory
    g_s: Any
    met: Any

    def zero(self, stage: int):
        return zero(self.rate, stage)

    def tiles(self, stage: int):
        """Of shared memory: queries, keys; factors of keys, of queries, of near keys; and log-decays."""
        at = self.at + self.zero(stage)
        tiles = [self.tiles_s.at[at, place] for place in range(3)]
        return *tiles[:2], *(self.factors_s.at[at, place] for place in range(2)), tiles[2], self.g_s.at[at]

    def narrow(self, stage: int):
        """The same; the factors' places as float16."""
        q_s, k_s, _, _, _, g_s = self.tiles(stage)
        at = self.at + self.zero(stage)
        return q_s, k_s, self.factors16_s.at[at, 0], self.factors16_s.at[at, 1], g_s

    def mine(self, *refs):
        """This warpgroup's channels of them, 32 by 32."""
        whole = self.nk == SPLIT  # a tile for each warpgroup
        for p in range(self.nk):
            part = pl.ds((p if whole else self.me) * WIDTH, WIDTH)
            yield tuple(ref.at[self.me if whole else 0, :, part] for ref in refs)

    def meet(self, which: int) -> None:
        """Both warpgroups, with what they have written so far; by turns at two barriers."""
        barrier = self.met.at[self.at * 2 + which % 2]
        plgpu.commit_smem()
        plgpu.barrier_arrive(barrier)
        plgpu.barrier_wait(barrier)

    def places(self, stage: int):
        """(row, column) of a score, as vectors."""
        line = lambda layout: plgpu.broadcasted_iota(jnp.int32, (CHUNK,), 0, layout=layout)
        return line(ROWS) + self.zero(stage), line(COLUMNS)


def _norms(me: _Chunk, form: Form, dot_s, real_C):
    """1 / |q| (0 at padding) and 1 / |k| of the rows; returns when both warpgroups are here."""
    if form.raw:
        q_s, k_s, *_ = me.tiles(0)
        for x, ref in enumerate((q_s, k_s)):
            dot_s[x, me.me] = sum(jnp.sum(jnp.square(load(part)), axis=1) for (part,) in me.mine(ref))
    me.meet(0)
    if form.raw:
        q_C, k_C = (
            lax.rsqrt(sum(load(dot_s.at[x, half], ROWS) for half in range(SPLIT)) + 1e-6) for x in range(2)
        )
    else:
        q_C = k_C = plgpu.layout_cast(jnp.ones(CHUNK, jnp.float32), ROWS)
    return q_C if real_C is None else q_C * real_C, k_C


def _put_unit(ref, x):
    """A part of a unit vector in float16, in memory of bfloat16."""
    ref[...] = lax.bitcast_convert_type(x.astype(jnp.float16), jnp.bfloat16)


def _unit(ref):
    """What `_put_unit` put."""
    return lax.bitcast_convert_type(plgpu.layout_cast(ref[...], MATRIX), jnp.float16)


def _spans(me: _Chunk, size: int, matrices):
    """What sums log-decays g_s between a token and where pairs of blocks of this size factor."""
    quarter, upto, after = matrices
    early, late = pl.ds(0, HALF), pl.ds(HALF, HALF)
    if size == HALF:
        return lambda g_s: [(after.at[:, early], g_s.at[early]), (upto.at[:, late], g_s.at[late])]
    if size == QUARTER:
        return lambda g_s: [(quarter, g_s)]
    matrix = _sums(positions(me.zero(size)), None).joined(size)
    return lambda g_s: [(matrix, g_s)]


def _scores(me: _Chunk, form: Form, matrices, same, norms, own_s, fetch):
    """Of pairs of tokens, undefined above the diagonal: of keys, in the second warpgroup of queries.

    Leaves unit vectors in the places of queries and keys, and in `own_s` each query's score of its own key,
    apart for both halves of channels. `fetch` is called when a tile is free.
    """
    (q_C, k_C), dots = norms, []
    own = _sums(positions(me.zero(1)), same).own(form.own)

    def score(left, right):
        return products([(left.at[c], turned(right.at[c])) for c in range(me.nk)])[0]

    for q_s, k_s, key_s, query_s, near_s, g_s in me.mine(*me.tiles(1)):
        (x,) = products([(own, g_s)])
        q, k, decay = load(q_s) * rows(q_C, WIDTH), load(k_s) * rows(k_C, WIDTH), jnp.exp2(x)
        near_s[...] = (k * jnp.exp2(-x)).astype(jnp.bfloat16)
        key_s[...], query_s[...] = (k * decay).astype(jnp.bfloat16), (q * decay).astype(jnp.bfloat16)
        _put_unit(q_s, q)
        _put_unit(k_s, k)
        dots.append(jnp.sum(q * k, axis=1))
    own_s[me.me] = sum(dots)
    me.meet(1)
    at = me.at + me.zero(2)
    scores = score(me.factors_s.at[at, me.me], me.tiles_s.at[at, 2])
    for turn, size in enumerate(form.joined):
        first, stage, spans = True, 3 + 2 * turn, _spans(me, size, matrices)
        for q_s, k_s, key_s, query_s, g_s in me.mine(*me.narrow(stage)):
            (x,) = products(spans(g_s))
            if first:
                me.meet(2 + 2 * turn)  # the scores before have been read
            first = False
            decay = jnp.exp2(x).astype(jnp.float16)
            key_s[...], query_s[...] = _unit(k_s) * decay, _unit(q_s) * decay
        if turn == 0:
            fetch()
        me.meet(3 + 2 * turn)
        at = me.at + me.zero(stage + 1)
        some = pl.ds(0, CHUNK - size // SLICE * SLICE)
        here = score(me.factors16_s.at[at, me.me], me.factors16_s.at[at, 0, :, some])
        scores = _joined(scores, here, size, me.places(stage))
    me.meet(2 + 2 * len(form.joined))
    return scores


def _joined(scores, here, size: int, places):
    """`here`, of pairs of blocks of a size, in its place: columns of the first, rows from the second on."""
    if size < SLICE:
        return jnp.where(joins(places, size), here, scores)
    i_C, pieces = places[0], []
    for at in range(0, CHUNK, size):
        part = lax.slice(scores, (0, at), (CHUNK, at + size))
        if at // size % 2 == 0:
            later = rows(i_C, size) >= at + size
            part = jnp.where(later, lax.slice(here, (0, at), (CHUNK, at + size)), part)
        pieces.append(part)
    return lax.concatenate(pieces, 1)


def _ends(me: _Chunk, stage: int, upto, after, scale, seg: decay.Segments):
    """Leaves q_in and k_in in the places of queries and keys, and k_out in that of their factors."""
    for q_s, k_s, _, out_s, _, g_s in me.mine(*me.tiles(stage)):
        (x,) = products([(upto, g_s)])
        enter = jnp.exp2(x)
        if seg.enters_C is not None:
            enter = enter * rows(seg.enters_C, WIDTH)
        q_s[...] = (_unit(q_s).astype(jnp.float32) * (enter * scale)).astype(jnp.bfloat16)
        (x,) = products([(after, g_s)])
        leave = jnp.exp2(x)
        if seg.leaves_C is not None:
            leave = leave * rows(seg.leaves_C, WIDTH)
        k = _unit(k_s).astype(jnp.float32)
        k_s[...], out_s[...] = (k * enter).astype(jnp.bfloat16), (k * leave).astype(jnp.bfloat16)
    me.meet(stage - 1)


def _kernel(sizes, scale, form, packed, *refs):
    """Two chunks of one head of one row."""
    nk, count = sizes[3] // TILE, 9 if packed else 7
    sums_g, *refs = refs
    x: Any = Inputs(*refs[:count], *([] if packed else [None, None]))
    out: Any = Prepared(*refs[count : count + 7])
    tiles_s, ((factors_s,), (factors16_s,)), g_s, *vectors_s, sums_s, ready, later, came, shared, met = refs[
        count + 7 :
    ]
    warpgroup = lax.axis_index("warpgroup")
    at, mine = warpgroup // SPLIT, warpgroup % SPLIT
    b, h, first = lax.axis_index("row"), lax.axis_index("head"), lax.axis_index("pair") * CHUNKS
    vectors = lambda at: [ref.at[at] for ref in vectors_s]

    def fetch(at: int):
        tokens, (token_s, bias_s, _, _, _, *index_s) = pl.ds((first + at) * CHUNK, CHUNK), vectors(at)
        plgpu.copy_gmem_to_smem(x.bias_HK.at[h], bias_s, ready.at[at])
        if packed:
            for source, target in ((x.index_BT, *index_s), (x.real_BT, token_s.at[1])):
                plgpu.copy_gmem_to_smem(source.at[b, tokens], target, ready.at[at])
        for source, place, arrival in ((x.z_BTHK, 2, ready), (x.q_BTHK, 0, later), (x.k_BTHK, 1, later)):
            for c in range(nk):
                target = tiles_s.at[at, place, c]
                plgpu.copy_gmem_to_smem(source.at[b, tokens, h, channels(c)], target, arrival.at[at])
        plgpu.copy_gmem_to_smem(x.beta_BHT.at[b, h, tokens], token_s.at[0], later.at[at])

    @pl.when(warpgroup == 0)
    def _():
        """In order: the first chunk need not wait for the second, and they do not stay in step."""
        fetch(0)
        plgpu.copy_gmem_to_smem(sums_g, sums_s, shared)
        fetch(1)

    plgpu.barrier_wait(ready.at[at])
    me = _Chunk(at, mine, nk, x.rate_H[h], tiles_s, factors_s, factors16_s, g_s, met)
    barriers = later.at[at], shared, came
    _chunk(x, out, (b, h, first + at), me, sums_s, vectors(at), barriers, scale, form)


def _chunk(x: Any, out: Any, where, me: _Chunk, sums_s, vectors, barriers, scale, form):
    """One chunk of one head of one row."""
    (later, shared, came), matrices = barriers, [sums_s.at[place] for place in range(3)]
    (b, h, n), at, mine, nk, packed = where, me.at, me.me, me.nk, x.index_BT is not None
    nv, tokens = out.u_BHNVC.shape[3] // TILE, pl.ds(n * CHUNK, CHUNK)
    token_s, bias_s, whole_s, norm_s, dot_s, *index_s = vectors
    beta_s, own_s, regained_s = token_s.at[0], dot_s.at[2], dot_s.at[0, 0]
    q_s, k_s, key_s, out_s, v_s, g_s = me.tiles(0)
    segments = lambda: decay.segments(x.index_BT, (*index_s, token_s.at[1]), b, n) if packed else decay.NONE
    seg = segments()
    _put_decays(me, form, v_s, g_s, bias_s, seg.real_C)
    plgpu.barrier_wait(later)
    q_C, k_C = _norms(me, form, dot_s, seg.real_C)

    @pl.when(mine == 0)
    def _():
        norm_s[0], norm_s[1] = q_C * scale, k_C

    plgpu.barrier_wait(shared)
    _put_whole(me, matrices[1], g_s, whole_s, seg.through)
    arrived = came.at[at * SPLIT + mine]

    def fetch():
        """Nothing of v was needed so far."""

        @pl.when(mine < nv)
        def _():
            source = x.v_BTHV.at[b, tokens, h, channels(mine)]
            plgpu.copy_gmem_to_smem(source, v_s.at[mine], arrived)

    scores = _scores(me, form, matrices, segments().same, (q_C, k_C), own_s, fetch)
    last = 4 + 2 * len(form.joined)
    _ends(me, last, matrices[1], matrices[2], scale, segments())

    @pl.when(mine < nk)
    def _():
        part = channels(mine)
        plgpu.copy_smem_to_gmem(q_s.at[mine], out.read_BHNRK.at[b, h, n, pl.ds(CHUNK, CHUNK), part])
        plgpu.copy_smem_to_gmem(out_s.at[mine], out.out_BHNCK.at[b, h, n, :, part])

    inverse = key_s.at[0]
    small, pair_g = (beta_s, own_s, regained_s), out.pair_BHNCC.at[b, h, n]
    _solve(me, scores, me.places(last + 1), segments().same, small, scale, pair_g)
    me.meet(last)
    w_g = out.read_BHNRK.at[b, h, n, pl.ds(0, CHUNK), channels(mine)]
    u_g = out.u_BHNVC.at[b, h, n, channels(mine)]
    _written(me, nv, inverse, k_s.at[mine], v_s.at[mine], regained_s, arrived, w_g, u_g)

    @pl.when(mine == 0)
    def _():
        plgpu.copy_smem_to_gmem(inverse, out.inverse_BHNCC.at[b, h, n])
        plgpu.copy_smem_to_gmem(whole_s, out.whole_BHNK.at[b, h, n])
        plgpu.copy_smem_to_gmem(norm_s, out.norm_BHNXC.at[b, h, n])

    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _put_decays(me: _Chunk, form: Form, z_s, g_s, bias_s, real_C):
    """Log-decays of this warpgroup's channels into shared memory; none at padding."""
    for p, (z, g) in enumerate(me.mine(z_s, g_s)):
        bias = load(bias_s.at[pl.ds((me.me * me.nk + p) * WIDTH, WIDTH)], COLUMNS)
        steps = form.steps(z, bias, me.rate)
        g[...] = (steps if real_C is None else steps * rows(real_C, WIDTH)).astype(jnp.float16)


def _put_whole(me: _Chunk, upto, g_s, whole_s, through):
    """The decay of the whole chunk."""

    @pl.when(me.me < me.nk)
    def _():
        last = upto.at[pl.ds(CHUNK - WIDTH, WIDTH)]
        (total,) = products([(turned(g_s.at[me.me]), turned(last))])
        whole = jnp.exp2(jnp.min(total, axis=1))  # running sums only fall
        whole_s[channels(me.me)] = whole if through is None else whole * through


def _solve(me: _Chunk, scores, places, same, vectors, scale, pair_g):
    """Leaves T Diag(beta) and the scores of queries in the first factors' place; sends these off.

    A query's score of its own key comes unrounded: where decays are strong, it is the largest of a row.
    What `_written` regains of beta is left in its place.
    """
    beta_s, own_s, regained_s = vectors
    inverse, pair = (me.tiles(0)[2].at[place] for place in range(2))
    g_s, (i_C, j_C) = me.tiles(0)[5], places
    only = lambda chosen: jnp.where(chosen if same is None else chosen & same, scores, 0.0)

    @pl.when(me.me == 0)
    def _():
        A = only(rows(i_C, CHUNK) > columns(j_C)) * rows(load(beta_s, ROWS))
        T = inverse_of(A, g_s.at[0], g_s.at[1], places)
        inverse[...] = (T * columns(rounded(load(beta_s, COLUMNS)))).astype(jnp.bfloat16)

    @pl.when(me.me == 1)
    def _():
        own_C = sum(load(own_s.at[half], ROWS) for half in range(SPLIT))
        own, before = (f(rows(i_C, CHUNK), columns(j_C)) for f in (jnp.equal, jnp.greater))
        pair[...] = (jnp.where(own, rows(own_C, CHUNK), only(before)) * scale).astype(jnp.bfloat16)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(pair, pair_g)
        beta = load(beta_s, ROWS)
        regained_s[...] = _regained(beta, rounded(beta))


def _written(me: _Chunk, nv: int, inverse, k_in, v, regained_s, arrived, w_g, u_g):
    """w in the place of k_in, u in that of v, and both out: of as many tiles as there are."""
    of_w, of_u = [(inverse, k_in)], [(turned(v), turned(inverse))]
    both = min(me.nk, nv)
    by_row, by_column = rows(load(regained_s, ROWS)), columns(load(regained_s, COLUMNS))

    @pl.when(me.me < both)
    def _():
        plgpu.barrier_wait(arrived)
        w, u = products(of_w, of_u)
        replace((k_in, w * by_row, w_g), (v, u * by_column, u_g))

    if me.nk > both:

        @pl.when(me.me >= both)
        def _():
            replace((k_in, products(of_w)[0] * by_row, w_g))

    if nv > both:

        @pl.when(me.me >= both)
        def _():
            plgpu.barrier_wait(arrived)
            replace((v, products(of_u)[0] * by_column, u_g))


def _sums(at, same) -> decay.Sums:
    """Of log-decays in units."""
    return decay.Sums(at, same, UNIT, jnp.float16)


def prepare(x: Inputs, scale: float, form: Form, interpret=None) -> Prepared:
    """Decays, pairs and the triangular inverse of every chunk; queries have the scale in them."""
    B, T, H, K, V = x.sizes
    N, nk, packed = T // CHUNK, K // TILE, x.index_BT is not None
    sums = _sums(np.indices((CHUNK, CHUNK)), None)
    sums_XCC = jnp.stack(
        [sums.joined(QUARTER), sums.upto(), sums.after()]
    )  # to make them there costs a tenth
    vector = lambda *shape, dtype=jnp.float32: plgpu.SMEM((CHUNKS, *shape), dtype)
    # One swizzle for all: both operands of a product need the same, and half a tile of columns is written.
    whole = partial(tiles, columns=WIDTH)
    half = partial(tiles, dtype=jnp.float16, columns=WIDTH)
    return Prepared(*plgpu.kernel(
        partial(_kernel, x.sizes, scale, form, packed),
        out_type=Prepared(
            bfloat16(B, H, N, 2 * CHUNK, K), bfloat16(B, H, N, CHUNK, K), bfloat16(B, H, N, CHUNK, CHUNK),
            bfloat16(B, H, N, V, CHUNK), float32(B, H, N, K), bfloat16(B, H, N, CHUNK, CHUNK),
            float32(B, H, N, 2, CHUNK),
        ),
        scratch_types=[
            whole(CHUNKS, 3, 2, CHUNK, TILE),
            plgpu.RefUnion([whole(CHUNKS, 2, 2, CHUNK, TILE)], [half(CHUNKS, 2, 2, CHUNK, TILE)]),
            half(CHUNKS, 2, CHUNK, TILE),
            # Few allocations: each takes a multiple of 1,024 bytes.
            vector(2, CHUNK), vector(K), vector(K), vector(2, CHUNK), vector(3, SPLIT, CHUNK),
            *([vector(CHUNK, dtype=jnp.int32)] if packed else []),
            half(3, CHUNK, CHUNK),
            plgpu.Barrier(num_arrivals=nk + 1 + 2 * packed, num_barriers=CHUNKS),
            plgpu.Barrier(num_arrivals=2 * nk + 1, num_barriers=CHUNKS),
            plgpu.Barrier(num_barriers=CHUNKS * SPLIT),
            plgpu.Barrier(),
            plgpu.Barrier(num_arrivals=SPLIT, num_barriers=CHUNKS * 2),
        ],
        grid=(N // CHUNKS, H, B), grid_names=("pair", "head", "row"),
        num_threads=CHUNKS * SPLIT, thread_name="warpgroup", kernel_name="kda_prepare",
        compiler_params=PARAMS, interpret=interpret,
    )(sums_XCC, *(y for y in x if y is not None)))  # fmt: skip
