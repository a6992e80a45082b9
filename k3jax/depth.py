"""The stack: scanned runs of layers, and a backward pass that keeps every source once.

Sources of Attention Residuals are only ever added. The bank that a layer read is the final bank
with the later entries masked, so the backward pass needs the final one alone; plain autodiff of a
scan would keep a bank per step. What else a layer keeps is what its remat policy says.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from k3jax.config import ModelConfig, Remat
from k3jax.layout import Leaf, block_facts, plan, sources
from k3jax.unit import Unit

PARTS = ("mixer", "channel")
POLICIES: dict[Remat, Any] = {
    "products": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "module": None,
}


class Stream(NamedTuple):
    """What flows up the stack."""

    partial_BTD: jax.Array  # the current block's sum
    sources_SBTD: jax.Array  # finished blocks, zeros where there is none yet
    penalty: jax.Array


class Fixed(NamedTuple):
    """What a leaf's layers read and never change: facts and state have the leaf's leading axes."""

    opens: Any
    count: Any
    state: Any


@jax.tree_util.register_static
class Recipes(dict):
    """How to put each unit's pullback together again; no arrays."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__


class Recipe(NamedTuple):
    """A pullback without its arrays: each is either an input of the unit or a saved residual."""

    tree: Any
    places: tuple[tuple[bool, int], ...]  # (is an input, index into inputs or saved)


def units(cfg: ModelConfig, leaf: Leaf) -> dict[str, Unit]:
    """The modules of a leaf's layers."""
    return {"mixer": Unit(leaf.mixer, cfg), "channel": Unit(leaf.channel, cfg)}


def run_stack(cfg: ModelConfig, params, embedded_BTD, states, segments):
    """Runs all layers.

    Args:
      params: leaf name -> {"mixer", "channel"} -> parameters with the leaf's leading axes.
      embedded_BTD: the embedding. states: leaf name -> mixer state with the same leading axes, or
        None; no gradient flows through them. segments: `Segments` or None.

    Returns:
      (Stream after the last layer, states or None, metrics by leaf and part, leading axes kept).
    """
    groups = plan(cfg)
    fixed = {}
    for group in groups:
        for leaf in group.leaves:
            facts = block_facts(cfg, leaf)
            state = None if states is None else jax.lax.stop_gradient(states[leaf.name])
            fixed[leaf.name] = Fixed(jnp.asarray(facts.opens), jnp.asarray(facts.count), state)
    stream, (states, metrics) = _stack(cfg, params, embedded_BTD, fixed, segments)
    return stream, states, metrics


def _loop(times: int, body: Callable, carry, xs, reverse=False):
    """A scan over the leading axis of xs, which is only there if there is something to repeat."""
    return body(carry, xs) if times == 1 else jax.lax.scan(body, carry, xs, reverse=reverse)


def _walk(cfg: ModelConfig, layer: Callable, carry, xs, reverse=False):
    """`layer(leaf, carry, x) -> (carry, y)` over the whole stack; xs and ys by leaf name."""
    order = reversed if reverse else iter
    results = {}
    for group in order(plan(cfg)):

        def cycle(carry, xs, group=group):
            ys = {}
            for leaf in order(group.leaves):
                carry, ys[leaf.name] = _loop(leaf.count, partial(layer, leaf), carry, xs[leaf.name], reverse)
            return carry, ys

        mine = {leaf.name: xs[leaf.name] for leaf in group.leaves}
        carry, ys = _loop(group.times, cycle, carry, mine, reverse)
        results |= ys
    return carry, results


def _open(stream: Stream, opens, count) -> Stream:
    """Where a module opens a block, the sum so far becomes the newest source."""
    bank = stream.sources_SBTD
    if bank.shape[0] == 0:
        return stream
    slot = jnp.maximum(count - 1, 0)
    newest = jnp.where(opens, stream.partial_BTD, jax.lax.dynamic_index_in_dim(bank, slot, 0, keepdims=False))
    return stream._replace(sources_SBTD=jax.lax.dynamic_update_index_in_dim(bank, newest, slot, 0))


def _start(cfg: ModelConfig, embedded_BTD) -> Stream:
    bank = jnp.zeros((sources(cfg), *embedded_BTD.shape), embedded_BTD.dtype)
    return Stream(embedded_BTD, bank, jnp.zeros((), jnp.promote_types(embedded_BTD.dtype, jnp.float32)))


def _state_of(part: str, fixed: Fixed):
    return fixed.state if part == "mixer" else None


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _stack(cfg, params, embedded_BTD, fixed, segments):
    def layer(leaf, stream, x):
        params, fixed = x
        ys = {}
        for at, part in enumerate(PARTS):
            opens, count = fixed.opens[at], fixed.count[at]
            stream = _open(stream, opens, count)
            (partial_BTD, penalty), ys[part] = units(cfg, leaf)[part].apply(
                {"params": params[part]}, stream.partial_BTD, stream.sources_SBTD, opens, count,
                _state_of(part, fixed), segments,
            )  # fmt: skip
            stream = Stream(partial_BTD, stream.sources_SBTD, stream.penalty + penalty)
        return stream, ys

    xs = {name: (params[name], fixed[name]) for name in fixed}
    stream, ys = _walk(cfg, layer, _start(cfg, embedded_BTD), xs)
    return stream, _outcome(ys)


def _outcome(ys):
    """(states by leaf or None, metrics by leaf and part) from what each unit returned."""
    states = {name: y["mixer"][0] for name, y in ys.items()}
    metrics = {name: {part: y[part][1] for part in PARTS} for name, y in ys.items()}
    return None if all(state is None for state in states.values()) else states, metrics


def _stack_forward(cfg, params, embedded_BTD, fixed, segments):
    recipes = Recipes()

    def layer(leaf, stream, x):
        params, fixed = x
        ys, saved = {}, {}
        for at, part in enumerate(PARTS):
            opens, count = fixed.opens[at], fixed.count[at]
            stream = _open(stream, opens, count)
            state = _state_of(part, fixed)

            def unit(params, partial_BTD, bank, leaf=leaf, part=part, rest=(opens, count, state, segments)):
                return units(cfg, leaf)[part].apply({"params": params}, partial_BTD, bank, *rest)

            if cfg.remat != "none":
                unit = jax.checkpoint(unit, policy=POLICIES[cfg.remat])
            given = (params[part], stream.partial_BTD, stream.sources_SBTD)
            (partial_BTD, penalty), pull, ys[part] = jax.vjp(unit, *given, has_aux=True)
            inputs = (*given, opens, count, state, segments)
            recipes[leaf.name, part], saved[part] = _take_apart(pull, inputs)
            saved[part].append(stream.partial_BTD)
            stream = Stream(partial_BTD, stream.sources_SBTD, stream.penalty + penalty)
        return stream, (ys, saved)

    xs = {name: (params[name], fixed[name]) for name in fixed}
    stream, results = _walk(cfg, layer, _start(cfg, embedded_BTD), xs)
    ys = {name: y for name, (y, _) in results.items()}
    saved = {name: s for name, (_, s) in results.items()}
    return (stream, _outcome(ys)), (params, fixed, segments, stream.sources_SBTD, saved, recipes)


def _take_apart(pull, inputs) -> tuple[Recipe, list]:
    """Splits a pullback into what its inputs hold anyway and what has to be saved."""
    leaves, tree = jax.tree.flatten(pull)
    known = {id(x): at for at, x in enumerate(jax.tree.leaves(inputs))}
    places, saved = [], []
    for leaf in leaves:
        if id(leaf) in known:
            places.append((True, known[id(leaf)]))
        else:
            places.append((False, len(saved)))
            saved.append(leaf)
    return Recipe(tree, tuple(places)), saved


def _put_together(recipe: Recipe, inputs, saved):
    known = jax.tree.leaves(inputs)
    leaves = [known[at] if is_input else saved[at] for is_input, at in recipe.places]
    return jax.tree.unflatten(recipe.tree, leaves)


def _stack_backward(cfg, residuals, cotangents):
    params, fixed, segments, bank_SBTD, saved, recipes = residuals
    d_stream, _ = cotangents
    d_penalty = d_stream.penalty

    def layer(leaf, carry, x):
        d_partial, d_bank = carry
        params, fixed, saved = x
        d_params = {}
        for at, part in reversed(list(enumerate(PARTS))):
            opens, count = fixed.opens[at], fixed.count[at]
            *rest, partial_BTD = saved[part]
            inputs = (params[part], partial_BTD, bank_SBTD, opens, count, _state_of(part, fixed), segments)
            pull = _put_together(recipes[leaf.name, part], inputs, rest)
            d_params[part], d_partial, d_read = pull((d_partial, d_penalty))
            if bank_SBTD.shape[0]:
                d_bank = d_bank + d_read.astype(d_bank.dtype)
                slot = jnp.maximum(count - 1, 0)
                d_newest = jax.lax.dynamic_index_in_dim(d_bank, slot, 0, keepdims=False)
                d_partial = d_partial + jnp.where(opens, d_newest, 0).astype(d_partial.dtype)
        return (d_partial, d_bank), d_params

    # Many reads add to one source's gradient: the sum is kept in float32 or more.
    wide = jnp.promote_types(bank_SBTD.dtype, jnp.float32)
    start = (d_stream.partial_BTD, d_stream.sources_SBTD.astype(wide))
    xs = {name: (params[name], fixed[name], saved[name]) for name in fixed}
    (d_embedded, _), d_params = _walk(cfg, layer, start, xs, reverse=True)
    return d_params, d_embedded, None, None


_stack.defvjp(_stack_forward, _stack_backward)
