"""The walks over whole rows, cut into pieces that run side by side where heads are few (README.md)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.kda.mosaic_gpu.backward import backward
from pallas_kernels.kda.mosaic_gpu.forward import Forward
from pallas_kernels.kda.mosaic_gpu.prepare import Prepared
from pallas_kernels.kda.mosaic_gpu.walk import STAGES, Pieces


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

    Forwards, most pieces are gone through three times: from nothing, from the identity, and from the state
    that follows; backwards twice. That pays where a block for each head leaves most of the card idle.
    """
    for most, wanted in ((16, 8), (32, 4)):
        if heads <= most:
            while wanted > 1 and (chunks % wanted or chunks // wanted < 2 * STAGES):
                wanted //= 2
            return wanted
    return 1


def _seeds(S_BHVK, count: int):
    """What `count` pieces start from: the first from S, the others from nothing."""
    return jnp.pad(S_BHVK[:, :, None], ((0, 0), (0, 0), (0, count - 1), (0, 0), (0, 0)))


def _joined(S_BHVK, ends_BHGVK, transition_BHGKK):
    """What each piece starts from: S, the first one's end, then that carried on with what others add."""
    found = [S_BHVK, ends_BHGVK[:, :, 0]]
    for g in range(transition_BHGKK.shape[2]):
        carried = jnp.einsum(
            "bhvk,bhkj->bhvj", found[-1], transition_BHGKK[:, :, g], precision=lax.Precision.HIGHEST
        )
        found.append(carried + ends_BHGVK[:, :, 1 + g])
    return jnp.stack(found, 2)


def starts(p: Prepared, S_BHVK, interpret=None) -> tuple[jax.Array, jax.Array]:
    """The state before each piece of a row, and the maps of it by all pieces but the first and last."""
    count = pieces(*_blocks(p))
    B, H, _, K = S_BHVK.shape
    transition = jnp.zeros((B, H, 0, K, K), jnp.float32)
    if count == 1:
        return S_BHVK[:, :, None], transition
    if count > 2:
        (transition,) = Forward("transition")(p, None, Pieces(count, 1, count - 2), interpret)
    seeds = _seeds(S_BHVK, count - 1)
    (ends,) = Forward("last")(p, seeds, Pieces(count, 0, count - 1), interpret)
    return _joined(S_BHVK, ends, transition), transition


def outputs(p: Prepared, S_BHGVK, interpret=None) -> tuple[jax.Array, jax.Array]:
    """(o_BTHV, the last state, float32 [B, H, V, K]) from the state before each piece."""
    count = S_BHGVK.shape[2]
    o, last = Forward("outputs")(p, S_BHGVK, Pieces(count, 0, count), interpret)
    return o, last[:, :, -1]


def states(p: Prepared, S_BHGVK, interpret=None) -> Kept:
    """What each chunk found and what it wrote, from the state before each piece."""
    count = S_BHGVK.shape[2]
    return Kept(*Forward("kept")(p, S_BHGVK, Pieces(count, 0, count), interpret))


def cotangents(p: Prepared, do_BTHV, dS_BHVK, transition_BHGKK, interpret=None) -> Cotangents:
    """From those of the output and of the last state, with the maps that `starts` gave."""
    count = pieces(*_blocks(p))
    after, back = dS_BHVK[:, :, None], lambda x: jnp.flip(x, 2)
    if count > 1:
        seeds = back(_seeds(dS_BHVK, count - 1))
        (begins,) = backward(p, do_BTHV, seeds, Pieces(count, 1, count - 1), False, interpret)
        transposed = jnp.swapaxes(transition_BHGKK, 3, 4)
        after = back(_joined(dS_BHVK, back(begins), back(transposed)))
    return Cotangents(*backward(p, do_BTHV, after, Pieces(count, 0, count), True, interpret))


def _blocks(p: Prepared) -> tuple[int, int]:
    B, H, N = p.read_BHNRK.shape[:3]
    return B * H, N
