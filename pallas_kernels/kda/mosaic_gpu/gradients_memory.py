"""A block's shared memory in `gradients`, and how its inputs come there."""

from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.kda.mosaic_gpu.terms import APART, WIDTH
from pallas_kernels.kda.mosaic_gpu.warpgroup import CHUNK, TILE, channels
from pallas_kernels.kda.mosaic_gpu.warpgroup import tiles as _tiles


class Memory(NamedTuple):
    """A block's shared memory, tiles of it numbered; and what its copies and warpgroups wait for."""

    inverse: Any  # later cotangents of scores of keys in one block
    kk: Any  # cotangents of scores of pairs apart
    qk: Any
    own_qk: Any
    sums: Any  # matrices that sum log-decays; in the last two, values at first
    q: Any
    k: Any
    z: Any  # what log-decays are made of, at first and at last
    g: Any  # the same memory: log-decays, in units
    dS: Any
    written: Any
    S: Any
    late: Any  # the same memory: a matrix that sums gradients; scores of small blocks, or decayed keys
    R: Any
    do: Any
    key: Any  # the same memory as R and do: decayed keys
    query: Any  # and queries, before them the second part of keys
    of_channel: Any  # bias, decay of the whole chunk, what the state says of all log-decays; `regained`
    of_token: Any  # norms, the diagonal of do v'^t, and in packed rows whether it is real
    dot: Any  # sums over channels
    index: Any  # of segments, in packed rows
    gate: Any
    raw: Any
    shared: Any
    states: Any
    again: Any
    summing: Any
    met: Any

    @classmethod
    def of(cls, refs) -> "Memory":
        """From memory as `scratch` asks for it."""
        inverse, kk, qk, own_qk, sums, q, k, gates, dS, written, states, values, *rest = refs
        ((z,), (g,)), ((S,), (late,)), ((R, do), (key, query)) = gates, states, values
        ids = [] if len(rest) > 10 else [None]
        return cls(
            inverse, kk, qk, own_qk, sums, q, k, z, g, dS, written, S, late, R, do, key, query,
            *rest[:3], *ids, *rest[3:],
        )  # fmt: skip

    def meet(self, at: int):
        """All warpgroups, with what they have written so far."""
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.met.at[at])
        plgpu.barrier_wait(self.met.at[at])


def scratch(K: int, V: int, packed: bool):
    """What `Memory.of` takes."""
    nk, nv = K // WIDTH, V // TILE
    # One swizzle for all: both operands of a product need the same, and half a tile of columns is read.
    tiles, half = partial(_tiles, columns=WIDTH), partial(_tiles, columns=WIDTH, dtype=jnp.float16)
    vector = lambda *shape, dtype=jnp.float32: plgpu.SMEM(shape, dtype)
    part, square, value = tiles(nk, CHUNK, WIDTH), tiles(CHUNK, CHUNK), tiles(nv, CHUNK, TILE)
    return [
        *(square,) * 4, half(3, CHUNK, CHUNK),
        part, part, plgpu.RefUnion([part], [half(nk, CHUNK, WIDTH)]),
        tiles(K // TILE, max(V, 2 * CHUNK), TILE), tiles(nv, TILE, CHUNK),
        plgpu.RefUnion([tiles(K // TILE, V, TILE)], [tiles(3, CHUNK, CHUNK)]),
        plgpu.RefUnion([value, value], [part, part]),
        # Few allocations: each takes a multiple of 1,024 bytes.
        vector(4, K), vector(4, CHUNK), vector(4, nk, CHUNK),
        *([vector(CHUNK, dtype=jnp.int32)] if packed else []),
        plgpu.Barrier(num_arrivals=2, num_barriers=nk),
        plgpu.Barrier(num_arrivals=2, num_barriers=nk),
        plgpu.Barrier(num_arrivals=4 + 4 * nv + 2 * packed),
        plgpu.Barrier(num_arrivals=2, num_barriers=K // TILE),
        plgpu.Barrier(num_barriers=nk),
        plgpu.Barrier(),
        plgpu.Barrier(num_arrivals=nk, num_barriers=5),
    ]  # fmt: skip


class Sources(NamedTuple):
    """In device memory."""

    q: Any
    k: Any
    z: Any
    bias: Any
    whole: Any
    inverse: Any
    norm: Any
    regained: Any
    v: Any  # bits of bfloat16 as float16: it goes where matrices in float16 will be
    S: Any
    written: Any
    dS: Any
    d_written: Any
    do: Any
    ids: tuple[Any, ...]  # of packed rows: index of segments, whether a token is real


def fetch(m: Memory, me, where, g: Sources) -> None:
    """Starts to copy a chunk's inputs, first what is needed first."""
    (b, h, n), tokens, mine = where, pl.ds(where[2] * CHUNK, CHUNK), pl.ds(me * WIDTH, WIDTH)
    nv = g.written.shape[3] // TILE
    plgpu.copy_gmem_to_smem(g.z.at[b, tokens, h, mine], m.z.at[me], m.gate.at[me])
    plgpu.copy_gmem_to_smem(g.bias.at[h, mine], m.of_channel.at[0, mine], m.gate.at[me])

    @pl.when(me == 0)
    def _():
        for source, target in zip(g.ids, (m.index, m.of_token.at[3]), strict=False):
            plgpu.copy_gmem_to_smem(source.at[b, tokens], target, m.shared)
        plgpu.copy_gmem_to_smem(g.inverse.at[b, h, n], m.inverse, m.shared)
        for v in range(nv):
            of = channels(v)
            plgpu.copy_gmem_to_smem(g.d_written.at[b, h, n, of], m.R.at[v], m.shared)
            plgpu.copy_gmem_to_smem(g.written.at[b, h, n, of], m.written.at[v], m.shared)
            plgpu.copy_gmem_to_smem(g.do.at[b, tokens, h, of], m.do.at[v], m.shared)
            plgpu.copy_gmem_to_smem(g.v.at[b, tokens, h, of], m.sums.at[APART + v], m.shared)
        plgpu.copy_gmem_to_smem(g.whole.at[b, h, n], m.of_channel.at[1], m.shared)
        plgpu.copy_gmem_to_smem(g.norm.at[b, h, n], m.of_token.at[pl.ds(0, 2)], m.shared)
        plgpu.copy_gmem_to_smem(g.regained.at[b, h, tokens], m.of_channel.at[3, channels(0)], m.shared)

    # A tile of the states is 64 channels wide, for two warpgroups.
    pair, values = me // 2, pl.ds(0, nv * TILE)

    @pl.when(me % 2 == 0)
    def _():
        for source, target in ((g.S, m.S), (g.dS, m.dS.at[:, values])):
            plgpu.copy_gmem_to_smem(source.at[b, h, n, :, channels(pair)], target.at[pair], m.states.at[pair])

    for source, target in ((g.q, m.q), (g.k, m.k)):
        plgpu.copy_gmem_to_smem(source.at[b, tokens, h, mine], target.at[me], m.raw.at[me])
