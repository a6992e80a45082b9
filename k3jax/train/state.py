"""What a run carries from step to step, and how it is laid over a mesh."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from k3jax import parameters
from k3jax.axes import weight_shardings
from k3jax.config import Config, ModelConfig, MoeConfig
from k3jax.layers import balance
from k3jax.layout import plan
from k3jax.model import K3


@struct.dataclass
class TrainState:
    """Everything a step reads and writes. Nothing random happens after initialisation.

    Attributes:
      step: int32, how many updates were applied.
      params: plain float32 masters.
      opt_state: of the optimiser of `k3jax.optim.build`.
      balance: leaf name -> what its balancing rule keeps between steps, None if nothing.
    """

    step: jax.Array
    params: Any
    opt_state: Any
    balance: Any


def around(cfg: Config, optimiser: optax.GradientTransformation, params: Any) -> TrainState:
    """The state before the first step, for these parameters."""
    return TrainState(jnp.zeros((), jnp.int32), params, optimiser.init(params), balance_memory(cfg.model))


def initial(cfg: Config, optimiser: optax.GradientTransformation, mesh: Mesh) -> TrainState:
    """The state before the first step, every device drawing and holding its own share."""
    with jax.set_mesh(mesh):
        boxes = K3(cfg.model).init(jax.random.key(cfg.run.seed), jnp.zeros((1, 1), jnp.int32))["params"]
        start = jax.jit(partial(around, cfg, optimiser), out_shardings=shardings(cfg, optimiser, mesh))
        return start(nn.meta.unbox(boxes))


def abstract(cfg: Config, optimiser: optax.GradientTransformation, mesh: Mesh) -> TrainState:
    """The shapes, dtypes and places of a TrainState: what a compiler or a restore needs to know."""
    shapes = jax.eval_shape(partial(around, cfg, optimiser), nn.meta.unbox(parameters.shapes(cfg.model)))
    place = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    return jax.tree.map(place, shapes, shardings(cfg, optimiser, mesh))


def balance_memory(cfg: ModelConfig) -> dict[str, Any]:
    """What each leaf's balancing rule keeps between steps, before the first."""
    memory = {}
    for group in plan(cfg):
        for leaf in group.leaves:
            if isinstance(leaf.channel, MoeConfig):
                one = balance.empty_memory(leaf.channel.balance, leaf.channel.experts)
                stack = lambda x, lead=leaf.repeats: jnp.broadcast_to(x, (*lead, *x.shape))
                memory[leaf.name] = jax.tree.map(stack, one)
    return memory


def shardings(cfg: Config, optimiser: optax.GradientTransformation, mesh: Mesh) -> TrainState:
    """Where each array of a TrainState lies: moments with their parameters, the rest everywhere.

    Raises:
      ValueError: a mesh axis that does not divide a weight's axis.
    """
    boxes = parameters.shapes(cfg.model)
    whole: Any = NamedSharding(mesh, PartitionSpec())
    params = weight_shardings(boxes, mesh)
    opt_state = jax.eval_shape(optimiser.init, nn.meta.unbox(boxes))
    hole = lambda x: isinstance(x, optax.MaskedNode)
    opt_state = optax.tree_map_params(
        optimiser,
        lambda x, sharding: x if hole(x) else sharding,
        opt_state,
        params,
        transform_non_params=lambda _: whole,
        is_leaf=hole,
    )
    memory = jax.tree.map(lambda _: whole, jax.eval_shape(lambda: balance_memory(cfg.model)))
    return TrainState(whole, params, opt_state, memory)
