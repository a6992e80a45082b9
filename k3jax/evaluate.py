"""Validation loss on fixed rows."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import jax


def mean_loss(step: Callable[[Any, Any], Any], params: Any, batches: Iterable[Any]) -> float:
    """Nats per token over all batches: one sum over one count, whatever the batches' sizes.

    Args:
      step: (params, batch) -> `k3jax.train.loss.Sums`.

    Returns:
      nan if no token has a weight.
    """
    loss, tokens = 0.0, 0.0
    for batch in batches:
        sums = jax.device_get(step(params, batch))
        loss, tokens = loss + float(sums.loss), tokens + float(sums.tokens)
    return loss / tokens if tokens else math.nan
