"""Which implementation of an op runs: the one named, or the best of a table. Never a fallback."""

from collections.abc import Callable, Mapping, Sequence

import jax


def choose(
    op: str,
    requested: str | None,
    best: Mapping[str, str],
    built: Sequence[str],
    why_not: Callable[[str], str | None] = lambda name: None,
) -> str:
    """The implementation that a call of `op` runs on this process's devices.

    Args:
      op: the op's name, for messages.
      requested: a name, or None for the table's choice.
      best: platform ("cpu", "gpu", "tpu") -> implementation.
      built: the implementations that exist.
      why_not: why one of them cannot run the call here; None if it can.

    Raises:
      ValueError: `requested` is not one of `built`, or cannot run the call.
    """
    if requested is None:
        return best[jax.default_backend()]
    if requested not in built:
        raise ValueError(
            f"{op}: implementation={requested!r} is not built for {jax.default_backend()}; "
            f"allowed: {', '.join(map(repr, built))}, or None for {best[jax.default_backend()]!r}"
        )
    if (reason := why_not(requested)) is not None:
        raise ValueError(f"{op}: implementation={requested!r} cannot run here: {reason}")
    return requested
