"""Tokens per second of this process's CPU time, and compile time, of a whole training step.

python -m experiments.throughput.run [--rows 2 8] [--steps 20] [--set "model.full_layers=(4, 8, 9)"]
"""

import argparse
import contextlib
import json
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax

from k3jax.config import Config, replace
from k3jax.layout import describe
from k3jax.override import load
from k3jax.parameters import counts
from k3jax.train.rundir import environment
from k3jax.train.setup import implementations, prepare
from k3jax.train.state import initial

HERE = Path(__file__).parent
CONFIG = HERE.parents[1] / "configs" / "throughput.py"
RESULTS = HERE / "results" / "throughput.jsonl"


@contextlib.contextmanager
def xla_seconds() -> Iterator[list[float]]:
    """A list that fills with the time of each compilation by XLA, tracing and lowering not counted."""
    spent: list[float] = []
    done = False

    def heard(name: str, seconds: float, **_: Any) -> None:
        if "backend_compile" in name and not done:
            spent.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(heard)
    yield spent
    done = True


def measure(cfg: Config, rows: int, steps: int) -> dict[str, Any]:
    """One row of results: compile once, warm up three steps, time `steps` more."""
    cfg = replace(cfg, data=replace(cfg.data, batch=rows))
    setup = prepare(cfg)
    began = time.perf_counter()
    state = initial(cfg, setup.optimiser, setup.mesh)
    jax.block_until_ready(state)
    made = time.perf_counter()
    with xla_seconds() as spent:
        step = setup.compile_step()
    compiled = time.perf_counter()
    stream = setup.stream()
    batches = [setup.on_mesh(next(stream)) for _ in range(steps + 3)]
    for batch in batches[:3]:
        state, report = step(state, batch)
    jax.block_until_ready(state)
    wall, cpu = time.perf_counter(), time.process_time()
    for batch in batches[3:]:
        state, report = step(state, batch)
    jax.block_until_ready(state)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    tokens = steps * rows * cfg.data.length
    count = counts(cfg.model)
    return {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "rows": rows,
        "length": cfg.data.length,
        "layers": describe(cfg.model),
        "parameters": count.total,
        "active": count.active,
        "device": jax.devices()[0].device_kind,
        "tokens_per_cpu_second": round(tokens / cpu, 1),
        "tokens_per_second": round(tokens / wall, 1),
        "seconds_per_step": round(wall / steps, 4),
        "cpu_seconds_per_step": round(cpu / steps, 4),
        "initialise_seconds": round(made - began, 2),
        "trace_and_compile_seconds": round(compiled - made, 2),
        "xla_seconds": round(sum(spent), 2),
        "last_loss": round(float(report["loss"]), 4),
        "implementations": implementations(cfg),
        "environment": environment(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--set", dest="sets", action="append", default=[], metavar="KEY=VALUE")
    args = parser.parse_args()
    RESULTS.parent.mkdir(exist_ok=True)
    for rows in args.rows:
        row = measure(load(str(CONFIG), args.sets), rows, args.steps)
        with RESULTS.open("a") as file:
            file.write(json.dumps(row) + "\n")
        shown = (
            "rows",
            "tokens_per_cpu_second",
            "tokens_per_second",
            "trace_and_compile_seconds",
            "xla_seconds",
        )
        print("  ".join(f"{name} {row[name]}" for name in shown), flush=True)


if __name__ == "__main__":
    main()
