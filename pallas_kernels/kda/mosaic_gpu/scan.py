"""The walks over whole rows, cut into pieces that run side by side where heads are few (README.md)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.kda.mosaic_gpu.backward import backward
from pallas_kernels.kda.mosaic_gpu.forward import Forward
from pallas_kernels.kda.mosaic_gpu.prepare import Prepared
from pallas_kernels.kda.mosaic_gpu.walk import STAGES


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
    (transition,) = Forward("transition")(p, None, count, interpret)
    nothing = jnp.zeros((*S_BHVK.shape[:2], count, *S_BHVK.shape[2:]), jnp.float32)
    (ends,) = Forward("last")(p, nothing, count, interpret)
    return _joined(S_BHVK, transition, ends), transition


def outputs(p: Prepared, S_BHVK, interpret=None) -> tuple[jax.Array, jax.Array]:
    """(o_BTHV, the last state, float32 [B, H, V, K]) from the first state."""
    count = pieces(*_blocks(p))
    S_BHGVK, _ = starts(p, S_BHVK, count, interpret)
    o, last = Forward("outputs")(p, S_BHGVK, count, interpret)
    return o, last[:, :, -1]


def states(p: Prepared, S_BHGVK, count: int, interpret=None) -> Kept:
    """What each chunk found and what it wrote, from the state before each piece."""
    return Kept(*Forward("kept")(p, S_BHGVK, count, interpret))


def cotangents(p: Prepared, do_BTHV, dS_BHVK, transition_BHGKK, interpret=None) -> Cotangents:
    """From those of the output and of the last state, over the pieces that `starts` gave transitions of."""
    if transition_BHGKK is None:
        return Cotangents(*backward(p, do_BTHV, dS_BHVK[:, :, None], 1, True, interpret))
    count = transition_BHGKK.shape[2]
    nothing = jnp.zeros((*dS_BHVK.shape[:2], count, *dS_BHVK.shape[2:]), jnp.float32)
    (begins,) = backward(p, do_BTHV, nothing, count, False, interpret)
    back = lambda x: jnp.flip(x, 2)
    after = _joined(dS_BHVK, back(jnp.swapaxes(transition_BHGKK, 3, 4)), back(begins))
    return Cotangents(*backward(p, do_BTHV, back(after), count, True, interpret))


def _blocks(p: Prepared) -> tuple[int, int]:
    B, H, N = p.read_BHNRK.shape[:3]
    return B * H, N
