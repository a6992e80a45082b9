"""The state over the chunks of a row, and what tokens read of it."""

from typing import Any, Literal, NamedTuple

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
    positions,
    products,
    tiles,
    turned,
)


class Forward(NamedTuple):
    """A walk forwards.

    `purpose`: the tokens' outputs; what is kept for the backward pass; the last state alone; or the map of
    the state from start to end, by a walk from the identity in which nothing is written to it.
    """

    purpose: Literal["outputs", "kept", "last", "transition"]

    @property
    def outputs(self) -> bool:
        return self.purpose == "outputs"

    @property
    def kept(self) -> bool:
        return self.purpose == "kept"

    @property
    def transition(self) -> bool:
        return self.purpose == "transition"

    def kernel(self, walk: Walk, *refs):
        """All chunks of one head of one piece."""
        nk, stages = walk.nk, walk.stages
        read_g, out_g, whole_g, *refs = refs
        u_g: Any = None
        if not self.transition:
            u_g, *refs = refs
        pair_g: Any = None
        if self.outputs:
            pair_g, *refs = refs
        S_g: Any = None
        if not self.transition:
            S_g, *refs = refs
        count = 2 if self.outputs or self.kept else 1
        targets, refs = refs[:count], refs[count:]
        read_s, out_s, pair_s, u_s, whole_s, staged_s, state_s, full, empty, loaded = refs
        b, h, g, first = walk.place()

        def fetch(step, slot):
            n, ready = first + step, full.at[slot]
            read = read_g.at[b, h, n] if self.outputs else read_g.at[b, h, n, pl.ds(0, CHUNK)]
            plgpu.copy_gmem_to_smem(read, read_s.at[slot], ready)
            for source, target in ((out_g, out_s), (whole_g, whole_s), (u_g, u_s), (pair_g, pair_s)):
                if source is not None:
                    plgpu.copy_gmem_to_smem(source.at[b, h, n], target.at[slot], ready)

        def compute(me):
            mine, parts = channels(me), [channels(c) for c in range(nk)]

            def chunk(step, S):
                n, slot = first + step, slot_of(step, stages)
                plgpu.barrier_wait(full.at[slot])
                narrow = [x.astype(jnp.bfloat16) for x in S]
                by_state = lambda at: [
                    (x, turned(read_s.at[slot, pl.ds(at, CHUNK), part]))
                    for x, part in zip(narrow, parts, strict=True)
                ]
                (x,) = products(by_state(0))
                written = (-x if self.transition else load(u_s.at[slot, mine]) - x).astype(jnp.bfloat16)
                of_output = [*by_state(CHUNK), (written, turned(pair_s.at[slot]))] if self.outputs else []

                def run(*refs):
                    """The next state is ready while the output's products are still under way."""
                    for ref, part in zip(refs, parts, strict=False):
                        plgpu.wgmma(ref, written, out_s.at[slot, :, part])
                    for x, y in of_output:
                        plgpu.wgmma(refs[nk], x, y)
                    added = [plgpu.wgmma_accumulator_load(ref, wait_n=len(of_output)) for ref in refs[:nk]]
                    after = [
                        x * columns(load(whole_s.at[slot, part], COLUMNS)) + y
                        for x, part, y in zip(S, parts, added, strict=True)
                    ]
                    return after, [ref[...] for ref in refs[nk:]]

                sums = [plgpu.WGMMAAccumulatorRef((TILE, TILE))] * (nk + self.outputs)
                after, output = pl.run_scoped(run, *sums)
                plgpu.commit_smem()  # the slot was also read by loads, which a copy may not overtake
                plgpu.barrier_arrive(empty.at[slot])
                if self.kept:
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    stage(staged_s.at[me], [*S, written])
                    for c, part in enumerate(parts):
                        plgpu.copy_smem_to_gmem(staged_s.at[me, c], targets[0].at[b, h, n, mine, part])
                    plgpu.copy_smem_to_gmem(staged_s.at[me, nk], targets[1].at[b, h, n, mine])
                if self.outputs:
                    plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                    staged = staged_s.at[me, slot_of(step, 2)]
                    turned(staged)[...] = output[0].astype(jnp.bfloat16)
                    plgpu.commit_smem()
                    tokens = pl.ds(n * CHUNK, CHUNK)
                    plgpu.copy_smem_to_gmem(staged, targets[0].at[b, tokens, h, mine])
                return after

            state = state_s.at[me]
            if self.transition:
                i, j = positions((me < 0).astype(jnp.int32))
                S = [jnp.where((i == j) & (me == c), 1.0, 0.0) for c in range(nk)]
            else:
                S = read_state(S_g.at[b, h, g, mine], state, loaded.at[me], nk)
            S = lax.fori_loop(0, walk.chunks, chunk, S)
            if not self.kept:
                write_state(S, targets[-1].at[b, h, g, mine], state)
            plgpu.wait_smem_to_gmem(0)

        walk.run(fetch, empty, compute)

    def __call__(self, p: Prepared, S_BHGVK, pieces: Pieces, interpret):
        B, T, H, K, V = sizes_of(p)
        V = K if self.transition else V
        walk = Walk(pieces, T // CHUNK // pieces.of, K // TILE, V // TILE)
        N, last = T // CHUNK, float32(B, H, pieces.taken, V, K)
        out_type = [last]
        if self.outputs:
            out_type = [bfloat16(B, T, H, V), last]
        if self.kept:
            out_type = [bfloat16(B, H, N, V, K), bfloat16(B, H, N, V, CHUNK)]
        stages, nk, nv = walk.stages, walk.nk, walk.nv
        staged = nk + 1 if self.kept else 2 if self.outputs else 1
        scratch = [
            tiles(stages, (1 + self.outputs) * CHUNK, K), tiles(stages, CHUNK, K),
            tiles(stages, CHUNK, CHUNK) if self.outputs else tiles(CHUNK, CHUNK),
            tiles(stages, V, CHUNK), plgpu.SMEM((stages, K), jnp.float32),
            tiles(nv, staged, CHUNK, TILE), tiles(nv, TILE, TILE, dtype=jnp.float32, columns=32),
        ]  # fmt: skip
        inputs = [p.read_BHNRK, p.out_BHNCK, p.whole_BHNK]
        inputs += [] if self.transition else [p.u_BHNVC]
        inputs += [p.pair_BHNCC] if self.outputs else []
        fetched = len(inputs)
        inputs += [] if self.transition else [S_BHGVK]
        return walk.launch(self.purpose, self.kernel, (B, H), out_type, scratch, fetched, interpret)(*inputs)
