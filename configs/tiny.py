"""The smallest model that has every mechanism, for tests: 9 layers of width 32.

    k3jax params configs/tiny.py
    k3jax train configs/tiny.py --with unbounded

Its 20 steps take a minute on two cores, nearly all of it compiling: a check that things run, no more.
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
    replace,
)
from k3jax.data.tokens import VOCABULARY
from k3jax.override import put


def model() -> ModelConfig:
    """The stack has single layers, equal neighbours and a cycle that recurs, and blocks open inside it."""
    return ModelConfig(
        width=32,
        vocabulary=VOCABULARY,
        depth=9,
        linear=KdaConfig(heads=2, key=8, value=8, taps=4, decay=Bounded(-5.0), gate=FullRank()),
        full=MlaConfig(
            heads=2,
            key=8,
            shared=4,
            value=8,
            latent=16,
            query_rank=12,
            gate=FullRank(),
            positions=NoPE(),
        ),
        dense=DenseConfig(hidden=48, activation=Situ(4.0, 25.0)),
        moe=LatentMoeConfig(
            experts=8,
            active=2,
            hidden=8,
            shared=2,
            latent=16,
            activation=Situ(4.0, 25.0),
            balance=Quantile(),
        ),
        full_layers=3,
        dense_layers=1,
        residual=BlockAttnRes(2),
    )


def config() -> Config:
    return Config(
        model=model(),
        optim=OptimConfig(),
        data=DataConfig(length=32, batch=8),
        run=RunConfig(
            name="tiny", steps=20, log_every=1, evaluate_every=10, evaluate_rows=8, checkpoint_every=10
        ),
    )


def with_model(c: Config, **changes) -> Config:
    return replace(c, model=replace(c.model, **changes))


ABLATIONS = {
    **COMMON,
    "other_heads": lambda c: put(put(c, "model.linear.heads", 3), "model.full.heads", 1),
    "wide_values": lambda c: put(put(c, "model.linear.value", 12), "model.full.value", 12),
    "no_shared_experts": lambda c: put(c, "model.moe.shared", 0),
    "raw_weights": lambda c: put(c, "model.moe.normalise", False),
    "listed_layers": lambda c: with_model(c, full_layers=(2, 7), residual=BlockAttnRes((0, 1, 4))),
    "all_dense": lambda c: with_model(c, dense_layers=c.model.depth, moe=None),
    "all_moe": lambda c: with_model(c, dense_layers=0, dense=None),
    "bfloat16": lambda c: put(c, "model.dtype", "bfloat16"),
    "accumulate": lambda c: put(c, "optim.accumulate", 2),
    "z_loss": lambda c: put(c, "optim.z_loss", 1e-4),
    "no_clip": lambda c: put(c, "optim.clip", None),
}
