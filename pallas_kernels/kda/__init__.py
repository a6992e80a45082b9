"""Kimi Delta Attention: the delta rule with one decay per key channel, chunkwise and one token at a time."""

from pallas_kernels.kda.api import kda, kda_gated
from pallas_kernels.kda.gate import log_decay
from pallas_kernels.kda.step import kda_step

__all__ = ["kda", "kda_gated", "kda_step", "log_decay"]
