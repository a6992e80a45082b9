"""Checkpoints by Orbax: asynchronous, the last few kept, complete or ignored."""

import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

PARTS = ("_CHECKPOINT_METADATA", "state", "position")  # what Orbax has in place once a step is complete


class CheckpointError(RuntimeError):
    """A checkpoint that is not there or cannot be read; says which, and what else there is."""


class PartialCheckpoint(UserWarning):
    """Something a save left behind when it was cut off; it is not used."""


class Checkpoints:
    """The checkpoints of one run, by step.

    A step is either wholly there or not there: Orbax writes it beside its place and moves it in
    when all of it is on disk. The oldest goes when there are more than `keep`, after the newest
    is in place.
    """

    def __init__(self, directory: Path, keep: int):
        self._directory = directory.absolute()
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, create=False, enable_async_checkpointing=True
        )
        self._directory.mkdir(parents=True, exist_ok=True)
        self._manager = ocp.CheckpointManager(self._directory, options=options)
        whole = set(map(str, self.steps()))
        if left := sorted(x.name for x in self._directory.iterdir() if x.name not in whole):
            message = f"{self._directory}: ignored, incomplete: {', '.join(left)}"
            warnings.warn(message, PartialCheckpoint, stacklevel=2)

    def steps(self) -> list[int]:
        """The complete checkpoints, oldest first."""
        numbers = (int(x.name) for x in self._directory.iterdir() if x.name.isdigit())
        return sorted(step for step in numbers if self._complete(step))

    def _complete(self, step: int) -> bool:
        return all((self._directory / str(step) / name).exists() for name in PARTS)

    def save(self, step: int, state: Any, position: dict[str, Any]) -> None:
        """Starts to write `state` and where the run stands; returns once they are copied.

        Raises:
          CheckpointError: this or an earlier save failed, on a full disk for instance.
        """
        arguments = ocp.args.Composite(
            state=ocp.args.StandardSave(state), position=ocp.args.JsonSave(position)
        )

        def write() -> None:
            place = self._directory / str(step)
            if place.exists() and not self._complete(step):  # kept, out of the way
                place.rename(place.with_name(f"{step}.incomplete-{time.time_ns()}"))
                self._manager.reload()
            self._manager.save(step, args=arguments, force=True)

        self._careful(write)

    def wait(self) -> None:
        """Returns when everything saved is on disk.

        Raises:
          CheckpointError: a save failed.
        """
        self._careful(self._manager.wait_until_finished)

    def _careful(self, write: Callable[[], Any]) -> None:
        try:
            write()
        except Exception as error:  # whatever a full or vanished disk leads to, below three libraries
            whole = ", ".join(map(str, self.steps())) or "none"
            raise CheckpointError(
                f"{self._directory}: a checkpoint could not be written ({_said(error)}); "
                f"complete ones: {whole}"
            ) from error

    def restore(self, step: int, like: Any) -> tuple[Any, dict[str, Any]]:
        """(state, position) of a step, each array read straight to where `like` says it lies.

        Raises:
          CheckpointError: the step is not there, is damaged, or is of another model.
        """
        arguments = ocp.args.Composite(state=ocp.args.StandardRestore(like), position=ocp.args.JsonRestore())
        try:
            found = self._manager.restore(step, args=arguments)
        except Exception as error:  # whatever a damaged file leads to, below three libraries
            others = ", ".join(str(s) for s in self.steps() if s != step) or "none"
            raise CheckpointError(
                f"{self._directory / str(step)} cannot be read ({_said(error)}); other complete checkpoints: "
                f"{others}. To go on from one of those, move this one away"
            ) from error
        return found["state"], found["position"]

    def close(self) -> None:
        """Waits like `wait`, and lets go of the directory."""
        self._careful(self._manager.close)


def _said(error: Exception) -> str:
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first[:300]}"
