"""Eight CPU devices, quick compiles, strict broadcasting: set before jax is imported."""

import atexit
import importlib.metadata
import os
import shutil
import tempfile

FLAGS: tuple[str, ...] = (
    "--xla_force_host_platform_device_count=8",
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
)
if importlib.metadata.version("jaxlib") < "0.11":  # three times quicker to compile; later ones do not know it
    FLAGS += ("--xla_cpu_use_fusion_emitters=false",)
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *FLAGS]).strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
# Of a Pallas kernel, interpreted, each warpgroup holds a thread of XLA's pool while it waits for others.
os.environ.setdefault("NPROC", "16")

# Runs of one config compile the same programs: within a session, and in processes that a test
# starts, each is made once.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    cache = tempfile.mkdtemp(prefix="k3jax-tests-")
    atexit.register(shutil.rmtree, cache, ignore_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = cache
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "2"
