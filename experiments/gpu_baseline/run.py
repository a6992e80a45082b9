"""Trains configs/gpu_baseline.py for its 200 steps and profiles a few more.

    python -m experiments.gpu_baseline.run [--out DIR] [--set optim.lr=1e-3]

Writes tokens per second, peak memory and the ten longest kernels to results/ (or DIR).
"""

import argparse
import collections
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import jax

from experiments.profiles import device_events
from k3jax.flops import model_flops
from k3jax.override import load
from k3jax.parameters import counts
from k3jax.train.rundir import environment
from k3jax.train.setup import implementations, prepare
from k3jax.train.state import initial

HERE = Path(__file__).parent
CONFIG = HERE.parents[1] / "configs" / "gpu_baseline.py"


def kernels(folder: Path) -> list[tuple[str, float, int]]:
    """(name, total ms, calls) of every device kernel in a profile, longest first."""
    total: dict[str, list[float]] = collections.defaultdict(list)
    for event in device_events(folder):
        total[event["name"]].append(event["dur"] / 1e3)
    rows = [(name, sum(times), len(times)) for name, times in total.items()]
    return sorted(rows, key=lambda row: -row[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--set", dest="sets", action="append", default=[])
    parser.add_argument("--profiled", type=int, default=3)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    cfg = load(str(CONFIG), ["model.linear.implementation='xla'", *args.sets])  # before there are kernels
    setup = prepare(cfg)
    print("\n".join(f"{name}: {value}" for name, value in setup.facts().items()), flush=True)
    state = initial(cfg, setup.optimiser, setup.mesh)
    began = time.perf_counter()
    step = setup.compile_step()
    compile_seconds = time.perf_counter() - began
    print(f"compiled in {compile_seconds:.1f} s", flush=True)
    stream, losses = setup.stream(), []
    warm = 10
    for at in range(cfg.run.steps):
        if at == warm:
            jax.block_until_ready(state)
            began = time.perf_counter()
        state, report = step(state, setup.on_mesh(next(stream)))
        losses.append(report["loss"])
    jax.block_until_ready(state)
    seconds = (time.perf_counter() - began) / (cfg.run.steps - warm)
    losses = [float(x) for x in losses]

    with tempfile.TemporaryDirectory() as folder:
        batches = [setup.on_mesh(next(stream)) for _ in range(args.profiled)]
        with jax.profiler.trace(folder):
            for batch in batches:
                state, report = step(state, batch)
            jax.block_until_ready(state)
        found = kernels(Path(folder))
    device_ms = sum(row[1] for row in found)
    memory = jax.devices()[0].memory_stats() or {}
    tokens = cfg.data.batch * cfg.data.length
    flops = model_flops(cfg.model, cfg.data.length)
    row: dict[str, Any] = {
        "device": jax.devices()[0].device_kind,
        "parameters": counts(cfg.model).total,
        "active": counts(cfg.model).active,
        "rows": cfg.data.batch,
        "length": cfg.data.length,
        "dtype": cfg.model.dtype,
        "seconds_per_step": round(seconds, 4),
        "tokens_per_second": round(tokens / seconds),
        "train_tflops_per_second": round(flops.training * tokens / seconds / 1e12, 2),
        "compile_seconds": round(compile_seconds, 1),
        "peak_gib": round(memory.get("peak_bytes_in_use", 0) / 2**30, 2),
        "loss_first_last": [losses[0], losses[-1]],
        "device_ms_per_step": round(device_ms / args.profiled, 2),
        "top": [
            {
                "kernel": name,
                "ms_per_step": round(ms / args.profiled, 3),
                "calls": calls // args.profiled,
                "share": round(ms / device_ms, 4),
            }
            for name, ms, calls in found[:10]
        ],
        "implementations": implementations(cfg),
        "environment": environment(),
    }  # fmt: skip
    (args.out / "gpu_baseline.json").write_text(json.dumps(row, indent=1) + "\n")
    (args.out / "losses.json").write_text(json.dumps(losses) + "\n")
    print(json.dumps({k: v for k, v in row.items() if k != "environment"}, indent=1))


if __name__ == "__main__":
    main()
