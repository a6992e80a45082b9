"""Reading a run's checkpoint for something other than going on with it."""

from contextlib import closing
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
    with closing(Checkpoints(run.checkpoints, setup.cfg.run.keep)) as checkpoints:
        steps = checkpoints.steps()
        if not steps or (step is not None and step not in steps):
            have = ", ".join(map(str, steps)) or "none"
            wanted = "any step" if step is None else f"step {step}"
            raise CheckpointError(f"{path}: no checkpoint of {wanted}; complete: {have}")
        state, position = checkpoints.restore(steps[-1] if step is None else step, setup.state)
    return setup, state, position["step"]
