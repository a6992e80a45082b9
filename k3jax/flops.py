"""Floating-point operations per token, in closed form, part by part.

A multiply-add is two operations. Counted is what multiplies: matrices, taps, pairs of tokens, the
KDA state and the depth-wise reads. Norms, gates and activations are not: they are a percent or two,
and no peak figure is about them. Masked pairs are not counted either, whoever computes them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from k3jax.config import (
    DenseConfig,
    FullRank,
    Gate,
    KdaConfig,
    LatentMoeConfig,
    LowRank,
    MlaConfig,
    ModelConfig,
    MoeConfig,
    NoGate,
    Plain,
    Remat,
)
from k3jax.layout import opens

CHUNK = 64  # tokens per chunk of KDA's chunkwise form

# Dense bfloat16 operations per second of one device at its peak, by jax's device_kind: vendors' data
# sheets, without sparsity. A name that is not here has no peak: its neighbours' may be half of it.
PEAKS: Mapping[str, float] = {
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H200 NVL": 835e12,
    "NVIDIA H200": 989e12,
    "NVIDIA B200": 2250e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
}


@dataclass(frozen=True)
class Parts:
    """Forward operations per token of each kind of work."""

    embedding: float = 0.0  # a lookup
    kda_projections: float = 0.0
    kda_recurrence: float = 0.0
    mla_projections: float = 0.0
    attention: float = 0.0
    own_mixers: float = 0.0
    router: float = 0.0
    latent: float = 0.0  # LatentMoE's way down and up again
    routed: float = 0.0
    shared: float = 0.0
    dense: float = 0.0
    reads: float = 0.0
    head: float = 0.0

    def __add__(self, other: "Parts") -> "Parts":
        names = [x.name for x in fields(self)]
        return Parts(**{name: getattr(self, name) + getattr(other, name) for name in names})

    @property
    def total(self) -> float:
        return sum(getattr(self, x.name) for x in fields(self))


@dataclass(frozen=True)
class Flops:
    """What one token costs in a row of `length` tokens that are all of one document.

    Attributes:
      parts: the forward pass, KDA in its chunkwise form.
      recomputed: what the backward pass computes again under the model's remat policy. It is work
        for the device and no credit for the model: no part of `training`.
      recurrence: KDA token by token, as decoding runs it, where `parts` has the chunkwise form.
      weights: the numbers in the matrices that a token meets (the lookup left out, the head not).
    """

    length: int
    parts: Parts
    recomputed: float
    recurrence: float
    weights: float

    @property
    def forward(self) -> float:
        return self.parts.total

    @property
    def training(self) -> float:
        """Forward and backward: each product has two in its gradient."""
        return 3 * self.forward

    @property
    def six_n(self) -> float:
        """The rule of thumb 6 N over `weights`. It knows no attention and no recurrence: not for MFU."""
        return 6 * self.weights

    def lines(self) -> list[str]:
        """For people: the total, then the parts by size."""
        shown = {x.name: getattr(self.parts, x.name) for x in fields(self.parts)}
        ordered = sorted(((value, name) for name, value in shown.items() if value), reverse=True)
        shares = ", ".join(f"{name.replace('_', ' ')} {value / self.forward:.1%}" for value, name in ordered)
        again = f", {si(self.recomputed)} recomputed" if self.recomputed else ""
        return [
            f"{si(self.training)} a token to train at length {self.length:,} (6N: {si(self.six_n)}){again}",
            f"{si(self.forward)} forward: {shares}",
        ]


def si(number: float) -> str:
    """A number of operations: 1.5e9 is "1.5 GFLOP"."""
    for power, prefix in ((18, "E"), (15, "P"), (12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if number >= 10**power:
            return f"{number / 10**power:.3g} {prefix}FLOP"
    return f"{number:.3g} FLOP"


def model_flops(cfg: ModelConfig, length: int) -> Flops:
    """The closed form for a model on rows of `length` tokens.

    Raises:
      ValueError: length below 1.
    """
    if length < 1:
        raise ValueError(f"length={length}: at least 1 token is needed")
    parts, again, recurrence = Parts(head=2.0 * cfg.width * cfg.vocabulary), 0.0, 0.0
    for mixer, channel in cfg.layers:
        for part in (mixer, channel):
            cost, last = _module(part, cfg.width, length)
            parts += cost
            again += _recomputed(cfg.remat, cost, last)
        if isinstance(mixer, KdaConfig):
            recurrence += kda_recurrence(mixer)
    # A source's mean square, its product with the query, its share of the mixture.
    reads = [6.0 * cfg.width * sources for sources in _sources(cfg)]
    parts += Parts(reads=sum(reads))
    again += 0.0 if cfg.remat == "none" else sum(reads[:-1])  # the final read is in no module
    products = parts.total - parts.kda_recurrence - parts.attention - parts.own_mixers - parts.reads
    return Flops(length, parts, again, recurrence, products / 2)


def _module(part: Any, width: int, length: int) -> tuple[Parts, float]:
    """(the cost of a module, that of its last products, which nothing in the backward pass reads)."""
    match part:
        case KdaConfig():
            projections = 2.0 * kda_weights(part, width)
            cost = Parts(kda_projections=projections, kda_recurrence=kda_chunkwise(part, length))
            return cost, 2.0 * part.heads * part.value * width
        case MlaConfig():
            cost = Parts(
                mla_projections=2.0 * mla_weights(part, width), attention=causal_attention(part, length)
            )
            return cost, 2.0 * part.heads * part.value * width
        case DenseConfig():
            return Parts(dense=6.0 * width * part.hidden), 2.0 * width * part.hidden
        case MoeConfig():
            inner, latent, last = width, 0.0, 2.0 * width * part.shared * part.hidden
            if isinstance(part, LatentMoeConfig):
                inner, latent = part.latent, 4.0 * width * part.latent
                last += 2.0 * width * part.latent
            return Parts(
                router=2.0 * width * part.experts,
                latent=latent,
                routed=6.0 * part.active * inner * part.hidden,
                shared=6.0 * width * part.shared * part.hidden,
            ), last
        case own:
            return Parts(own_mixers=float(own.flops(width, length))), 0.0


def _recomputed(remat: Remat, cost: Parts, last: float) -> float:
    match remat:
        case "none":
            return 0.0
        case "products":  # the others are products with a batch axis, or of several steps
            return cost.kda_recurrence + cost.attention + cost.own_mixers + cost.routed
        case "ops":
            return cost.total - last - cost.kda_recurrence - cost.attention
        case "module":
            return cost.total - last


def _gate(gate: Gate, width: int, channels: int) -> int:
    match gate:
        case NoGate():
            return 0
        case FullRank():
            return width * channels
        case LowRank(rank):
            return rank * (width + channels)


def kda_weights(cfg: KdaConfig, width: int) -> int:
    """Numbers in a KDA layer's matrices, and its taps."""
    H, K, V = cfg.heads, cfg.key, cfg.value
    query_key_value = H * (2 * K + V) * (width + cfg.taps)
    decay, beta = K * (width + H * K), width * H
    return query_key_value + decay + beta + _gate(cfg.gate, width, H * V) + H * V * width


def kda_recurrence(cfg: KdaConfig) -> float:
    """Operations per token of the recurrence: decay, S^T k, the rank-one write, S^T q."""
    return 7.0 * cfg.heads * cfg.key * cfg.value


def kda_chunkwise(cfg: KdaConfig, length: int) -> float:
    """Operations per token of the chunkwise form, over the pairs that see each other in a chunk.

    q k^T and T v with the diagonal, k k^T without; T is the inverse of a unit triangle (C^3 / 3);
    the state is read twice and written once.
    """
    C, K, V = min(CHUNK, length), cfg.key, cfg.value
    pairs = (C - 1) * K + (C + 1) * (K + (K + V) + V)  # k k^T; q k^T, w and u, the output
    return cfg.heads * (pairs + C * C / 3 + 6.0 * K * V)


def mla_weights(cfg: MlaConfig, width: int) -> int:
    """Numbers in an MLA layer's matrices."""
    H, K, V, C = cfg.heads, cfg.key, cfg.value, cfg.latent
    queries = H * (K + cfg.shared)
    query = width * queries if cfg.query_rank is None else cfg.query_rank * (width + queries)
    latent = width * (C + cfg.shared) + C * H * (K + V)
    return query + latent + _gate(cfg.gate, width, H * V) + H * V * width


def causal_attention(cfg: MlaConfig, length: int) -> float:
    """Operations per token of q k^T and p v over the (length + 1) / 2 keys that a query sees on average."""
    return cfg.heads * (cfg.key + cfg.shared + cfg.value) * (length + 1.0)


def _sources(cfg: ModelConfig) -> list[int]:
    """How many sources each read weighs, the final one last; 0 where there is nothing to choose."""
    if isinstance(cfg.residual, Plain):
        return [0]
    counts, finished = [], 0  # finished blocks, the embedding being the first
    for module_opens in (x for layer in opens(cfg) for x in layer):
        finished += module_opens
        counts.append(finished + (not module_opens))
    return [count if count > 1 else 0 for count in (*counts, finished + 1)]


def utilisation(flops: Flops, tokens_per_second: float, devices: int, device_kind: str) -> dict[str, float]:
    """Model FLOPs utilisation while training, under a key that names the device: {"mfu (NVIDIA H200)": 0.31}.

    Shares of different peaks do not compare, so the number never goes without the device. Nothing if
    its peak is not in PEAKS.

    Args:
      tokens_per_second: over all `devices`.
    """
    if device_kind not in PEAKS:
        return {}
    used = flops.training * tokens_per_second / (devices * PEAKS[device_kind])
    return {f"mfu ({device_kind})": used}
