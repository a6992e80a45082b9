"""One optimiser step, as a pure function: gradients, update, balancing, QK-Clip."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from k3jax.axes import shard
from k3jax.config import Config, MlaConfig, ModelConfig, MoeConfig
from k3jax.layers import balance
from k3jax.layout import plan
from k3jax.optim.qk_clip import clip_queries_and_keys
from k3jax.optim.schedule import learning_rate
from k3jax.report import Report, merge, total
from k3jax.train.loss import Sums, loss_sums
from k3jax.train.state import TrainState

# Level 3 of XLA's CPU compiler takes half as long again as level 1, and its code is no faster here.
CPU_OPTIONS = {"xla_backend_optimization_level": 1}


def compiler_options() -> dict[str, Any]:
    """What training programs are compiled with on this process's devices."""
    return dict(CPU_OPTIONS) if jax.default_backend() == "cpu" else {}


def train_step(cfg: Config, optimiser: optax.GradientTransformation, state: TrainState, batch: Any):
    """(the next state, metrics) from a whole step's rows.

    If the loss or the gradient is not finite anywhere, the state is returned as it was and
    metrics["finite"] is False: the decision is one for all devices.

    Args:
      batch: arrays [rows, T] as `k3jax.train.loss.loss_sums` wants them; rows is a multiple of
        `cfg.optim.accumulate`.
    """
    sums, gradients, seen = _gradients(cfg, state.params, batch)
    norm = optax.tree.norm(gradients)
    finite = jnp.isfinite(sums.loss) & jnp.isfinite(norm)
    updates, opt_state = optimiser.update(gradients, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    params, memory = _balance(cfg.model, params, state.balance, seen)
    if cfg.optim.qk_clip is not None:
        params = _clip_logits(cfg.model, params, seen, cfg.optim.qk_clip)
    after = TrainState(state.step + 1, params, opt_state, memory)
    after = jax.tree.map(lambda new, old: jnp.where(finite, new, old), after, state)
    metrics = {
        "loss": sums.loss / sums.tokens,
        "tokens": sums.tokens,
        "penalty": sums.penalty / sums.tokens,
        "z": sums.z / sums.tokens,
        "gradient_norm": norm,
        "lr": learning_rate(cfg.optim, cfg.run.steps)(state.step),
        "finite": finite,
        "layers": jax.tree.map(_without_statistics, seen, is_leaf=lambda x: isinstance(x, Report)),
    }
    return after, metrics


def _without_statistics(report: Report) -> Report:
    """A report less what only the balancing rule wants: histograms are large."""
    return dataclasses.replace(report, sums={name: x for name, x in report.sums.items() if name != "balance"})


def evaluate_step(cfg: ModelConfig, params: Any, batch: Any) -> Sums:
    """Sums over a batch; nothing is updated, the router's bias included."""
    return loss_sums(cfg, params, batch)[0]


def _gradients(cfg: Config, params, batch):
    """(sums over all micro-batches, the gradient of the mean over tokens, what layers report)."""

    tokens = jnp.maximum(batch["weights"].sum(), 1)

    def objective(params, batch):
        sums, seen = loss_sums(cfg.model, params, batch)
        return (sums.loss + cfg.optim.z_loss * sums.z + sums.penalty) / tokens, (sums, seen)

    gradient = jax.grad(objective, has_aux=True)
    parts = cfg.optim.accumulate
    if parts == 1:
        gradients, (sums, seen) = gradient(params, batch)
    else:
        # Neighbouring rows go to different micro-batches, so that each device keeps its own rows.
        micro = lambda x: shard(jnp.moveaxis(x.reshape(-1, parts, x.shape[1]), 1, 0), "_BT")

        def add(total, batch):
            gradients, (sums, seen) = total
            more, (sums_more, seen_more) = gradient(params, batch)
            seen = merge(seen, seen_more, sums.tokens, sums_more.tokens)
            gradients, sums = jax.tree.map(jnp.add, (gradients, sums), (more, sums_more))
            return (gradients, (sums, seen)), None

        batch = jax.tree.map(micro, batch)
        first, rest = (jax.tree.map(lambda x, i=i: x[i], batch) for i in (0, slice(1, None)))
        (gradients, (sums, seen)), _ = jax.lax.scan(add, gradient(params, first), rest)
    return sums, gradients, seen


def _balance(cfg: ModelConfig, params, memory, seen):
    """The routers' biases for the next step, and what their rules remember."""
    params, memory = dict(params), dict(memory)
    for group in plan(cfg):
        for leaf in group.leaves:
            if not isinstance(leaf.channel, MoeConfig):
                continue
            update = partial(balance.update, leaf.channel.balance)
            for _ in leaf.repeats:
                update = jax.vmap(update)
            channel = params[leaf.name]["channel"]
            sums = total(seen[leaf.name]["channel"].sums, len(leaf.repeats))
            bias, memory[leaf.name] = update(
                channel["moe"]["router_bias"], sums["balance"], sums["load_E"], memory[leaf.name]
            )
            moe = channel["moe"] | {"router_bias": bias}
            params[leaf.name] = params[leaf.name] | {"channel": channel | {"moe": moe}}
    return params, memory


def _clip_logits(cfg: ModelConfig, params, seen, tau: float):
    """QK-Clip on every MLA layer, by the largest logits of the whole step."""
    params = dict(params)
    for group in plan(cfg):
        for leaf in group.leaves:
            if not isinstance(leaf.mixer, MlaConfig):
                continue
            mixer = params[leaf.name]["mixer"]
            mla = mixer["mla"]
            name = "query" if leaf.mixer.query_rank is None else "query_up"
            query, key_up = clip_queries_and_keys(
                mla[name], mla["key_up"], seen[leaf.name]["mixer"].maxima["max_logit_H"], tau, leaf.mixer.key
            )
            mixer = mixer | {"mla": mla | {name: query, "key_up": key_up}}
            params[leaf.name] = params[leaf.name] | {"mixer": mixer}
    return params
