"""K3 shrunk along one dial, so that a scaling sweep is a list of integers.

    k3jax params "configs/ladder.py:rung(2)"
    k3jax train "configs/ladder.py:rung(2)" --with unbounded --set optim.lr=1e-3

    rung   width   layers   parameters   active in the stack   routed share of active
       1     128        9         113M                  4.4M                      44%
       2     256       13         557M                 21.4M                      45%
       4     512       21         3.3B                  125M                      46%
       8    1024       37        22.4B                  829M                      47%

Kept from K3: macrocycles of three KDA and one MLA and one more MLA, the first layer dense, one
expert in 56 active, a latent of half the width, the routed experts' share of the active parameters
(K3: 47%), eight AttnRes blocks, and nearly its heads' width (1.5 times the embedding's; K3: 1.7).
Not kept: 8 experts of twice the relative width in place of 16, since narrow routers weigh more; heads
of 64; MLA latents of a quarter width (K3: a fourteenth), below which few channels are left.

Rates, batches and lengths are starting points. Cost and result: not run yet.
"""

from configs.ablations import ABLATIONS as COMMON
from k3jax.config import (
    BlockAttnRes,
    Config,
    ConfigError,
    DataConfig,
    DenseConfig,
    KdaConfig,
    LatentMoeConfig,
    MlaConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
)
from k3jax.data.tokens import VOCABULARY

HEAD = 64
BLOCKS = 8


def model(n: int) -> ModelConfig:
    if not isinstance(n, int) or n < 1:
        raise ConfigError(f"rung({n!r}): a whole number of at least 1 is needed")
    depth = 4 * (n + 1) + 1
    return ModelConfig(
        width=128 * n,
        vocabulary=VOCABULARY,
        depth=depth,
        linear=KdaConfig(heads=3 * n, key=HEAD, value=HEAD),
        full=MlaConfig(heads=3 * n, key=HEAD, shared=HEAD // 2, value=HEAD, latent=32 * n, query_rank=32 * n),
        dense=DenseConfig(hidden=608 * n),
        # The constant keeps the routed share where the router is a larger part of the model.
        moe=LatentMoeConfig(experts=448, active=8, hidden=104 * n + 56, shared=1, latent=64 * n),
        residual=BlockAttnRes(tuple(block * depth // BLOCKS for block in range(BLOCKS))),
        dtype="bfloat16",
    )


def rung(n: int = 1) -> Config:
    return Config(
        model=model(n),
        optim=OptimConfig(lr=2e-3),
        data=DataConfig(length=1024, batch=32),
        run=RunConfig(name=f"ladder_{n}", steps=2000),
    )


config = rung

ABLATIONS = COMMON
