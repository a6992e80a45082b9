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
from pallas_kernels.kda.mosaic_gpu.form import Form
from pallas_kernels.kda.mosaic_gpu.prepare import Inputs, Prepared
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
    rows,
    split,
    turned,
)
from pallas_kernels.kda.mosaic_gpu.warpgroup import tiles as _tiles

WIDTH = 32  # key channels of a warpgroup: with four of them a thread has 128 registers
FIRST, SECOND = pl.ds(0, HALF), pl.ds(HALF, HALF)
HALVES, QUARTERS, OWN = range(3)  # matrices that lie in shared memory: `decay.Sums`


class Gradients(NamedTuple):
    """Of q, k, v and z in bfloat16 (with finished log-decays, of these).

    `beta_BHT`: of beta, times beta squared. `rate_BHNXC`: of a_log, for each part of channels and token.
    """

    q_BTHK: jax.Array
    k_BTHK: jax.Array
    v_BTHV: jax.Array
    z_BTHK: jax.Array
    beta_BHT: jax.Array
    rate_BHNXC: jax.Array


class _Part(NamedTuple):
    """A warpgroup's key channels of a chunk, [64, 32]."""

    q_s: Any
    k_s: Any
    high_s: Any  # log-decays, in two parts; before and after, what they are made of
    low_s: Any
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
        return self.high_s, load(self.bias_s, COLUMNS), self.rate

    def put_decays(self):
        g = self.form.decays(*self.gate())
        g = g if self.seg.real_C is None else g * rows(self.seg.real_C, WIDTH)
        _put(g, self.high_s, self.low_s)

    def decays(self):
        return load(self.high_s) + load(self.low_s)

    def summed(self, matrix):
        """Sums of log-decays over the tokens that the matrix chooses."""
        (x,) = products([(matrix, self.high_s), (matrix, self.low_s)])
        return x


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


def _held(d: _Gradients) -> _Gradients:
    """d, added up. Left to itself, the compiler keeps terms and factors instead, in more registers."""
    return _Gradients(*lax.optimization_barrier(tuple(d)))


def _rounded(x):
    return x.astype(jnp.bfloat16).astype(jnp.float32)


def _put(x, high_s, low_s):
    """x into shared memory, for sums over tokens."""
    high_s[...], low_s[...] = split(x)
    plgpu.commit_smem()


def _second_half():
    """Whether a row of a [64, 32] matrix is of the second half of the chunk."""
    return plgpu.broadcasted_iota(jnp.int32, (CHUNK, WIDTH), 0, layout=MATRIX) >= HALF


def _put_scores(x, sums, apart_s, own_s):
    """Cotangents of the scores of pairs below the diagonal: those apart, and those in one quarter."""
    i, j = sums.i, sums.j
    before = j < i if sums.same is None else (j < i) & sums.same
    own = i // QUARTER == j // QUARTER
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
    return _held(_Gradients(query, key, part.query() * query + part.key() * key))


def _of_pairs(part: _Part, d: _Gradients, sums, sums_s, scores, finer, free) -> _Gradients:
    """By the scores of pairs, factored as in `prepare`.

    Args:
      sums: makes matrices of sums. sums_s: those that lie in memory. scores: cotangents (of keys apart, of
        queries apart, of keys in one quarter, of queries in one quarter). finer: a generator of (size of
        blocks, cotangents of keys, of queries) of pairs of blocks inside a quarter, which are shared out
        when it is first asked. free: two tiles of shared memory.
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

    def add_to_key(d, x, y, sign=1):
        return _held(d._replace(key=d.key + x * y, through=d.through + sign * (load(key_s) * y)))

    # Rows of the second half, columns of the first.
    x = jnp.exp2(part.summed(sums_s.at[HALVES]))
    put(x)
    keys, queries = both(FIRST)[0]
    (y,) = products(keys)
    d = add_to_key(d, x, jnp.where(second, y, 0.0))
    (y,) = products(queries)
    d = add_to_query(d, x, jnp.where(second, y, 0.0))
    (y,) = products(both(SECOND)[1])
    d = add_to_key(d, x, jnp.where(second, 0.0, y), sign=-1)

    # Rows of a half's second quarter, columns of its first.
    x = jnp.exp2(part.summed(sums_s.at[QUARTERS]))
    put(x)
    halves = lambda first, later: jnp.where(second, later, first)
    (keys, queries), of_columns = both(FIRST)
    (later_keys, later_queries), of_later_columns = both(SECOND)
    d = add_to_key(d, x, halves(*products(keys, later_keys)))
    d = add_to_query(d, x, halves(*products(queries, later_queries)))
    d = add_to_key(d, x, halves(*products(of_columns, of_later_columns)), sign=-1)

    # Rows of the second of a pair of smaller blocks, columns of its first.
    for size, finer_kk_s, finer_qk_s in finer:
        x = jnp.exp2(part.summed(sums().joined(size)))
        put(x)
        d = add_to_key(d, x, *products([(finer_kk_s, key_s)]))
        d = add_to_query(d, x, *products([(finer_qk_s, key_s)]))
        of_columns = [(turned(finer_kk_s), key_s), (turned(finer_qk_s), query_s)]
        d = add_to_key(d, x, *products(of_columns), sign=-1)

    # Of one tile, whose columns' factors grow: they are not the rows'.
    own = part.summed(sums_s.at[OWN])
    plgpu.commit_smem()
    key_s[...] = (part.key() * jnp.exp2(-own)).astype(jnp.bfloat16)
    plgpu.commit_smem()
    (y,) = products([(own_kk_s, key_s)])
    through = d.through + _rounded(part.key() * jnp.exp2(own)) * y
    d = _held(d._replace(key=d.key + jnp.exp2(own) * y, through=through))
    (y,) = products([(own_qk_s, key_s)])
    through = d.through + _rounded(part.query() * jnp.exp2(own)) * y
    d = _held(d._replace(query=d.query + jnp.exp2(own) * y, through=through))
    put(jnp.exp2(own))
    (y,) = products([(turned(own_kk_s), key_s), (turned(own_qk_s), query_s)])
    through = d.through - _rounded(part.key() * jnp.exp2(-own)) * y
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
    through_s, left_s = free[:2], free[2:]
    _put(d.through, *through_s)
    _put(part.key() * left, *left_s)
    onward = [(turned(before_s), x_s) for x_s in through_s]
    (x,) = products([*onward, *((before_s, x_s) for x_s in left_s)])
    x = x + (load(through_s[0]) + load(through_s[1])) + columns(load(held_s, COLUMNS))
    return x if part.seg.real_C is None else x * rows(part.seg.real_C, WIDTH)


def _of_scores(me, nk, sums, meet, shared, finished):
    """Leaves R in the place of dv', and the cotangents of scores of pairs in four tiles; shares out the work.

    With R = Diag(beta) T^t dv', the cotangent of v is R itself, that of scores of keys is -R v'^t, and its
    diagonal is that of beta, times -beta^2. The pair of a token with itself is not decayed: it stands apart.
    """
    inverse_s, R_s, written_s, do_s, kk_s, qk_s, own_qk_s, before_s, diagonal_s = shared
    for v, x_s in enumerate(R_s):

        @pl.when(me == v)
        def _(v=v, x_s=x_s):
            (x,) = products([(turned(inverse_s), turned(x_s))])
            plgpu.commit_smem()
            x_s[...] = x.astype(jnp.bfloat16)
            plgpu.commit_smem()
            finished(v)

    @pl.when(me == nk - 2)
    def _():
        before_s[...] = sums().before()

    @pl.when(me == nk - 1)
    def _():
        chosen = sums()
        (x,) = products([(do_s[v], y_s) for v, y_s in enumerate(written_s)])
        diagonal_s[1] = _diagonal(x, chosen)
        _put_scores(x, chosen, qk_s, own_qk_s)

    meet(0)

    @pl.when(me == 0)
    def _():
        chosen = sums()
        (x,) = products([(R_s[v], y_s) for v, y_s in enumerate(written_s)])
        diagonal_s[0] = _diagonal(x, chosen)
        _put_scores(-x, chosen, kk_s, inverse_s)


def _kernel(sizes, scale, form, packed, *refs):
    """One chunk of one head of one row."""
    nk, nv = sizes[3] // WIDTH, sizes[4] // TILE
    q_g, k_g, z_g, rate_g, bias_g, whole_g, inverse_g, norm_g, *refs = refs
    S_g, written_g, dS_g, d_written_g, do_g, *refs = refs
    ids_g, refs = (refs[:2], refs[2:]) if packed else ([], refs)
    dq_g, dk_g, dv_g, dz_g, dbeta_g, drate_g, *refs = refs
    (
        inverse_s, kk_s, qk_s, own_qk_s, before_s, q_s, k_s, z_s, low_s, dS_s, written_s,
        ((S_s,), (sums_s,)), ((R_s, do_s), (key_s, query_s)),
        of_channel_s, of_token_s, dot_s, *ids_s, shared, own, states, again, met,
    ) = refs  # fmt: skip
    # Few allocations: each takes a multiple of 1,024 bytes.
    bias_s, whole_s, held_s = (of_channel_s.at[at] for at in range(3))
    norm_s, diagonal_s = of_token_s.at[pl.ds(0, 2)], of_token_s.at[pl.ds(2, 2)]
    b, h, n = lax.axis_index("row"), lax.axis_index("head"), lax.axis_index("chunk")
    me = lax.axis_index("warpgroup")
    tokens, mine = pl.ds(n * CHUNK, CHUNK), pl.ds(me * WIDTH, WIDTH)

    def meet(at: int):
        """All warpgroups, with what they have written so far."""
        plgpu.commit_smem()
        plgpu.barrier_arrive(met.at[at])
        plgpu.barrier_wait(met.at[at])

    for source, target in ((z_g, z_s), (q_g, q_s), (k_g, k_s)):
        plgpu.copy_gmem_to_smem(source.at[b, tokens, h, mine], target.at[me], own.at[me])

    @pl.when(me == 0)
    def _():
        plgpu.copy_gmem_to_smem(inverse_g.at[b, h, n], inverse_s, shared)
        for v in range(nv):
            of = channels(v)
            plgpu.copy_gmem_to_smem(d_written_g.at[b, h, n, of], R_s.at[v], shared)
            plgpu.copy_gmem_to_smem(written_g.at[b, h, n, of], written_s.at[v], shared)
            plgpu.copy_gmem_to_smem(do_g.at[b, tokens, h, of], do_s.at[v], shared)
        plgpu.copy_gmem_to_smem(bias_g.at[h], bias_s, shared)
        plgpu.copy_gmem_to_smem(whole_g.at[b, h, n], whole_s, shared)
        plgpu.copy_gmem_to_smem(norm_g.at[b, h, n], norm_s, shared)
        for source, target in zip(ids_g, ids_s, strict=True):
            plgpu.copy_gmem_to_smem(source.at[b, tokens], target, shared)

    # A tile of the states is 64 channels wide, for two warpgroups.
    pair, side, values = me // 2, pl.ds(me % 2 * WIDTH, WIDTH), pl.ds(0, nv * TILE)

    @pl.when(me % 2 == 0)
    def _():
        for source, target in ((S_g, S_s), (dS_g, dS_s.at[:, values])):
            plgpu.copy_gmem_to_smem(source.at[b, h, n, :, channels(pair)], target.at[pair], states.at[pair])

    R_v, do_v, written_v = ([x.at[v] for v in range(nv)] for x in (R_s, do_s, written_s))
    rate = rate_g[h]
    segments = lambda: decay.segments(ids_g[0], ids_s, b, n) if packed else decay.NONE
    sums = lambda: decay.Sums(positions((rate < 0).astype(jnp.int32)), segments().same)
    plgpu.barrier_wait(shared)
    q_C, k_C = load(norm_s.at[0], ROWS), load(norm_s.at[1], ROWS)
    part = _Part(
        q_s.at[me], k_s.at[me], z_s.at[me], low_s.at[me], q_C, k_C, bias_s.at[mine], rate, form,
        segments(),
    )  # fmt: skip
    plgpu.barrier_wait(own.at[me])
    part.put_decays()

    finished = lambda v: plgpu.copy_smem_to_gmem(R_v[v], dv_g.at[b, tokens, h, channels(v)])
    parts = inverse_s, R_v, written_v, do_v, kk_s, qk_s, own_qk_s, before_s, diagonal_s
    _of_scores(me, nk, sums, meet, parts, finished)
    plgpu.barrier_wait(states.at[pair])

    @pl.when(me % 2 == 0)
    def _():
        """What the state itself says about all log-decays of 64 channels."""
        (x,) = products([(turned(S_s.at[pair]), dS_s.at[pair, values])])
        held_s[channels(pair)] = _diagonal(x, sums()) * load(whole_s.at[channels(pair)], ROWS)

    d = _of_state(part, before_s, S_s.at[pair, :, side], R_v, do_v)

    # Once all are here, the memory of S, R and the output's cotangent is free.
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    meet(1)
    matrices = lambda of: (of.joined(HALF), of.joined(QUARTER), of.own(form.own))
    for at in (HALVES, QUARTERS, OWN):

        @pl.when(me == at % nk)
        def _(at=at):
            sums_s[at] = matrices(sums())[at]

    @pl.when(me == nk - 1)
    def _():
        plgpu.copy_smem_to_gmem(diagonal_s.at[0], dbeta_g.at[b, h, tokens])

    meet(2)

    def finer():
        """In the memory of pairs apart, and of matrices that nobody needs any more."""
        sizes = [size for size in form.joined if size < QUARTER]
        if not sizes:
            return
        of_keys, of_queries = (kk_s, sums_s.at[HALVES]), (qk_s, sums_s.at[QUARTERS])
        meet(4)
        for who, own_s, places in ((0, inverse_s, of_keys), (nk - 1, own_qk_s, of_queries)):

            @pl.when(me == who)
            def _(own_s=own_s, places=places):
                _share_out(own_s, zip(sizes, places, strict=True), sums(), form.own)

        meet(5)
        yield from zip(sizes, of_keys, of_queries, strict=True)

    free = key_s.at[me], query_s.at[me]
    d = _of_pairs(part, d, sums, sums_s, (kk_s, qk_s, inverse_s, own_qk_s), finer(), free)
    left = _of_leaving(part, before_s, dS_s.at[pair, :, side], written_v)
    plgpu.commit_smem()  # log-decays and the state's cotangent were read for the last time
    if form.raw:
        plgpu.copy_gmem_to_smem(z_g.at[b, tokens, h, mine], z_s.at[me], again.at[me])
    kept = [dS_s.at[pair, channels(at), side] for at in range(2)]
    dg = _of_decays(part, d, left, before_s, held_s.at[mine], (*free, *kept))
    itself = rows(load(diagonal_s.at[1], ROWS), WIDTH)
    dq, dk = d.query + itself * part.key(), d.key + left + itself * part.query()
    if packed:
        dq = dq * rows(part.seg.real_C, WIDTH)
    if form.raw:
        plgpu.barrier_wait(again.at[me])
    dz, dot_s[2, me] = form.through(dg, *part.gate())
    if form.raw:
        # Through the norms. The scale is in the query: its unit vector is query / scale.
        dot_s[0, me] = jnp.sum(part.query() * dq, axis=1)
        dot_s[1, me] = jnp.sum(part.key() * dk, axis=1)
        meet(3)
        along = lambda x: rows(sum(load(dot_s.at[x, at], ROWS) for at in range(nk)), WIDTH)
        dq = dq - part.query() * (along(0) * (1.0 / scale**2))
        dk = dk - part.key() * along(1)
    dq, dk = rows(q_C, WIDTH) * dq, rows(k_C, WIDTH) * dk
    targets = (part.q_s, dq_g, dq), (part.k_s, dk_g, dk), (part.high_s, dz_g, dz)
    for place, _, x in targets:
        place[...] = x.astype(jnp.bfloat16)
    plgpu.commit_smem()
    for place, target, _ in targets:
        plgpu.copy_smem_to_gmem(place, target.at[b, tokens, h, mine])
    plgpu.copy_smem_to_gmem(dot_s.at[2, me], drate_g.at[b, h, n, me])
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
    N, nk, nv, packed = T // CHUNK, K // WIDTH, V // TILE, x.index_BT is not None
    out_type = Gradients(
        bfloat16(B, T, H, K), bfloat16(B, T, H, K), bfloat16(B, T, H, V), bfloat16(B, T, H, K),
        float32(B, H, T), float32(B, H, N, nk, CHUNK),
    )  # fmt: skip
    vector = lambda *shape, dtype=jnp.float32: plgpu.SMEM(shape, dtype)
    # One swizzle for all: both operands of a product need the same, and half a tile of columns is read.
    tiles = partial(_tiles, columns=WIDTH)
    part, square = tiles(nk, CHUNK, WIDTH), tiles(CHUNK, CHUNK)
    launch = plgpu.kernel(
        partial(_kernel, x.sizes, scale, form, packed), out_type=out_type,
        scratch_types=[
            *(square,) * 5, *(part,) * 4, tiles(K // TILE, max(V, 2 * CHUNK), TILE), tiles(nv, TILE, CHUNK),
            plgpu.RefUnion([tiles(K // TILE, V, TILE)], [tiles(3, CHUNK, CHUNK)]),
            plgpu.RefUnion([tiles(nv, CHUNK, TILE), tiles(nv, CHUNK, TILE)], [part, part]),
            vector(3, K), vector(4, CHUNK), vector(3, nk, CHUNK),
            *([vector(CHUNK, dtype=jnp.int32), vector(CHUNK)] if packed else []),
            plgpu.Barrier(num_arrivals=4 + 3 * nv + 2 * packed),
            plgpu.Barrier(num_arrivals=3, num_barriers=nk),
            plgpu.Barrier(num_arrivals=2, num_barriers=K // TILE),
            plgpu.Barrier(num_barriers=nk),
            plgpu.Barrier(num_arrivals=nk, num_barriers=6),
        ],
        grid=(N, H, B), grid_names=("chunk", "head", "row"), num_threads=nk, thread_name="warpgroup",
        kernel_name="kda_gradients",
        compiler_params=PARAMS, interpret=interpret,
    )  # fmt: skip
    ids = (x.index_BT, x.real_BT) if packed else ()
    return Gradients(*launch(
        x.q_BTHK, x.k_BTHK, x.z_BTHK, x.rate_H, x.bias_HK, p.whole_BHNK, p.inverse_BHNCC, p.norm_BHNXC,
        kept.S_BHNVK, kept.written_BHNVC, d.dS_BHNVK, d.d_written_BHNVC, do_BTHV, *ids,
    ))  # fmt: skip
