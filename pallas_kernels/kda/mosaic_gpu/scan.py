"""The state over the chunks of a row, forwards; and its cotangent, backwards (README.md).

Both keep their [V, K] in registers, transposed, 64 values of V to a warpgroup: it is the left operand of
the products that read it, and never passes through shared memory. One more warpgroup fetches.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.kda.mosaic_gpu.prepare import Prepared
from pallas_kernels.kda.mosaic_gpu.warpgroup import (
    CHUNK,
    COLUMNS,
    PARAMS,
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

STAGES = 2  # chunks in flight


def _slot(n, count: int):
    return lax.rem(n, jnp.array(count, n.dtype))


def _roles(N: int, nv: int, stages: int, fetch, empty, compute) -> None:
    """The last warpgroup fetches chunk after chunk as slots become free; the others compute."""
    me = lax.axis_index("warpgroup")

    @pl.when(me == nv)
    def _():
        plgpu.set_max_registers(40, action="decrease")
        for n in range(stages):
            fetch(n, n)

        @pl.loop(0, N - stages)
        def _(n):
            slot = _slot(n, stages)
            plgpu.barrier_wait(empty.at[slot])
            fetch(n + stages, slot)

    @pl.when(me < nv)
    def _():
        plgpu.set_max_registers(232, action="increase")
        compute(me)


def _read_state(source, state_s, loaded, nk: int):
    """[V tile, K] float32 in device memory as nk tiles in registers."""
    S = []
    for c in range(nk):
        plgpu.copy_gmem_to_smem(source.at[:, channels(c)], state_s, loaded)
        plgpu.barrier_wait(loaded)
        S.append(load(state_s))
        plgpu.commit_smem()
    return S


def _write_state(S, target, state_s) -> None:
    for c, x in enumerate(S):
        plgpu.wait_smem_to_gmem(0)
        state_s[...] = x
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(state_s, target.at[:, channels(c)])
    plgpu.wait_smem_to_gmem(0)


def _keep(staged_s, matrices) -> None:
    """Each in a tile of its own, in bfloat16, ready to be copied."""
    for c, x in enumerate(matrices):
        staged_s[c] = x.astype(jnp.bfloat16)
    plgpu.commit_smem()


def _forward_kernel(sizes, keep, *refs):
    """All chunks of one head of one row."""
    _, T, _, K, V = sizes
    nk, nv, N = K // TILE, V // TILE, T // CHUNK
    read_g, out_g, pair_g, u_g, whole_g, S_g, first_g, second_g, *refs = refs
    read_s, out_s, pair_s, u_s, whole_s, staged_s, state_s, full, empty, loaded = refs
    b, h = lax.axis_index("row"), lax.axis_index("head")
    stages = min(STAGES, N)

    def fetch(n, slot):
        read = read_g.at[:, :, :, pl.ds(0, CHUNK)] if keep else read_g
        pairs = [(read, read_s), (out_g, out_s), (u_g, u_s), (whole_g, whole_s)]
        pairs += [] if keep else [(pair_g, pair_s)]
        for source, target in pairs:
            plgpu.copy_gmem_to_smem(source.at[b, h, n], target.at[slot], full.at[slot])

    def compute(me):
        mine, parts = channels(me), [channels(c) for c in range(nk)]

        def chunk(n, S):
            slot = _slot(n, stages)
            plgpu.barrier_wait(full.at[slot])
            narrow = [x.astype(jnp.bfloat16) for x in S]
            by_state = lambda at: [
                (x, turned(read_s.at[slot, pl.ds(at, CHUNK), part]))
                for x, part in zip(narrow, parts, strict=True)
            ]
            (x,) = products(by_state(0))
            written = (load(u_s.at[slot, mine]) - x).astype(jnp.bfloat16)
            of_output = [] if keep else [*by_state(CHUNK), (written, turned(pair_s.at[slot]))]

            def run(*refs):
                """The next state is ready while the output's products are still under way."""
                for ref, part in zip(refs, parts, strict=False):
                    plgpu.wgmma(ref, written, out_s.at[slot, :, part])
                for a, b in of_output:
                    plgpu.wgmma(refs[nk], a, b)
                added = [plgpu.wgmma_accumulator_load(ref, wait_n=len(of_output)) for ref in refs[:nk]]
                after = [
                    x * columns(load(whole_s.at[slot, part], COLUMNS)) + y
                    for x, part, y in zip(S, parts, added, strict=True)
                ]
                return after, [ref[...] for ref in refs[nk:]]

            sums = [plgpu.WGMMAAccumulatorRef((TILE, TILE))] * nk
            sums += [] if keep else [plgpu.WGMMAAccumulatorRef((TILE, CHUNK))]
            after, output = pl.run_scoped(run, *sums)
            plgpu.barrier_arrive(empty.at[slot])
            if keep:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                _keep(staged_s.at[me], [*S, written])
                for c, part in enumerate(parts):
                    plgpu.copy_smem_to_gmem(staged_s.at[me, c], first_g.at[b, h, n, mine, part])
                plgpu.copy_smem_to_gmem(staged_s.at[me, nk], second_g.at[b, h, n, mine])
            else:
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                staged = staged_s.at[me, _slot(n, 2)]
                turned(staged)[...] = output[0].astype(jnp.bfloat16)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(staged, first_g.at[b, pl.ds(n * CHUNK, CHUNK), h, mine])
            return after

        S = _read_state(S_g.at[b, h, mine], state_s.at[me], loaded.at[me], nk)
        S = lax.fori_loop(0, N, chunk, S)
        if not keep:
            _write_state(S, second_g.at[b, h, mine], state_s.at[me])
        plgpu.wait_smem_to_gmem(0)

    _roles(N, nv, stages, fetch, empty, compute)


def _launch(body, sizes, out_type, scratch, fetched: int, interpret):
    """A kernel of one block for each head of each row."""
    B, T, H, _, V = sizes
    nv, stages = V // TILE, min(STAGES, T // CHUNK)
    return plgpu.kernel(
        partial(body, sizes), out_type=out_type,
        scratch_types=[
            *scratch,
            plgpu.Barrier(num_arrivals=fetched, num_barriers=stages),
            plgpu.Barrier(num_arrivals=nv, num_barriers=stages),
            plgpu.Barrier(num_barriers=nv),
        ],
        grid=(H, B), grid_names=("head", "row"), num_threads=nv + 1, thread_name="warpgroup",
        compiler_params=PARAMS, interpret=interpret,
    )  # fmt: skip


def _sizes(p: Prepared) -> tuple[int, int, int, int, int]:
    B, H, N, _, K = p.read_BHNRK.shape
    return B, N * CHUNK, H, K, p.u_BHNVC.shape[3]


def _forward(p: Prepared, S_BHVK, keep: bool, interpret):
    B, T, H, K, V = sizes = _sizes(p)
    N, nk, nv, stages = T // CHUNK, K // TILE, V // TILE, min(STAGES, T // CHUNK)
    if keep:
        outputs = bfloat16(B, H, N, V, K), bfloat16(B, H, N, V, CHUNK)
    else:
        outputs = bfloat16(B, T, H, V), float32(B, H, V, K)
    scratch = [
        tiles(stages, (1 if keep else 2) * CHUNK, K), tiles(stages, CHUNK, K), tiles(stages, CHUNK, CHUNK),
        tiles(stages, V, CHUNK), plgpu.SMEM((stages, K), jnp.float32),
        tiles(nv, nk + 1 if keep else 2, CHUNK, TILE), tiles(nv, TILE, TILE, dtype=jnp.float32, columns=32),
    ]  # fmt: skip
    body = lambda sizes, *refs: _forward_kernel(sizes, keep, *refs)
    launch = _launch(body, sizes, outputs, scratch, 4 if keep else 5, interpret)
    return launch(*p[:5], S_BHVK)


def outputs(p: Prepared, S_BHVK, interpret=None) -> tuple[jax.Array, jax.Array]:
    """(o_BTHV, the last state, float32 [B, H, V, K]) from the first state."""
    return _forward(p, S_BHVK, False, interpret)


class Kept(NamedTuple):
    """The forward scan again, for the backward pass: bfloat16, transposed.

    `S_BHNVK` is the state before each chunk; `written_BHNVC` is v' = u - w S.
    """

    S_BHNVK: jax.Array
    written_BHNVC: jax.Array


def states(p: Prepared, S_BHVK, interpret=None) -> Kept:
    """What each chunk found and what it wrote, from the first state."""
    return Kept(*_forward(p, S_BHVK, True, interpret))


def _backward_kernel(sizes, *refs):
    """All chunks of one head of one row, the last one first."""
    _, T, _, K, V = sizes
    nk, nv, N = K // TILE, V // TILE, T // CHUNK
    read_g, out_g, pair_g, whole_g, do_g, dS_g, kept_g, written_g, first_g, *refs = refs
    read_s, out_s, pair_s, whole_s, do_s, staged_s, state_s, full, empty, loaded = refs
    b, h = lax.axis_index("row"), lax.axis_index("head")
    stages = min(STAGES, N)

    def fetch(step, slot):
        n = N - 1 - step
        for source, target in ((read_g, read_s), (out_g, out_s), (pair_g, pair_s), (whole_g, whole_s)):
            plgpu.copy_gmem_to_smem(source.at[b, h, n], target.at[slot], full.at[slot])
        plgpu.copy_gmem_to_smem(do_g.at[b, pl.ds(n * CHUNK, CHUNK), h], do_s.at[slot], full.at[slot])

    def compute(me):
        mine, parts = channels(me), [channels(c) for c in range(nk)]

        def chunk(step, dS):
            n, slot = N - 1 - step, _slot(step, stages)
            plgpu.barrier_wait(full.at[slot])
            narrow = [x.astype(jnp.bfloat16) for x in dS]
            do = turned(do_s.at[slot, :, mine])
            by_state = [(x, turned(out_s.at[slot, :, part])) for x, part in zip(narrow, parts, strict=True)]
            (x,) = products([*by_state, (do, pair_s.at[slot])])
            d_written = x.astype(jnp.bfloat16)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            _keep(staged_s.at[me], [*dS, d_written])
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
            plgpu.barrier_arrive(empty.at[slot])
            return dS

        dS = _read_state(dS_g.at[b, h, mine], state_s.at[me], loaded.at[me], nk)
        _write_state(lax.fori_loop(0, N, chunk, dS), first_g.at[b, h, mine], state_s.at[me])

    _roles(N, nv, stages, fetch, empty, compute)


class Cotangents(NamedTuple):
    """Of the state after each chunk and of what the chunk wrote, bfloat16; of the first state, float32."""

    dS_BHNVK: jax.Array
    d_written_BHNVC: jax.Array
    first_BHVK: jax.Array


def cotangents(p: Prepared, do_BTHV, dS_BHVK, interpret=None) -> Cotangents:
    """From those of the output and of the last state."""
    B, T, H, K, V = sizes = _sizes(p)
    N, nk, nv, stages = T // CHUNK, K // TILE, V // TILE, min(STAGES, T // CHUNK)
    outputs = bfloat16(B, H, N, V, K), bfloat16(B, H, N, V, CHUNK), float32(B, H, V, K)
    scratch = [
        tiles(stages, 2 * CHUNK, K), tiles(stages, CHUNK, K), tiles(stages, CHUNK, CHUNK),
        plgpu.SMEM((stages, K), jnp.float32), tiles(stages, CHUNK, V), tiles(nv, nk + 1, CHUNK, TILE),
        tiles(nv, TILE, TILE, dtype=jnp.float32, columns=32),
    ]  # fmt: skip
    launch = _launch(_backward_kernel, sizes, outputs, scratch, 5, interpret)
    return Cotangents(*launch(*p[:3], p.whole_BHNK, do_BTHV, dS_BHVK))
