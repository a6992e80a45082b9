"""From what a step returns to numbers for people and files."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from k3jax.config import ModelConfig
from k3jax.layout import plan


def by_layer(cfg: ModelConfig, reports: Any, kind: str, name: str) -> Iterator[tuple[int, str, np.ndarray]]:
    """Each module's report of `name`, in order of depth: (layer from 1, "mixer" or "channel", array).

    Args:
      kind: "sums", "maxima" or "means".
    """
    found = []
    for group in plan(cfg):
        for leaf in group.leaves:
            for at, part in enumerate(("mixer", "channel")):
                values = getattr(reports[leaf.name][part], kind).get(name)
                if values is None:
                    continue
                values = np.asarray(values)
                found += [
                    (int(layer) + 1, at, part, values[index]) for index, layer in np.ndenumerate(leaf.layers)
                ]
    yield from ((layer, part, value) for layer, _, part, value in sorted(found, key=lambda x: x[:2]))


def loads(cfg: ModelConfig, reports: Any) -> np.ndarray:
    """Tokens per expert over all devices, [MoE layers, E]; no rows if there are no experts."""
    rows = [value.sum(axis=0) for _, _, value in by_layer(cfg, reports, "sums", "load_E")]
    return np.stack(rows) if rows else np.zeros((0, 1), np.int32)


def max_violation(loads_NE: np.ndarray) -> np.ndarray:
    """max_j load_j / mean load - 1, per layer (MaxVio); 0 where no token came."""
    mean_N = loads_NE.mean(axis=1)
    return np.divide(loads_NE.max(axis=1), mean_N, out=np.ones_like(mean_N), where=mean_N > 0) - 1


def scalars(cfg: ModelConfig, metrics: Any) -> dict[str, float]:
    """A step's numbers for metrics.jsonl and the progress bar, fetched from the devices."""
    host = jax.device_get(metrics)
    names = ("loss", "penalty", "z", "gradient_norm", "lr")
    out = {name: float(host[name]) for name in names}
    out["tokens"] = int(host["tokens"])
    loads_NE = loads(cfg, host["layers"])
    if loads_NE.size > 1:
        violation_N = max_violation(loads_NE)
        out |= {
            "max_vio": float(violation_N.max()),
            "mean_vio": float(violation_N.mean()),
            "dead_experts": int((loads_NE == 0).sum()),
            "dead_share": float((loads_NE == 0).mean()),
        }
    logits = [float(value.max()) for _, _, value in by_layer(cfg, host["layers"], "maxima", "max_logit_H")]
    if logits:
        out["max_logit"] = max(logits)
    return out


def arrays(cfg: ModelConfig, metrics: Any, params: Any) -> dict[str, np.ndarray]:
    """What plots need of a step: expert loads, AttnRes weights, decay half-lives."""
    host = jax.device_get(metrics["layers"])
    out = {"load": loads(cfg, host)}
    reads = [value for _, _, value in by_layer(cfg, host, "means", "read_S")]
    if reads:
        out["read"] = np.stack([*reads, np.asarray(host["final"].means["read_S"])])
    half_lives = list(decay_half_lives(cfg, params))
    if half_lives:
        out["half_life_layer"] = np.array([layer for layer, _ in half_lives])
        out["half_life"] = np.stack([value for _, value in half_lives])
    return out


def decay_half_lives(cfg: ModelConfig, params: Any) -> Iterator[tuple[int, np.ndarray]]:
    """(KDA layer from 1, half-life in tokens of each head's key channels where the input says nothing).

    That is ln 2 / -g at zero gate logits: what a_log and dt_bias alone make of the decay.
    """
    from k3jax.config import Bounded, KdaConfig
    from pallas_kernels.kda import log_decay

    found = []
    for group in plan(cfg):
        for leaf in group.leaves:
            if not isinstance(leaf.mixer, KdaConfig):
                continue
            kda = jax.device_get({k: params[leaf.name]["mixer"]["kda"][k] for k in ("a_log", "dt_bias")})
            decay = leaf.mixer.decay
            floor = decay.floor if isinstance(decay, Bounded) else None
            for index, layer in np.ndenumerate(leaf.layers):
                bias = kda["dt_bias"][index]
                g = log_decay(np.zeros((1, 1, *bias.shape), bias.dtype), kda["a_log"][index], bias, floor)
                found.append((int(layer) + 1, np.log(2) / -np.asarray(g)[0, 0]))
    yield from sorted(found, key=lambda x: x[0])
