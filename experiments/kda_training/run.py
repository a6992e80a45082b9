"""Trains configs/gpu_baseline.py with KDA's kernels and without them: loss, speed, KDA's share of a step.

    python -m experiments.kda_training.run [--steps 300] [--set data.batch=4] [--out DIR]

Both start from one seed and see the same rows; `xla` also starts from a second seed, which says how far
apart two such runs are anyway. Writes training.json and losses.png to results/ (or DIR).
"""

import argparse
import json
import re
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
from matplotlib.figure import Figure

from experiments.profiles import device_events
from k3jax.config import Config, replace
from k3jax.override import load
from k3jax.train.rundir import environment
from k3jax.train.setup import Setup, prepare
from k3jax.train.state import initial

HERE = Path(__file__).parent
CONFIG = HERE.parents[1] / "configs" / "gpu_baseline.py"
RUNS = (("xla", 0), ("mosaic_gpu", 0), ("xla", 1))  # implementation, seed of the parameters
SCOPE = "kda_gated"  # what the op calls its part of a program
SMOOTHED = 10  # steps that a point of the curves is the mean of
WARM, PROFILED = 10, 3  # steps before the clock starts, and under the profiler


def variant(cfg: Config, implementation: str, seed: int) -> Config:
    model = replace(cfg.model, linear=replace(cfg.model.linear, implementation=implementation))
    return replace(cfg, model=model, run=replace(cfg.run, seed=seed))


def in_scope(program: str) -> set[str]:
    """Names of the instructions of a compiled program that stem from the op."""
    pattern = rf'^\s*(?:ROOT )?%?([\w.\-]+) = .*op_name="[^"]*{SCOPE}'
    return set(re.findall(pattern, program, re.MULTILINE))


def shares(events: Sequence[dict[str, Any]], names: set[str]) -> dict[str, float]:
    """Milliseconds of a step on the device: all of it, the op's, and what names no instruction."""
    total = {"all": 0.0, "kda": 0.0, "unnamed": 0.0}
    for event in events:
        facts = event.get("args", {})
        instruction = facts.get("hlo_op", "")
        total["all"] += event["dur"] / 1e3
        if instruction in names or SCOPE in json.dumps(facts) or event["name"].startswith("kda_"):
            total["kda"] += event["dur"] / 1e3
        elif not instruction:
            total["unnamed"] += event["dur"] / 1e3
    return {name: ms / PROFILED for name, ms in total.items()}


def train(setup: Setup, step: Any, steps: int) -> dict[str, Any]:
    """Losses, seconds a step, and a profile."""
    state = initial(setup.cfg, setup.optimiser, setup.mesh)
    stream, losses, began = setup.stream(), [], 0.0
    for at in range(steps):
        if at == WARM:
            jax.block_until_ready(state)
            began = time.perf_counter()
        state, report = step(state, setup.on_mesh(next(stream)))
        losses.append(report["loss"])
    jax.block_until_ready(state)
    seconds = (time.perf_counter() - began) / (steps - WARM)
    with tempfile.TemporaryDirectory() as folder:
        batches = [setup.on_mesh(next(stream)) for _ in range(PROFILED)]
        with jax.profiler.trace(folder):
            for batch in batches:
                state, _ = step(state, batch)
            jax.block_until_ready(state)
        device_ms = shares(device_events(Path(folder)), in_scope(step.as_text()))
    data = setup.cfg.data
    return {
        "seconds_per_step": round(seconds, 4),
        "tokens_per_second": round(data.batch * data.length / seconds),
        "device_ms_per_step": {name: round(ms, 2) for name, ms in device_ms.items()},
        "losses": [float(x) for x in losses],
    }


def smooth(losses: Sequence[float]) -> np.ndarray:
    return np.convolve(losses, np.ones(SMOOTHED) / SMOOTHED, mode="valid")


def draw(runs: Sequence[dict[str, Any]], path: Path) -> None:
    """Curves over each other, and how far each is from the first."""
    figure = Figure(figsize=(7, 6), layout="constrained")
    above, below = figure.subplots(2, sharex=True, height_ratios=(2, 1))
    first = smooth(runs[0]["losses"])
    for run, style in zip(runs, ("-", "--", ":"), strict=False):
        curve = smooth(run["losses"])
        steps = np.arange(SMOOTHED, SMOOTHED + len(curve))
        label = f"{run['implementation']}, seed {run['seed']}"
        above.plot(steps, curve, style, label=label)
        if run is not runs[0]:
            below.plot(steps, curve - first, style, label=label, color=above.lines[-1].get_color())
    above.set(yscale="log", ylabel="training loss", title=f"mean over {SMOOTHED} steps")
    below.set(xlabel="step", ylabel=f"less {runs[0]['implementation']}, seed {runs[0]['seed']}")
    below.axhline(0, color="black", linewidth=0.5)
    for axes in (above, below):
        axes.legend(frameon=False)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--set", dest="sets", action="append", default=[])
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    cfg = load(str(CONFIG), args.sets)
    began = time.perf_counter()
    setups = {run: prepare(variant(cfg, *run)) for run in RUNS}
    with ThreadPoolExecutor() as pool:  # seeds share a program
        programs = {name: pool.submit(setups[name, 0].compile_step) for name, seed in RUNS if seed == 0}
        steps = {name: program.result() for name, program in programs.items()}
    print(f"compiled after {time.perf_counter() - began:.0f} s", flush=True)
    runs = []
    for (name, seed), setup in setups.items():
        found = train(setup, steps[name], args.steps)
        runs.append({"implementation": name, "seed": seed, **found})
        print(json.dumps({k: v for k, v in runs[-1].items() if k != "losses"}), flush=True)
        facts = {"rows": cfg.data.batch, "length": cfg.data.length, "device": jax.devices()[0].device_kind}
        facts |= {"environment": environment(), "runs": runs}
        (args.out / "training.json").write_text(json.dumps(facts, indent=1) + "\n")
        draw(runs, args.out / "losses.png")


if __name__ == "__main__":
    main()
