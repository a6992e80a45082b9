"""The first kernel: everything that a chunk needs besides the state, all chunks at once (README.md)."""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.kda.mosaic_gpu import decay
from pallas_kernels.kda.mosaic_gpu.decay import HALF, QUARTER
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
    tiles,
    turned,
)

SPLIT = 2  # warpgroups of a chunk: each has half of the channels
CHUNKS = 2  # of a block: with four warpgroups the compiler keeps to 128 registers a thread
WIDTH = 32  # channels in a warpgroup's registers at a time
UNIT = 2.0**-10  # of log-decays in float16, so that slow ones are not subnormal


class Inputs(NamedTuple):
    """What both directions read, T a multiple of 128, K and V of 64.

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
    def chunks(self) -> int:
        return self.q_BTHK.shape[1] // CHUNK


class Prepared(NamedTuple):
    """Of every chunk, in the letters of README.md."""

    read_BHNRK: jax.Array  # [2 x 64, K]: w above q_in
    out_BHNCK: jax.Array  # k_out
    pair_BHNCC: jax.Array  # Aqk
    u_BHNVC: jax.Array
    whole_BHNK: jax.Array
    inverse_BHNCC: jax.Array  # T Diag(beta)
    norm_BHNXC: jax.Array  # 1 / |q| (with the scale) and 1 / |k| of the rows


class _Chunk(NamedTuple):
    """What a warpgroup works on: half of the channels of one chunk."""

    at: Any  # which chunk of the block
    me: Any  # which warpgroup of the chunk
    nk: int
    rate: Any
    tiles_s: Any
    g_s: Any
    met: Any

    def zero(self, stage: int):
        """0 at run time. The compiler must not know that it is that of another stage.

        It would compute all stages' masks and addresses first, and has no registers to keep them.
        """
        return (self.rate < -1.0 * stage).astype(jnp.int32)

    def tiles(self, stage: int):
        """Of shared memory: queries, keys; two or three tiles of factors; and log-decays."""
        at = self.at + self.zero(stage)
        return *(self.tiles_s.at[at, place] for place in range(5)), self.g_s.at[at]

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


def _joins(places, size: int):
    """Rows of the second block of a pair of blocks, columns of the first."""
    i_C, j_C = places
    first = jnp.where((i_C & size) != 0, i_C & (-2 * size), -1)
    return rows(first, CHUNK) == columns(j_C & -size)


def _inverse(A, a16, t16, places):
    """(I + A)^-1 of a strictly lower triangular A, by doubling; `a16` and `t16` are free memory.

    From blocks of size s, T <- T - T A T gives those of 2 s where the product lies in the lower left of
    a pair. Keys are unit vectors and beta < 1, so no entry of T is above 1: float16 holds it.
    """
    a16[...] = A.astype(jnp.float16)
    plgpu.commit_smem()
    T = jnp.where(_joins(places, 1), -A, 0.0)
    T = jnp.where(rows(places[0], CHUNK) == columns(places[1]), 1.0, T)
    for size in (2, 4, 8, 16, 32):
        narrow = T.astype(jnp.float16)
        plgpu.commit_smem()
        t16[...] = narrow

        def by_A(total, narrow=narrow):
            """T becomes visible to the next product while this one is under way."""
            plgpu.wgmma(total, narrow, a16)
            plgpu.commit_smem()
            return total[...]

        x = pl.run_scoped(by_A, plgpu.WGMMAAccumulatorRef((CHUNK, CHUNK)))
        (x,) = products([(x.astype(jnp.float16), t16)])
        T = jnp.where(_joins(places, size), T - x, T)
    return T


def _decays(z, bias_K, rate, lower_bound: float):
    """Bounded log-decays to base 2, negated, in units; 1 / x is the square of rsqrt(x)."""
    slope, part = rate * -LOG2E, UNIT / (-lower_bound * LOG2E)
    x = jnp.exp2(z * slope + columns(bias_K * slope + math.log2(part)))
    return jnp.square(lax.rsqrt(part + x))


def _norms(me: _Chunk, scale, dot_s, real_C):
    """1 / |q|, with the scale, and 1 / |k| of the rows; returns when both warpgroups are here."""
    q_s, k_s, *_ = me.tiles(0)
    for x, ref in enumerate((q_s, k_s)):
        dot_s[me.me, x] = sum(jnp.sum(jnp.square(load(part)), axis=1) for (part,) in me.mine(ref))
    me.meet(0)
    q_C, k_C = (
        lax.rsqrt(sum(load(dot_s.at[half, x], ROWS) for half in range(SPLIT)) + 1e-6) for x in range(2)
    )
    return scale * q_C if real_C is None else scale * q_C * real_C, k_C


def _scores(me: _Chunk, matrices, own, norms, fetch):
    """Of pairs of tokens, undefined above the diagonal: of keys, in the second warpgroup of queries.

    `fetch` is called when a tile is free.
    """
    (half, quarter, _), (q_C, k_C) = matrices, norms

    def score(place: int, stage: int):
        here = me.tiles_s.at[me.at + me.zero(stage)]
        left, right = here.at[2 + me.me], here.at[place]
        return products([(left.at[c], turned(right.at[c])) for c in range(me.nk)])[0]

    for q_s, k_s, key_s, query_s, near_s, g_s in me.mine(*me.tiles(1)):
        (x,) = products([(own, g_s)])
        q, k, decay = load(q_s) * rows(q_C, WIDTH), load(k_s) * rows(k_C, WIDTH), jnp.exp2(x)
        near_s[...] = (k * jnp.exp2(-x)).astype(jnp.bfloat16)
        key_s[...], query_s[...] = (k * decay).astype(jnp.bfloat16), (q * decay).astype(jnp.bfloat16)
    me.meet(1)
    scores = score(4, 2)
    for at, (matrix, size) in enumerate(((quarter, QUARTER), (half, HALF))):
        first, stage = True, 3 + 2 * at
        for q_s, k_s, key_s, query_s, _, g_s in me.mine(*me.tiles(stage)):
            (x,) = products([(matrix, g_s)])
            if first:
                me.meet(2 + 2 * at)  # the scores before have been read
            first = False
            decay = jnp.exp2(x)
            key_s[...] = (load(k_s) * rows(k_C, WIDTH) * decay).astype(jnp.bfloat16)
            query_s[...] = (load(q_s) * rows(q_C, WIDTH) * decay).astype(jnp.bfloat16)
        if at == 0:
            fetch()
        me.meet(3 + 2 * at)
        scores = jnp.where(_joins(me.places(stage), size), score(2, stage + 1), scores)
    me.meet(6)
    return scores


def _ends(me: _Chunk, upto, after, norms, seg: decay.Segments):
    """Leaves q_in and k_in in the places of queries and keys, and k_out in that of their factors."""
    q_C, k_C = norms
    for q_s, k_s, _, out_s, _, g_s in me.mine(*me.tiles(8)):
        (x,) = products([(upto, g_s)])
        enter = jnp.exp2(x)
        if seg.enters_C is not None:
            enter = enter * rows(seg.enters_C, WIDTH)
        q_s[...] = (load(q_s) * rows(q_C, WIDTH) * enter).astype(jnp.bfloat16)
        (x,) = products([(after, g_s)])
        leave = jnp.exp2(x)
        if seg.leaves_C is not None:
            leave = leave * rows(seg.leaves_C, WIDTH)
        k = load(k_s) * rows(k_C, WIDTH)
        k_s[...], out_s[...] = (k * enter).astype(jnp.bfloat16), (k * leave).astype(jnp.bfloat16)
    me.meet(7)


def _kernel(sizes, scale, lower_bound, packed, *refs):
    """Two chunks of one head of one row."""
    nk, count = sizes[3] // TILE, 9 if packed else 7
    x: Any = Inputs(*refs[:count], *([] if packed else [None, None]))
    out: Any = Prepared(*refs[count : count + 7])
    tiles_s, g_s, *vectors, ready, came, met, matrices_s, made = refs[count + 7 :]
    warpgroup = lax.axis_index("warpgroup")
    at, mine = warpgroup // SPLIT, warpgroup % SPLIT
    b, h, n = lax.axis_index("row"), lax.axis_index("head"), lax.axis_index("pair") * CHUNKS + at
    vectors = [ref.at[at] for ref in vectors]
    beta_s, bias_s, _, _, _, *ids_s = vectors

    @pl.when(mine == 0)
    def _():
        tokens = pl.ds(n * CHUNK, CHUNK)
        for source, place in ((x.z_BTHK, 4), (x.q_BTHK, 0), (x.k_BTHK, 1)):
            for c in range(nk):
                target = tiles_s.at[at, place, c]
                plgpu.copy_gmem_to_smem(source.at[b, tokens, h, channels(c)], target, ready.at[at])
        plgpu.copy_gmem_to_smem(x.beta_BHT.at[b, h, tokens], beta_s, ready.at[at])
        plgpu.copy_gmem_to_smem(x.bias_HK.at[h], bias_s, ready.at[at])
        for source, target in zip((x.index_BT, x.real_BT), ids_s, strict=False):  # of packed rows
            plgpu.copy_gmem_to_smem(source.at[b, tokens], target, ready.at[at])

    sums = decay.Sums(0, None, -UNIT, jnp.float16)
    for place, matrix in enumerate((sums.half, sums.quarter, sums.upto)):

        @pl.when(warpgroup == place)
        def _(place=place, matrix=matrix):
            matrices_s[place] = matrix()

    plgpu.commit_smem()
    plgpu.barrier_arrive(made)
    plgpu.barrier_wait(made)
    plgpu.barrier_wait(ready.at[at])
    me = _Chunk(at, mine, nk, x.rate_H[h], tiles_s, g_s, met)
    matrices = [matrices_s.at[place] for place in range(3)]
    _chunk(x, out, (b, h, n), me, matrices, vectors, came, scale, lower_bound)


def _chunk(x: Any, out: Any, where, me: _Chunk, matrices, vectors, came, scale, lower_bound):
    """One chunk of one head of one row."""
    (b, h, n), at, mine, nk, packed = where, me.at, me.me, me.nk, x.index_BT is not None
    nv, tokens = out.u_BHNVC.shape[3] // TILE, pl.ds(n * CHUNK, CHUNK)
    beta_s, bias_s, whole_s, norm_s, dot_s, *ids_s = vectors
    q_s, k_s, key_s, out_s, v_s, g_s = me.tiles(0)
    z_s = v_s
    segments = lambda: decay.segments(x.index_BT, ids_s, b, n) if packed else decay.NONE
    sums = lambda stage, same: decay.Sums(me.zero(stage), same, -UNIT, jnp.float16)
    seg = segments()
    for p, (z, g) in enumerate(me.mine(z_s, g_s)):
        bias = load(bias_s.at[pl.ds((mine * nk + p) * WIDTH, WIDTH)], COLUMNS)
        steps = _decays(load(z), bias, me.rate, lower_bound)
        g[...] = (steps * rows(seg.real_C, WIDTH) if packed else steps).astype(jnp.float16)
    q_C, k_C = _norms(me, scale, dot_s, seg.real_C)

    @pl.when(mine == 0)
    def _():
        norm_s[0], norm_s[1] = q_C, k_C

    @pl.when(mine < nk)
    def _():
        last = matrices[2].at[pl.ds(CHUNK - WIDTH, WIDTH)]
        (total,) = products([(turned(g_s.at[mine]), turned(last))])
        whole = jnp.exp2(jnp.min(total, axis=1))  # running sums only fall
        whole_s[channels(mine)] = whole * seg.through if packed else whole

    def fetch():
        """Nothing of v was needed so far."""

        @pl.when(mine < nv)
        def _():
            source = x.v_BTHV.at[b, tokens, h, channels(mine)]
            plgpu.copy_gmem_to_smem(source, v_s.at[mine], came.at[at * SPLIT + mine])

    scores = _scores(me, matrices, sums(1, segments().same).own(), (q_C, k_C), fetch)
    _ends(me, matrices[2], sums(8, None).after(), (q_C, k_C), segments())

    @pl.when(mine < nk)
    def _():
        part = channels(mine)
        plgpu.copy_smem_to_gmem(q_s.at[mine], out.read_BHNRK.at[b, h, n, pl.ds(CHUNK, CHUNK), part])
        plgpu.copy_smem_to_gmem(out_s.at[mine], out.out_BHNCK.at[b, h, n, :, part])

    inverse, pair = key_s.at[0], key_s.at[1]
    i_C, j_C = places = me.places(9)
    same = segments().same
    only = lambda chosen: jnp.where(chosen & same if packed else chosen, scores, 0.0)

    @pl.when(mine == 0)
    def _():
        A = only(rows(i_C, CHUNK) > columns(j_C)) * rows(load(beta_s, ROWS))
        T = _inverse(A, g_s.at[0], g_s.at[1], places)
        inverse[...] = (T * columns(load(beta_s, COLUMNS))).astype(jnp.bfloat16)

    @pl.when(mine == 1)
    def _():
        pair[...] = only(rows(i_C, CHUNK) >= columns(j_C)).astype(jnp.bfloat16)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(pair, out.pair_BHNCC.at[b, h, n])

    me.meet(8)

    k_in, v = k_s.at[mine], v_s.at[mine]
    of_w, of_u = [(inverse, k_in)], [(turned(v), turned(inverse))]
    both = min(nk, nv)

    def replace(*results):
        """Products in the place of their operands, and out."""
        plgpu.commit_smem()
        for ref, result, _ in results:
            ref[...] = result.astype(jnp.bfloat16)
        plgpu.commit_smem()
        for ref, _, target in results:
            plgpu.copy_smem_to_gmem(ref, target)

    w_g = out.read_BHNRK.at[b, h, n, pl.ds(0, CHUNK), channels(mine)]
    u_g = out.u_BHNVC.at[b, h, n, channels(mine)]

    @pl.when(mine < both)
    def _():
        plgpu.barrier_wait(came.at[at * SPLIT + mine])
        w, u = products(of_w, of_u)
        replace((k_in, w, w_g), (v, u, u_g))

    if nk > both:

        @pl.when(mine >= both)
        def _():
            replace((k_in, products(of_w)[0], w_g))

    if nv > both:

        @pl.when(mine >= both)
        def _():
            plgpu.barrier_wait(came.at[at * SPLIT + mine])
            replace((v, products(of_u)[0], u_g))

    @pl.when(mine == 0)
    def _():
        plgpu.copy_smem_to_gmem(inverse, out.inverse_BHNCC.at[b, h, n])
        plgpu.copy_smem_to_gmem(whole_s, out.whole_BHNK.at[b, h, n])
        plgpu.copy_smem_to_gmem(norm_s, out.norm_BHNXC.at[b, h, n])

    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def prepare(x: Inputs, scale: float, lower_bound: float, interpret=None) -> Prepared:
    """Decays, pairs and the triangular inverse of every chunk; queries have the scale in them."""
    B, T, H, K, V = x.sizes
    N, nk, packed = T // CHUNK, K // TILE, x.index_BT is not None
    vector = lambda *shape, dtype=jnp.float32: plgpu.SMEM((CHUNKS, *shape), dtype)
    # One swizzle for all: both operands of a product need the same, and half a tile of columns is written.
    half = partial(tiles, dtype=jnp.float16, columns=WIDTH)
    return Prepared(*plgpu.kernel(
        partial(_kernel, x.sizes, scale, lower_bound, packed),
        out_type=Prepared(
            bfloat16(B, H, N, 2 * CHUNK, K), bfloat16(B, H, N, CHUNK, K), bfloat16(B, H, N, CHUNK, CHUNK),
            bfloat16(B, H, N, V, CHUNK), float32(B, H, N, K), bfloat16(B, H, N, CHUNK, CHUNK),
            float32(B, H, N, 2, CHUNK),
        ),
        scratch_types=[
            tiles(CHUNKS, 5, 2, CHUNK, TILE, columns=WIDTH), half(CHUNKS, 2, CHUNK, TILE),
            vector(CHUNK), vector(K), vector(K), vector(2, CHUNK), vector(SPLIT, 2, CHUNK),
            *([vector(CHUNK, dtype=jnp.int32), vector(CHUNK)] if packed else []),
            plgpu.Barrier(num_arrivals=3 * nk + 2 + 2 * packed, num_barriers=CHUNKS),
            plgpu.Barrier(num_barriers=CHUNKS * SPLIT),
            plgpu.Barrier(num_arrivals=SPLIT, num_barriers=CHUNKS * 2),
            half(3, CHUNK, CHUNK), plgpu.Barrier(num_arrivals=CHUNKS * SPLIT),
        ],
        grid=(N // CHUNKS, H, B), grid_names=("pair", "head", "row"),
        num_threads=CHUNKS * SPLIT, thread_name="warpgroup", kernel_name="kda_prepare",
        compiler_params=PARAMS, interpret=interpret,
    )(*(y for y in x if y is not None)))  # fmt: skip
