"""Hopper GPUs: the chunkwise forms, and one token at a time, in Pallas Mosaic GPU kernels."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.kda.mosaic_gpu.op import kda, kda_gated, row_pieces
from pallas_kernels.kda.mosaic_gpu.step import kda_step

__all__ = ["kda", "kda_gated", "kda_step", "row_pieces", "why_not", "why_not_step"]

OLDEST = (0, 11)  # of JAX: before, Pallas cannot turn a swizzled tile around
LARGEST = 128  # key and value channels: what fits shared memory


def why_not(device: Any, *, key: int, value: int, dtypes: Iterable[Any]) -> str | None:
    """Why the kernels cannot run a call of `kda` or `kda_gated` on a device; None if they can.

    Args:
      device: a `jax.Device`. key, value: channels of a head. dtypes: of query, key, value and logits.
    """
    if (reason := _why_not_here(device)) is not None:
        return reason
    if (reason := _other_than(("bfloat16",), dtypes)) is not None:
        return reason
    return _too_large(key, value) if max(key, value) > LARGEST else None


def why_not_step(device: Any, *, key: int, value: int, dtypes: Iterable[Any]) -> str | None:
    """Why the kernel cannot run a call of `kda_step` on a device; None if it can.

    Args:
      device: a `jax.Device`. key, value: channels of a head. dtypes: of all inputs but the state.
    """
    if (reason := _why_not_here(device)) is not None:
        return reason
    if (reason := _other_than(("bfloat16", "float32"), dtypes)) is not None:
        return reason
    return _too_large(key, value) if max(key, value) > LARGEST else None


def _why_not_here(device: Any) -> str | None:
    capability = str(getattr(device, "compute_capability", device.platform))
    if not capability.startswith("9."):
        return f"it needs an NVIDIA GPU of compute capability 9 (Hopper), and this is {capability}"
    if jax.__version_info__[:2] < OLDEST:
        return f"it needs jax {'.'.join(map(str, OLDEST))} or newer, and this is {jax.__version__}"
    return None


def _other_than(known: Sequence[str], dtypes: Iterable[Any]) -> str | None:
    others = {jnp.dtype(dtype).name for dtype in dtypes}.difference(known)
    return f"it takes {' and '.join(known)} inputs, not {', '.join(sorted(others))}" if others else None


def _too_large(key: int, value: int) -> str:
    return f"it takes heads of up to {LARGEST} channels, not {key} for keys and {value} for values"
