"""What the released checkpoints call each weight, and how its axes are laid out there."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from k3jax.config import (
    DenseConfig,
    FullRank,
    KdaConfig,
    LatentMoeConfig,
    LowRank,
    MlaConfig,
    ModelConfig,
    MoeConfig,
    Plain,
)
from k3jax.layout import plan


@dataclass(frozen=True)
class Part:
    """One of our weights inside a stored tensor.

    Attributes:
      path: keys in the parameter tree. index: into its leading axes (layers, then expert).
      axes: letters of ours, a permutation of the stored tensor's.
      take: its range along the stored axis X, where several of ours share a tensor.
    """

    path: tuple[str, ...]
    index: tuple[int, ...]
    axes: str
    take: tuple[int, int] | None = None


@dataclass(frozen=True)
class Tensor:
    """One stored tensor: its name, its shape, and its axes once flattened ones are apart."""

    name: str
    shape: tuple[int, ...]
    axes: str
    sizes: tuple[int, ...]
    parts: tuple[Part, ...]

    def to_ours(self, stored: np.ndarray) -> Iterator[tuple[Part, np.ndarray]]:
        """Each of our weights in a stored array of this tensor's size."""
        x = stored.reshape(self.sizes)
        for part in self.parts:
            y = x
            if part.take is not None:
                y = np.take(x, range(*part.take), axis=self.axes.index("X"))
            yield part, np.transpose(y, [self.axes.index(c) for c in part.axes])

    def to_stored(self, ours: list[np.ndarray]) -> np.ndarray:
        """The inverse of `to_ours`, parts in order."""
        back = [
            np.transpose(y, [part.axes.index(c) for c in self.axes])
            for part, y in zip(self.parts, ours, strict=True)
        ]
        x = back[0] if len(back) == 1 else np.concatenate(back, axis=self.axes.index("X"))
        return x.reshape(self.shape)


def tensors(cfg: ModelConfig) -> Iterator[Tensor]:
    """Every tensor of a released checkpoint of this model.

    Raises:
      ValueError: a part that the released format has no name for.
    """
    D, Y = cfg.width, cfg.vocabulary
    yield _tensor("model.embed_tokens.weight", ("embedding",), (), "YD", "YD", Y=Y, D=D)
    if not cfg.tie_embeddings:
        yield _tensor("lm_head.weight", ("head",), (), "YD", "DY", Y=Y, D=D)
    yield _tensor("model.norm.weight", ("norm",), (), "D", "D", D=D)
    if not isinstance(cfg.residual, Plain):
        yield from _read("model.output_attn_res", (), (), D)
    for group in plan(cfg):
        for leaf in group.leaves:
            for index in np.ndindex(*leaf.repeats):
                prefix = f"model.layers.{leaf.layers[index]}."
                yield from _mixer(cfg, leaf.mixer, prefix, (leaf.name, "mixer"), index)
                yield from _channel(cfg, leaf.channel, prefix, (leaf.name, "channel"), index)


def _tensor(name, path, index, stored: str, ours: str, **sizes: int) -> Tensor:
    """`stored` groups flattened axes in parentheses: "(HK)D" is [H * K, D]."""
    axes = stored.replace("(", "").replace(")", "").replace("1", "")
    shape, inside = [], False
    for c in stored:
        if c in "()":
            inside = c == "("
            if inside:
                shape.append(1)
        elif inside:
            shape[-1] *= sizes[c]
        else:
            shape.append(1 if c == "1" else sizes[c])
    return Tensor(name, tuple(shape), axes, tuple(sizes[c] for c in axes), (Part(path, index, ours),))


def _read(prefix: str, path, index, D: int) -> Iterator[Tensor]:
    yield _tensor(f"{prefix}_proj.weight", (*path, "read_query"), index, "1D", "D", D=D)
    yield _tensor(f"{prefix}_norm.weight", (*path, "read_norm"), index, "D", "D", D=D)


def _mixer(cfg: ModelConfig, mixer: Any, prefix: str, path, index) -> Iterator[Tensor]:
    if not isinstance(cfg.residual, Plain):
        yield from _read(f"{prefix}self_attention_res", path, index, cfg.width)
    yield _tensor(f"{prefix}input_layernorm.weight", (*path, "norm"), index, "D", "D", D=cfg.width)
    prefix = f"{prefix}self_attn."
    match mixer:
        case KdaConfig():
            yield from _kda(mixer, cfg.width, prefix, (*path, "kda"), index)
        case MlaConfig():
            yield from _mla(mixer, cfg.width, prefix, (*path, "mla"), index)
        case _:
            raise ValueError(f"the released format has no names for a mixer of kind {mixer.kind!r}")


def _kda(c: KdaConfig, D: int, prefix: str, path, index) -> Iterator[Tensor]:
    def tensor(name, ours, stored, axes, **sizes):
        sizes = dict(D=D, H=c.heads, K=c.key, V=c.value, W=c.taps, R=c.key) | sizes
        return _tensor(f"{prefix}{name}", (*path, ours), index, stored, axes, **sizes)

    for letter, name, X in (("q", "query", "K"), ("k", "key", "K"), ("v", "value", "V")):
        yield tensor(f"{letter}_proj.weight", name, f"(H{X})D", f"DH{X}")
        yield tensor(f"{letter}_conv1d.weight", f"{name}_taps", f"(H{X})1W", f"H{X}W")
    yield tensor("f_a_proj.weight", "decay_down", "RD", "DR")
    yield tensor("f_b_proj.weight", "decay_up", "(HK)R", "RHK")
    yield tensor("b_proj.weight", "beta", "HD", "DH")
    yield tensor("A_log", "a_log", "H", "H")
    yield tensor("dt_bias", "dt_bias", "(HK)", "HK")
    yield tensor("o_norm.weight", "norm", "V", "V")
    yield tensor("o_proj.weight", "out", "D(HV)", "HVD")
    yield from _gate(c, tensor)


def _gate(c, tensor) -> Iterator[Tensor]:
    match c.gate:
        case FullRank():
            yield tensor("g_proj.weight", "gate", "(HV)D", "DHV")
        case LowRank(rank):
            yield tensor("g_a_proj.weight", "gate_down", "RD", "DR", R=rank)
            yield tensor("g_b_proj.weight", "gate_up", "(HV)R", "RHV", R=rank)


def _mla(c: MlaConfig, D: int, prefix: str, path, index) -> Iterator[Tensor]:
    K, A = c.key + c.shared, c.latent + c.shared

    def tensor(name, ours, stored, axes, **sizes):
        sizes = dict(D=D, H=c.heads, K=K, V=c.value, C=c.latent, A=A, R=c.query_rank or 0) | sizes
        return _tensor(f"{prefix}{name}", (*path, ours), index, stored, axes, **sizes)

    if c.query_rank is None:
        yield tensor("q_proj.weight", "query", "(HK)D", "DHK")
    else:
        yield tensor("q_a_proj.weight", "query_down", "RD", "DR")
        yield tensor("q_a_layernorm.weight", "query_norm", "R", "R")
        yield tensor("q_b_proj.weight", "query_up", "(HK)R", "RHK")
    yield tensor("kv_a_proj_with_mqa.weight", "latent", "AD", "DA")
    yield tensor("kv_a_layernorm.weight", "latent_norm", "C", "C")
    both = c.key + c.value
    yield Tensor(
        f"{prefix}kv_b_proj.weight", (c.heads * both, c.latent), "HXC", (c.heads, both, c.latent),
        (
            Part((*path, "key_up"), index, "CHX", (0, c.key)),
            Part((*path, "value_up"), index, "CHX", (c.key, both)),
        ),
    )  # fmt: skip
    yield tensor("o_proj.weight", "out", "D(HV)", "HVD")
    yield from _gate(c, tensor)


def _channel(cfg: ModelConfig, channel: Any, prefix: str, path, index) -> Iterator[Tensor]:
    D = cfg.width
    if not isinstance(cfg.residual, Plain):
        yield from _read(f"{prefix}mlp_res", path, index, D)
    yield _tensor(f"{prefix}post_attention_layernorm.weight", (*path, "norm"), index, "D", "D", D=D)
    match channel:
        case DenseConfig(hidden=F):
            yield from _glu(f"{prefix}mlp.", (*path, "mlp"), index, D, F)
        case MoeConfig():
            yield from _moe(channel, D, f"{prefix}block_sparse_moe.", (*path, "moe"), index)


def _glu(prefix: str, path, index, D: int, F: int) -> Iterator[Tensor]:
    for name in ("gate", "up"):
        yield _tensor(f"{prefix}{name}_proj.weight", (*path, name), index, "FD", "DF", D=D, F=F)
    yield _tensor(f"{prefix}down_proj.weight", (*path, "down"), index, "DF", "FD", D=D, F=F)


def _moe(c: MoeConfig, D: int, prefix: str, path, index) -> Iterator[Tensor]:
    E, F, inner = c.experts, c.hidden, D
    yield _tensor(f"{prefix}gate.weight", (*path, "router"), index, "ED", "DE", D=D, E=E)
    yield _tensor(f"{prefix}gate.e_score_correction_bias", (*path, "router_bias"), index, "E", "E", E=E)
    if isinstance(c, LatentMoeConfig):
        inner = c.latent
        yield _tensor(
            f"{prefix}routed_expert_down_proj.weight", (*path, "down"), index, "LD", "DL", D=D, L=inner
        )
        yield _tensor(f"{prefix}routed_expert_up_proj.weight", (*path, "up"), index, "DL", "LD", D=D, L=inner)
        if c.norm == "rms":
            yield _tensor(f"{prefix}routed_expert_norm.weight", (*path, "norm"), index, "L", "L", L=inner)
    for e in range(E):
        one, at = f"{prefix}experts.{e}.", (*index, e)
        yield _tensor(f"{one}w1.weight", (*path, "experts_gate"), at, "FL", "LF", L=inner, F=F)
        yield _tensor(f"{one}w3.weight", (*path, "experts_up"), at, "FL", "LF", L=inner, F=F)
        yield _tensor(f"{one}w2.weight", (*path, "experts_down"), at, "LF", "FL", L=inner, F=F)
    if c.shared:
        yield from _glu(f"{prefix}shared_experts.", (*path, "shared"), index, D, c.shared * F)
