"""The last kernel of the backward pass: gradients of raw inputs, all chunks at once (README.md).

A block has a warpgroup for each tile of 64 key channels. What they share, the pairs' cotangents, each makes
a part of; from then on a tile's channels are its own, but for the norm of queries and keys.
"""

from functools import partial
from typing import NamedTuple

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


def _kernel(sizes, scale, lower_bound, packed, *refs):
    """One chunk of one head of one row."""
    nk, nv = sizes[3] // TILE, sizes[4] // TILE
    q_g, k_g, z_g, rate_g, bias_g, whole_g, inverse_g, norm_g, *refs = refs
    S_g, written_g, dS_g, d_written_g, do_g, *refs = refs
    ids_g, refs = (refs[:2], refs[2:]) if packed else ([], refs)
    dq_g, dk_g, dv_g, dz_g, dbeta_g, drate_g, *refs = refs
    (
        inverse_s, d_written_s, written_s, do_s, kk_s, qk_s, q_s, k_s, z_s, high_s, low_s, S_s, dS_s,
        bias_s, whole_s, norm_s, diagonal_s, dot_s, drate_s, *ids_s, shared, own, met,
    ) = refs  # fmt: skip
    b, h, n = lax.axis_index("row"), lax.axis_index("head"), lax.axis_index("chunk")
    c = lax.axis_index("warpgroup")
    tokens, part = pl.ds(n * CHUNK, CHUNK), channels(c)

    def meet(at: int):
        """All warpgroups, with what they have written so far."""
        plgpu.commit_smem()
        plgpu.barrier_arrive(met.at[at])
        plgpu.barrier_wait(met.at[at])

    @pl.when(c == 0)
    def _():
        plgpu.copy_gmem_to_smem(inverse_g.at[b, h, n], inverse_s, shared)
        for v in range(nv):
            part = channels(v)
            plgpu.copy_gmem_to_smem(d_written_g.at[b, h, n, part], d_written_s.at[v], shared)
            plgpu.copy_gmem_to_smem(written_g.at[b, h, n, part], written_s.at[v], shared)
            plgpu.copy_gmem_to_smem(do_g.at[b, tokens, h, part], do_s.at[v], shared)
        plgpu.copy_gmem_to_smem(bias_g.at[h], bias_s, shared)
        plgpu.copy_gmem_to_smem(whole_g.at[b, h, n], whole_s, shared)
        plgpu.copy_gmem_to_smem(norm_g.at[b, h, n], norm_s, shared)
        for source, target in zip(ids_g, ids_s, strict=True):
            plgpu.copy_gmem_to_smem(source.at[b, tokens], target, shared)

    for source, target in ((z_g, z_s), (q_g, q_s), (k_g, k_s)):
        plgpu.copy_gmem_to_smem(source.at[b, tokens, h, part], target.at[c], own.at[c])
    for source, target in ((dS_g, dS_s), (S_g, S_s)):
        for v in range(nv):
            plgpu.copy_gmem_to_smem(source.at[b, h, n, channels(v), part], target.at[c, v], own.at[c])
    plgpu.barrier_wait(shared)

    rate = rate_g[h]
    seg = decay.segments(ids_g[0], ids_s, b, n) if packed else decay.NONE
    opaque = (rate < 0).astype(jnp.int32)
    sums = decay.Sums(opaque, seg.same)
    i, j = sums.i, sums.j

    # R = Diag(beta) T^t dv': the cotangent of v, and with v' that of the pairs of keys.
    for v in range(nv):

        @pl.when(c == v % nk)
        def _(v=v):
            (x,) = products([(turned(inverse_s), turned(d_written_s.at[v]))])
            plgpu.commit_smem()
            d_written_s[v] = x.astype(jnp.bfloat16)

    meet(0)
    R = d_written_s
    before = j < i if seg.same is None else (j < i) & seg.same
    diagonal = lambda x: jnp.sum(jnp.where(i == j, x, 0.0), axis=1)

    @pl.when(c == 0)
    def _():
        (x,) = products([(R.at[v], written_s.at[v]) for v in range(nv)])
        diagonal_s[0] = diagonal(x)
        kk_s[...] = jnp.where(before, -x, 0.0).astype(jnp.bfloat16)

    @pl.when(c == nk - 1)
    def _():
        (x,) = products([(do_s.at[v], written_s.at[v]) for v in range(nv)])
        diagonal_s[1] = diagonal(x)
        qk_s[...] = jnp.where(before, x, 0.0).astype(jnp.bfloat16)

    meet(1)

    @pl.when(c == 0)
    def _():
        for v in range(nv):
            plgpu.copy_smem_to_gmem(R.at[v], dv_g.at[b, tokens, h, channels(v)])
        plgpu.copy_smem_to_gmem(diagonal_s.at[0], dbeta_g.at[b, h, tokens])

    q_s, k_s, z_s, high_s, low_s, S_s, dS_s = (ref.at[c] for ref in (q_s, k_s, z_s, high_s, low_s, S_s, dS_s))
    plgpu.barrier_wait(own.at[c])
    q_C, k_C = load(norm_s.at[0], ROWS), load(norm_s.at[1], ROWS)
    query, key = lambda: load(q_s) * rows(q_C), lambda: load(k_s) * rows(k_C)
    logits = lambda: load(z_s) + columns(load(bias_s.at[part], COLUMNS))

    def put(x):
        """x in two parts, for a product with a matrix of `sums`."""
        plgpu.commit_smem()
        high_s[...], low_s[...] = split(x)
        plgpu.commit_smem()

    total = lambda matrix: [(matrix, high_s), (matrix, low_s)]

    def put_decays():
        g = decay.bounded(logits(), rate, lower_bound)
        put(g if seg.real_C is None else g * rows(seg.real_C))

    put_decays()
    enter, leave = products(total(sums.upto()), total(sums.after()))
    enter, leave = jnp.exp2(enter), jnp.exp2(leave)
    if packed:
        enter, leave = enter * rows(seg.enters_C), leave * rows(seg.leaves_C)

    # To the states. What decays a product has the product itself as its gradient: `lasting` collects it for
    # what decays after a token, `through` for what decays up to it, `held` for the state.
    (d_leave,) = products([(turned(written_s.at[v]), dS_s.at[v]) for v in range(nv)])
    dk = d_leave * leave
    lasting = key() * dk
    asked, missed = products(
        [(do_s.at[v], S_s.at[v]) for v in range(nv)], [(R.at[v], S_s.at[v]) for v in range(nv)]
    )
    dq, less = asked * enter, missed * enter
    through = query() * dq - key() * less
    dk = dk - less
    held = sum(load(S_s.at[v]) * load(dS_s.at[v]) for v in range(nv))
    held = held * columns(load(whole_s.at[part], COLUMNS))
    put(lasting)
    (dg,) = products(total(sums.before()))
    put(held)
    everyone = jnp.where(i >= 0, 1.0 + opaque.astype(jnp.float32), 0.0).astype(jnp.bfloat16)
    (x,) = products(total(everyone))
    dg = dg + x

    # To the pairs, factored as in `prepare`. The states' memory is free from here on, and once all are
    # here, so is that of v' and of the output's cotangent.
    meet(2)
    key_s, query_s, near_s, of_keys_s, of_queries_s = (
        S_s.at[0],
        S_s.at[1],
        dS_s.at[0],
        written_s.at[c],
        do_s.at[c],
    )
    put_decays()

    def decayed(matrix):
        """Keys and queries decayed by what `matrix` sums, for products; and that decay."""
        (x,) = products(total(matrix))
        x = jnp.exp2(x)
        plgpu.commit_smem()
        key_s[...], query_s[...] = (key() * x).astype(jnp.bfloat16), (query() * x).astype(jnp.bfloat16)
        return x

    def only(chosen):
        """The cotangents of some pairs, for products."""
        for source, target in ((kk_s, of_keys_s), (qk_s, of_queries_s)):
            target[...] = jnp.where(chosen, load(source), 0.0).astype(jnp.bfloat16)
        plgpu.commit_smem()

    first, second = pl.ds(0, HALF), pl.ds(HALF, HALF)
    of_half, of_quarter = sums.apart()
    x = decayed(sums.half())
    plgpu.commit_smem()
    y, z = products([(kk_s.at[:, first], key_s.at[first])], [(qk_s.at[:, first], key_s.at[first])])
    (w,) = products(
        [(turned(kk_s.at[second]), key_s.at[second]), (turned(qk_s.at[second]), query_s.at[second])]
    )
    late = i >= HALF
    y, z = x * jnp.where(late, y, w), x * jnp.where(late, z, 0.0)
    dk, dq = dk + y, dq + z
    through = through + key() * jnp.where(late, y, -y) + query() * z

    x = decayed(sums.quarter())
    only(of_quarter)
    y, z = products(
        [(of_keys_s, key_s), (turned(of_keys_s), key_s), (turned(of_queries_s), query_s)],
        [(of_queries_s, key_s)],
    )
    y, z = x * y, x * z
    dk, dq = dk + y, dq + z
    through = through + key() * jnp.where(i // QUARTER % 2 == 1, y, -y) + query() * z

    x = decayed(sums.own())
    back = jnp.square(lax.rsqrt(x))  # 1 / x
    near_s[...] = (key() * back).astype(jnp.bfloat16)
    only(~(of_half | of_quarter))
    y, z = products([(of_keys_s, near_s)], [(of_queries_s, near_s)])
    y, z = x * y, x * z
    dk, dq = dk + y, dq + z
    through = through + key() * y + query() * z
    (y,) = products([(turned(of_keys_s), key_s), (turned(of_queries_s), query_s)])
    y = back * y
    dk, through = dk + y, through - key() * y
    put(through)
    (x,) = products(total(sums.onward()))
    dg = dg + x
    own_pair = rows(load(diagonal_s.at[1], ROWS))
    dq, dk = dq + own_pair * key(), dk + own_pair * query()

    # To the raw inputs.
    if packed:
        dg, dq = dg * rows(seg.real_C), dq * rows(seg.real_C)
    z = logits()
    e = jnp.minimum(jnp.exp2(z * (rate * -LOG2E)), 1e37)
    s = jnp.square(lax.rsqrt(1.0 + e))
    dz = dg * (s * (s * e)) * (rate * lower_bound)
    drate_s[c] = jnp.sum(dz * z, axis=1)
    dot_s[0, c] = jnp.sum(query() * dq, axis=1)
    dot_s[1, c] = jnp.sum(key() * dk, axis=1)
    meet(3)
    along = lambda x: sum(load(dot_s.at[x, at], ROWS) for at in range(nk))
    # The scale is in q: its unit vector is q / scale.
    dq = rows(q_C) * (dq - query() * rows(along(0) * (1.0 / scale**2)))
    dk = rows(k_C) * (dk - key() * rows(along(1)))
    q_s[...], k_s[...], z_s[...] = (x.astype(jnp.bfloat16) for x in (dq, dk, dz))
    plgpu.commit_smem()
    for source, target in ((q_s, dq_g), (k_s, dk_g), (z_s, dz_g)):
        plgpu.copy_smem_to_gmem(source, target.at[b, tokens, h, part])
    plgpu.copy_smem_to_gmem(drate_s.at[c], drate_g.at[b, h, n, c])
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
            tiles(CHUNK, CHUNK), tiles(nv, CHUNK, TILE), *(tiles(most, CHUNK, TILE),) * 2,
            *(tiles(CHUNK, CHUNK),) * 2, *(tiles(nk, CHUNK, TILE),) * 5,
            *(tiles(nk, max(nv, 2), TILE, TILE),) * 2,
            vector(K), vector(K), vector(2, CHUNK), vector(2, CHUNK), vector(2, nk, CHUNK), vector(nk, CHUNK),
            *([vector(CHUNK, dtype=jnp.int32), vector(CHUNK)] if packed else []),
            plgpu.Barrier(num_arrivals=4 + 3 * nv + 2 * packed),
            plgpu.Barrier(num_arrivals=3 + 2 * nv, num_barriers=nk),
            plgpu.Barrier(num_arrivals=nk, num_barriers=4),
        ],
        grid=(N, H, B), grid_names=("chunk", "head", "row"), num_threads=nk, thread_name="warpgroup",
        compiler_params=PARAMS, interpret=interpret,
    )  # fmt: skip
    ids = (x.index_BT, x.real_BT) if packed else ()
    return Gradients(*launch(
        x.q_BTHK, x.k_BTHK, x.z_BTHK, x.rate_H, x.bias_HK, p.whole_BHNK, p.inverse_BHNCC, p.norm_BHNXC,
        kept.S_BHNVK, kept.written_BHNVC, d.dS_BHNVK, d.d_written_BHNVC, do_BTHV, *ids,
    ))  # fmt: skip
