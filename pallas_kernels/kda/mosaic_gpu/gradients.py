"""The last kernel backwards: what every chunk's cotangents say about its inputs (README.md)."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.kda.mosaic_gpu import decay
from pallas_kernels.kda.mosaic_gpu.decay import HALF, QUARTER
from pallas_kernels.kda.mosaic_gpu.form import UNIT, Form
from pallas_kernels.kda.mosaic_gpu.prepare import Inputs, Prepared, regained
from pallas_kernels.kda.mosaic_gpu.scan import Cotangents, Kept
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
    rounded,
    rows,
    split,
    turned,
)
from pallas_kernels.kda.mosaic_gpu.warpgroup import tiles as _tiles

WIDTH = 32  # key channels of a warpgroup: with four of them a thread has 128 registers
FIRST, SECOND = pl.ds(0, HALF), pl.ds(HALF, HALF)
BEFORE, QUARTERS, OWN = range(3)  # matrices that sum log-decays: `decay.Sums`


class Gradients(NamedTuple):
    """Of q, k, v and z in bfloat16 (with finished log-decays, of these).

    For each part of channels and token, `beta_BHNXC`: of beta, times beta; `rate_BHNXC`: of a_log.
    """

    q_BTHK: jax.Array
    k_BTHK: jax.Array
    v_BTHV: jax.Array
    z_BTHK: jax.Array
    beta_BHNXC: jax.Array
    rate_BHNXC: jax.Array


class _Memory(NamedTuple):
    """A block's shared memory, tiles of it numbered; and what its copies and warpgroups wait for."""

    inverse: Any  # later cotangents of scores of keys in one block
    kk: Any  # cotangents of scores of pairs apart
    qk: Any
    own_qk: Any
    sums: Any
    q: Any
    k: Any
    z: Any  # what log-decays are made of, at first and at last
    g: Any  # the same memory: log-decays, in units
    dS: Any
    written: Any
    S: Any
    late: Any  # the same memory: a matrix that sums gradients, and scores of pairs in one block
    R: Any
    do: Any
    key: Any  # the same memory as R and do: decayed keys and queries
    query: Any
    of_channel: Any  # bias, decay of the whole chunk, what the state says of all log-decays; `regained`
    of_token: Any  # norms, the diagonal of do v'^t, and in packed rows whether it is real
    dot: Any  # sums over channels
    index: Any  # of segments, in packed rows
    gate: Any
    raw: Any
    shared: Any
    states: Any
    again: Any
    summing: Any
    met: Any

    @classmethod
    def of(cls, refs) -> "_Memory":
        """From scratch memory as `_scratch` asks for it."""
        inverse, kk, qk, own_qk, sums, q, k, gates, dS, written, states, values, *rest = refs
        ((z,), (g,)), ((S,), (late,)), ((R, do), (key, query)) = gates, states, values
        ids = [] if len(rest) > 10 else [None]
        return cls(
            inverse, kk, qk, own_qk, sums, q, k, z, g, dS, written, S, late, R, do, key, query,
            *rest[:3], *ids, *rest[3:],
        )  # fmt: skip

    def meet(self, at: int):
        """All warpgroups, with what they have written so far."""
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.met.at[at])
        plgpu.barrier_wait(self.met.at[at])


def _scratch(K: int, V: int, packed: bool):
    nk, nv = K // WIDTH, V // TILE
    # One swizzle for all: both operands of a product need the same, and half a tile of columns is read.
    tiles, half = partial(_tiles, columns=WIDTH), partial(_tiles, columns=WIDTH, dtype=jnp.float16)
    vector = lambda *shape, dtype=jnp.float32: plgpu.SMEM(shape, dtype)
    part, square, value = tiles(nk, CHUNK, WIDTH), tiles(CHUNK, CHUNK), tiles(nv, CHUNK, TILE)
    return [
        *(square,) * 4, half(3, CHUNK, CHUNK),
        part, part, plgpu.RefUnion([part], [half(nk, CHUNK, WIDTH)]),
        tiles(K // TILE, max(V, 2 * CHUNK), TILE), tiles(nv, TILE, CHUNK),
        plgpu.RefUnion([tiles(K // TILE, V, TILE)], [tiles(3, CHUNK, CHUNK)]),
        plgpu.RefUnion([value, value], [part, part]),
        # Few allocations: each takes a multiple of 1,024 bytes.
        vector(4, K), vector(4, CHUNK), vector(4, nk, CHUNK),
        *([vector(CHUNK, dtype=jnp.int32)] if packed else []),
        plgpu.Barrier(num_arrivals=2, num_barriers=nk),
        plgpu.Barrier(num_arrivals=2, num_barriers=nk),
        plgpu.Barrier(num_arrivals=4 + 4 * nv + 2 * packed),
        plgpu.Barrier(num_arrivals=2, num_barriers=K // TILE),
        plgpu.Barrier(num_barriers=nk),
        plgpu.Barrier(),
        plgpu.Barrier(num_arrivals=nk, num_barriers=5),
    ]  # fmt: skip


class _Part(NamedTuple):
    """A warpgroup's key channels of a chunk, [64, 32]."""

    q_s: Any
    k_s: Any
    z_s: Any
    g_s: Any
    q_C: Any  # 1 / |q|, with the scale
    k_C: Any
    bias_s: Any
    rate: Any
    form: Form
    seg: decay.Segments

    def query(self):
        return load(self.q_s) * rows(self.q_C, WIDTH)

    def key(self):
        return load(self.k_s) * rows(self.k_C, WIDTH)

    def gate(self):
        """What log-decays are made of."""
        return self.z_s, load(self.bias_s, COLUMNS), self.rate

    def put_decays(self):
        steps = self.form.steps(*self.gate())
        steps = steps if self.seg.real_C is None else steps * rows(self.seg.real_C, WIDTH)
        self.g_s[...] = steps.astype(jnp.float16)
        plgpu.commit_smem()

    def decays(self):
        """To base 2, as what is summed."""
        return load(self.g_s) * UNIT

    def summed(self, matrix):
        """Sums of log-decays over the tokens that the matrix chooses."""
        (x,) = products([(matrix, self.g_s)])
        return x

    def to_middle(self, before_s):
        """Sums between a token and the end of the first half."""
        after, upto = turned(before_s.at[FIRST]), before_s.at[:, SECOND]
        (x,) = products([(after, self.g_s.at[FIRST]), (upto, self.g_s.at[SECOND])])
        return x + jnp.where(_second_half(), self.decays(), 0.0)


class _Gradients(NamedTuple):
    """In registers, as far as tokens decay: of queries (with the scale in them), of keys, and `through`.

    The last is what comes to a token by decays up to it, less what others read of it by decays after it: the
    gradients of log-decays are sums of it. Most of such a sum cancels, as a pair of tokens both of which lie
    behind a decay says nothing of it. So each pair must come in and go out as the same number: of the factors
    that `query` and `key` are made of, `through` takes those that products have, rounded.
    """

    query: Any
    key: Any
    through: Any
    missed: Any  # of each token: its key times the key's gradient by what it read


def _held(d: _Gradients) -> _Gradients:
    """d, added up. Left to itself, the compiler keeps terms and factors instead, in more registers."""
    return _Gradients(*lax.optimization_barrier(tuple(d)))


def _put(x, high_s, low_s):
    """x into shared memory, for sums over tokens."""
    high_s[...], low_s[...] = split(x)
    plgpu.commit_smem()


def _second_half():
    """Whether a row of a [64, 32] matrix is of the second half of the chunk."""
    return plgpu.broadcasted_iota(jnp.int32, (CHUNK, WIDTH), 0, layout=MATRIX) >= HALF


def _put_scores(x, sums, size: int, apart_s, own_s):
    """Cotangents of the scores of pairs below the diagonal: those apart, and those in one block of a size."""
    i, j = sums.i, sums.j
    before = j < i if sums.same is None else (j < i) & sums.same
    own = i // size == j // size
    apart_s[...] = jnp.where(before & ~own, x, 0.0).astype(jnp.bfloat16)
    own_s[...] = jnp.where(before & own, x, 0.0).astype(jnp.bfloat16)


def _share_out(own_s, finer, sums, own: int):
    """Pairs of one quarter: to each place in `finer` those of its blocks; here stay those of tiles `own`."""
    x, i, j = load(own_s), sums.i, sums.j
    for size, place in finer:
        chosen = (i // (2 * size) == j // (2 * size)) & (i // size != j // size)
        place[...] = jnp.where(chosen, x, 0.0).astype(jnp.bfloat16)
    own_s[...] = jnp.where(i // own == j // own, x, 0.0).astype(jnp.bfloat16)


def _diagonal(x, sums):
    return jnp.sum(jnp.where(sums.i == sums.j, x, 0.0), axis=1)


def _of_state(part: _Part, before_s, S_s, R_s, do_s) -> _Gradients:
    """By what the chunk's state gave its tokens."""
    enter = jnp.exp2(part.summed(before_s) + part.decays())
    if part.seg.enters_C is not None:
        enter = enter * rows(part.seg.enters_C, WIDTH)
    of = lambda left: [(x, S_s.at[channels(v)]) for v, x in enumerate(left)]
    (x,) = products(of(R_s))
    (y,) = products(of(do_s))
    query, key = y * enter, -(x * enter)
    of_key = part.key() * key
    return _held(_Gradients(query, key, part.query() * query + of_key, jnp.sum(of_key, axis=1)))


def _of_pairs(part: _Part, d: _Gradients, sums_s, scores, finer, free) -> _Gradients:
    """By the scores of pairs, factored as in `prepare`, or with those of a half as one product.

    Args:
      sums_s: the matrices of sums. scores: cotangents (of keys apart, of queries apart, of keys in one
        block, of queries in one block). finer: a generator of (matrix of sums, cotangents of keys, of
        queries) of pairs of blocks inside a quarter, which are shared out when it is first asked.
        free: two tiles of shared memory.
    """
    kk_s, qk_s, own_kk_s, own_qk_s = scores
    key_s, query_s = free
    second = _second_half()

    def put(x):
        """Keys and queries decayed by x, once all warps have done with the last."""
        plgpu.commit_smem()
        key_s[...] = (part.key() * x).astype(jnp.bfloat16)
        query_s[...] = (part.query() * x).astype(jnp.bfloat16)
        plgpu.commit_smem()

    def both(at):
        """Keys' and queries' sums over columns of one half, as rows; and the sums over its rows."""
        by_rows = [(kk_s.at[:, at], key_s.at[at])], [(qk_s.at[:, at], key_s.at[at])]
        by_columns = [(turned(kk_s.at[at]), key_s.at[at]), (turned(qk_s.at[at]), query_s.at[at])]
        return by_rows, by_columns

    # Products with the factors in memory, whose own factors those are too.
    def add_to_query(d, x, y):
        return _held(d._replace(query=d.query + x * y, through=d.through + load(query_s) * y))

    def add_to_key(d, x, y):
        z = load(key_s) * y
        missed = d.missed + jnp.sum(z, axis=1)
        return _held(d._replace(key=d.key + x * y, through=d.through + z, missed=missed))

    def add_column(d, x, y):
        return _held(d._replace(key=d.key + x * y, through=d.through - load(key_s) * y))

    # Rows of the second half, columns of the first.
    x = jnp.exp2(part.to_middle(sums_s.at[BEFORE]))
    put(x)
    keys, queries = both(FIRST)[0]
    (y,) = products(keys)
    d = add_to_key(d, x, jnp.where(second, y, 0.0))
    (y,) = products(queries)
    d = add_to_query(d, x, jnp.where(second, y, 0.0))
    (y,) = products(both(SECOND)[1])
    d = add_column(d, x, jnp.where(second, 0.0, y))

    # Rows of a half's second quarter, columns of its first.
    if part.form.together == QUARTER:
        x = jnp.exp2(part.summed(sums_s.at[QUARTERS]))
        put(x)
        halves = lambda first, later: jnp.where(second, later, first)
        (keys, queries), of_columns = both(FIRST)
        (later_keys, later_queries), of_later_columns = both(SECOND)
        d = add_to_key(d, x, halves(*products(keys, later_keys)))
        d = add_to_query(d, x, halves(*products(queries, later_queries)))
        d = add_column(d, x, halves(*products(of_columns, of_later_columns)))

    # Rows of the second of a pair of smaller blocks, columns of its first.
    for matrix, finer_kk_s, finer_qk_s in finer:
        x = jnp.exp2(part.summed(matrix))
        put(x)
        d = add_to_key(d, x, *products([(finer_kk_s, key_s)]))
        d = add_to_query(d, x, *products([(finer_qk_s, key_s)]))
        of_columns = [(turned(finer_kk_s), key_s), (turned(finer_qk_s), query_s)]
        d = add_column(d, x, *products(of_columns))

    # In one block: its columns' factors are not its rows', but these inverted.
    own = part.summed(sums_s.at[OWN])
    plgpu.commit_smem()
    key_s[...] = (part.key() * jnp.exp2(-own)).astype(jnp.bfloat16)
    plgpu.commit_smem()
    (y,) = products([(own_kk_s, key_s)])
    z = rounded(part.key() * jnp.exp2(own)) * y
    missed = d.missed + jnp.sum(z, axis=1)
    d = _held(d._replace(key=d.key + jnp.exp2(own) * y, through=d.through + z, missed=missed))
    (y,) = products([(own_qk_s, key_s)])
    through = d.through + rounded(part.query() * jnp.exp2(own)) * y
    d = _held(d._replace(query=d.query + jnp.exp2(own) * y, through=through))
    put(jnp.exp2(own))
    (y,) = products([(turned(own_kk_s), key_s), (turned(own_qk_s), query_s)])
    through = d.through - rounded(part.key() * jnp.exp2(-own)) * y
    return _held(d._replace(key=d.key + jnp.exp2(-own) * y, through=through))


def _of_leaving(part: _Part, before_s, dS_s, written_s):
    """The gradient of keys by what they left to the state after the chunk."""
    leave = jnp.exp2(part.summed(turned(before_s)))
    if part.seg.leaves_C is not None:
        leave = leave * rows(part.seg.leaves_C, WIDTH)
    (left,) = products([(turned(x_s), dS_s.at[channels(v)]) for v, x_s in enumerate(written_s)])
    return left * leave


def _of_decays(part: _Part, d: _Gradients, left, before_s, held_s, free):
    """The gradient of log-decays: a token's lie between every pair that it decays.

    Args:
      left: of keys, by what they left. free: four tiles of shared memory.
    """
    *through_s, left_s = free
    left_s[...] = (part.key() * left).astype(jnp.bfloat16)
    _put(d.through, *through_s)
    onward = [(turned(before_s), x_s) for x_s in through_s]
    (x,) = products([*onward, (before_s, left_s)])
    x = x + (load(through_s[0]) + load(through_s[1])) + columns(load(held_s, COLUMNS))
    return x if part.seg.real_C is None else x * rows(part.seg.real_C, WIDTH)


def _of_scores(m: _Memory, me, nk: int, nv: int, form: Form, sums, finished):
    """Leaves R in the place of dv', and the cotangents of scores of pairs in four tiles; shares out the work.

    With R = Diag(beta) T^t dv', the cotangent of v is R itself, that of scores of keys is -R v'^t, and that
    of beta, times beta, is R times what the token missed: v, whose part is left in `dot`, less what its key
    reads. The pair of a token with itself is not decayed: it stands apart.
    """

    def put_sums(who: int, at: int, matrix):
        @pl.when(me == who)
        def _():
            m.sums[at] = matrix(sums())

    for v in range(nv):

        @pl.when(me == v)
        def _(v=v):
            (x,) = products([(turned(m.inverse), turned(m.R.at[v]))])
            x = x * rows(load(m.of_channel.at[3, channels(0)], ROWS))
            plgpu.commit_smem()
            m.R[v] = x.astype(jnp.bfloat16)
            plgpu.commit_smem()
            finished(v)
            v_s = plgpu.layout_cast(m.sums[QUARTERS + v], MATRIX)
            m.dot[3, v] = jnp.sum(x * lax.bitcast_convert_type(v_s, jnp.bfloat16).astype(jnp.float32), axis=1)

    @pl.when(me >= nv)
    def _():
        m.dot[3, me] = plgpu.layout_cast(jnp.zeros(CHUNK, jnp.float32), ROWS)

    put_sums(nk - 2, BEFORE, lambda of: of.before())

    @pl.when(me == nk - 1)
    def _():
        chosen = sums()
        (x,) = products([(m.do.at[v], m.written.at[v]) for v in range(nv)])
        m.of_token[2] = _diagonal(x, chosen)
        _put_scores(x, chosen, form.together, m.qk, m.own_qk)

    m.meet(0)

    @pl.when(me == 0)
    def _():
        chosen = sums()
        (x,) = products([(m.R.at[v], m.written.at[v]) for v in range(nv)])
        _put_scores(-x, chosen, form.together, m.kk, m.inverse)

    if form.together == QUARTER:
        put_sums(1, QUARTERS, lambda of: of.joined(QUARTER))
    put_sums(nk - 1, OWN, lambda of: of.around(HALF) if form.together == HALF else of.own(form.own))


class _Sources(NamedTuple):
    """In device memory."""

    q: Any
    k: Any
    z: Any
    bias: Any
    whole: Any
    inverse: Any
    norm: Any
    regained: Any
    v: Any  # bits of bfloat16 as float16: it goes where matrices in float16 will be
    S: Any
    written: Any
    dS: Any
    d_written: Any
    do: Any
    ids: tuple[Any, ...]  # of packed rows: index of segments, whether a token is real


def _fetch(m: _Memory, me, where, g: _Sources) -> None:
    """Starts to copy a chunk's inputs, first what is needed first."""
    (b, h, n), tokens, mine = where, pl.ds(where[2] * CHUNK, CHUNK), pl.ds(me * WIDTH, WIDTH)
    nv = g.written.shape[3] // TILE
    plgpu.copy_gmem_to_smem(g.z.at[b, tokens, h, mine], m.z.at[me], m.gate.at[me])
    plgpu.copy_gmem_to_smem(g.bias.at[h, mine], m.of_channel.at[0, mine], m.gate.at[me])

    @pl.when(me == 0)
    def _():
        for source, target in zip(g.ids, (m.index, m.of_token.at[3]), strict=False):
            plgpu.copy_gmem_to_smem(source.at[b, tokens], target, m.shared)
        plgpu.copy_gmem_to_smem(g.inverse.at[b, h, n], m.inverse, m.shared)
        for v in range(nv):
            of = channels(v)
            plgpu.copy_gmem_to_smem(g.d_written.at[b, h, n, of], m.R.at[v], m.shared)
            plgpu.copy_gmem_to_smem(g.written.at[b, h, n, of], m.written.at[v], m.shared)
            plgpu.copy_gmem_to_smem(g.do.at[b, tokens, h, of], m.do.at[v], m.shared)
            plgpu.copy_gmem_to_smem(g.v.at[b, tokens, h, of], m.sums.at[QUARTERS + v], m.shared)
        plgpu.copy_gmem_to_smem(g.whole.at[b, h, n], m.of_channel.at[1], m.shared)
        plgpu.copy_gmem_to_smem(g.norm.at[b, h, n], m.of_token.at[pl.ds(0, 2)], m.shared)
        plgpu.copy_gmem_to_smem(g.regained.at[b, h, tokens], m.of_channel.at[3, channels(0)], m.shared)

    # A tile of the states is 64 channels wide, for two warpgroups.
    pair, values = me // 2, pl.ds(0, nv * TILE)

    @pl.when(me % 2 == 0)
    def _():
        for source, target in ((g.S, m.S), (g.dS, m.dS.at[:, values])):
            plgpu.copy_gmem_to_smem(source.at[b, h, n, :, channels(pair)], target.at[pair], m.states.at[pair])

    for source, target in ((g.q, m.q), (g.k, m.k)):
        plgpu.copy_gmem_to_smem(source.at[b, tokens, h, mine], target.at[me], m.raw.at[me])


def _put_held(m: _Memory, me, nv: int, sums) -> None:
    """What the state itself says about all log-decays."""

    @pl.when(me % 2 == 1)
    def _():
        pair = me // 2
        (x,) = products([(turned(m.S.at[pair]), m.dS.at[pair, pl.ds(0, nv * TILE)])])
        whole = load(m.of_channel.at[1, channels(pair)], ROWS)
        m.of_channel[2, channels(pair)] = _diagonal(x, sums()) * whole


def _finer(m: _Memory, me, nk: int, form: Form, sums):
    """Of pairs of blocks inside a quarter: the matrix of sums, cotangents of scores of keys, of queries.

    These are in the memory of pairs apart and of the state, which nobody needs any more.
    """
    sizes = [size for size in form.joined if size < QUARTER]
    if not sizes:
        return
    of_keys, of_queries = (m.kk, m.late.at[1]), (m.qk, m.late.at[2])
    m.meet(3)
    for who, own_s, places in ((0, m.inverse, of_keys), (nk - 1, m.own_qk, of_queries)):

        @pl.when(me == who)
        def _(own_s=own_s, places=places):
            _share_out(own_s, zip(sizes, places, strict=True), sums(), form.own)

    m.meet(4)
    for size, *scores in zip(sizes, of_keys, of_queries, strict=True):
        yield sums().joined(size), *scores


def _through_norms(part: _Part, m: _Memory, me, nk: int, scale: float, dq, dk):
    """Gradients of unit vectors, less what lies along these; the query's has the scale in it."""
    m.dot[0, me] = jnp.sum(part.query() * dq, axis=1)
    m.dot[1, me] = jnp.sum(part.key() * dk, axis=1)
    m.meet(2)
    along = lambda x: rows(sum(load(m.dot.at[x, at], ROWS) for at in range(nk)), WIDTH)
    return dq - part.query() * (along(0) * (1.0 / scale**2)), dk - part.key() * along(1)


def _kernel(sizes, scale, form, packed, *refs):
    """One chunk of one head of one row."""
    nk, nv = sizes[3] // WIDTH, sizes[4] // TILE
    rate_g, *refs = refs
    g, refs = _Sources(*refs[:14], ids=tuple(refs[14 : 14 + 2 * packed])), refs[14 + 2 * packed :]
    dq_g, dk_g, dv_g, dz_g, dbeta_g, drate_g = refs[:6]
    m = _Memory.of(refs[6:])
    b, h, n = where = tuple(lax.axis_index(name) for name in ("row", "head", "chunk"))
    me = lax.axis_index("warpgroup")
    tokens, mine = pl.ds(n * CHUNK, CHUNK), pl.ds(me * WIDTH, WIDTH)
    pair, side = me // 2, pl.ds(me % 2 * WIDTH, WIDTH)
    _fetch(m, me, where, g)

    rate = rate_g[h]
    ids_s = m.index, m.of_token.at[3]
    segments = lambda: decay.segments(g.ids[0], ids_s, b, n) if packed else decay.NONE
    places = lambda: (positions((rate < 0).astype(jnp.int32)), segments().same)
    sums = lambda: decay.Sums(*places(), UNIT, jnp.float16)
    if packed:
        plgpu.barrier_wait(m.shared)
    part = _Part(
        m.q.at[me], m.k.at[me], m.z.at[me], m.g.at[me], None, None, m.of_channel.at[0, mine], rate, form,
        segments(),
    )  # fmt: skip
    plgpu.barrier_wait(m.gate.at[me])
    part.put_decays()
    if not packed:
        plgpu.barrier_wait(m.shared)
    finished = lambda v: plgpu.copy_smem_to_gmem(m.R.at[v], dv_g.at[b, tokens, h, channels(v)])
    _of_scores(m, me, nk, nv, form, sums, finished)
    plgpu.barrier_wait(m.states.at[pair])
    _put_held(m, me, nv, sums)
    plgpu.barrier_wait(m.raw.at[me])
    q_C, k_C = (load(m.of_token.at[x], ROWS) for x in range(2))
    part = part._replace(q_C=q_C, k_C=k_C)
    each = lambda x: [x.at[v] for v in range(nv)]
    d = _of_state(part, m.sums.at[BEFORE], m.S.at[pair, :, side], each(m.R), each(m.do))

    # Once all are here, the memory of S, R and the output's cotangent is free.
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    m.meet(1)

    @pl.when(me == 1)
    def _():
        m.late[0] = decay.Sums(*places()).before()
        plgpu.commit_smem()
        plgpu.barrier_arrive(m.summing)

    free = m.key.at[me], m.query.at[me]
    finer = _finer(m, me, nk, form, sums)
    d = _of_pairs(part, d, m.sums, (m.kk, m.qk, m.inverse, m.own_qk), finer, free)
    left = _of_leaving(part, m.sums.at[BEFORE], m.dS.at[pair, :, side], each(m.written))
    plgpu.commit_smem()  # log-decays and the state's cotangent were read for the last time
    if form.raw:
        plgpu.copy_gmem_to_smem(g.z.at[b, tokens, h, mine], m.z.at[me], m.again.at[me])
    kept = [m.dS.at[pair, channels(0), side]]
    plgpu.barrier_wait(m.summing)
    dg = _of_decays(part, d, left, m.late.at[0], m.of_channel.at[2, mine], (*free, *kept))
    itself = rows(load(m.of_token.at[2], ROWS), WIDTH)
    dq, dk = d.query + itself * part.key(), d.key + left + itself * part.query()
    if packed:
        dq = dq * rows(part.seg.real_C, WIDTH)
    if form.raw:
        plgpu.barrier_wait(m.again.at[me])
    dz, m.dot[2, me] = form.through(dg, *part.gate())
    m.dot[3, me] = load(m.dot.at[3, me], ROWS) + d.missed
    if form.raw:
        dq, dk = _through_norms(part, m, me, nk, scale, dq, dk)
    dq, dk = rows(q_C, WIDTH) * dq, rows(k_C, WIDTH) * dk
    targets = (part.q_s, dq_g, dq), (part.k_s, dk_g, dk), (part.z_s, dz_g, dz)
    for place, _, x in targets:
        place[...] = x.astype(jnp.bfloat16)
    plgpu.commit_smem()
    for place, target, _ in targets:
        plgpu.copy_smem_to_gmem(place, target.at[b, tokens, h, mine])
    plgpu.copy_smem_to_gmem(m.dot.at[2, me], drate_g.at[b, h, n, me])
    plgpu.copy_smem_to_gmem(m.dot.at[3, me], dbeta_g.at[b, h, n, me])
    plgpu.wait_smem_to_gmem(0)


def gradients(
    x: Inputs,
    p: Prepared,
    kept: Kept,
    d: Cotangents,
    do_BTHV,
    scale: float,
    form: Form,
    interpret=None,
) -> Gradients:
    """Everything that each chunk's cotangents say about the inputs."""
    B, T, H, K, V = x.sizes
    N, nk, packed = T // CHUNK, K // WIDTH, x.index_BT is not None
    out_type = Gradients(
        bfloat16(B, T, H, K), bfloat16(B, T, H, K), bfloat16(B, T, H, V), bfloat16(B, T, H, K),
        float32(B, H, N, nk, CHUNK), float32(B, H, N, nk, CHUNK),
    )  # fmt: skip
    launch = plgpu.kernel(
        partial(_kernel, x.sizes, scale, form, packed), out_type=out_type,
        scratch_types=_scratch(K, V, packed),
        grid=(N, H, B), grid_names=("chunk", "head", "row"), num_threads=nk, thread_name="warpgroup",
        kernel_name="kda_gradients",
        compiler_params=PARAMS, interpret=interpret,
    )  # fmt: skip
    ids = (x.index_BT, x.real_BT) if packed else ()
    return Gradients(*launch(
        x.rate_H, x.q_BTHK, x.k_BTHK, x.z_BTHK, x.bias_HK, p.whole_BHNK, p.inverse_BHNCC, p.norm_BHNXC,
        regained(x.beta_BHT), lax.bitcast_convert_type(x.v_BTHV, jnp.float16), kept.S_BHNVK,
        kept.written_BHNVC, d.dS_BHNVK, d.d_written_BHNVC, do_BTHV, *ids,
    ))  # fmt: skip
