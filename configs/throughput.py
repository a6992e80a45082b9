"""Nine layers of width 128 with 16 experts, top-4: about 3.7M parameters, to time a training step.

    python -m experiments.throughput.run

A dense layer, then two whole cycles of three KDA layers and one of attention, which like full K3's
stack end in attention: what repeats is compiled once.
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
    RunConfig,
)


def config() -> Config:
    return Config(
        model=ModelConfig(
            width=128,
            vocabulary=257,
            depth=9,
            full_layers=(5, 9),
            linear=KdaConfig(heads=2, key=64, value=64),
            full=MlaConfig(heads=2, key=64, shared=32, value=64, latent=64, query_rank=64),
            dense=DenseConfig(hidden=384),
            moe=LatentMoeConfig(experts=16, active=4, hidden=80, shared=2, latent=64),
            residual=BlockAttnRes(4),
            dtype="float32",
        ),
        data=DataConfig(length=256, batch=2),
        run=RunConfig(name="throughput", steps=1000),
    )
