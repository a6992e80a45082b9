"""A model's parameters before any exist: their shapes, and how many there are."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from k3jax.axes import AXES, Weight, is_weight
from k3jax.config import ModelConfig
from k3jax.model import K3


def shapes(cfg: ModelConfig) -> Any:
    """The tree of boxed `Weight`s whose values are ShapeDtypeStructs; nothing is allocated."""
    tokens = jax.ShapeDtypeStruct((1, 1), np.int32)
    return jax.eval_shape(K3(cfg).init, jax.eval_shape(lambda: jax.random.key(0)), tokens)["params"]


def leaves(weights: Any) -> list[tuple[tuple[str, ...], Weight]]:
    """(path, weight) of every boxed weight, in the tree's order."""
    pairs = jax.tree_util.tree_leaves_with_path(weights, is_leaf=is_weight)
    text = lambda key: jax.tree_util.keystr((key,), simple=True)
    return [(tuple(map(text, path)), w) for path, w in pairs]


@dataclass(frozen=True)
class Share:
    """How many parameters a part has, and how many of them one token meets."""

    total: int
    active: int


@dataclass(frozen=True)
class Counts:
    """How many parameters a model has.

    Attributes:
      total: all, routers' biases and reads that nothing differentiates included.
      active: those one token meets: of the routed experts the chosen ones, and no input embedding
        (a table that is also the head counts as the head).
      parts: the same by kind of part, in the model's order.
    """

    total: int
    active: int
    parts: Mapping[str, Share]

    @property
    def body(self) -> int:
        """The active parameters of the stack alone, which small models are sized by."""
        ends = (self.parts[name].active for name in ("embedding", "head") if name in self.parts)
        return self.active - sum(ends)

    @property
    def routed_share(self) -> float:
        """Routed experts' share of the active parameters."""
        return self.parts["routed experts"].active / self.active if "routed experts" in self.parts else 0.0


def counts(cfg: ModelConfig) -> Counts:
    """Counts a model's parameters from their shapes."""
    parts: dict[str, Share] = {}
    for path, w in sorted(leaves(shapes(cfg)), key=lambda leaf: ORDER.get(leaf[0][0], 1)):
        part = part_of(path)
        size = active = math.prod(w.value.shape)
        if part == "embedding" and not cfg.tie_embeddings:
            active = 0
        elif part == "routed experts":
            experts = w.value.shape[w.names.index(AXES["E"][0])]
            active = size // experts * cfg.moe.active if cfg.moe is not None else size
        before = parts.get(part, Share(0, 0))
        parts[part] = Share(before.total + size, before.active + active)
    return Counts(sum(x.total for x in parts.values()), sum(x.active for x in parts.values()), parts)


ORDER = {"embedding": 0, "head": 2}  # the stack between them


def part_of(path: tuple[str, ...]) -> str:
    """What a parameter is counted under."""
    match path:
        case ("embedding" | "head" as name,):
            return name
        case (_, "mixer", kind, _, *_):
            return f"{kind} mixers"
        case (_, "channel", "mlp", *_):
            return "dense MLPs"
        case (_, "channel", "moe", "router" | "router_bias"):
            return "routers"
        case (_, "channel", "moe", "shared", *_):
            return "shared experts"
        case (_, "channel", "moe", "down" | "up" | "norm"):
            return "latent projections"
        case (_, "channel", "moe", *_):
            return "routed experts"
        case _:
            return "norms and reads"
