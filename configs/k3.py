"""Kimi K3 at full size: 93 layers, 2.78T parameters, 104.2B active per token.

    k3jax params configs/k3.py
    k3jax params configs/k3.py --with full_width

Counts and shapes only: nothing here trains on one machine.
"""

from configs.ablations import ABLATIONS as COMMON
from k3jax.config import (
    BlockAttnRes,
    Bounded,
    Config,
    DataConfig,
    DenseConfig,
    FullRank,
    KdaConfig,
    LatentMoeConfig,
    MlaConfig,
    ModelConfig,
    NoPE,
    OptimConfig,
    Quantile,
    RunConfig,
    Situ,
)


def model() -> ModelConfig:
    return ModelConfig(
        width=7168,
        vocabulary=163840,
        depth=93,
        linear=KdaConfig(heads=96, key=128, value=128, taps=4, decay=Bounded(-5.0), gate=FullRank()),
        full=MlaConfig(
            heads=96,
            key=128,
            shared=64,
            value=128,
            latent=512,
            query_rank=1536,
            gate=FullRank(),
            positions=NoPE(),
        ),
        dense=DenseConfig(hidden=33792, activation=Situ(4.0, 25.0)),
        moe=LatentMoeConfig(
            experts=896,
            active=16,
            hidden=3072,
            shared=2,
            latent=3584,
            activation=Situ(4.0, 25.0),
            balance=Quantile(),
        ),
        full_layers=4,
        dense_layers=1,
        residual=BlockAttnRes(12),
        dtype="bfloat16",
    )


def config() -> Config:
    return Config(
        model=model(),
        optim=OptimConfig(),
        data=DataConfig(length=8192, batch=8192),
        run=RunConfig(name="k3"),
    )


ABLATIONS = COMMON
