"""The whole optimiser, put together from what each weight says of itself."""

from collections.abc import Hashable
from typing import Any, get_args

import jax
import jax.numpy as jnp
import optax

from k3jax.axes import Rule, Weight
from k3jax.config import AdamW, Muon, OptimConfig
from k3jax.optim.muon import Blocks, muon, per_weight
from k3jax.optim.schedule import learning_rate


def _group(w: Weight) -> str:
    if w.rule is None or w.rule not in get_args(Rule):
        raise ValueError(f"rule {w.rule!r}: one of {', '.join(map(repr, get_args(Rule)))} must move it")
    if jnp.promote_types(w.value.dtype, jnp.float32) != w.value.dtype:
        raise ValueError(f"a {w.value.dtype} parameter loses small steps: masters are float32")
    return "adamw decayed" if w.rule == "adamw" and w.decayed else w.rule


def describe(cfg: OptimConfig, w: Weight) -> str:
    """Who moves `w`: "muon 128x64 x [3, 2]" (rows x columns x batch), "adamw", "adamw decayed" or "balance".

    Raises:
      ValueError: no known rule, a dtype narrower than float32, or a Muon weight that is no matrix.
    """
    group = _group(w)
    if group != "muon":
        return group
    if isinstance(cfg.matrices, AdamW):
        return "adamw decayed"
    batch, rows, columns = Blocks.of(w, cfg.matrices.split).sizes(w.value.shape)
    return f"muon {rows}x{columns}" + (f" x {list(batch)}" if batch else "")


def labels(cfg: OptimConfig, weights: Any) -> Any:
    """The tree of `describe` over boxed weights; its errors name the leaf."""
    return per_weight(lambda w: describe(cfg, w), weights)


def build(cfg: OptimConfig, weights: Any, steps: int) -> optax.GradientTransformation:
    """Clipping, then Muon or AdamW by each weight's rule, decoupled decay and one learning rate for all.

    Decay is weight_decay * rate on every matrix in the stack and on AdamW's weights that ask for it.
    One rate serves both rules because Muon's updates are scaled to AdamW's size (Moonlight). A weight
    that its balancing rule moves stays put, and its gradient is no part of the global norm.

    Args:
      cfg: `matrices` moves the weights of rule "muon", `adam` those of rule "adamw".
      weights: the boxed weights, as jax.eval_shape(model.init, ...) returns them.
      steps: of the whole run, for the schedule; `learning_rate` gives the same one for logs.

    Returns:
      A transformation over the tree of plain arrays; its `update` needs the parameters.

    Raises:
      ValueError: a leaf that `describe` refuses, by its path; fewer than one step.
    """
    groups = per_weight(_group, weights)
    adam = lambda rule: optax.scale_by_adam(rule.b1, rule.b2, rule.eps)
    decay = optax.add_decayed_weights(cfg.weight_decay)

    if isinstance(cfg.matrices, Muon):
        # Laid out as `partition` hands it the updates: other rules' leaves are holes in the tree.
        keep = lambda group, w: w if group == "muon" else optax.MaskedNode()
        matrices = muon(cfg.matrices, jax.tree.map(keep, groups, weights))
    else:
        matrices = adam(cfg.matrices)
    rules: dict[Hashable, optax.GradientTransformation] = {
        "muon": optax.chain(matrices, decay),
        "adamw": adam(cfg.adam),
        "adamw decayed": optax.chain(adam(cfg.adam), decay),
        "balance": optax.set_to_zero(),
    }
    clip = optax.identity() if cfg.clip is None else optax.clip_by_global_norm(cfg.clip)
    return optax.chain(
        optax.masked(clip, jax.tree.map(lambda group: group != "balance", groups)),
        optax.partition(rules, groups),
        optax.scale_by_learning_rate(learning_rate(cfg, steps)),
    )
