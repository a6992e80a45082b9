"""Times `kda_step` beside what reading and writing its state takes.

    python -m pallas_kernels.kda.bench_step [--implementation mosaic_gpu ...] [--rows 1 64 ...] [--out DIR]

A step of 96 heads of 128 by 128 channels in bfloat16, floor -5, for each number of rows. Each step takes
the state that the last one gave away; where rows are few, a program is several steps, so that the device
does not wait for the host. The floor moves every input, the output, the state and the new state once, at
the speed of a large copy on this device in this run. Rows are added to results/step.jsonl (or DIR).
"""

import argparse
import importlib.metadata
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from pallas_kernels.bench import measure_device, milliseconds
from pallas_kernels.kda import kda_step
from pallas_kernels.kda.api import Implementation
from pallas_kernels.kda.step import why_not

H, K, V = 96, 128, 128
ROWS = 16  # that a program takes a step of, at least
IMPLEMENTATIONS: tuple[Implementation, ...] = ("xla", "mosaic_gpu")


@dataclass(frozen=True)
class Row:
    """A step of B rows."""

    implementation: str
    B: int
    ms: float
    floor_ms: float
    extra_gib: float  # what the program holds beside inputs and outputs

    @property
    def over_floor(self) -> float:
        return self.ms / self.floor_ms


def inputs(B: int) -> tuple[list[tuple], tuple, jax.Array]:
    """(query, key, value, logits of gate and beta) of each token, (a_log, dt_bias) and a state."""
    shapes = [(B, H, K), (B, H, K), (B, H, V), (B, H, K), (B, H)]
    keys = iter(jax.random.split(jax.random.key(0), max(1, ROWS // B) * len(shapes) + 3))
    normal = lambda shape, dtype=jnp.bfloat16: jax.random.normal(next(keys), shape, dtype)
    tokens = [tuple(map(normal, shapes)) for _ in range(max(1, ROWS // B))]
    a_log, dt_bias, state = (normal(shape, jnp.float32) for shape in ((H,), (H, K), (B, H, K, V)))
    return tokens, (a_log, dt_bias), state


def traffic(B: int) -> int:
    """Bytes of a step: q, k, z and v, beta's logit and the output in bfloat16, the state twice."""
    return B * H * (2 * (3 * K + 2 * V + 1) + 2 * 4 * K * V)


def steps(implementation: Implementation) -> Any:
    """(tokens, parameters, state) -> (outputs, new state), the state given away."""
    step = jax.jit(partial(kda_step, implementation=implementation))

    def run(tokens, parameters, state):
        outputs = []
        for token in tokens:
            o, state = step(*token, *parameters, state)
            outputs.append(o)
            state = jax.lax.optimization_barrier(state)  # in a model, much lies between two steps
        return outputs, state

    return jax.jit(run, donate_argnums=2)


def measure(implementation: Implementation, B: int, bytes_per_second: float) -> Row:
    tokens, parameters, state = inputs(B)
    compiled = steps(implementation).lower(tokens, parameters, state).compile()

    def run():
        nonlocal state
        outputs, state = compiled(tokens, parameters, state)
        return outputs

    ms, floor_ms = milliseconds(run, ()) / len(tokens), 1e3 * traffic(B) / bytes_per_second
    extra = compiled.memory_analysis().temp_size_in_bytes / 2**30
    return Row(implementation, B, ms, floor_ms, extra)


def show(rows: Sequence[Row], title: str, console: Console) -> None:
    table = Table(title=title)
    table.add_column("implementation")
    for column in ("B", "ms", "floor ms", "x floor", "extra GiB"):
        table.add_column(column, justify="right")
    for x in rows:
        numbers = (f"{x.ms:.4f}", f"{x.floor_ms:.4f}", f"{x.over_floor:.2f}", f"{x.extra_gib:.2f}")
        table.add_row(x.implementation, str(x.B), *numbers)
    console.print(table)


def main(argv: Sequence[str] | None = None) -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--implementation", nargs="+", choices=IMPLEMENTATIONS, help="all that run here")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 64], metavar="B")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args(argv)
    reasons = {x: why_not(x, key=K, value=V, dtypes=[jnp.bfloat16, jnp.float32]) for x in IMPLEMENTATIONS}
    for name in args.implementation or ():
        if reasons[name] is not None:
            parser.error(f"--implementation {name} cannot run here: {reasons[name]}")
    chosen: Any = args.implementation or [name for name, reason in reasons.items() if reason is None]
    device = measure_device()
    rows = [measure(name, B, device.bytes_per_second) for B in args.rows for name in chosen]
    show(rows, f"{device.kind}: copy {device.bytes_per_second / 1e12:.2f} TB/s", Console())
    facts = {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": asdict(device),
        "versions": {x: importlib.metadata.version(x) for x in ("jax", "jaxlib")},
    }
    args.out.mkdir(parents=True, exist_ok=True)
    with (args.out / "step.jsonl").open("a") as file:
        for x in rows:
            file.write(json.dumps(asdict(x) | {"H": H, "K": K, "V": V} | facts) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
