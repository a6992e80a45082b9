"""A model small enough to train in a test, and steps of it on made-up rows."""

from functools import partial

import jax
import numpy as np

from k3jax.axes import make_mesh
from k3jax.config import (
    AdamW,
    BlockAttnRes,
    Config,
    DataConfig,
    DenseConfig,
    KdaConfig,
    LatentMoeConfig,
    MlaConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
)
from k3jax.optim.build import build
from k3jax.parameters import shapes
from k3jax.train.state import initial, shardings
from k3jax.train.step import train_step


def small() -> Config:
    """Three layers of width 32: kda dense, kda moe, mla moe; each opens an AttnRes block."""
    return Config(
        model=ModelConfig(
            width=32,
            vocabulary=257,
            depth=3,
            linear=KdaConfig(heads=2, key=8, value=8),
            full=MlaConfig(heads=2, key=8, shared=4, value=8, latent=16, query_rank=16),
            dense=DenseConfig(32),
            moe=LatentMoeConfig(experts=8, active=2, hidden=16, shared=1, latent=16),
            full_layers=(3,),
            residual=BlockAttnRes((0, 1, 2)),
        ),
        # A gradient that is all rounding, divided by its own size, would be a step of its own.
        optim=OptimConfig(lr=5e-3, adam=AdamW(eps=1e-6)),
        data=DataConfig(length=32, batch=8),
        run=RunConfig(
            name="small", steps=8, log_every=1, evaluate_every=4, evaluate_rows=8, checkpoint_every=2
        ),
    )


def rows(cfg: Config, seed: int = 0) -> dict[str, np.ndarray]:
    """Random rows of one step, with two documents each and some padding."""
    rng = np.random.default_rng(seed)
    B, T = cfg.data.batch, cfg.data.length
    tokens = rng.integers(0, 16, (B, T + 1), np.int32)
    cut = rng.integers(T // 4, T // 2, (B, 1))
    real = rng.integers(3 * T // 4, T + 1, (B, 1))
    at = np.arange(T)[None]
    ids = np.where(at < real, 1 + (at >= cut), 0).astype(np.int32)
    weights = ((ids > 0) & (at != cut - 1)).astype(np.float32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "segment_ids": ids, "weights": weights}


def begin(cfg: Config, devices=None):
    """(the state before the first step, the compiled step) on a mesh over `devices` (one by default)."""
    devices = jax.devices()[:1] if devices is None else devices
    mesh = make_mesh(cfg.mesh.sizes(len(devices)), devices)
    optimiser = build(cfg.optim, shapes(cfg.model), cfg.run.steps)
    places = shardings(cfg, optimiser, mesh)
    compiled = jax.jit(partial(train_step, cfg, optimiser), out_shardings=(places, None))

    def step(state, batch):
        with jax.set_mesh(mesh):
            return compiled(state, batch)

    return initial(cfg, optimiser, mesh), step


def steps(cfg: Config, count: int, *, devices=None, same_rows: bool = False):
    """(state before, state after, reports) of `count` steps on a mesh over `devices` (one by default)."""
    before, step = begin(cfg, devices)
    state, reports = before, []
    for at in range(count):
        state, report = step(state, rows(cfg, 0 if same_rows else at))
        reports.append(jax.device_get(report))
    return before, state, reports
