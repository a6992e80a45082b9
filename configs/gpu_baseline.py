"""Twelve layers of width 1024 with 64 experts in bfloat16, for one GPU.

    k3jax train configs/gpu_baseline.py
    python -m experiments.gpu_baseline.run

The second command trains it for 200 steps and profiles a few of them.
"""

from k3jax.config import (
    BlockAttnRes,
    Config,
    DataConfig,
    DenseConfig,
    KdaConfig,
    LatentMoeConfig,
    MlaConfig,
    ModelConfig,
    Muon,
    OptimConfig,
    RunConfig,
)


def config() -> Config:
    return Config(
        model=ModelConfig(
            width=1024,
            vocabulary=512,
            depth=12,
            linear=KdaConfig(heads=8, key=128, value=128),
            full=MlaConfig(heads=8, key=128, shared=64, value=128, latent=256, query_rank=384),
            dense=DenseConfig(hidden=4096),
            moe=LatentMoeConfig(experts=64, active=8, hidden=768, shared=1, latent=512),
            residual=BlockAttnRes((0, 1, 3, 4, 6, 7, 9, 10)),
            dtype="bfloat16",
        ),
        optim=OptimConfig(lr=1e-3, matrices=Muon(precision="bfloat16")),
        data=DataConfig(length=4096, batch=8),
        run=RunConfig(name="gpu_baseline", steps=200, evaluate_every=100, checkpoint_every=200),
    )
