"""A Hopper GPU that is not there: what tests of its kernels ask about, and lower for."""

import contextlib
import inspect
from types import SimpleNamespace

import jax
import pytest

from pallas_kernels.kda import mosaic_gpu

NEW = jax.__version_info__[:2] >= mosaic_gpu.OLDEST
needs_new = pytest.mark.skipif(not NEW, reason=f"needs jax {mosaic_gpu.OLDEST} or newer")
HOPPER = SimpleNamespace(platform="gpu", compute_capability="9.0")


def abstract_hopper(axes=("one",)):
    """A mesh of one card."""
    facts = {"device_kind": "NVIDIA H200", "num_cores": 132, "platform": "gpu"}
    known = inspect.signature(jax.sharding.AbstractDevice).parameters
    device = jax.sharding.AbstractDevice(**{name: x for name, x in facts.items() if name in known})
    kinds = (jax.sharding.AxisType.Auto,) * len(axes)
    return jax.sharding.AbstractMesh((1,) * len(axes), axes, kinds, abstract_device=device)


@contextlib.contextmanager
def interpreter(monkeypatch):
    """Pallas's interpreter, in which a race is an error: it only notes them, launch by launch.

    A unit for each copy of a block: it takes copies of one unit to be done together.
    """
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
    from jax.experimental.pallas import mosaic_gpu as plgpu

    launches, make = [], gpu_callbacks.GPURaceDetectionState

    def noted(*args, **kwargs):
        launches.append(make(*args, **kwargs))
        return launches[-1]

    monkeypatch.setattr(gpu_callbacks, "GPURaceDetectionState", noted)
    yield plgpu.InterpretGPUParams(detect_races=True, num_tma_threads_per_device=16)
    assert launches
    assert not any(launch.races_found for launch in launches)
