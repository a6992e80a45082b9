"""Kimi K2, the family that K3 is measured against: 61 layers, 1.03T parameters, 31.7B active per token.

    k3jax params configs/k2.py
    k3jax train "configs/k2.py:rung(2)"

All MLA with RoPE on the shared dims and no output gate, SwiGLU, experts over the full width, the sign
rule, plain residuals, whole-matrix Muon with QK-Clip (arXiv 2507.20534). Reported as 1.04T and 32.6B:
here the MTP layer is left out, and the input embedding is not active. `rung(n)` has the width, data
and schedule of rung n of configs/ladder.py, K2's proportions and two thirds of its depth, as the
full sizes have.

    rung   width   layers   parameters   active in the stack
       1     128        6          30M                  1.3M
       2     256        9         192M                  7.2M
       4     512       14         1.2B                   42M
       8    1024       24         8.8B                  281M

Rates, batches and lengths are starting points. Cost and result: not run yet.
"""

from configs import ladder
from k3jax.config import (
    BlockAttnRes,
    Config,
    DataConfig,
    DenseConfig,
    MlaConfig,
    ModelConfig,
    MoeConfig,
    Muon,
    NoGate,
    OptimConfig,
    Plain,
    Quantile,
    RoPE,
    RunConfig,
    Sign,
    Situ,
    Swiglu,
    replace,
)
from k3jax.override import put

THETA, SCALE, STEP = 50000.0, 2.827, 1e-3  # the sign rule's step is DeepSeek-V3's


def model() -> ModelConfig:
    return ModelConfig(
        width=7168,
        vocabulary=163840,
        depth=61,
        full=MlaConfig(
            heads=64,
            key=128,
            shared=64,
            value=128,
            latent=512,
            query_rank=1536,
            gate=NoGate(),
            positions=RoPE(THETA),
        ),
        dense=DenseConfig(hidden=18432, activation=Swiglu()),
        moe=MoeConfig(
            experts=384,
            active=8,
            hidden=2048,
            shared=1,
            scale=SCALE,
            activation=Swiglu(),
            balance=Sign(STEP),
        ),
        full_layers=1,
        dense_layers=1,
        residual=Plain(),
        dtype="bfloat16",
    )


def optim(lr: float = 2e-3) -> OptimConfig:
    return OptimConfig(lr=lr, matrices=Muon(split="matrix"), qk_clip=100.0)


def config() -> Config:
    return Config(
        model=model(), optim=optim(2e-4), data=DataConfig(length=4096, batch=16384), run=RunConfig(name="k2")
    )


def rung(n: int = 1) -> Config:
    k3 = ladder.rung(n)
    head = ladder.HEAD
    full = MlaConfig(
        heads=2 * n,
        key=head,
        shared=head // 2,
        value=head,
        latent=32 * n,
        query_rank=32 * n,
        gate=NoGate(),
        positions=RoPE(THETA),
    )
    small = replace(
        model(),
        width=k3.model.width,
        vocabulary=k3.model.vocabulary,
        depth=round(k3.model.depth * 61 / 93),
        full=full,
        dense=DenseConfig(hidden=328 * n, activation=Swiglu()),
        moe=replace(model().moe, hidden=40 * n),
    )
    return replace(k3, model=small, optim=optim(k3.optim.lr), run=replace(k3.run, name=f"k2_{n}"))


ABLATIONS = {  # what K3 changed, one at a time
    "quantile": lambda c: put(c, "model.moe.balance", Quantile()),
    "situ": lambda c: put(put(c, "model.dense.activation", Situ()), "model.moe.activation", Situ()),
    "per_head": lambda c: put(c, "optim.matrices", Muon(split="head")),
    "block_residual": lambda c: put(c, "model.residual", BlockAttnRes(-(-c.model.depth // ladder.BLOCKS))),
}
