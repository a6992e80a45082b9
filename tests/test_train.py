"""A whole run: what it leaves, that stopping and going on is exact, and what it says when things go wrong."""

import errno
import json
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import jax
import numpy as np
import pytest
from orbax.checkpoint import CheckpointManager
from rich.console import Console

from k3jax.cli import main
from k3jax.config import ConfigError, Files, replace
from k3jax.override import load
from k3jax.train import loop, restore
from k3jax.train.announce import Announcer
from k3jax.train.checkpoint import CheckpointError, Checkpoints, PartialCheckpoint
from k3jax.train.rundir import RunDirectory, RunError
from tests.small import small

STEPS = 8


class Quiet(Announcer):
    """Says nothing, and does something at a step."""

    def __init__(self, at: int | None = None, do=None):
        super().__init__(Console(quiet=True))
        self.at, self.do, self.said = at, do, []

    def line(self, text):
        self.said.append(text)

    def advance(self, step, numbers, worth_a_line=False):
        if step == self.at:
            self.do()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A hundred small documents, so that a run reads them in no time."""
    folder = tmp_path_factory.mktemp("documents")
    rng = np.random.default_rng(0)
    for number in range(100):
        words = rng.choice(["def", "return", "lambda", "import", "x", "y", " ", "\n"], 60)
        (folder / f"{number:03d}.txt").write_text(" ".join(words))
    return folder


@pytest.fixture(scope="module")
def cfg(corpus):
    base = small()
    return replace(base, data=replace(base.data, corpus=Files(str(corpus)), held_out=0.2))


@pytest.fixture(scope="module")
def whole(cfg, tmp_path_factory):
    """A run that nothing interrupted."""
    path = tmp_path_factory.mktemp("runs") / "whole"
    loop.start(cfg, path, Quiet())
    return path


def final(path: Path):
    """Every array of a run's last checkpoint, the data position included."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PartialCheckpoint)
        setup, state, step = restore.load(path)
        checkpoints = Checkpoints(RunDirectory(path).checkpoints, 99)
    _, position = checkpoints.restore(step, setup.state)
    checkpoints.close()
    return jax.device_get(state), position


def assert_same(a: Path, b: Path):
    (state, position), (other, other_position) = final(a), final(b)
    jax.tree.map(np.testing.assert_array_equal, state, other)
    assert position == other_position


def test_a_run_leaves_everything_behind(whole, cfg):
    run = RunDirectory(whole)
    assert run.config() == cfg
    facts = json.loads((whole / "run.json").read_text())
    assert {"versions", "devices", "implementations", "memory", "command"} <= facts.keys()
    assert any("kda: xla" in line for line in facts["implementations"])
    records = list(run.records())
    assert [r["step"] for r in records if r["kind"] == "step"] == list(range(1, STEPS + 1))
    checks = [r for r in records if r["kind"] == "validation"]
    assert [r["step"] for r in checks] == [4, 8]
    assert all(r["ratio"] == pytest.approx(r["loss"] / r["bigram"]) for r in checks)
    names = {"loss", "learning_rate", "expert_load", "balance", "attnres_weights", "decay_half_lives"}
    assert {path.stem for path in run.plots.glob("*.png")} == names
    assert json.loads((whole / "corpus.json").read_text())
    arrays = run.arrays()[8]
    assert arrays["load"].shape == (2, 8)
    assert arrays["read"].shape == (7, 4)
    assert arrays["half_life"].shape == (2, 2, 8)


def test_the_last_checkpoints_are_kept(whole, cfg):
    checkpoints = Checkpoints(RunDirectory(whole).checkpoints, cfg.run.keep)
    assert checkpoints.steps() == [6, 8]
    checkpoints.close()


def test_a_run_repeats_itself(whole, cfg, tmp_path):
    """The resolved config alone gives the same run, bit for bit."""
    loop.start(load(str(whole / "config.py")), tmp_path / "again", Quiet())
    assert_same(whole, tmp_path / "again")


@pytest.mark.parametrize("at", [3, 5])
def test_an_interrupted_run_goes_on_exactly(whole, cfg, tmp_path, at):
    path = tmp_path / "stopped"
    loop.start(cfg, path, Quiet(at, lambda: os.kill(os.getpid(), signal.SIGINT)))
    steps = [int(x.name) for x in RunDirectory(path).checkpoints.iterdir()]
    assert max(steps) in (at + 1, at + 2), "a signal ends the run after the step at hand, and saves"
    assert max(steps) < STEPS
    announcer = Quiet()
    loop.resume(path, announcer)
    assert any("resumed at step" in text for text in announcer.said)
    assert_same(whole, path)


CHILD = """
import os, sys
from pathlib import Path
import tests.conftest
from k3jax.override import load
from k3jax.train import loop
from tests.test_train import Quiet
loop.start(load(sys.argv[1]), Path(sys.argv[2]), Quiet(int(sys.argv[3]), lambda: os.kill(os.getpid(), 9)))
"""


@pytest.mark.parametrize("at", [1, 6])
def test_a_killed_run_goes_on_exactly(whole, tmp_path, at):
    """SIGKILL at any step: before the first checkpoint, or while one is being written."""
    path = tmp_path / "killed"
    command = [sys.executable, "-c", CHILD, str(whole / "config.py"), str(path), str(at)]
    ended = subprocess.run(
        command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    with warnings.catch_warnings():  # a save that was cut off is passed over, and may have left something
        warnings.simplefilter("ignore", PartialCheckpoint)
        loop.resume(path, Quiet())
    assert_same(whole, path)


def test_a_finished_run_says_so(whole):
    with pytest.raises(RunError, match="is finished: it has made all its 8 steps"):
        loop.resume(whole, Quiet())


def test_nothing_is_overwritten(whole, cfg):
    before = sorted((path, path.stat().st_mtime_ns) for path in whole.rglob("*"))
    with pytest.raises(RunError, match="exists: nothing is overwritten"):
        loop.start(cfg, whole, Quiet())
    assert sorted((path, path.stat().st_mtime_ns) for path in whole.rglob("*")) == before


def test_a_run_that_cannot_start_leaves_nothing(cfg, tmp_path):
    bad = replace(cfg, model=replace(cfg.model, vocabulary=100))
    with pytest.raises(ConfigError, match="vocabulary=100"):
        loop.start(bad, tmp_path / "runs" / "bad", Quiet())
    missing = replace(cfg, data=replace(cfg.data, corpus=Files("/nowhere/at/all")))
    with pytest.raises(ValueError, match="/nowhere/at/all"):
        loop.start(missing, tmp_path / "runs" / "bad", Quiet())
    unbuilt = replace(
        cfg, model=replace(cfg.model, linear=replace(cfg.model.linear, implementation="triton"))
    )
    with pytest.raises(ConfigError, match="'triton' is not built"):
        loop.start(unbuilt, tmp_path / "runs" / "bad", Quiet())
    assert not (tmp_path / "runs").exists()


def copy(run: Path, to: Path) -> Path:
    subprocess.run(["cp", "-r", str(run), str(to)], check=True)
    return to


def test_a_cut_off_checkpoint_is_an_error(whole, tmp_path):
    run = copy(whole, tmp_path / "cut")
    (cut,) = (run / "checkpoints" / "8" / "state" / "d").iterdir()
    os.truncate(cut, cut.stat().st_size // 2)
    code = "import sys; from k3jax.cli import main; sys.exit(main(['eval', sys.argv[1]]))"
    # In a process of its own: reads that still wait when one fails complain to stderr as it ends.
    ended = subprocess.run(
        [sys.executable, "-c", code, str(run)], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 2
    assert "checkpoints/8 cannot be read" in ended.stderr
    assert "other complete checkpoints: 6" in ended.stderr


def test_an_incomplete_checkpoint_is_passed_over(whole, tmp_path):
    run = copy(whole, tmp_path / "partial")
    (run / "checkpoints" / "8" / "_CHECKPOINT_METADATA").unlink()
    with pytest.warns(PartialCheckpoint, match="ignored, incomplete: 8"):
        loop.resume(run, Quiet())
    # It went on from step 6 and ended where the whole run did.
    assert_same(whole, run)


def test_a_changed_corpus_is_an_error(cfg, whole, corpus):
    path = corpus / "000.txt"
    text = path.read_text()
    path.write_text(text + "more")
    try:
        with pytest.raises(RuntimeError, match=r"000\.txt"):
            loop.resume(whole, Quiet())
    finally:
        path.write_text(text)


def test_a_full_disk_ends_the_run_and_keeps_what_is_there(cfg, tmp_path, monkeypatch):
    path = tmp_path / "full"
    save = CheckpointManager.save

    def full(self, step, *args, **kwargs):
        if step > 4:
            self.wait_until_finished()  # as Orbax does before it begins another
            raise OSError(errno.ENOSPC, "No space left on device")
        return save(self, step, *args, **kwargs)

    monkeypatch.setattr(CheckpointManager, "save", full)
    with pytest.raises(CheckpointError, match=r"No space left on device.*complete ones: 2, 4"):
        loop.start(cfg, path, Quiet())
    monkeypatch.undo()
    loop.resume(path, Quiet())
    assert restore.load(path)[2] == STEPS


def test_a_loss_that_is_no_number_ends_the_run(cfg, tmp_path):
    # Decay of 99 a step makes every matrix 98 times larger.
    wild = replace(cfg, optim=replace(cfg.optim, lr=99.0, clip=None, weight_decay=1.0))
    with pytest.raises(loop.NonFiniteLoss, match="is not finite, so its update was not made"):
        loop.start(wild, tmp_path / "wild", Quiet())
    _, state, step = restore.load(tmp_path / "wild")
    assert step <= STEPS
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(jax.device_get(state.params)))


def test_steps_after_the_first_compile_nothing(cfg, tmp_path):
    """One program, made once: whatever places the state comes back in."""
    compiled = []
    listener = lambda name, *_, **__: compiled.append(name) if "backend_compile" in name else None
    jax.monitoring.register_event_duration_secs_listener(listener)
    counts = []
    record = lambda: counts.append(len(compiled))

    class Counting(Quiet):
        def advance(self, step, numbers, worth_a_line=False):
            record()

    short = replace(cfg, run=replace(cfg.run, evaluate_every=100, checkpoint_every=100))
    loop.start(short, tmp_path / "counted", Counting())
    assert len(set(counts)) == 1
    assert counts[0] > 0, "the listener must hear compilations at all"


def test_eval_and_sample_read_a_run(whole, capsys):
    assert main(["eval", str(whole)]) == 0
    said = capsys.readouterr().out
    check = [r for r in RunDirectory(whole).records() if r["kind"] == "validation"][-1]
    assert f"validation loss {check['loss']:.4f}" in said
    assert main(["sample", str(whole), "--prompt", "def ", "--tokens", "6", "--temperature", "0"]) == 0
    first = capsys.readouterr().out
    assert first.startswith("def ")
    assert main(["sample", str(whole), "--prompt", "def ", "--tokens", "6", "--temperature", "0"]) == 0
    assert capsys.readouterr().out == first
    assert main(["eval", str(whole), "--step", "3"]) == 2
    assert "no checkpoint of step 3; complete: 6, 8" in capsys.readouterr().err
    assert main(["sample", str(whole.parent / "nothing")]) == 2
    assert "is no run directory" in capsys.readouterr().err


def test_train_says_what_resume_does_not_take(capsys, whole):
    assert main(["train", "--resume", str(whole), "--set", "optim.lr=1"]) == 2
    assert "takes no CONFIG" in capsys.readouterr().err
