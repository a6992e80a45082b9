"""Eight CPU devices, quick compiles, strict broadcasting: set before jax is imported."""

import os

FLAGS = (
    "--xla_force_host_platform_device_count=8",
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
)
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *FLAGS]).strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402 (the flags come first)

jax.config.update("jax_numpy_rank_promotion", "raise")
