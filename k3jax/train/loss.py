"""Next-token losses as sums over tokens, so that any split into parts adds up."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from k3jax.config import ModelConfig
from k3jax.model import K3


@struct.dataclass
class Sums:
    """Totals over the weighted tokens of a batch.

    Attributes:
      loss: cross-entropy in nats. tokens: the sum of the weights.
      z: log^2 of the softmax normaliser. penalty: the balancing rules' losses.
    """

    loss: jax.Array
    tokens: jax.Array
    z: jax.Array
    penalty: jax.Array


def loss_sums(cfg: ModelConfig, params: Any, batch: dict[str, jax.Array]) -> tuple[Sums, Any]:
    """Runs the model on a batch.

    Args:
      batch: tokens, targets, segment_ids [B, T] integers and weights [B, T], 1 where a target
        counts and 0 elsewhere.

    Returns:
      (Sums, the layers' reports).
    """
    out: Any = K3(cfg).apply({"params": params}, batch["tokens"], batch["segment_ids"])
    normaliser_BT = jax.nn.logsumexp(out.logits, axis=-1)
    picked_BT = jnp.take_along_axis(out.logits, batch["targets"][..., None], axis=-1)[..., 0]
    weights_BT = batch["weights"].astype(out.logits.dtype)
    total = lambda x_BT: jnp.sum(x_BT * weights_BT)
    sums = Sums(
        loss=total(normaliser_BT - picked_BT),
        tokens=jnp.sum(weights_BT),
        z=total(jnp.square(normaliser_BT)),
        penalty=out.penalty,
    )
    return sums, out.reports
