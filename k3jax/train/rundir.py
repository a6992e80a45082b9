"""A run's directory: everything needed to read it, repeat it and go on with it.

config.py       the resolved config, which `k3jax train RUN/config.py` repeats
run.json        versions, devices, chosen implementations, sizes
corpus.json     every file read, with its hash
metrics.jsonl   one line per record, only ever appended
arrays/         what layers report, by step
checkpoints/    by step
plots/
"""

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from k3jax.config import Config
from k3jax.data import corpus
from k3jax.override import load, write

PACKAGES = ("k3jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")


class RunError(RuntimeError):
    """A run directory that cannot be made, read or gone on with; says why and what to do."""


@dataclass(frozen=True)
class RunDirectory:
    """Paths and records of one run."""

    path: Path

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def plots(self) -> Path:
        return self.path / "plots"

    def config(self) -> Config:
        """The config the run was started with."""
        if not (self.path / "config.py").exists():
            raise RunError(f"{self.path} is no run directory: it has no config.py")
        return load(str(self.path / "config.py"))

    def manifest(self) -> corpus.Manifest:
        """The files the run was started on."""
        return corpus.from_json(json.loads((self.path / "corpus.json").read_text()))

    def append(self, record: dict[str, Any]) -> None:
        """Adds a line to metrics.jsonl."""
        with (self.path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")

    def records(self) -> Iterator[dict[str, Any]]:
        """The lines of metrics.jsonl; a last line cut off by a crash is passed over."""
        path = self.path / "metrics.jsonl"
        for line in path.read_text().splitlines() if path.exists() else ():
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                continue

    def save_arrays(self, step: int, arrays: dict[str, Any]) -> None:
        (self.path / "arrays").mkdir(exist_ok=True)
        np.savez(self.path / "arrays" / f"{step:08d}.npz", **arrays)

    def arrays(self) -> dict[int, dict[str, np.ndarray]]:
        """What layers reported, by step."""
        found = {}
        for path in sorted((self.path / "arrays").glob("*.npz")):
            with np.load(path) as file:
                found[int(path.stem)] = dict(file)
        return found


def refuse_existing(path: Path) -> None:
    """Raises RunError if there is something at `path`."""
    if path.exists():
        raise RunError(
            f"{path} exists: nothing is overwritten. Go on with it by `k3jax train --resume {path}`, "
            "or choose another place with --run"
        )


def create(path: Path, cfg: Config, manifest: corpus.Manifest, facts: dict[str, Any]) -> RunDirectory:
    """Makes a new run directory; all of it or nothing appears.

    Raises:
      RunError: there is something at `path` already.
    """
    refuse_existing(path)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.mkdir(parents=True)
    try:
        write(cfg, scratch)
        (scratch / "corpus.json").write_text(json.dumps(corpus.as_json(manifest), indent=1) + "\n")
        (scratch / "run.json").write_text(json.dumps(facts, indent=1) + "\n")
        scratch.rename(path)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    return RunDirectory(path)


def free_name(parent: Path, name: str) -> Path:
    """parent/name, or the first of parent/name-2, -3, ... that is not there yet."""
    path, number = parent / name, 1
    while path.exists():
        number += 1
        path = parent / f"{name}-{number}"
    return path


def environment() -> dict[str, Any]:
    """Versions, machine and command line, for run.json."""
    return {
        "command": [_from_here(sys.argv[0]), *sys.argv[1:]],
        "python": platform.python_version(),
        "machine": platform.platform(),
        "versions": {name: _version(name) for name in PACKAGES},
        "commit": _commit(),
    }


def _from_here(path: str) -> str:
    """A path as it is called from the current directory, if it lies there."""
    here = Path.cwd()
    return str(Path(path).relative_to(here)) if Path(path).is_relative_to(here) else path


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The git commit of the code that runs, with a + if files differ from it; None outside git."""
    here = Path(__file__).parent
    git = lambda *words: subprocess.run(
        ["git", "-C", str(here), *words], capture_output=True, text=True, check=False
    )
    try:
        head, changes = git("rev-parse", "HEAD"), git("status", "--porcelain")
    except OSError:
        return None
    if head.returncode:
        return None
    return head.stdout.strip() + ("+" if changes.stdout.strip() else "")
