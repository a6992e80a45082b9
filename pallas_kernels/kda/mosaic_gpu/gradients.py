"""The last kernel of the backward pass: gradients of raw inputs, all chunks at once (README.md).

A block has a warpgroup for each tile of 64 key channels. What they share, the pairs' cotangents, each makes
a part of; from then on a tile's channels are its own, but for the norm of queries and keys.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.kda.mosaic_gpu import decay
from pallas_kernels.kda.mosaic_gpu.decay import HALF, QUARTER
from pallas_kernels.kda.mosaic_gpu.prepare import Inputs, Prepared
from pallas_kernels.kda.mosaic_gpu.scan import Cotangents, Kept
from pallas_kernels.kda.mosaic_gpu.warpgroup import (
    CHUNK,
    COLUMNS,
    LOG2E,
    PARAMS,
    ROWS,
    TILE,
    bfloat16,
    channels,
    columns,
    float32,
    load,
    products,
    rows,
    split,
    turned,
)
from pallas_kernels.kda.mosaic_gpu.warpgroup import tiles as _tiles


class Gradients(NamedTuple):
    """Of q, k, v and z in bfloat16.

    `beta_BHT`: of beta, times beta squared. `rate_BHNXC`: of a_log, for each tile of channels and token.
    """

    q_BTHK: jax.Array
    k_BTHK: jax.Array
    v_BTHV: jax.Array
    z_BTHK: jax.Array
    beta_BHT: jax.Array
    rate_BHNXC: jax.Array


class _Tile(NamedTuple):
    """A warpgroup's 64 channels of a chunk: what it reads of them, and how it sums over tokens."""

    q_s: Any
    k_s: Any
    z_s: Any
    high_s: Any
    low_s: Any
    q_C: Any  # 1 / |q|, with the scale
    k_C: Any
    bias_s: Any
    rate: Any
    lower_bound: float
    seg: decay.Segments
    sums: decay.Sums

    def query(self):
        return load(self.q_s) * rows(self.q_C)

    def key(self):
        return load(self.k_s) * rows(self.k_C)

    def logits(self):
        return load(self.z_s) + columns(load(self.bias_s, COLUMNS))

    def put(self, x):
        """x into shared memory, to be summed over tokens."""
        plgpu.commit_smem()
        self.high_s[...], self.low_s[...] = split(x)
        plgpu.commit_smem()

    def put_decays(self):
        g = decay.bounded(self.logits(), self.rate, self.lower_bound)
        self.put(g if self.seg.real_C is None else g * rows(self.seg.real_C))

    def summed(self, *matrices):
        """Sums of what was put, over the tokens that each matrix chooses."""
        return products(*([(matrix, self.high_s), (matrix, self.low_s)] for matrix in matrices))


class _Gradients(NamedTuple):
    """In registers: of queries (with the scale in them) and keys, and what becomes that of log-decays.

    What decays a product has the product itself as its gradient. `through` collects that for products that
    decay up to a token. `decays` is the gradient as far as it is summed.
    """

    query: Any
    key: Any
    through: Any
    decays: Any


def _pair_cotangents(me, nk, nv, seg, sums, meet, shared):
    """Leaves R in the place of dv', and the cotangents of scores of pairs in that of `kk_s` and `qk_s`.

    With R = Diag(beta) T^t dv', the cotangent of v is R itself, that of scores of keys is -R v'^t, and its
    diagonal is that of beta, times -beta^2. The pair of a token with itself is not decayed: it stands apart.
    """
    inverse_s, R_s, written_s, do_s, kk_s, qk_s, diagonal_s = shared
    i, j = sums.i, sums.j
    before = j < i if seg.same is None else (j < i) & seg.same
    diagonal = lambda x: jnp.sum(jnp.where(i == j, x, 0.0), axis=1)
    for v in range(nv):

        @pl.when(me == v % nk)
        def _(v=v):
            (x,) = products([(turned(inverse_s), turned(R_s.at[v]))])
            plgpu.commit_smem()
            R_s[v] = x.astype(jnp.bfloat16)

    meet(0)

    @pl.when(me == 0)
    def _():
        (x,) = products([(R_s.at[v], written_s.at[v]) for v in range(nv)])
        diagonal_s[0] = diagonal(x)
        kk_s[...] = jnp.where(before, -x, 0.0).astype(jnp.bfloat16)

    @pl.when(me == nk - 1)
    def _():
        (x,) = products([(do_s.at[v], written_s.at[v]) for v in range(nv)])
        diagonal_s[1] = diagonal(x)
        qk_s[...] = jnp.where(before, x, 0.0).astype(jnp.bfloat16)

    meet(1)


def _of_states(tile: _Tile, nv, whole_s, opaque, states) -> _Gradients:
    """By what the chunk's state gave its tokens, and what they left to the state after it."""
    S_s, dS_s, R_s, written_s, do_s = states
    seg, sums = tile.seg, tile.sums
    # What a token left decays after it, and the state itself over all of the chunk.
    tile.put_decays()
    (x,) = tile.summed(sums.after())
    leave = jnp.exp2(x) if seg.same is None else jnp.exp2(x) * rows(seg.leaves_C)
    (left,) = products([(turned(written_s.at[v]), dS_s.at[v]) for v in range(nv)])
    dk = left * leave
    tile.put(tile.key() * dk)
    (decays,) = tile.summed(sums.before())
    held = sum(load(S_s.at[v]) * load(dS_s.at[v]) for v in range(nv))
    tile.put(held * columns(load(whole_s, COLUMNS)))
    everyone = jnp.where(sums.i >= 0, 1.0 + opaque.astype(jnp.float32), 0.0).astype(jnp.bfloat16)
    (x,) = tile.summed(everyone)
    decays = decays + x
    tile.put_decays()
    (x,) = tile.summed(sums.upto())
    enter = jnp.exp2(x) if seg.same is None else jnp.exp2(x) * rows(seg.enters_C)
    (x,) = products([(R_s.at[v], S_s.at[v]) for v in range(nv)])
    x = x * enter
    dk, through = dk - x, -(tile.key() * x)
    (x,) = products([(do_s.at[v], S_s.at[v]) for v in range(nv)])
    x = x * enter
    return _Gradients(x, dk, through + tile.query() * x, decays)


def _inverted(x):
    """1 / x, in one instruction and a product."""
    return jnp.square(lax.rsqrt(x))


def _of_pairs(tile: _Tile, d: _Gradients, scores, free) -> _Gradients:
    """By the scores of pairs, factored as in `prepare`.

    Args:
      scores: cotangents of those of keys, and of queries with keys, below the diagonal.
      free: five tiles of shared memory.
    """
    kk_s, qk_s = scores
    key_s, query_s, near_s, of_keys_s, of_queries_s = free
    sums, i = tile.sums, tile.sums.i
    of_half, of_quarter = sums.apart()
    dq, dk, through = d.query, d.key, d.through
    tile.put_decays()

    def decayed(matrix):
        """The decay that `matrix` sums; keys and queries by it are put into shared memory."""
        (x,) = tile.summed(matrix)
        x = jnp.exp2(x)
        plgpu.commit_smem()
        key_s[...] = (tile.key() * x).astype(jnp.bfloat16)
        query_s[...] = (tile.query() * x).astype(jnp.bfloat16)
        return x

    def only(chosen):
        """The cotangents of some pairs alone."""
        for source, target in ((kk_s, of_keys_s), (qk_s, of_queries_s)):
            target[...] = jnp.where(chosen, load(source), 0.0).astype(jnp.bfloat16)
        plgpu.commit_smem()

    # Rows of the second half, columns of the first.
    x = decayed(sums.half())
    plgpu.commit_smem()
    first, second, row = pl.ds(0, HALF), pl.ds(HALF, HALF), i >= HALF
    y, z = products(
        [(kk_s.at[:, first], key_s.at[first])],
        [(turned(kk_s.at[second]), key_s.at[second]), (turned(qk_s.at[second]), query_s.at[second])],
    )
    y = x * jnp.where(row, y, z)
    dk, through = dk + y, through + tile.key() * jnp.where(row, y, -y)
    (y,) = products([(qk_s.at[:, first], key_s.at[first])])
    y = x * jnp.where(row, y, 0.0)
    dq, through = dq + y, through + tile.query() * y

    # Rows of a half's second quarter, columns of its first.
    x = decayed(sums.quarter())
    only(of_quarter)
    (y,) = products([(of_keys_s, key_s), (turned(of_keys_s), key_s), (turned(of_queries_s), query_s)])
    y = x * y
    dk, through = dk + y, through + tile.key() * jnp.where(i // QUARTER % 2 == 1, y, -y)
    (y,) = products([(of_queries_s, key_s)])
    y = x * y
    dq, through = dq + y, through + tile.query() * y

    # Of one quarter a token is row and column.
    x = decayed(sums.own())
    near_s[...] = (tile.key() * _inverted(x)).astype(jnp.bfloat16)
    only(~(of_half | of_quarter))
    (y,) = products([(of_keys_s, near_s)])
    y = x * y
    dk, through = dk + y, through + tile.key() * y
    (y,) = products([(of_queries_s, near_s)])
    y = x * y
    dq, through = dq + y, through + tile.query() * y
    (y,) = products([(turned(of_keys_s), key_s), (turned(of_queries_s), query_s)])
    y = _inverted(x) * y
    return d._replace(query=dq, key=dk + y, through=through - tile.key() * y)


def _kernel(sizes, scale, lower_bound, packed, *refs):
    """One chunk of one head of one row."""
    nk, nv = sizes[3] // TILE, sizes[4] // TILE
    q_g, k_g, z_g, rate_g, bias_g, whole_g, inverse_g, norm_g, *refs = refs
    S_g, written_g, dS_g, d_written_g, do_g, *refs = refs
    ids_g, refs = (refs[:2], refs[2:]) if packed else ([], refs)
    dq_g, dk_g, dv_g, dz_g, dbeta_g, drate_g, *refs = refs
    (
        inverse_s, R_s, written_s, do_s, kk_s, qk_s, q_s, k_s, z_s, high_s, low_s, S_s, dS_s,
        bias_s, whole_s, norm_s, diagonal_s, dot_s, drate_s, *ids_s, shared, own, met,
    ) = refs  # fmt: skip
    b, h, n = lax.axis_index("row"), lax.axis_index("head"), lax.axis_index("chunk")
    me = lax.axis_index("warpgroup")
    tokens, part = pl.ds(n * CHUNK, CHUNK), channels(me)

    def meet(at: int):
        """All warpgroups, with what they have written so far."""
        plgpu.commit_smem()
        plgpu.barrier_arrive(met.at[at])
        plgpu.barrier_wait(met.at[at])

    @pl.when(me == 0)
    def _():
        plgpu.copy_gmem_to_smem(inverse_g.at[b, h, n], inverse_s, shared)
        for v in range(nv):
            values = channels(v)
            plgpu.copy_gmem_to_smem(d_written_g.at[b, h, n, values], R_s.at[v], shared)
            plgpu.copy_gmem_to_smem(written_g.at[b, h, n, values], written_s.at[v], shared)
            plgpu.copy_gmem_to_smem(do_g.at[b, tokens, h, values], do_s.at[v], shared)
        plgpu.copy_gmem_to_smem(bias_g.at[h], bias_s, shared)
        plgpu.copy_gmem_to_smem(whole_g.at[b, h, n], whole_s, shared)
        plgpu.copy_gmem_to_smem(norm_g.at[b, h, n], norm_s, shared)
        for source, target in zip(ids_g, ids_s, strict=True):
            plgpu.copy_gmem_to_smem(source.at[b, tokens], target, shared)

    for source, target in ((z_g, z_s), (q_g, q_s), (k_g, k_s)):
        plgpu.copy_gmem_to_smem(source.at[b, tokens, h, part], target.at[me], own.at[me])
    for source, target in ((dS_g, dS_s), (S_g, S_s)):
        for v in range(nv):
            plgpu.copy_gmem_to_smem(source.at[b, h, n, channels(v), part], target.at[me, v], own.at[me])
    plgpu.barrier_wait(shared)

    rate = rate_g[h]
    opaque = (rate < 0).astype(jnp.int32)
    seg = decay.segments(ids_g[0], ids_s, b, n) if packed else decay.NONE
    sums = decay.Sums(opaque, seg.same)
    _pair_cotangents(me, nk, nv, seg, sums, meet, (inverse_s, R_s, written_s, do_s, kk_s, qk_s, diagonal_s))

    @pl.when(me == 0)
    def _():
        for v in range(nv):
            plgpu.copy_smem_to_gmem(R_s.at[v], dv_g.at[b, tokens, h, channels(v)])
        plgpu.copy_smem_to_gmem(diagonal_s.at[0], dbeta_g.at[b, h, tokens])

    plgpu.barrier_wait(own.at[me])
    q_s, k_s, z_s, high_s, low_s, S_s, dS_s = (
        ref.at[me] for ref in (q_s, k_s, z_s, high_s, low_s, S_s, dS_s)
    )
    q_C, k_C = load(norm_s.at[0], ROWS), load(norm_s.at[1], ROWS)
    tile = _Tile(q_s, k_s, z_s, high_s, low_s, q_C, k_C, bias_s.at[part], rate, lower_bound, seg, sums)
    d = _of_states(tile, nv, whole_s.at[part], opaque, (S_s, dS_s, R_s, written_s, do_s))

    # Once all are here, the memory of R, v', the output's cotangent and the states is free.
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    meet(2)
    kept = dS_s.at[1], R_s.at[me]  # registers are short
    kept[0][...], kept[1][...] = split(d.decays)
    free = S_s.at[0], S_s.at[1], dS_s.at[0], written_s.at[me], do_s.at[me]
    d = _of_pairs(tile, d, (kk_s, qk_s), free)
    tile.put(d.through)
    (x,) = tile.summed(sums.onward())
    dg = load(kept[0]) + load(kept[1]) + x
    itself = rows(load(diagonal_s.at[1], ROWS))
    dq, dk = d.query + itself * tile.key(), d.key + itself * tile.query()

    # To the raw inputs.
    if packed:
        dg, dq = dg * rows(seg.real_C), dq * rows(seg.real_C)
    z = tile.logits()
    e = jnp.minimum(jnp.exp2(z * (rate * -LOG2E)), 1e37)
    s = jnp.square(lax.rsqrt(1.0 + e))
    dz = dg * (s * (s * e)) * (rate * lower_bound)
    drate_s[me] = jnp.sum(dz * z, axis=1)
    dot_s[0, me] = jnp.sum(tile.query() * dq, axis=1)
    dot_s[1, me] = jnp.sum(tile.key() * dk, axis=1)
    meet(3)
    along = lambda x: rows(sum(load(dot_s.at[x, at], ROWS) for at in range(nk)))
    # The scale is in the query: its unit vector is query / scale.
    dq = rows(tile.q_C) * (dq - tile.query() * (along(0) * (1.0 / scale**2)))
    dk = rows(tile.k_C) * (dk - tile.key() * along(1))
    targets = (tile.q_s, dq_g, dq), (tile.k_s, dk_g, dk), (tile.z_s, dz_g, dz)
    for place, _, x in targets:
        place[...] = x.astype(jnp.bfloat16)
    plgpu.commit_smem()
    for place, target, _ in targets:
        plgpu.copy_smem_to_gmem(place, target.at[b, tokens, h, part])
    plgpu.copy_smem_to_gmem(drate_s.at[me], drate_g.at[b, h, n, me])
    plgpu.wait_smem_to_gmem(0)


def gradients(
    x: Inputs,
    p: Prepared,
    kept: Kept,
    d: Cotangents,
    do_BTHV,
    scale: float,
    lower_bound: float,
    interpret=None,
) -> Gradients:
    """Everything that each chunk's cotangents say about the inputs."""
    B, T, H, K, V = x.sizes
    N, nk, nv, packed = T // CHUNK, K // TILE, V // TILE, x.index_BT is not None
    out_type = Gradients(
        bfloat16(B, T, H, K), bfloat16(B, T, H, K), bfloat16(B, T, H, V), bfloat16(B, T, H, K),
        float32(B, H, T), float32(B, H, N, nk, CHUNK),
    )  # fmt: skip
    vector = lambda *shape, dtype=jnp.float32: plgpu.SMEM(shape, dtype)
    # One swizzle for all: both operands of a product need the same, and half a tile of columns is read.
    tiles, most = partial(_tiles, columns=HALF), max(nk, nv)
    launch = plgpu.kernel(
        partial(_kernel, x.sizes, scale, lower_bound, packed), out_type=out_type,
        scratch_types=[
            tiles(CHUNK, CHUNK), *(tiles(most, CHUNK, TILE),) * 3,
            *(tiles(CHUNK, CHUNK),) * 2, *(tiles(nk, CHUNK, TILE),) * 5,
            *(tiles(nk, max(nv, 2), TILE, TILE),) * 2,
            vector(K), vector(K), vector(2, CHUNK), vector(2, CHUNK), vector(2, nk, CHUNK), vector(nk, CHUNK),
            *([vector(CHUNK, dtype=jnp.int32), vector(CHUNK)] if packed else []),
            plgpu.Barrier(num_arrivals=4 + 3 * nv + 2 * packed),
            plgpu.Barrier(num_arrivals=3 + 2 * nv, num_barriers=nk),
            plgpu.Barrier(num_arrivals=nk, num_barriers=4),
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
