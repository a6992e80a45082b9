"""What both programs of this study train: configs/gpu_baseline.py with an implementation of KDA named."""

from pathlib import Path

from k3jax.config import Config, replace

HERE = Path(__file__).parent
CONFIG = HERE.parents[1] / "configs" / "gpu_baseline.py"
IMPLEMENTATIONS = ("xla", "mosaic_gpu")


def variant(cfg: Config, implementation: str, seed: int) -> Config:
    """The same with KDA by one implementation, from another seed."""
    model = replace(cfg.model, linear=replace(cfg.model.linear, implementation=implementation))
    return replace(cfg, model=model, run=replace(cfg.run, seed=seed))
