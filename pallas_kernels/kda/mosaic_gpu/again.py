"""The first kernel backwards: what `prepare` gave, once more, from the little that was kept (README.md)."""

from functools import partial

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.kda.mosaic_gpu import decay
from pallas_kernels.kda.mosaic_gpu.form import UNIT, Form
from pallas_kernels.kda.mosaic_gpu.prepare import Inputs, Prepared, Solved
from pallas_kernels.kda.mosaic_gpu.warpgroup import (
    CHUNK,
    COLUMNS,
    PARAMS,
    ROWS,
    TILE,
    bfloat16,
    channels,
    columns,
    load,
    products,
    replace,
    rows,
    tiles,
    turned,
)


def _kernel(nk: int, nv: int, form: Form, packed: bool, *refs):
    """One chunk of one head of one row: a warpgroup for each 64 channels of keys and of values."""
    rate_g, before_g, q_g, k_g, v_g, z_g, bias_g, regained_g, inverse_g, norm_g, *refs = refs
    ids_g, refs = (refs[:2], refs[2:]) if packed else ([], refs)
    read_g, out_g, u_g, *refs = refs
    q_s, k_s, ((z_s,), (g_s,)), v_s, inverse_s, before_s, bias_s, regained_s, norm_s, *refs = refs
    *ids_s, gate, keys, values, shared = refs
    b, h, n = (lax.axis_index(name) for name in ("row", "head", "chunk"))
    me, tokens = lax.axis_index("warpgroup"), pl.ds(n * CHUNK, CHUNK)
    mine = channels(me)

    @pl.when(me < nk)
    def _():
        plgpu.copy_gmem_to_smem(z_g.at[b, tokens, h, mine], z_s.at[me], gate.at[me])
        plgpu.copy_gmem_to_smem(bias_g.at[h, mine], bias_s.at[mine], gate.at[me])

    @pl.when(me == 0)
    def _():
        of_chunk = (x.at[b, h, n] for x in (norm_g, inverse_g))
        sources = before_g, *of_chunk, regained_g.at[b, h, tokens], *(x.at[b, tokens] for x in ids_g)
        for source, target in zip(sources, (before_s, norm_s, inverse_s, regained_s, *ids_s), strict=True):
            plgpu.copy_gmem_to_smem(source, target, shared)

    @pl.when(me < nk)
    def _():
        for source, target in ((q_g, q_s), (k_g, k_s)):
            plgpu.copy_gmem_to_smem(source.at[b, tokens, h, mine], target.at[me], keys.at[me])

    @pl.when(me < nv)
    def _():
        plgpu.copy_gmem_to_smem(v_g.at[b, tokens, h, mine], v_s.at[me], values.at[me])

    @pl.when(me < nk)
    def _():
        if packed:
            plgpu.barrier_wait(shared)
        seg = decay.segments(ids_g[0], ids_s, b, n) if packed else decay.NONE
        plgpu.barrier_wait(gate.at[me])
        steps = form.steps(z_s.at[me], load(bias_s.at[mine], COLUMNS), rate_g[h])
        g_s[me] = (steps * rows(seg.real_C) if packed else steps).astype(jnp.float16)
        plgpu.commit_smem()
        if not packed:
            plgpu.barrier_wait(shared)
        plgpu.barrier_wait(keys.at[me])
        norms = [load(norm_s.at[x], ROWS) for x in range(2)]
        _ends(q_s.at[me], k_s.at[me], z_s.at[me], g_s.at[me], before_s, norms, seg)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(q_s.at[me], read_g.at[b, h, n, pl.ds(CHUNK, CHUNK), mine])
        plgpu.copy_smem_to_gmem(z_s.at[me], out_g.at[b, h, n, :, mine])
        (w,) = products([(inverse_s, k_s.at[me])])
        w = w * rows(load(regained_s, ROWS))
        replace((k_s.at[me], w, read_g.at[b, h, n, pl.ds(0, CHUNK), mine]))

    if nv > nk:

        @pl.when(me >= nk)
        def _():
            plgpu.barrier_wait(shared)  # as the others have: a second time, it would be for the next arrivals

    @pl.when(me < nv)
    def _():
        plgpu.barrier_wait(values.at[me])
        (u,) = products([(turned(v_s.at[me]), turned(inverse_s))])
        u = u * columns(load(regained_s, COLUMNS))
        replace((v_s.at[me], u, u_g.at[b, h, n, mine]))

    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _ends(q_s, k_s, out_s, g_s, before_s, norms, seg: decay.Segments):
    """Leaves q_in and k_in in the places of queries and keys, and k_out in that of log-decays, `out_s`."""
    q_C, k_C = norms
    (before,) = products([(before_s, g_s)])
    enter = jnp.exp2(before + load(g_s) * UNIT)
    if seg.enters_C is not None:
        enter = enter * rows(seg.enters_C)
    q_s[...] = (load(q_s) * rows(q_C) * enter).astype(jnp.bfloat16)
    (after,) = products([(turned(before_s), g_s)])
    leave = jnp.exp2(after)
    if seg.leaves_C is not None:
        leave = leave * rows(seg.leaves_C)
    k = load(k_s) * rows(k_C)
    k_s[...] = (k * enter).astype(jnp.bfloat16)
    plgpu.commit_smem()  # log-decays have been read
    out_s[...] = (k * leave).astype(jnp.bfloat16)


def prepare_again(x: Inputs, solved: Solved, form: Form, interpret=None) -> Prepared:
    """What `prepare` gave of these inputs, of which `solved` was kept."""
    B, T, H, K, V = x.sizes
    N, nk, nv, packed = T // CHUNK, K // TILE, V // TILE, x.index_BT is not None
    before = decay.Sums(np.indices((CHUNK, CHUNK)), None, UNIT, jnp.float16).before()
    half = partial(tiles, dtype=jnp.float16)
    key, value = tiles(nk, CHUNK, TILE), tiles(nv, CHUNK, TILE)
    vector = lambda *shape, dtype=jnp.float32: plgpu.SMEM(shape, dtype)
    read, out, u = plgpu.kernel(
        partial(_kernel, nk, nv, form, packed),
        out_type=(bfloat16(B, H, N, 2 * CHUNK, K), bfloat16(B, H, N, CHUNK, K), bfloat16(B, H, N, V, CHUNK)),
        scratch_types=[
            key, key, plgpu.RefUnion([key], [half(nk, CHUNK, TILE)]), value, tiles(CHUNK, CHUNK),
            half(CHUNK, CHUNK),
            vector(K), vector(CHUNK), vector(2, CHUNK),
            *([vector(CHUNK, dtype=jnp.int32), vector(CHUNK)] if packed else []),
            plgpu.Barrier(num_arrivals=2, num_barriers=nk),
            plgpu.Barrier(num_arrivals=2, num_barriers=nk),
            plgpu.Barrier(num_barriers=nv),
            plgpu.Barrier(num_arrivals=4 + 2 * packed),
        ],
        grid=(H, N, B), grid_names=("head", "chunk", "row"),
        num_threads=max(nk, nv), thread_name="warpgroup", kernel_name="kda_prepare_again",
        compiler_params=PARAMS, interpret=interpret,
    )(
        x.rate_H, before, x.q_BTHK, x.k_BTHK, x.v_BTHV, x.z_BTHK, x.bias_HK, x.regained_BHT,
        solved.inverse_BHNCC, solved.norm_BHNXC, *((x.index_BT, x.real_BT) if packed else ()),
    )  # fmt: skip
    return Prepared(read, out, solved.pair_BHNCC, u, *solved[1:])
