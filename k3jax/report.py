"""What layers tell of themselves during a step, sorted by how it adds up over micro-batches."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct


@struct.dataclass
class Report:
    """Named arrays without gradient.

    Attributes:
      sums: counts, such as load_E: two micro-batches add. Their first axis, after that of layers,
        is the devices that counted: `total` adds those up, once a step.
      maxima: such as max_logit_H: the larger wins.
      means: over real tokens, such as read_S: two micro-batches weigh by their tokens.
    """

    sums: Mapping[str, Any] = struct.field(default_factory=dict)
    maxima: Mapping[str, Any] = struct.field(default_factory=dict)
    means: Mapping[str, Any] = struct.field(default_factory=dict)

    def with_means(self, **means: Any) -> "Report":
        return dataclasses.replace(self, means={**self.means, **means})


def total(sums: Any, layers: int) -> Any:
    """Counts over all devices, from counts with `layers` leading axes and then one for devices."""
    return jax.tree.map(lambda x: jnp.sum(x, axis=layers), sums)


def merge(a: Any, b: Any, tokens_a, tokens_b) -> Any:
    """Two trees of Reports over two sets of tokens as one over both."""
    total = jnp.maximum(tokens_a + tokens_b, 1)

    def one(a: Report, b: Report) -> Report:
        return Report(
            sums=jax.tree.map(jnp.add, a.sums, b.sums),
            maxima=jax.tree.map(jnp.maximum, a.maxima, b.maxima),
            means=jax.tree.map(lambda x, y: (x * tokens_a + y * tokens_b) / total, a.means, b.means),
        )

    return jax.tree.map(one, a, b, is_leaf=lambda x: isinstance(x, Report))
