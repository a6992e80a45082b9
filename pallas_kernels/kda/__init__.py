"""Kimi Delta Attention: the chunkwise delta rule with one decay per key channel."""

from pallas_kernels.kda.api import kda, kda_gated
from pallas_kernels.kda.gate import log_decay

__all__ = ["kda", "kda_gated", "log_decay"]
