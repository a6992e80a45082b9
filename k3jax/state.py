"""Decode state: one pytree, stacked like the parameters it goes with."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from k3jax.config import ModelConfig
from k3jax.layout import plan
from k3jax.unit import empty_state


@struct.dataclass
class State:
    """What a model carries from one piece of its rows to the next.

    Attributes:
      last_id_B: the last real segment id, 0 before any token.
      layers: leaf name -> mixer state, with the leaf's leading axes.
    """

    last_id_B: jax.Array
    layers: Any

    @classmethod
    def empty(cls, cfg: ModelConfig, batch: int, dtype) -> "State":
        layers = {}
        for group in plan(cfg):
            for leaf in group.leaves:
                state = empty_state(leaf.mixer, cfg, batch, dtype)
                lead = leaf.repeats
                layers[leaf.name] = jax.tree.map(
                    lambda x, lead=lead: jnp.broadcast_to(x, (*lead, *x.shape)), state
                )
        return cls(jnp.zeros(batch, jnp.int32), layers)
