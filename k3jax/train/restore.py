"""Reading a run's checkpoint for something other than going on with it."""

from pathlib import Path

from k3jax.data import corpus
from k3jax.train.checkpoint import CheckpointError, Checkpoints
from k3jax.train.rundir import RunDirectory
from k3jax.train.setup import Setup, prepare
from k3jax.train.state import TrainState


def load(path: Path, step: int | None = None) -> tuple[Setup, TrainState, int]:
    """(what the run works with, a checkpoint's state, its step); the last complete one by default.

    Raises:
      RunError: no run there. DataError: the corpus is not what the run read. CheckpointError: no
        such checkpoint, or a damaged one.
    """
    run = RunDirectory(path)
    setup = prepare(run.config())
    corpus.check_same(run.manifest(), setup.manifest)
    checkpoints = Checkpoints(run.checkpoints, setup.cfg.run.keep)
    steps = checkpoints.steps()
    if not steps or (step is not None and step not in steps):
        have = ", ".join(map(str, steps)) or "none"
        raise CheckpointError(
            f"{path}: no checkpoint of {'any step' if step is None else f'step {step}'}; complete: {have}"
        )
    step = steps[-1] if step is None else step
    state, position = checkpoints.restore(step, setup.state)
    checkpoints.close()
    return setup, state, position["step"]
