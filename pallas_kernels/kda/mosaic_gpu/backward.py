"""The state's cotangent over the chunks of a row, the last one first."""

from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.kda.mosaic_gpu.prepare import Prepared
from pallas_kernels.kda.mosaic_gpu.walk import Pieces, Walk, read_state, sizes_of, slot_of, stage, write_state
from pallas_kernels.kda.mosaic_gpu.warpgroup import (
    CHUNK,
    COLUMNS,
    TILE,
    bfloat16,
    channels,
    columns,
    float32,
    load,
    products,
    tiles,
    turned,
)


def _kernel(keep: bool, walk: Walk, *refs):
    """All chunks of one head of one piece, the last one first."""
    nk, stages = walk.nk, walk.stages
    read_g, out_g, pair_g, whole_g, do_g, dS_g, *refs = refs
    kept_g: Any = None
    written_g: Any = None
    if keep:
        kept_g, written_g, *refs = refs
    first_g, read_s, out_s, pair_s, whole_s, do_s, staged_s, state_s, full, empty, loaded = refs
    b, h, g, first = walk.place()

    def fetch(step, slot):
        n = first + walk.chunks - 1 - step
        for source, target in ((read_g, read_s), (out_g, out_s), (pair_g, pair_s), (whole_g, whole_s)):
            plgpu.copy_gmem_to_smem(source.at[b, h, n], target.at[slot], full.at[slot])
        plgpu.copy_gmem_to_smem(do_g.at[b, pl.ds(n * CHUNK, CHUNK), h], do_s.at[slot], full.at[slot])

    def compute(me):
        mine, parts = channels(me), [channels(c) for c in range(nk)]

        def chunk(step, dS):
            n, slot = first + walk.chunks - 1 - step, slot_of(step, stages)
            plgpu.barrier_wait(full.at[slot])
            narrow = [x.astype(jnp.bfloat16) for x in dS]
            do = turned(do_s.at[slot, :, mine])
            by_state = [(x, turned(out_s.at[slot, :, part])) for x, part in zip(narrow, parts, strict=True)]
            (x,) = products([*by_state, (do, pair_s.at[slot])])
            d_written = x.astype(jnp.bfloat16)
            if keep:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                stage(staged_s.at[me], [*dS, d_written])
                for c, part in enumerate(parts):
                    plgpu.copy_smem_to_gmem(staged_s.at[me, c], kept_g.at[b, h, n, mine, part])
                plgpu.copy_smem_to_gmem(staged_s.at[me, nk], written_g.at[b, h, n, mine])
            w, q_in = (lambda part, at=at: read_s.at[slot, pl.ds(at, CHUNK), part] for at in (0, CHUNK))
            lost = products(*([(d_written, w(part))] for part in parts))
            asked = products(*([(do, q_in(part))] for part in parts))
            dS = [
                x * columns(load(whole_s.at[slot, part], COLUMNS)) + more - less
                for x, part, more, less in zip(dS, parts, asked, lost, strict=True)
            ]
            plgpu.commit_smem()  # as in the walk forwards
            plgpu.barrier_arrive(empty.at[slot])
            return dS

        dS = read_state(dS_g.at[b, h, g, mine], state_s.at[me], loaded.at[me], nk)
        write_state(lax.fori_loop(0, walk.chunks, chunk, dS), first_g.at[b, h, g, mine], state_s.at[me])

    walk.run(fetch, empty, compute)


def backward(p: Prepared, do_BTHV, dS_BHGVK, pieces: Pieces, keep: bool, interpret):
    B, T, H, K, V = sizes_of(p)
    walk = Walk(pieces, T // CHUNK // pieces.of, K // TILE, V // TILE)
    N, stages, nk, nv = T // CHUNK, walk.stages, walk.nk, walk.nv
    out_type = [bfloat16(B, H, N, V, K), bfloat16(B, H, N, V, CHUNK)] if keep else []
    scratch = [
        tiles(stages, 2 * CHUNK, K), tiles(stages, CHUNK, K), tiles(stages, CHUNK, CHUNK),
        plgpu.SMEM((stages, K), jnp.float32), tiles(stages, CHUNK, V),
        tiles(nv, nk + 1 if keep else 1, CHUNK, TILE), tiles(nv, TILE, TILE, dtype=jnp.float32, columns=32),
    ]  # fmt: skip
    out_type = [*out_type, float32(B, H, pieces.taken, V, K)]
    name = "cotangents" if keep else "first_cotangent"
    launch = walk.launch(name, partial(_kernel, keep), (B, H), out_type, scratch, 5, interpret)
    return launch(*p[:3], p.whole_BHNK, do_BTHV, dS_BHGVK)
