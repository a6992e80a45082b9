"""The gated chunkwise form on Hopper GPUs, forward and backward, in Pallas Mosaic GPU kernels."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.kda.mosaic_gpu.op import kda_gated

__all__ = ["kda_gated", "why_not"]

OLDEST = (0, 11)  # of JAX: before, Pallas cannot turn a swizzled tile around
LOWEST = -5.0  # floor of log-decays: a lower one overflows in half a chunk
LARGEST = 128  # key and value channels: what fits shared memory


def why_not(device: Any, *, key: int, value: int, dtype: Any, lower_bound: float | None) -> str | None:
    """Why the kernels cannot run a call on a device; None if they can.

    Args:
      device: a `jax.Device`. key, value: channels of a head. dtype: of query, key, value and logits.
      lower_bound: of the gate, as in `pallas_kernels.kda.log_decay`.
    """
    capability = str(getattr(device, "compute_capability", device.platform))
    if not capability.startswith("9."):
        return f"it needs an NVIDIA GPU of compute capability 9 (Hopper), and this is {capability}"
    if jax.__version_info__[:2] < OLDEST:
        return f"it needs jax {'.'.join(map(str, OLDEST))} or newer, and this is {jax.__version__}"
    if jnp.dtype(dtype) != jnp.bfloat16:
        return f"it takes bfloat16 inputs, not {jnp.dtype(dtype).name}"
    if max(key, value) > LARGEST:
        return f"it takes heads of up to {LARGEST} channels, not {key} for keys and {value} for values"
    if lower_bound is None or lower_bound < LOWEST:
        return f"it takes gates bounded at {LOWEST:g} or above, not {lower_bound}"
    return None
