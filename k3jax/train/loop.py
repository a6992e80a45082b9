"""The training run, from top to bottom."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import jax

from k3jax import plots
from k3jax.config import Config
from k3jax.data import corpus
from k3jax.data.bigram import cross_entropy, fit_bigram
from k3jax.data.loader import TrainStream
from k3jax.evaluate import mean_loss
from k3jax.flops import model_flops, utilisation
from k3jax.train import metrics, rundir
from k3jax.train.announce import Announcer
from k3jax.train.checkpoint import Checkpoints
from k3jax.train.setup import Setup, prepare
from k3jax.train.state import TrainState, initial


class NonFiniteLoss(RuntimeError):
    """The loss or a gradient stopped being a number; the update from it was not made."""


def start(cfg: Config, path: Path, announcer: Announcer) -> None:
    """Trains from step 0 in a new directory.

    Raises:
      RunError: the directory exists. ConfigError, DataError, ValueError: as `prepare` does.
      NonFiniteLoss, CheckpointError: what ended the run early; earlier checkpoints are whole.
    """
    rundir.refuse_existing(path)
    setup = prepare(cfg)
    facts = rundir.environment() | setup.facts()
    announcer.setup(facts)
    run = rundir.RunDirectory(path)
    if jax.process_index() == 0:
        run = rundir.create(path, cfg, setup.manifest, facts)
    _train(setup, run, announcer)


def resume(path: Path, announcer: Announcer) -> None:
    """Goes on with a run from its last complete checkpoint, as if it had never stopped.

    Raises:
      RunError: no run there, or a finished one. DataError: the corpus is not what it was.
      The others as in `start`.
    """
    run = rundir.RunDirectory(path)
    setup = prepare(run.config())
    corpus.check_same(run.manifest(), setup.manifest)
    announcer.setup(setup.facts())
    _train(setup, run, announcer)


def _train(setup: Setup, run: rundir.RunDirectory, announcer: Announcer) -> None:
    # Whatever ends the run, a checkpoint that is being written is written to its end.
    with closing(Checkpoints(run.checkpoints, setup.cfg.run.keep)) as checkpoints:
        step = _steps(setup, run, checkpoints, announcer)
    if jax.process_index() == 0:
        announcer.finished(step, setup.cfg.run.steps, run.path, plots.draw(run))


def _steps(setup: Setup, run: rundir.RunDirectory, checkpoints: Checkpoints, announcer: Announcer) -> int:
    """Makes the steps that are left, or those until somebody asks to stop; the step it came to."""
    cfg, steps, stream = setup.cfg, setup.cfg.run.steps, setup.stream()
    state, step = _restore_or_begin(setup, run, checkpoints, stream, announcer)
    train_step, evaluate = announcer.compiling(setup.compile_step, setup.compile_evaluation)
    validation = setup.validation()
    bigram = cross_entropy(fit_bigram(setup.manifest), setup.validation_rows())
    recorder = Recorder(setup, run, announcer)
    pending: tuple[int, Any] | None = None
    kept = step

    def keep() -> None:
        nonlocal kept
        checkpoints.save(step, state, {"step": step, "stream": stream.get_state()})
        kept = step

    def settle() -> None:
        """Reads the numbers of the last step that has not been looked at."""
        nonlocal pending
        if pending is not None:
            (at, report), pending = pending, None
            if not recorder.step(at, report):
                keep()
                checkpoints.wait()
                raise NonFiniteLoss(
                    f"step {at}: the loss or its gradient is not finite, so its update was not made; the "
                    f"state at step {step} is saved in {run.checkpoints}. A lower optim.lr is the usual cure"
                )

    with _stop_signals() as stopped, announcer.progress(step, steps), jax.transfer_guard("disallow"):
        while step < steps and not stopped():
            state, report = train_step(state, setup.on_mesh(next(stream)))
            step += 1
            settle()  # of the step before: the devices never wait for the host
            pending = (step, report)
            if step % cfg.run.evaluate_every == 0 or step == steps:
                settle()
                loss = mean_loss(evaluate, state.params, validation)
                recorder.validation(step, loss, bigram, report, state.params)
            if step % cfg.run.checkpoint_every == 0:
                settle()
                keep()
        settle()
        if kept != step:
            keep()
    checkpoints.wait()
    return step


def _restore_or_begin(
    setup: Setup,
    run: rundir.RunDirectory,
    checkpoints: Checkpoints,
    stream: TrainStream,
    announcer: Announcer,
) -> tuple[TrainState, int]:
    """(the state, how many steps it has seen), from the last checkpoint if there is one."""
    steps = checkpoints.steps()
    if not steps:
        return initial(setup.cfg, setup.optimiser, setup.mesh), 0
    state, position = checkpoints.restore(steps[-1], setup.state)
    step = position["step"]
    if step >= setup.cfg.run.steps:
        raise rundir.RunError(
            f"{run.path} is finished: it has made all its {step} steps. Look at it by `k3jax eval`"
        )
    stream.set_state(position["stream"])
    run.append({"kind": "resumed", "step": step})
    announcer.line(f"resumed at step {step}")
    return state, step


class Recorder:
    """Turns what steps return into lines of metrics.jsonl and of the terminal."""

    def __init__(self, setup: Setup, run: rundir.RunDirectory, announcer: Announcer):
        self._cfg, self._run, self._announcer = setup.cfg, run, announcer
        self._since: tuple[float, float, int] | None = None  # no record yet
        self._flops = model_flops(setup.cfg.model, setup.cfg.data.length)

    def step(self, step: int, report: Any) -> bool:
        """Shows a step's numbers, and every so often writes them; whether they are finite."""
        if step % self._cfg.run.log_every and step != 1 and step != self._cfg.run.steps:
            loss, finite = jax.device_get((report["loss"], report["finite"]))
            self._announcer.advance(step, {"loss": float(loss)})
            return bool(finite)
        numbers = metrics.scalars(self._cfg.model, report)
        numbers |= self._speed(step)
        self._write({"kind": "step", "step": step, **numbers})
        self._announcer.advance(step, numbers, worth_a_line=True)
        return bool(jax.device_get(report["finite"]))

    def _speed(self, step: int) -> dict[str, float]:
        """Tokens per second, per second of this process's CPU time, and MFU, since the last record."""
        since, self._since = self._since, (time.perf_counter(), time.process_time(), step)
        if since is None or since[2] == step:
            return {}
        wall, cpu, steps = (now - then for now, then in zip(self._since, since, strict=True))
        tokens = steps * self._cfg.data.batch * self._cfg.data.length
        device = jax.devices()[0].device_kind
        return {
            "tokens_per_second": tokens / wall,
            "tokens_per_cpu_second": tokens / cpu,
            **utilisation(self._flops, tokens / wall, jax.device_count(), device),
        }

    def validation(self, step: int, loss: float, bigram: float, report: Any, params: Any) -> None:
        """Writes a validation loss beside the bigram model's on the same rows, and what layers report."""
        self._write(
            {"kind": "validation", "step": step, "loss": loss, "bigram": bigram, "ratio": loss / bigram}
        )
        if jax.process_index() == 0:
            with jax.transfer_guard("allow"):
                self._run.save_arrays(step, metrics.arrays(self._cfg.model, report, params))
        self._announcer.line(
            f"step {step}: validation loss {loss:.4f}, byte-bigram {bigram:.4f}, ratio {loss / bigram:.3f}"
        )
        self._since = (time.perf_counter(), time.process_time(), step)

    def _write(self, record: dict[str, Any]) -> None:
        if jax.process_index() == 0:
            self._run.append(record)


@contextmanager
def _stop_signals() -> Iterator[Callable[[], bool]]:
    """The first Ctrl-C (or SIGTERM) ends the run after the step at hand; the second one at once."""
    asked = False

    def ask(number, frame):
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
