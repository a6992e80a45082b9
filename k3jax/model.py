"""K3: embedding, stack, final read and norm, head."""

import dataclasses
from functools import cache
from typing import Any

import chex
import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct

from k3jax.axes import Constant, Normal, draw, is_weight, least, shard, stacked, weight
from k3jax.config import ModelConfig, Plain
from k3jax.depth import run_stack, units
from k3jax.layers.norm import rms_norm
from k3jax.layers.residual import read
from k3jax.layout import Leaf, bank_size, plan
from k3jax.report import Report
from k3jax.segments import compact, reorder
from k3jax.state import State
from k3jax.unit import mean_over_tokens
from pallas_kernels.products import wide_einsum


@struct.dataclass
class Output:
    """What a forward pass gives.

    Attributes:
      logits: [B, T, Y], at least float32; 0 at padding.
      states: `State` after the last real token, or None where none was given.
      penalty: the balancing rules' losses, summed over layers and real tokens.
      reports: leaf name -> "mixer" or "channel" -> `Report`, arrays with the leaf's leading axes;
        "final" -> that of the last read.
    """

    logits: jax.Array
    states: State | None
    penalty: jax.Array
    reports: Any


class K3(nn.Module):
    """The whole text model.

    `init(key, tokens)["params"]` gives boxed `Weight`s, each knowing its axes and its optimiser;
    everywhere else parameters are plain arrays (`flax.linen.meta.unbox`).
    """

    cfg: ModelConfig

    @nn.compact
    def __call__(self, tokens, segment_ids=None, states: State | None = None) -> Output:
        """Next-token logits.

        Args:
          tokens: [B, T] integers below the vocabulary's size.
          segment_ids: [B, T] integers: a segment is a maximal run of one positive id, zeros
            skipped, and is its own document; 0 is padding. None: each row is one document, which
            goes on with the one that `states` were in.
          states: from `K3.empty_states` or an earlier call, to go on where that one stopped; no
            gradient flows through them.
        """
        params = self._declare()
        if self.is_initializing():  # the parameters are there: no need to run the stack
            return Output(jnp.zeros((*tokens.shape, self.cfg.vocabulary)), None, jnp.zeros(()), {})
        if segment_ids is not None:
            chex.assert_equal_shape([tokens, segment_ids])
        if tokens.shape[1]:
            return _forward(self.cfg, params, tokens, segment_ids, states)
        padding = jnp.zeros((tokens.shape[0], 1), jnp.int32)  # a row of no tokens is one of padding
        out = _forward(self.cfg, params, padding, padding, states)
        return dataclasses.replace(out, logits=out.logits[:, :0])

    def _declare(self) -> dict[str, Any]:
        """Every parameter by name: the ends' arrays, and a tree for each run of layers."""
        cfg = self.cfg
        sizes = dict(D=cfg.width, Y=cfg.vocabulary)
        vector = lambda name, value: weight(self, name, "D", sizes, Constant(value), "adamw")
        table = lambda name, spec: weight(
            self, name, spec, sizes, Normal(cfg.init_std), "adamw", decayed=True
        )
        params = {"embedding": table("embedding", "YD")}
        layers = _init_leaf if self.is_initializing() else _zeros
        for group in plan(cfg):
            for leaf in group.leaves:
                params[leaf.name] = self.param(leaf.name, layers, cfg, leaf)
        if not isinstance(cfg.residual, Plain):
            params |= {"read_query": vector("read_query", 0.0), "read_norm": vector("read_norm", 1.0)}
        params["norm"] = vector("norm", 1.0)
        params["head"] = params["embedding"].T if cfg.tie_embeddings else table("head", "D->Y")
        return params

    def empty_states(self, batch: int, dtype=jnp.float32) -> State:
        """The states before any token, for `batch` rows; `dtype` is what activations are in."""
        return State.empty(self.cfg, batch, dtype)


def _forward(cfg: ModelConfig, params, tokens, segment_ids, states: State | None) -> Output:
    dtype = jnp.dtype(cfg.dtype) if cfg.dtype else params["embedding"].dtype
    order_BT, segments, last_id_B = None, None, None
    if segment_ids is not None:
        order_BT, segments, last_id_B = compact(segment_ids, None if states is None else states.last_id_B)
        tokens = jnp.take_along_axis(tokens, order_BT, axis=1)
    elif states is not None:
        # Without ids, a row goes on with the document that it was in, or begins its first.
        ids_B1 = jnp.maximum(states.last_id_B, 1)[:, None]
        _, segments, last_id_B = compact(jnp.broadcast_to(ids_B1, tokens.shape), states.last_id_B)

    x_BTD = shard(shard(params["embedding"].astype(dtype), "YD")[tokens], "BTD")
    before = None if states is None else states.layers
    (bank_SBTD, penalty), layers, reports = run_stack(cfg, params, x_BTD, before, segments)
    if isinstance(cfg.residual, Plain):
        x_BTD = bank_SBTD[0]
    else:
        x_BTD, mix_SBT = read(
            bank_SBTD, params["read_query"], params["read_norm"], bank_size(cfg), cfg.norm_eps
        )
        reports["final"] = Report(means={"read_S": mean_over_tokens(mix_SBT, segments)})
    x_BTD = rms_norm(x_BTD, params["norm"], cfg.norm_eps)
    if segments is not None:
        x_BTD = jnp.where(segments.real_BT[..., None], x_BTD, 0)
    if order_BT is not None:
        x_BTD = reorder(x_BTD, jnp.argsort(order_BT, axis=1), order_BT)
    head_DY = shard(params["head"].astype(dtype), "DY")
    logits = wide_einsum("btd,dy->bty", x_BTD, head_DY)
    after = None if last_id_B is None or states is None else State(last_id_B, layers)
    return Output(shard(logits, "BTY"), after, penalty, reports)


def _init_leaf(key, cfg: ModelConfig, leaf: Leaf) -> Any:
    """The boxed parameters of equal layers, stacked; shapes come first, then every weight is drawn."""
    weights, tree = jax.tree.flatten(_boxes(cfg, leaf, jax.sharding.get_abstract_mesh()), is_leaf=is_weight)
    keys = jax.random.split(key, len(weights))
    return jax.tree.unflatten(tree, [draw(k, w) for k, w in zip(keys, weights, strict=True)])


def _zeros(key, cfg: ModelConfig, leaf: Leaf) -> Any:
    """Of the shapes that `_init_leaf` gives, for Flax to compare the parameters with."""
    boxes = _boxes(cfg, leaf, jax.sharding.get_abstract_mesh())
    return jax.tree.map(lambda w: jnp.zeros(w.shape, w.dtype), boxes)


@cache
def _boxes(cfg: ModelConfig, leaf: Leaf, mesh) -> Any:
    """Boxed shapes of the parameters of equal layers; what they depend on is all in the arguments."""
    # As wide as activations are: an op may take no others.
    bank_SBTD = jnp.zeros((bank_size(cfg), least("B"), least("T"), cfg.width), cfg.dtype or "float32")
    inputs = (bank_SBTD, jnp.bool_(True), jnp.int32(1), None, None)
    shapes = lambda unit: jax.eval_shape(unit.init, jax.random.key(0), *inputs)["params"]
    boxes = {name: shapes(unit) for name, unit in units(cfg, leaf).items()}
    return jax.tree.map(lambda w: stacked(w, leaf.repeats), boxes, is_leaf=is_weight)
