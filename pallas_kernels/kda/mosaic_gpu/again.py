"""The first kernel backwards: what `prepare` gave once more, from the little of it that was kept (README.md)."""

from functools import partial
from typing import Any

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
    load,
    products,
    rows,
    tiles,
    turned,
)

WIDTH = 32  # channels in a warpgroup's registers at a time
PARTS = TILE // WIDTH


def _kernel(nk: int, nv: int, form: Form, packed: bool, *refs):
    """One chunk of one head of one row: a warpgroup for each 64 channels of keys and of values."""
    rate_g, before_g, q_g, k_g, v_g, z_g, bias_g, inverse_g, norm_g, *refs = refs
    ids_g, refs = (refs[:2], refs[2:]) if packed else ([], refs)
    read_g, out_g, u_g, *refs = refs
    q_s, k_s, ((z_s,), (g_s,)), v_s, inverse_s, before_s, bias_s, norm_s, *refs = refs
    *ids_s, gate, keys, values, shared = refs
    b, h, n = (lax.axis_index(name) for name in ("row", "head", "chunk"))
    me, tokens = lax.axis_index("warpgroup"), pl.ds(n * CHUNK, CHUNK)
    mine, parts = channels(me), [(me * PARTS + at, pl.ds((me * PARTS + at) * WIDTH, WIDTH)) for at in range(PARTS)]

    @pl.when(me < nk)
    def _():
        for at, part in parts:
            plgpu.copy_gmem_to_smem(z_g.at[b, tokens, h, part], z_s.at[at], gate.at[me])
        plgpu.copy_gmem_to_smem(bias_g.at[h, mine], bias_s.at[mine], gate.at[me])

    @pl.when(me == 0)
    def _():
        shared_ones = (before_g, before_s), (norm_g.at[b, h, n], norm_s), (inverse_g.at[b, h, n], inverse_s)
        for source, target in (*zip([x.at[b, tokens] for x in ids_g], ids_s, strict=True), *shared_ones):
            plgpu.copy_gmem_to_smem(source, target, shared)

    @pl.when(me < nk)
    def _():
        for source, target in ((q_g, q_s), (k_g, k_s)):
            for at, part in parts:
                plgpu.copy_gmem_to_smem(source.at[b, tokens, h, part], target.at[at], keys.at[me])

    @pl.when(me < nv)
    def _():
        plgpu.copy_gmem_to_smem(v_g.at[b, tokens, h, mine], v_s.at[me], values.at[me])

    @pl.when(me < nk)
    def _():
        if packed:
            plgpu.barrier_wait(shared)
        seg = decay.segments(ids_g[0], ids_s, b, n) if packed else decay.NONE
        plgpu.barrier_wait(gate.at[me])
        for at, part in parts:
            steps = form.steps(z_s.at[at], load(bias_s.at[part], COLUMNS), rate_g[h])
            steps = steps * rows(seg.real_C, WIDTH) if packed else steps
            g_s[at] = steps.astype(jnp.float16)
        plgpu.commit_smem()
        if not packed:
            plgpu.barrier_wait(shared)
        plgpu.barrier_wait(keys.at[me])
        norms = [load(norm_s.at[x], ROWS) for x in range(2)]
        for at, _ in parts:
            _ends(*(x.at[at] for x in (q_s, k_s, z_s, g_s)), before_s, norms, seg)
        plgpu.commit_smem()
        for at, part in parts:
            plgpu.copy_smem_to_gmem(q_s.at[at], read_g.at[b, h, n, pl.ds(CHUNK, CHUNK), part])
            plgpu.copy_smem_to_gmem(z_s.at[at], out_g.at[b, h, n, :, part])
        w = products(*([(inverse_s, k_s.at[at])] for at, _ in parts))
        _replace(*((k_s.at[at], x, read_g.at[b, h, n, pl.ds(0, CHUNK), part]) for (at, part), x in zip(parts, w, strict=True)))

    @pl.when(me < nv)
    def _():
        if nv > nk:
            plgpu.barrier_wait(shared)
        plgpu.barrier_wait(values.at[me])
        (u,) = products([(turned(v_s.at[me]), turned(inverse_s))])
        _replace((v_s.at[me], u, u_g.at[b, h, n, mine]))

    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _ends(q_s, k_s, out_s, g_s, before_s, norms, seg: decay.Segments):
    """Leaves q_in and k_in in the places of queries and keys, and k_out in that of log-decays, `out_s`."""
    q_C, k_C = norms
    before, after = products([(before_s, g_s)], [(turned(before_s), g_s)])
    enter, leave = jnp.exp2(before + load(g_s) * UNIT), jnp.exp2(after)
    if seg.enters_C is not None:
        enter, leave = enter * rows(seg.enters_C, WIDTH), leave * rows(seg.leaves_C, WIDTH)
    k = load(k_s) * rows(k_C, WIDTH)
    q_s[...] = (load(q_s) * rows(q_C, WIDTH) * enter).astype(jnp.bfloat16)
    k_s[...] = (k * enter).astype(jnp.bfloat16)
    plgpu.commit_smem()  # log-decays have been read
    out_s[...] = (k * leave).astype(jnp.bfloat16)


def _replace(*results):
    """Products in the places of their operands, and out."""
    plgpu.commit_smem()
    for ref, result, _ in results:
        ref[...] = result.astype(jnp.bfloat16)
    plgpu.commit_smem()
    for ref, _, target in results:
        plgpu.copy_smem_to_gmem(ref, target)


def prepare_again(x: Inputs, solved: Solved, form: Form, interpret=None) -> Prepared:
    """What `prepare` gave of these inputs, of which `solved` was kept."""
    B, T, H, K, V = x.sizes
    N, nk, nv, packed = T // CHUNK, K // TILE, V // TILE, x.index_BT is not None
    before = decay.Sums(np.indices((CHUNK, CHUNK)), None, UNIT, jnp.float16).before()
    # One swizzle for all: both operands of a product need the same, and half a tile of columns is written.
    whole, half = partial(tiles, columns=WIDTH), partial(tiles, dtype=jnp.float16, columns=WIDTH)
    part = nk * PARTS, CHUNK, WIDTH
    vector = lambda *shape, dtype=jnp.float32: plgpu.SMEM(shape, dtype)
    read, out, u = plgpu.kernel(
        partial(_kernel, nk, nv, form, packed),
        out_type=(bfloat16(B, H, N, 2 * CHUNK, K), bfloat16(B, H, N, CHUNK, K), bfloat16(B, H, N, V, CHUNK)),
        scratch_types=[
            whole(*part), whole(*part), plgpu.RefUnion([whole(*part)], [half(*part)]),
            whole(nv, CHUNK, TILE), whole(CHUNK, CHUNK), half(CHUNK, CHUNK),
            vector(K), vector(2, CHUNK),
            *([vector(CHUNK, dtype=jnp.int32), vector(CHUNK)] if packed else []),
            plgpu.Barrier(num_arrivals=1 + PARTS, num_barriers=nk),
            plgpu.Barrier(num_arrivals=2 * PARTS, num_barriers=nk),
            plgpu.Barrier(num_barriers=nv),
            plgpu.Barrier(num_arrivals=3 + 2 * packed),
        ],
        grid=(N, H, B), grid_names=("chunk", "head", "row"),
        num_threads=max(nk, nv), thread_name="warpgroup", kernel_name="kda_prepare_again",
        compiler_params=PARAMS, interpret=interpret,
    )(
        x.rate_H, before, x.q_BTHK, x.k_BTHK, x.v_BTHV, x.z_BTHK, x.bias_HK, solved.inverse_BHNCC,
        solved.norm_BHNXC, *((x.index_BT, x.real_BT) if packed else ()),
    )  # fmt: skip
    return Prepared(read, out, solved.pair_BHNCC, u, *solved[1:])
