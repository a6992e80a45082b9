"""Kimi Linear at the size released: 27 layers, 49.1B parameters, 3.1B active per token ("48B-A3B").

    k3jax params configs/kimi_linear.py

Published in the report (arXiv 2510.26692): three KDA layers to one MLA, NoPE, output gates of rank
one head, 8 of 256 experts active beside a shared one, the first layer dense, Muon as in Moonlight.
Published in the checkpoint's config.json: every width, the layer list, heads and their dims, the
scale 2.446, the vocabulary, no gate on MLA; in its code, how decay rates start. Ours: the sign rule's
step, rate, batch and length.
Cost and result: not run yet.
"""

from k3jax.config import (
    Config,
    DataConfig,
    DenseConfig,
    KdaConfig,
    LowRank,
    MlaConfig,
    ModelConfig,
    MoeConfig,
    Muon,
    NoGate,
    NoPE,
    OptimConfig,
    Plain,
    RunConfig,
    Sign,
    Swiglu,
    Unbounded,
)


def model() -> ModelConfig:
    return ModelConfig(
        width=2304,
        vocabulary=163840,
        depth=27,
        linear=KdaConfig(
            heads=32,
            key=128,
            value=128,
            taps=4,
            decay=Unbounded(),
            gate=LowRank(128),
            rate_init="uniform",
        ),
        full=MlaConfig(
            heads=32,
            key=128,
            shared=64,
            value=128,
            latent=512,
            query_rank=None,
            gate=NoGate(),
            positions=NoPE(),
        ),
        dense=DenseConfig(hidden=9216, activation=Swiglu()),
        moe=MoeConfig(
            experts=256,
            active=8,
            hidden=1024,
            shared=1,
            scale=2.446,
            activation=Swiglu(),
            balance=Sign(1e-3),
        ),
        full_layers=(4, 8, 12, 16, 20, 24, 27),
        dense_layers=1,
        residual=Plain(),
        dtype="bfloat16",
    )


def config() -> Config:
    return Config(
        model=model(),
        optim=OptimConfig(matrices=Muon(split="matrix"), qk_clip=None),
        data=DataConfig(length=4096, batch=1024),
        run=RunConfig(name="kimi_linear"),
    )
