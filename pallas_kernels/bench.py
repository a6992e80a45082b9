"""Times an op's implementations beside the least that the device could need.

    python -m pallas_kernels.bench kda [--implementation xla] [--case k3_layer] [--peer fla] [--out DIR]

The byte floor of a case is what it reads and writes, once, at the speed of a large copy on this device
in this run. Extra memory is what the compiled program holds beside inputs and outputs. Errors are
relative L2 distances from the definition in float64, of several draws as one array. Peers are other
libraries' kernels, timed in this run as CUDA graphs; "x peer" says how many times as fast as the first
of them ours is. Every flag but the last takes several names.
Rows are added to results/ in the op's folder (or DIR) as rows.jsonl, errors of every draw as errors.jsonl,
beside roofline.png.
"""

import argparse
import importlib
import importlib.metadata
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter
from rich.console import Console
from rich.table import Table

OPS = ("kda",)
VERSIONS = ("jax", "jaxlib", "torch", "triton", "fla-core")  # of what takes part, where it is installed
ENOUGH = 0.1  # seconds that one measurement takes, at least
REPEATS = 5
LARGE = {"cpu": (1 << 26, 1024), "gpu": (1 << 31, 8192), "tpu": (1 << 31, 8192)}  # bytes, side of a matrix


@dataclass(frozen=True)
class Device:
    """What this device does at best, measured in this run."""

    kind: str
    bytes_per_second: float
    flops_per_second: float


@dataclass(frozen=True)
class Row:
    """One case of one implementation in one direction."""

    case: str
    implementation: str
    direction: str  # "forward" or "both"
    ms: float
    floor_ms: float
    flops: float
    bytes: int
    extra_gib: float
    over_peer: float | None = None  # the peer's time by this one's

    @property
    def over_floor(self) -> float:
        return self.ms / self.floor_ms


def milliseconds(run: Callable, inputs: Sequence[Any], wait: Callable = jax.block_until_ready) -> float:
    """The median of REPEATS back-to-back series; the device never waits for the host between calls."""

    def series(count: int) -> float:
        began = time.perf_counter()
        out = None
        for _ in range(count):
            out = run(*inputs)
        wait(out)
        return time.perf_counter() - began

    series(2)
    count = max(1, round(ENOUGH / max(series(1), 1e-6)))
    return 1e3 * statistics.median(series(count) / count for _ in range(REPEATS))


def measure_device() -> Device:
    """The speed of a large copy and of a large bfloat16 product."""
    size, side = LARGE[jax.default_backend()]
    copy = jax.jit(lambda x: x + 1)
    x = jnp.zeros(size // 4, jnp.float32)
    copy_ms = milliseconds(copy, (x,))
    square = jax.random.normal(jax.random.key(0), (side, side), jnp.bfloat16)  # ones would draw less power
    product_ms = milliseconds(jax.jit(jnp.matmul), (square, square))
    kind = jax.devices()[0].device_kind
    return Device(kind, 2 * size / copy_ms * 1e3, 2 * side**3 / product_ms * 1e3)


def _directions(op: Any, maker: Any, name: str) -> Iterator[tuple[str, Callable, int, int]]:
    """(direction, what makes it, bytes moved, FLOPs) of a case."""
    case = op.CASES[name]
    makers = maker.forward, maker.both
    return zip(("forward", "both"), makers, op.traffic(case), op.work(case), strict=True)


def compiled(op: Any, names: Sequence[str], implementations: Sequence[str]) -> dict[tuple, Any]:
    """Programs by (implementation, case, direction), made side by side before any is timed."""

    def program(implementation: str, name: str, make: Callable) -> Any:
        case = op.CASES[name]
        shapes = jax.eval_shape(lambda: op.inputs(case))
        return jax.jit(make(implementation, case)).lower(*shapes).compile()

    with ThreadPoolExecutor() as pool:
        jobs = {
            (implementation, name, direction): pool.submit(program, implementation, name, make)
            for implementation in implementations
            for name in names
            for direction, make, *_ in _directions(op, op, name)
        }
        return {key: job.result() for key, job in jobs.items()}


def measure(op: Any, device: Device, programs: dict[tuple, Any], implementation: str, name: str) -> list[Row]:
    """Both directions of one case."""
    inputs = op.inputs(op.CASES[name])
    rows = []
    for direction, _, moved, flops in _directions(op, op, name):
        program = programs[implementation, name, direction]
        extra = program.memory_analysis().temp_size_in_bytes / 2**30
        ms, floor = milliseconds(program, inputs), 1e3 * moved / device.bytes_per_second
        rows.append(Row(name, implementation, direction, ms, floor, flops, moved, extra))
    return rows


def measure_peer(op: Any, peer: Any, device: Device, name: str) -> list[Row]:
    """The same of another library's."""
    case = op.CASES[name]
    inputs = peer.random(case)
    rows = []
    for direction, make, moved, flops in _directions(op, peer, name):
        run = make(case, inputs)
        replay = peer.replayed(run)
        ms, floor = milliseconds(replay, (), peer.wait), 1e3 * moved / device.bytes_per_second
        rows.append(Row(name, peer.name, direction, ms, floor, flops, moved, peer.extra_bytes(run) / 2**30))
    return rows


def beside(rows: Sequence[Row], peers: Sequence[Row]) -> list[Row]:
    """Rows that know how they stand to a peer's of the same case and direction."""
    of_peer = {(row.case, row.direction): row.ms for row in peers}
    known = lambda row: (row.case, row.direction) in of_peer
    ratio = lambda row: of_peer[row.case, row.direction] / row.ms
    return [replace(row, over_peer=ratio(row)) if known(row) else row for row in rows]


def show(rows: Sequence[Row], errors: dict[str, Any], device: Device, console: Console) -> None:
    """The table, and a line of errors for each implementation."""
    tera, peta = device.bytes_per_second / 1e12, device.flops_per_second / 1e12
    table = Table(title=f"{device.kind}: copy {tera:.2f} TB/s, bfloat16 product {peta:.0f} TFLOP/s")
    for column in ("case", "implementation", "direction"):
        table.add_column(column)
    for column in ("ms", "floor ms", "x floor", "x peer", "extra GiB"):
        table.add_column(column, justify="right")
    for row in rows:
        peer = "" if row.over_peer is None else f"{row.over_peer:.2f}"
        numbers = (
            f"{row.ms:.3f}",
            f"{row.floor_ms:.3f}",
            f"{row.over_floor:.1f}",
            peer,
            f"{row.extra_gib:.2f}",
        )
        table.add_row(row.case, row.implementation, row.direction, *numbers)
    console.print(table)
    for implementation, found in errors.items():
        shown = ", ".join(f"{name} {error:.1e}" for name, error in found.pooled.items())
        console.print(f"{implementation}, relative errors against float64: {shown}")


def draw(rows: Sequence[Row], device: Device, path: Path) -> None:
    """A roofline: the definition's FLOPs over the time, by the definition's FLOPs per byte."""
    figure = Figure(figsize=(7, 5), layout="constrained")
    axes = figure.subplots()
    at = [row.flops / row.bytes for row in rows]
    ridge = device.flops_per_second / device.bytes_per_second
    reach = [min(at) / 4, ridge, max([ridge, *at]) * 4]
    roof = [min(x * device.bytes_per_second, device.flops_per_second) / 1e12 for x in reach]
    axes.plot(reach, roof, color="black", label="copy, then bfloat16 product")
    for implementation in sorted({row.implementation for row in rows}):
        for direction, marker in (("forward", "o"), ("both", "s")):
            mine = [r for r in rows if (r.implementation, r.direction) == (implementation, direction)]
            x, y = [r.flops / r.bytes for r in mine], [r.flops / r.ms / 1e9 for r in mine]
            axes.plot(x, y, marker, label=f"{implementation}, {direction}", alpha=0.7)
    axes.set(xscale="log", yscale="log", xlabel="FLOP per byte", ylabel="TFLOP/s", title=device.kind)
    axes.xaxis.set_minor_formatter(NullFormatter())  # within one decade they would run into each other
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)


def _installed(distribution: str) -> bool:
    return any(True for _ in importlib.metadata.distributions(name=distribution))


def _facts(device: Device) -> dict[str, Any]:
    return {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": asdict(device),
        "versions": {x: importlib.metadata.version(x) for x in VERSIONS if _installed(x)},
    }


def _append(lines: Iterable[dict[str, Any]], device: Device, path: Path) -> None:
    """What is there stays."""
    with path.open("a") as file:
        file.writelines(json.dumps(line | _facts(device)) + "\n" for line in lines)


def store(rows: Sequence[Row], device: Device, folder: Path) -> None:
    _append(map(asdict, rows), device, folder / "rows.jsonl")


def store_errors(errors: dict[str, Any], device: Device, folder: Path) -> None:
    lines = ({"implementation": name} | found._asdict() for name, found in errors.items())
    _append(lines, device, folder / "errors.jsonl")


def _peer(op: Any, name: str, parser: argparse.ArgumentParser) -> Any:
    if name not in op.PEERS:
        parser.error(f"--peer {name}: one of {', '.join(op.PEERS)}")
    try:
        return op.PEERS[name]()
    except ImportError as error:
        parser.error(f"--peer {name} cannot run here: {error}")


def main(argv: Sequence[str] | None = None) -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("op", choices=OPS)
    parser.add_argument("--implementation", nargs="+", help="all that run here, if not given")
    parser.add_argument("--case", nargs="+", help="all, if not given")
    parser.add_argument("--peer", nargs="+", default=[], help="other libraries' kernels, timed beside ours")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    op: Any = importlib.import_module(f"pallas_kernels.{args.op}.bench")
    for flag, given, known in (
        ("--implementation", args.implementation, op.IMPLEMENTATIONS),
        ("--case", args.case, tuple(op.CASES)),
    ):
        if unknown := [name for name in given or () if name not in known]:
            parser.error(f"{flag} {unknown[0]}: one of {', '.join(known)}")
    for name in args.implementation or ():
        if (reason := op.why_not(name)) is not None:
            parser.error(f"--implementation {name} cannot run here: {reason}")
    peers = [_peer(op, name, parser) for name in args.peer]
    chosen = args.implementation or [name for name in op.IMPLEMENTATIONS if op.why_not(name) is None]
    folder = args.out or Path(op.__file__).parent / "results"
    folder.mkdir(parents=True, exist_ok=True)

    names = list(args.case or op.CASES)
    programs = compiled(op, names, chosen)
    device, rows = measure_device(), []
    errors = op.errors(chosen, peers)
    store_errors(errors, device, folder)
    for name in names:
        ours = [row for x in chosen for row in measure(op, device, programs, x, name)]
        theirs = [measure_peer(op, peer, device, name) for peer in peers]
        found = sum(theirs, beside(ours, theirs[0]) if theirs else ours)
        store(found, device, folder)  # at once: a long run may be cut short
        rows += found
    show(rows, errors, device, Console(width=None if sys.stdout.isatty() else 110))
    draw(rows, device, folder / "roofline.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
