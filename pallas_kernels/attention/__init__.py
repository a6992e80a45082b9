"""Causal softmax attention over packed rows, without a [T, T] array."""

from pallas_kernels.attention.api import attention

__all__ = ["attention"]
