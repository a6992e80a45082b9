"""Rows sorted by group, each group times its own matrix."""

from pallas_kernels.grouped_matmul.api import alignment, grouped_matmul

__all__ = ["alignment", "grouped_matmul"]
