"""Going through the chunks of a row in order, with a [V, K] state in registers (README.md).

The state is transposed, 64 of its V to a warpgroup: it is the left operand of the products that read it, and
never passes through shared memory. One more warpgroup fetches.
"""

from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.kda.mosaic_gpu.prepare import Prepared
from pallas_kernels.kda.mosaic_gpu.warpgroup import CHUNK, PARAMS, channels, load

STAGES = 2  # chunks in flight


def slot_of(n, count: int):
    """Which of `count` places in a ring the n-th thing has."""
    return lax.rem(n, jnp.array(count, n.dtype))


class Pieces(NamedTuple):
    """Those of a row's that are gone through: `taken` from the first one on, of `of`."""

    of: int
    first: int
    taken: int


class Walk(NamedTuple):
    """The chunks that a block goes through: those of one piece of a row, for one head."""

    pieces: Pieces
    chunks: int  # of a piece
    nk: int  # tiles of key channels
    nv: int  # and of value channels: as many warpgroups compute

    @property
    def stages(self) -> int:
        return min(STAGES, self.chunks)

    def place(self):
        """(row, head, which of the pieces gone through, its first chunk)"""
        b, h, g = (lax.axis_index(name) for name in ("row", "head", "piece"))
        return b, h, g, (g + self.pieces.first) * self.chunks

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
                slot = slot_of(step, stages)
                plgpu.barrier_wait(empty.at[slot])
                fetch(step + stages, slot)

            for step in range(stages):  # no barrier may be left with more behind it than was waited for
                plgpu.barrier_wait(empty.at[(self.chunks - stages + step) % stages])

        @pl.when(me < self.nv)
        def _():
            if self.nv > 1:
                plgpu.set_max_registers(232, action="increase")
            compute(me)

    def launch(self, name: str, body, rows_and_heads, out_type, scratch, fetched: int, interpret):
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
            grid=(H, self.pieces.taken, B), grid_names=("head", "piece", "row"),
            num_threads=self.nv + 1, thread_name="warpgroup", kernel_name=f"kda_{name}",
            compiler_params=PARAMS, interpret=interpret,
        )  # fmt: skip


def read_state(source, state_s, loaded, nk: int):
    """[V tile, K] float32 in device memory as nk tiles in registers."""
    S = []
    for c in range(nk):
        plgpu.copy_gmem_to_smem(source.at[:, channels(c)], state_s, loaded)
        plgpu.barrier_wait(loaded)
        S.append(load(state_s))
        plgpu.commit_smem()
    return S


def write_state(S, target, state_s) -> None:
    """The inverse of `read_state`; returns when all is written."""
    for c, x in enumerate(S):
        plgpu.wait_smem_to_gmem(0)
        state_s[...] = x
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(state_s, target.at[:, channels(c)])
    plgpu.wait_smem_to_gmem(0)


def stage(staged_s, matrices) -> None:
    """Each in a tile of its own, in bfloat16, ready to be copied."""
    for c, x in enumerate(matrices):
        staged_s[c] = x.astype(jnp.bfloat16)
    plgpu.commit_smem()


def sizes_of(p: Prepared) -> tuple[int, int, int, int, int]:
    """(B, T, H, K, V)"""
    B, H, N, _, K = p.read_BHNRK.shape
    return B, N * CHUNK, H, K, p.u_BHNVC.shape[3]
