"""A Hopper GPU that is not there: what tests of its kernels ask about, and lower for."""

import contextlib
import inspect
import itertools
from types import SimpleNamespace

import jax
import numpy as np
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

    A unit for each copy of a block: it takes copies of one unit to be done together. Alternatives of memory
    with two names are compared tile by tile; it would take an access to one tile for one to all.
    """
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
    from jax.experimental.pallas import mosaic_gpu as plgpu

    launches = []

    class ByTile(gpu_callbacks.GPURaceDetectionState):
        def _tile(self, key, access):
            if key not in self.ref_union_members:
                return key
            union, alternative = self.ref_union_members[key]
            place = tuple(itertools.takewhile(lambda x: isinstance(x, int | np.integer), access.range))
            self.ref_union_members[key, place] = (union, place), alternative
            return key, place

        def check_read(self, thread, clock, key, access, source_info=None):
            super().check_read(thread, clock, self._tile(key, access), access, source_info)

        def check_write(self, thread, clock, key, access, source_info=None):
            super().check_write(thread, clock, self._tile(key, access), access, source_info)

    def noted(*args, **kwargs):
        launches.append(ByTile(*args, **kwargs))
        return launches[-1]

    monkeypatch.setattr(gpu_callbacks, "GPURaceDetectionState", noted)
    yield plgpu.InterpretGPUParams(detect_races=True, num_tma_threads_per_device=16)
    assert launches
    assert not any(launch.races_found for launch in launches)
