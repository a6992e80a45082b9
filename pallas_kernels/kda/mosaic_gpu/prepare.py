"""The first kernel: everything that a chunk needs besides the state, all chunks at once (README.md)."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.kda.mosaic_gpu import decay
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
    products,
    rows,
    split,
    tiles,
    turned,
)


class Inputs(NamedTuple):
    """What both directions read, T a multiple of 64, K and V of 64.

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


def _inverse(a16, t16, i, j):
    """(I + A)^-1 in float32 of the strictly lower triangular A that lies in `a16`, by doubling.

    From blocks of size s, T <- T - T A T gives those of 2 s where the product lies in the lower left of
    a pair. Keys are unit vectors and beta < 1, so no entry of T is above 1: float16 holds it.
    """
    T = jnp.where((i == j + 1) & (i % 2 == 1), -load(a16), 0.0)
    T = jnp.where(i == j, 1.0, T)
    for size in (2, 4, 8, 16, 32):
        narrow = T.astype(jnp.float16)
        plgpu.commit_smem()
        t16[...] = narrow
        plgpu.commit_smem()
        (x,) = products([(narrow, a16)])
        (x,) = products([(x.astype(jnp.float16), t16)])
        joins = (i // (2 * size) == j // (2 * size)) & (i // size != j // size) & (i > j)
        T = jnp.where(joins, T - x, T)
    return T


def _kernel(sizes, scale, lower_bound, packed, *refs):
    """One chunk of one head of one row."""
    nk, nv = sizes[3] // TILE, sizes[4] // TILE
    q_g, k_g, v_g, z_g, beta_g, rate_g, bias_g, *ids_g = refs[: 9 if packed else 7]
    (
        read_g, out_g, pair_g, u_g, whole_g, inverse_g, norm_g,
        q_s, k_s, z_s, low_s, work_s, ((enter_s, leave_s), (a16, t16)),
        beta_s, bias_s, whole_s, norm_s, *ids_s, ready, came,
    ) = refs[9 if packed else 7 :]  # fmt: skip
    b, h, n = lax.axis_index("row"), lax.axis_index("head"), lax.axis_index("chunk")
    tokens = pl.ds(n * CHUNK, CHUNK)
    for source, target in ((z_g, z_s), (q_g, q_s), (k_g, k_s)):
        for c in range(nk):
            plgpu.copy_gmem_to_smem(source.at[b, tokens, h, channels(c)], target.at[c], ready)
    plgpu.copy_gmem_to_smem(beta_g.at[b, h, tokens], beta_s, ready)
    plgpu.copy_gmem_to_smem(bias_g.at[h], bias_s, ready)
    for source, target in zip(ids_g, ids_s, strict=True):
        plgpu.copy_gmem_to_smem(source.at[b, tokens], target, ready)
    plgpu.barrier_wait(ready)

    rate = rate_g[h]
    seg = decay.segments(ids_g[0], ids_s, b, n) if packed else decay.NONE
    matrices = lambda c: decay.Sums((rate < -c).astype(jnp.int32), seg.same)

    def inverse_norm(ref):
        add = lambda c, total: total + jnp.sum(jnp.square(load(ref.at[c])), axis=1)
        return lax.rsqrt(lax.fori_loop(0, nk, add, plgpu.layout_cast(jnp.zeros((CHUNK,)), ROWS)) + 1e-6)

    q_C, k_C = scale * inverse_norm(q_s), inverse_norm(k_s)
    if packed:
        q_C = q_C * seg.real_C
    norm_s[0], norm_s[1] = q_C, k_C

    key_half, query_half, key_quarter, query_quarter = (work_s.at[at] for at in range(4))

    def one_tile(c, scores):
        """Decays 64 channels of the chunk, in place, and adds what they say about its pairs."""
        part = channels(c)
        sums = matrices(1.0 * c)  # made in the loop: outside, they would fill the registers
        of_half, of_quarter = sums.apart()
        g = decay.bounded(load(z_s.at[c]) + columns(load(bias_s.at[part], COLUMNS)), rate, lower_bound)
        if packed:
            g = g * rows(seg.real_C)
        whole = jnp.exp2(jnp.sum(g, axis=0))
        whole_s[part] = whole * seg.through if packed else whole
        plgpu.commit_smem()
        z_s[c], low_s[...] = split(g)
        plgpu.commit_smem()
        total = lambda matrix: [(matrix, z_s.at[c]), (matrix, low_s)]

        enter, leave = products(total(sums.upto()), total(sums.after()))
        q, k = load(q_s.at[c]) * rows(q_C), load(k_s.at[c]) * rows(k_C)
        enter, leave = jnp.exp2(enter), jnp.exp2(leave)
        if packed:
            enter, leave = enter * rows(seg.enters_C), leave * rows(seg.leaves_C)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        enter_s[...] = (q * enter).astype(jnp.bfloat16)
        leave_s[...] = (k * leave).astype(jnp.bfloat16)
        k_in = (k * enter).astype(jnp.bfloat16)
        for matrix, key_s, query_s in (
            (sums.half(), key_half, query_half),
            (sums.quarter(), key_quarter, query_quarter),
        ):
            (x,) = products(total(matrix))
            x = jnp.exp2(x)
            key_s[...] = (load(k_s.at[c]) * rows(k_C) * x).astype(jnp.bfloat16)
            query_s[...] = (load(q_s.at[c]) * rows(q_C) * x).astype(jnp.bfloat16)
        (own,) = products(total(sums.own()))
        q, k = load(q_s.at[c]) * rows(q_C), load(k_s.at[c]) * rows(k_C)
        to_row = jnp.exp2(own)
        q_s[c] = (q * to_row).astype(jnp.bfloat16)
        k_s[c] = (k * to_row).astype(jnp.bfloat16)
        plgpu.commit_smem()
        z_s[c] = k_in
        low_s[...] = (k * jnp.exp2(-own)).astype(jnp.bfloat16)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(enter_s, read_g.at[b, h, n, pl.ds(CHUNK, CHUNK), part])
        plgpu.copy_smem_to_gmem(leave_s, out_g.at[b, h, n, :, part])

        def score(half, quarter, own):
            x, y, z = products(
                [(half, turned(key_half))], [(quarter, turned(key_quarter))], [(own, turned(low_s))]
            )
            return jnp.where(of_half, x, jnp.where(of_quarter, y, z))

        kk, qk = scores
        kk = kk + score(key_half, key_quarter, k_s.at[c])
        return kk, qk + score(query_half, query_quarter, q_s.at[c])

    nothing = plgpu.layout_cast(jnp.zeros((CHUNK, CHUNK), jnp.float32), MATRIX)
    kk, qk = lax.fori_loop(0, nk, one_tile, (nothing, nothing))
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    for c in range(nv):  # nothing of v was needed so far
        plgpu.copy_gmem_to_smem(v_g.at[b, tokens, h, channels(c)], work_s.at[c], came)

    inverse, pair = work_s.at[2], work_s.at[3]
    i, j = matrices(0.0).i, matrices(0.0).j
    before, seen = j < i, j <= i
    if packed:
        before, seen = before & seg.same, seen & seg.same
    beta_row, beta_column = rows(load(beta_s, ROWS)), columns(load(beta_s, COLUMNS))
    a16[...] = jnp.where(before, kk * beta_row, 0.0).astype(jnp.float16)
    pair[...] = jnp.where(seen, qk, 0.0).astype(jnp.bfloat16)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(pair, pair_g.at[b, h, n])

    inverse[...] = (_inverse(a16, t16, i, j) * beta_column).astype(jnp.bfloat16)
    plgpu.commit_smem()
    plgpu.barrier_wait(came)
    w = products(*([(inverse, z_s.at[c])] for c in range(nk)))
    plgpu.commit_smem()
    for c in range(nk):
        z_s[c] = w[c].astype(jnp.bfloat16)
    u = products(*([(turned(work_s.at[c]), turned(inverse))] for c in range(nv)))
    plgpu.commit_smem()
    for c in range(nv):
        work_s[c] = u[c].astype(jnp.bfloat16)
    plgpu.commit_smem()
    for c in range(nk):
        plgpu.copy_smem_to_gmem(z_s.at[c], read_g.at[b, h, n, pl.ds(0, CHUNK), channels(c)])
    for c in range(nv):
        plgpu.copy_smem_to_gmem(work_s.at[c], u_g.at[b, h, n, channels(c)])
    plgpu.copy_smem_to_gmem(inverse, inverse_g.at[b, h, n])
    plgpu.copy_smem_to_gmem(whole_s, whole_g.at[b, h, n])
    plgpu.copy_smem_to_gmem(norm_s, norm_g.at[b, h, n])
    plgpu.wait_smem_to_gmem(0)


def prepare(x: Inputs, scale: float, lower_bound: float, interpret=None) -> Prepared:
    """Decays, pairs and the triangular inverse of every chunk; queries have the scale in them."""
    B, T, H, K, V = x.sizes
    N, nk, nv, packed = T // CHUNK, K // TILE, V // TILE, x.index_BT is not None
    vector = lambda size, dtype=jnp.float32: plgpu.SMEM((size,), dtype)
    half = partial(tiles, dtype=jnp.float16)
    return Prepared(*plgpu.kernel(
        partial(_kernel, x.sizes, scale, lower_bound, packed),
        out_type=Prepared(
            bfloat16(B, H, N, 2 * CHUNK, K), bfloat16(B, H, N, CHUNK, K), bfloat16(B, H, N, CHUNK, CHUNK),
            bfloat16(B, H, N, V, CHUNK), float32(B, H, N, K), bfloat16(B, H, N, CHUNK, CHUNK),
            float32(B, H, N, 2, CHUNK),
        ),
        scratch_types=[
            *(tiles(nk, CHUNK, TILE),) * 3, tiles(CHUNK, TILE), tiles(4, CHUNK, TILE),
            plgpu.RefUnion(
                [tiles(CHUNK, TILE), tiles(CHUNK, TILE)], [half(CHUNK, CHUNK), half(CHUNK, CHUNK)]
            ),
            vector(CHUNK), vector(K), vector(K), plgpu.SMEM((2, CHUNK), jnp.float32),
            *([vector(CHUNK, jnp.int32), vector(CHUNK)] if packed else []),
            plgpu.Barrier(num_arrivals=3 * nk + 2 + 2 * packed), plgpu.Barrier(num_arrivals=nv),
        ],
        grid=(N, H, B), grid_names=("chunk", "head", "row"), kernel_name="kda_prepare",
        compiler_params=PARAMS, interpret=interpret,
    )(*(y for y in x if y is not None)))  # fmt: skip
