"""Running a function on each device's own share: the one place that calls shard_map."""

from collections.abc import Callable

import jax

from k3jax.axes import partition


def on_each_shard(run: Callable, inputs: str, outputs: str) -> Callable:
    """`run` on each device's share of its arguments.

    Kernels cannot be partitioned by the compiler, and sorting tokens must not cross devices: both
    are called through this. Without a mesh, or on a mesh of one device, it is `run` itself.

    Args:
      run: a function of arrays (or None) whose results keep the axes named here.
      inputs: the letters of each argument, in order, with spaces between; `_` is never cut.
      outputs: the letters of each result; one array if there is one word.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return run
    into = tuple(partition(letters) for letters in inputs.split())
    out = tuple(partition(letters) for letters in outputs.split())
    return jax.shard_map(run, in_specs=into, out_specs=out[0] if len(out) == 1 else out, check_vma=False)
