"""The state over the chunks of a row, forwards; and its cotangent, backwards (README.md).

Both keep their [V, K] in registers, transposed, 64 values of V to a warpgroup: it is the left operand of
the products that read it, and never passes through shared memory. One more warpgroup fetches.
"""

from functools import partial
from typing import Any, NamedTuple

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
    positions,
    products,
    tiles,
    turned,
)

STAGES = 2  # chunks in flight


def _slot(n, count: int):
    return lax.rem(n, jnp.array(count, n.dtype))


class _Walk(NamedTuple):
    """The chunks that a block goes through: those of one piece of a row, for one head."""

    pieces: int  # of a row
    chunks: int  # of a piece
    nk: int  # tiles of key channels
    nv: int  # and of value channels: as many warpgroups compute

    @property
    def stages(self) -> int:
        return min(STAGES, self.chunks)

    def place(self):
        """(row, head, piece, its first chunk)"""
        b, h, g = (lax.axis_index(name) for name in ("row", "head", "piece"))
        return b, h, g, g * self.chunks

    def run(self, fetch, empty, compute) -> None:
        """The last warpgroup fetches chunk after chunk as slots become free; the others compute."""
        me, stages = lax.axis_index("warpgroup"), self.stages

        @pl.when(me == self.nv)
        def _():
            if self.nv > 1:  # two warpgroups have registers enough as they are
                plgpu.set_max_registers(40, action="decrease")
            for step in range(stages):
                fetch(step, step)

            @pl.loop(0, self.chunks - stages)
            def _(step):
                slot = _slot(step, stages)
                plgpu.barrier_wait(empty.at[slot])
                fetch(step + stages, slot)

        @pl.when(me < self.nv)
        def _():
            if self.nv > 1:
                plgpu.set_max_registers(232, action="increase")
            compute(me)

    def launch(self, body, rows_and_heads, out_type, scratch, fetched: int, interpret):
        """A kernel of one block for each piece of each head of each row."""
        (B, H), stages = rows_and_heads, self.stages
        return plgpu.kernel(
            partial(body, self), out_type=out_type,
            scratch_types=[
                *scratch,
                plgpu.Barrier(num_arrivals=fetched, num_barriers=stages),
                plgpu.Barrier(num_arrivals=self.nv, num_barriers=stages),
                plgpu.Barrier(num_barriers=self.nv),
            ],
            grid=(H, self.pieces, B), grid_names=("head", "piece", "row"),
            num_threads=self.nv + 1, thread_name="warpgroup",
            compiler_params=PARAMS, interpret=interpret,
        )  # fmt: skip


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


def _stage(staged_s, matrices) -> None:
    """Each in a tile of its own, in bfloat16, ready to be copied."""
    for c, x in enumerate(matrices):
        staged_s[c] = x.astype(jnp.bfloat16)
    plgpu.commit_smem()


class _Forward(NamedTuple):
    """What a walk forwards is for; one of `outputs`, `kept`, or the last state alone."""

    outputs: bool = False
    kept: bool = False
    transition: bool = False  # of the state: it starts from the identity, and nothing is written to it

    def kernel(self, walk: _Walk, *refs):
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
                n, slot = first + step, _slot(step, stages)
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
                    _stage(staged_s.at[me], [*S, written])
                    for c, part in enumerate(parts):
                        plgpu.copy_smem_to_gmem(staged_s.at[me, c], targets[0].at[b, h, n, mine, part])
                    plgpu.copy_smem_to_gmem(staged_s.at[me, nk], targets[1].at[b, h, n, mine])
                if self.outputs:
                    plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                    staged = staged_s.at[me, _slot(step, 2)]
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
                S = _read_state(S_g.at[b, h, g, mine], state, loaded.at[me], nk)
            S = lax.fori_loop(0, walk.chunks, chunk, S)
            if not self.kept:
                _write_state(S, targets[-1].at[b, h, g, mine], state)
            plgpu.wait_smem_to_gmem(0)

        walk.run(fetch, empty, compute)

    def __call__(self, p: Prepared, S_BHGVK, pieces: int, interpret):
        B, T, H, K, V = _sizes(p)
        V = K if self.transition else V
        walk = _Walk(pieces, T // CHUNK // pieces, K // TILE, V // TILE)
        N, last = T // CHUNK, float32(B, H, pieces, V, K)
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
        return walk.launch(self.kernel, (B, H), out_type, scratch, fetched, interpret)(*inputs)


def _sizes(p: Prepared) -> tuple[int, int, int, int, int]:
    B, H, N, _, K = p.read_BHNRK.shape
    return B, N * CHUNK, H, K, p.u_BHNVC.shape[3]


class Kept(NamedTuple):
    """The forward scan again, for the backward pass: bfloat16, transposed.

    `S_BHNVK` is the state before each chunk; `written_BHNVC` is v' = u - w S.
    """

    S_BHNVK: jax.Array
    written_BHNVC: jax.Array


class Cotangents(NamedTuple):
    """Of the state after each chunk and of what the chunk wrote, bfloat16; of the first states, float32."""

    dS_BHNVK: jax.Array
    d_written_BHNVC: jax.Array
    first_BHGVK: jax.Array


def _backward_kernel(keep: bool, walk: _Walk, *refs):
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
            n, slot = first + walk.chunks - 1 - step, _slot(step, stages)
            plgpu.barrier_wait(full.at[slot])
            narrow = [x.astype(jnp.bfloat16) for x in dS]
            do = turned(do_s.at[slot, :, mine])
            by_state = [(x, turned(out_s.at[slot, :, part])) for x, part in zip(narrow, parts, strict=True)]
            (x,) = products([*by_state, (do, pair_s.at[slot])])
            d_written = x.astype(jnp.bfloat16)
            if keep:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                _stage(staged_s.at[me], [*dS, d_written])
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

        dS = _read_state(dS_g.at[b, h, g, mine], state_s.at[me], loaded.at[me], nk)
        _write_state(lax.fori_loop(0, walk.chunks, chunk, dS), first_g.at[b, h, g, mine], state_s.at[me])

    walk.run(fetch, empty, compute)


def _backward(p: Prepared, do_BTHV, dS_BHGVK, pieces: int, keep: bool, interpret):
    B, T, H, K, V = _sizes(p)
    walk = _Walk(pieces, T // CHUNK // pieces, K // TILE, V // TILE)
    N, stages, nk, nv = T // CHUNK, walk.stages, walk.nk, walk.nv
    out_type = [bfloat16(B, H, N, V, K), bfloat16(B, H, N, V, CHUNK)] if keep else []
    scratch = [
        tiles(stages, 2 * CHUNK, K), tiles(stages, CHUNK, K), tiles(stages, CHUNK, CHUNK),
        plgpu.SMEM((stages, K), jnp.float32), tiles(stages, CHUNK, V),
        tiles(nv, nk + 1 if keep else 1, CHUNK, TILE), tiles(nv, TILE, TILE, dtype=jnp.float32, columns=32),
    ]  # fmt: skip
    out_type = [*out_type, float32(B, H, pieces, V, K)]
    launch = walk.launch(partial(_backward_kernel, keep), (B, H), out_type, scratch, 5, interpret)
    return launch(*p[:3], p.whole_BHNK, do_BTHV, dS_BHGVK)


# ---- pieces of a row, side by side ----


def pieces(heads: int, chunks: int) -> int:
    """How many pieces a row is cut into, from how many heads all rows have and how many chunks a row has.

    A piece is gone through three times: from nothing, from the identity, and from the state that follows.
    That pays where a block for each head leaves most of the card idle.
    """
    for most, wanted in ((16, 8), (32, 4)):
        if heads <= most:
            while wanted > 1 and (chunks % wanted or chunks // wanted < 2 * STAGES):
                wanted //= 2
            return wanted
    return 1


def _joined(first_BHVK, transition_BHGKK, ends_BHGVK):
    """The state before each piece: the one before the last piece carried on, and what that piece adds."""

    def step(S, piece):
        transition, end = piece
        return jnp.einsum("bhvk,bhkj->bhvj", S, transition, precision=lax.Precision.HIGHEST) + end, S

    by_piece = lambda x: jnp.moveaxis(x, 2, 0)
    _, before = lax.scan(step, first_BHVK, (by_piece(transition_BHGKK), by_piece(ends_BHGVK)))
    return jnp.moveaxis(before, 0, 2)


def starts(p: Prepared, S_BHVK, count: int, interpret=None) -> tuple[jax.Array, jax.Array | None]:
    """(the state before each of `count` pieces of a row [B, H, G, V, K], the pieces' transitions)."""
    if count == 1:
        return S_BHVK[:, :, None], None
    (transition,) = _Forward(transition=True)(p, None, count, interpret)
    nothing = jnp.zeros((*S_BHVK.shape[:2], count, *S_BHVK.shape[2:]), jnp.float32)
    (ends,) = _Forward()(p, nothing, count, interpret)
    return _joined(S_BHVK, transition, ends), transition


def outputs(p: Prepared, S_BHVK, interpret=None) -> tuple[jax.Array, jax.Array]:
    """(o_BTHV, the last state, float32 [B, H, V, K]) from the first state."""
    count = pieces(*_blocks(p))
    S_BHGVK, _ = starts(p, S_BHVK, count, interpret)
    o, last = _Forward(outputs=True)(p, S_BHGVK, count, interpret)
    return o, last[:, :, -1]


def states(p: Prepared, S_BHGVK, count: int, interpret=None) -> Kept:
    """What each chunk found and what it wrote, from the state before each piece."""
    return Kept(*_Forward(kept=True)(p, S_BHGVK, count, interpret))


def cotangents(p: Prepared, do_BTHV, dS_BHVK, transition_BHGKK, interpret=None) -> Cotangents:
    """From those of the output and of the last state, over the pieces that `starts` gave transitions of."""
    if transition_BHGKK is None:
        return Cotangents(*_backward(p, do_BTHV, dS_BHVK[:, :, None], 1, True, interpret))
    count = transition_BHGKK.shape[2]
    nothing = jnp.zeros((*dS_BHVK.shape[:2], count, *dS_BHVK.shape[2:]), jnp.float32)
    (begins,) = _backward(p, do_BTHV, nothing, count, False, interpret)
    back = lambda x: jnp.flip(x, 2)
    after = _joined(dS_BHVK, back(jnp.swapaxes(transition_BHGKK, 3, 4)), back(begins))
    return Cotangents(*_backward(p, do_BTHV, back(after), count, True, interpret))


def _blocks(p: Prepared) -> tuple[int, int]:
    B, H, N = p.read_BHNRK.shape[:3]
    return B * H, N
