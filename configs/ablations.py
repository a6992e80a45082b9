"""Changes to a K3-like config, one mechanism each, for `--with NAME`.

    k3jax params configs/tiny.py --with unbounded

A config file takes what fits it into its own ABLATIONS.
"""

from dataclasses import fields

from k3jax.config import (
    AdamW,
    Auxiliary,
    Config,
    FullAttnRes,
    LowRank,
    MoeConfig,
    Muon,
    NoGate,
    Plain,
    Quantile,
    RoPE,
    Sign,
    Swiglu,
    Unbalanced,
    Unbounded,
    Wsd,
    replace,
)
from k3jax.override import put


def full_width(c: Config) -> Config:
    """Experts over the full width, without W_down, W_up and the norm between them."""
    shared = {f.name: getattr(c.model.moe, f.name) for f in fields(MoeConfig)}
    return put(c, "model.moe", MoeConfig(**shared))


def swiglu(c: Config) -> Config:
    return put(put(c, "model.dense.activation", Swiglu()), "model.moe.activation", Swiglu())


def kda_gate(c: Config, gate) -> Config:
    """KDA's output gate; the full mixer keeps its own."""
    return put(c, "model.linear.gate", gate)


def kda_only(c: Config) -> Config:
    return replace(c, model=replace(c.model, full_layers=(), full=None))


def mla_only(c: Config) -> Config:
    return replace(c, model=replace(c.model, full_layers=1, linear=None))


ABLATIONS = {
    # the linear mixer
    "unbounded": lambda c: put(c, "model.linear.decay", Unbounded()),
    "low_rank_gate": lambda c: kda_gate(c, LowRank(c.model.linear.key)),
    "no_gate": lambda c: put(kda_gate(c, NoGate()), "model.full.gate", NoGate()),
    "uniform_rate": lambda c: put(c, "model.linear.rate_init", "uniform"),
    "no_conv": lambda c: put(c, "model.linear.taps", 1),
    "kda_only": kda_only,
    # the full mixer
    "full_query": lambda c: put(c, "model.full.query_rank", None),
    "rope": lambda c: put(c, "model.full.positions", RoPE()),
    "mla_only": mla_only,
    # the residual stream
    "plain_residual": lambda c: put(c, "model.residual", Plain()),
    "full_residual": lambda c: put(c, "model.residual", FullAttnRes()),
    # experts
    "full_width": full_width,
    "no_latent_norm": lambda c: put(c, "model.moe.norm", "none"),
    "swiglu": swiglu,
    "ema": lambda c: put(c, "model.moe.balance", Quantile(ema=0.9)),
    "sign": lambda c: put(c, "model.moe.balance", Sign()),
    "auxiliary": lambda c: put(c, "model.moe.balance", Auxiliary()),
    "unbalanced": lambda c: put(c, "model.moe.balance", Unbalanced()),
    # ends and optimiser
    "tied": lambda c: put(c, "model.tie_embeddings", True),
    "adamw": lambda c: put(c, "optim.matrices", AdamW()),
    "whole_matrix": lambda c: put(c, "optim.matrices", Muon(split="matrix")),
    "every_head": lambda c: put(c, "optim.matrices", Muon(split="every_head")),
    "wsd": lambda c: put(c, "optim.schedule", Wsd()),
    "no_qk_clip": lambda c: put(c, "optim.qk_clip", None),
}
