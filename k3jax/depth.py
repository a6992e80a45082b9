"""The stack: scanned runs of layers, and a backward pass that keeps every source once.

The stream is a bank of sums: the embedding, then one per block, the last being the current one.
Finished sums never change, so what a layer read is the final bank with the later entries masked and
its own sum put back; plain autodiff of a scan would keep a whole bank per step. What else a module
keeps for the backward pass is what the remat policy says.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from k3jax.axes import shard
from k3jax.config import ModelConfig, Remat
from k3jax.layout import Leaf, bank_size, block_facts, plan
from k3jax.unit import Unit

PARTS = ("mixer", "channel")
POLICIES: dict[Remat, Any] = {
    "products": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "ops": jax.checkpoint_policies.save_only_these_names("op"),
    "module": None,
}


class Stream(NamedTuple):
    """What flows up the stack."""

    bank_SBTD: jax.Array
    penalty: jax.Array


class Fixed(NamedTuple):
    """What a leaf's layers read and never change, with the leaf's leading axes."""

    opens: Any
    slot: Any
    state: Any

    def of(self, part: str):
        """(opens, slot, state) of a module of one layer."""
        at = PARTS.index(part)
        return self.opens[at], self.slot[at], self.state if part == "mixer" else None


class Recipe(NamedTuple):
    """A pullback without its arrays: each is either an input of the unit or a saved residual."""

    tree: Any
    places: tuple[tuple[bool, int], ...]  # (is an input, index into inputs or saved)


@jax.tree_util.register_static
@dataclass(frozen=True, eq=False)
class Recipes:
    """How to put each unit's pullback together again, by leaf and part; no arrays."""

    of: dict[tuple[str, str], Recipe] = field(default_factory=dict)


def units(cfg: ModelConfig, leaf: Leaf) -> dict[str, Unit]:
    """The modules of a leaf's layers."""
    return {"mixer": Unit(leaf.mixer, cfg), "channel": Unit(leaf.channel, cfg)}


def run_stack(cfg: ModelConfig, params, embedded_BTD, states, segments):
    """Runs all layers.

    Args:
      params: leaf name -> {"mixer", "channel"} -> parameters with the leaf's leading axes; other
        entries are left alone.
      embedded_BTD: the embedding. states: leaf name -> mixer state with the same leading axes, or
        None; no gradient flows through them. segments: `Segments` or None.

    Returns:
      (Stream after the last layer, states or None, Reports by leaf and part, leading axes kept).
    """
    fixed = {}
    for group in plan(cfg):
        for leaf in group.leaves:
            facts = block_facts(cfg, leaf)
            state = None if states is None else jax.lax.stop_gradient(states[leaf.name])
            fixed[leaf.name] = Fixed(jnp.asarray(facts.opens), jnp.asarray(facts.slot), state)
    mine = {name: params[name] for name in fixed}
    result: Any = _stack(cfg, mine, embedded_BTD, fixed, segments)
    stream, (states_after, reports) = result
    return stream, None if states is None else states_after, reports


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


def _start(cfg: ModelConfig, embedded_BTD) -> Stream:
    bank = jnp.zeros((bank_size(cfg), *embedded_BTD.shape), embedded_BTD.dtype).at[0].set(embedded_BTD)
    return Stream(shard(bank, "_BTD"), jnp.zeros((), jnp.promote_types(embedded_BTD.dtype, jnp.float32)))


def _put(bank_SBTD, x_BTD, slot):
    return jax.lax.dynamic_update_index_in_dim(bank_SBTD, x_BTD.astype(bank_SBTD.dtype), slot, 0)


def _get(bank_SBTD, slot):
    return jax.lax.dynamic_index_in_dim(bank_SBTD, slot, 0, keepdims=False)


def _add(stream: Stream, opens, slot, y_BTD, penalty) -> Stream:
    """Adds a module's output to the current sum, which starts here if the module opens a block."""
    before = jnp.where(opens, 0, _get(stream.bank_SBTD, slot))
    return Stream(_put(stream.bank_SBTD, before + y_BTD, slot), stream.penalty + penalty)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _stack(cfg, params, embedded_BTD, fixed, segments):
    def layer(leaf, stream, x):
        params, fixed = x
        ys = {}
        for part in PARTS:
            opens, slot, state = fixed.of(part)
            unit = units(cfg, leaf)[part]
            out, ys[part] = unit.apply(
                {"params": params[part]}, stream.bank_SBTD, opens, slot, state, segments
            )
            stream = _add(stream, opens, slot, *out)
        return stream, ys

    xs = {name: (params[name], fixed[name]) for name in fixed}
    stream, ys = _walk(cfg, layer, _start(cfg, embedded_BTD), xs)
    return stream, _sorted_out(ys)


def _sorted_out(ys):
    """(states by leaf, Reports by leaf and part) from what each unit returned."""
    states = {name: y["mixer"][0] for name, y in ys.items()}
    return states, {name: {part: y[part][1] for part in PARTS} for name, y in ys.items()}


def _stack_forward(cfg, params, embedded_BTD, fixed, segments):
    recipes = Recipes()

    def layer(leaf, stream, x):
        params, fixed = x
        ys, saved = {}, {}
        for part in PARTS:
            opens, slot, state = fixed.of(part)
            unit = units(cfg, leaf)[part]

            def run(params, bank_SBTD, unit=unit, rest=(opens, slot, state, segments)):
                return unit.apply({"params": params}, bank_SBTD, *rest)

            if cfg.remat != "none":
                run = jax.checkpoint(run, policy=POLICIES[cfg.remat])
            out, pull, ys[part] = jax.vjp(run, params[part], stream.bank_SBTD, has_aux=True)
            inputs = (params[part], stream.bank_SBTD, opens, slot, state, segments)
            recipes.of[leaf.name, part], residuals = _take_apart(pull, inputs)
            saved[part] = (_get(stream.bank_SBTD, slot), residuals)
            stream = _add(stream, opens, slot, *out)
        return stream, (ys, saved)

    xs = {name: (params[name], fixed[name]) for name in fixed}
    stream, results = _walk(cfg, layer, _start(cfg, embedded_BTD), xs)
    ys = {name: y for name, (y, _) in results.items()}
    saved = {name: s for name, (_, s) in results.items()}
    return (stream, _sorted_out(ys)), (params, fixed, segments, stream.bank_SBTD, saved, recipes)


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
    (d_bank_SBTD, d_penalty), _ = cotangents

    def layer(leaf, carry, x):
        bank, d_bank = carry
        params, fixed, saved = x
        d_params = {}
        for part in reversed(PARTS):
            opens, slot, state = fixed.of(part)
            sum_before, rest = saved[part]
            bank = _put(bank, sum_before, slot)  # later entries are masked, earlier ones final
            pull = _put_together(
                recipes.of[leaf.name, part], (params[part], bank, opens, slot, state, segments), rest
            )
            # An addition hands its gradient on as it is; that of a block which opens here is read no more.
            d_sum = _get(d_bank, slot)
            d_params[part], d_read = pull((d_sum.astype(bank.dtype), d_penalty))
            d_bank = shard(d_bank + d_read.astype(d_bank.dtype), "_BTD")
        return (bank, d_bank), d_params

    # Many reads add to one source's gradient: the sums are kept in float32 or more.
    wide = jnp.promote_types(bank_SBTD.dtype, jnp.float32)
    xs = {name: (params[name], fixed[name], saved[name]) for name in fixed}
    (_, d_bank), d_params = _walk(cfg, layer, (bank_SBTD, d_bank_SBTD.astype(wide)), xs, reverse=True)
    return d_params, d_bank[0].astype(bank_SBTD.dtype), None, None


_stack.defvjp(_stack_forward, _stack_backward)
