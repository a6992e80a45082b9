"""Trains configs/gpu_baseline.py with KDA's kernels and without them: loss and speed.

    python -m experiments.kda_training.run [--steps 300] [--set data.batch=4] [--out DIR]

Both start from one seed and see the same rows; `xla` also starts from a second seed, which says how far
apart two such runs are anyway. Writes training.json and losses.png to results/ (or DIR).
"""

import argparse
import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
from matplotlib.figure import Figure

from experiments.kda_training.variants import CONFIG, HERE, IMPLEMENTATIONS, variant
from k3jax.override import load
from k3jax.train.rundir import environment
from k3jax.train.setup import Setup, prepare
from k3jax.train.state import initial

RUNS = (*((name, 0) for name in IMPLEMENTATIONS), ("xla", 1))  # implementation, seed of the parameters
SMOOTHED = 10  # steps that a point of the curves is the mean of
WARM = 10  # steps before the clock starts


def train(setup: Setup, step: Any, steps: int) -> dict[str, Any]:
    """Losses and seconds a step."""
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
    data = setup.cfg.data
    return {
        "seconds_per_step": round(seconds, 4),
        "tokens_per_second": round(data.batch * data.length / seconds),
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
    above.legend(frameon=False)  # the colours and lines of both
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
