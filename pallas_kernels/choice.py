"""Which implementation of an op runs: the one named, or the best that can. Never another than was named."""

from collections.abc import Callable, Mapping, Sequence

import jax


def choose(
    op: str,
    requested: str | None,
    best: Mapping[str, Sequence[str]],
    built: Sequence[str],
    why_not: Callable[[str], str | None] = lambda name: None,
) -> str:
    """The implementation that a call of `op` runs on this process's devices.

    Args:
      op: the op's name, for messages.
      requested: a name, or None for the first of the table's that can run the call.
      best: platform ("cpu", "gpu", "tpu") -> implementations, the best first; the last runs anything.
      built: the implementations that exist.
      why_not: why one of them cannot run the call here; None if it can.

    Raises:
      ValueError: `requested` is not one of `built`, or cannot run the call.
    """
    if requested is None:
        return next(name for name in best[jax.default_backend()] if why_not(name) is None)
    if requested not in built:
        raise ValueError(
            f"{op}: implementation={requested!r} is not built for {jax.default_backend()}; allowed: "
            f"{', '.join(map(repr, built))}, or None for {choose(op, None, best, built, why_not)!r}"
        )
    if (reason := why_not(requested)) is not None:
        raise ValueError(f"{op}: implementation={requested!r} cannot run here: {reason}")
    return requested
