"""Compiles KDA's Hopper kernels to machine code, without a GPU, and reads what came of them.

    python -m experiments.machine_code.run [--only prepare ...] [--keep DIR] [--out DIR]

For each kernel and shape: registers, bytes spilled, instructions, matrix products, and how many
instructions touch registers of a product in flight (hazards.py). The exit status is 1 if any does. The whole
table is stored in DIR (results/ by default). README.md says what has to be installed.
"""

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from experiments.machine_code import driver, hazards
from k3jax.train.rundir import environment
from pallas_kernels.kda.mosaic_gpu.backward import backward
from pallas_kernels.kda.mosaic_gpu.form import Finished, Raw
from pallas_kernels.kda.mosaic_gpu.forward import Forward
from pallas_kernels.kda.mosaic_gpu.gradients import gradients
from pallas_kernels.kda.mosaic_gpu.prepare import Inputs, Prepared, prepare
from pallas_kernels.kda.mosaic_gpu.scan import Cotangents, Kept
from pallas_kernels.kda.mosaic_gpu.step import kda_step
from pallas_kernels.kda.mosaic_gpu.walk import Pieces

RESULTS = Path(__file__).parent / "results"
SHAPES = {  # K, V, whether rows are packed
    "128x128": (128, 128, False),
    "128x128 packed": (128, 128, True),
    "64x64": (64, 64, False),
    "64x128 packed": (64, 128, True),
    "128x64": (128, 64, False),
}


class Missing(RuntimeError):
    """Something that compiling needs is not installed."""


@dataclass(frozen=True)
class Row:
    """What a kernel came to."""

    kernel: str
    shape: str
    registers: int
    spilled: int
    instructions: int
    products: int
    waits_after_every_product: bool
    hazards: tuple[hazards.Hazard, ...]


@dataclass(frozen=True)
class Tools:
    """Where NVIDIA's and JAX's compilers are."""

    site: Path
    driver: Path

    @property
    def cuda(self) -> Path:
        return self.site / "nvidia" / "cu13"

    @property
    def plugin(self) -> Path:
        return self.site / "jax_plugins" / "xla_cuda13" / "xla_cuda_plugin.so"

    @classmethod
    def find(cls, folder: Path) -> "Tools":
        spec = importlib.util.find_spec("jaxlib")
        assert spec is not None
        assert spec.origin is not None
        tools = cls(Path(spec.origin).parents[1], folder / "libcuda.so.1")
        for path in (tools.plugin, tools.cuda / "bin" / "ptxas", tools.cuda / "bin" / "nvdisasm"):
            if not path.exists():
                raise Missing(f"{path} is not there: README.md says what to install")
        driver.build(tools.cuda / "include" / "cuda.h", folder)
        return tools

    def compile(self, module: bytes, path: Path) -> tuple[str, list[str]]:
        """(ptxas's report, nvdisasm's lines) of a kernel's module; files beside `path`."""
        path.with_suffix(".module").write_bytes(module)
        program = path.with_suffix(".cubin")
        settings = {
            driver.PROGRAM: str(program),
            "MOSAIC_GPU_DUMP_PTX": "1",
            "MOSAIC_GPU_DUMP_PTXAS": "1",
            "MOSAIC_GPU_CUDA_ROOT": str(self.cuda),
            "MOSAIC_GPU_RUNTIME_LIB_PATH": str(self.site / "jax_cuda13_plugin" / "libmosaic_gpu_runtime.so"),
            "PATH": f"{self.cuda / 'bin'}{os.pathsep}{os.environ['PATH']}",
        }
        command = [
            sys.executable,
            "-c",
            CHILD,
            str(self.driver),
            str(self.plugin),
            str(path.with_suffix(".module")),
        ]
        done = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, check=False)
        if done.returncode or not program.exists():
            raise RuntimeError(f"{path.name}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
        text = subprocess.run(
            [self.cuda / "bin" / "nvdisasm", "-c", "-ndf", program],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        path.with_suffix(".sass").write_text(text)
        return done.stdout, text.splitlines()


# Another process, as the stub must be there before anything looks for a driver.
CHILD = """
import ctypes, os, sys
driver, plugin, module = sys.argv[1:]
ctypes.CDLL(driver, mode=ctypes.RTLD_GLOBAL)
compile = ctypes.CDLL(plugin).MosaicGpuCompile
compile.argtypes, compile.restype = [ctypes.c_char_p, ctypes.c_int], ctypes.POINTER(ctypes.c_void_p)
data = open(module, "rb").read()
made = compile(data, len(data))
sys.stdout.flush()
os._exit(0 if made else 3)
"""


def kernels(K: int, V: int, packed: bool) -> Iterator[tuple[str, Callable, tuple]]:
    """(name, function, shapes of its arguments) of every kernel."""
    B, T, H = 1, 4096, 16
    N, wide = T // 64, jnp.float32
    array = lambda *shape, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(shape, dtype)
    keys, values = array(B, T, H, K), array(B, T, H, V)
    ids = (array(B, T, dtype=jnp.int32), array(B, T, dtype=wide)) if packed else (None, None)
    x: Any = Inputs(
        keys,
        keys,
        values,
        keys,
        array(B, H, T, dtype=wide),
        array(H, dtype=wide),
        array(H, K, dtype=wide),
        *ids,
    )
    p: Any = Prepared(
        array(B, H, N, 128, K), array(B, H, N, 64, K), array(B, H, N, 64, 64), array(B, H, N, V, 64),
        array(B, H, N, K, dtype=wide), array(B, H, N, 64, 64), array(B, H, N, 2, 64, dtype=wide),
    )  # fmt: skip
    row = Pieces(1, 0, 1)
    states = lambda pieces: array(B, H, pieces, V, K, dtype=wide)
    kept: Any = Kept(array(B, H, N, V, K), array(B, H, N, V, 64))
    d: Any = Cotangents(*kept, states(1))
    scale = K**-0.5
    forms = {"": Raw(-5.0), " finished": Finished()}
    for of, form in forms.items():
        yield f"prepare{of}", partial(prepare, scale=scale, form=form), (x,)
    yield "outputs", lambda p, S: Forward("outputs")(p, S, row, None), (p, states(1))
    yield "states", lambda p, S: Forward("kept")(p, S, row, None), (p, states(1))
    yield "last state", lambda p, S: Forward("last")(p, S, Pieces(4, 0, 3), None), (p, states(3))
    yield "transition", lambda p: Forward("transition")(p, None, Pieces(4, 1, 2), None), (p,)
    yield "cotangents", lambda p, do, S: backward(p, do, S, row, True, None), (p, values, states(1))
    yield (
        "first cotangent",
        lambda p, do, S: backward(p, do, S, Pieces(4, 1, 3), False, None),
        (p, values, states(3)),
    )
    for of, form in forms.items():
        yield f"gradients{of}", partial(gradients, scale=scale, form=form), (x, p, kept, d, values)
    key, value, head = array(B, H, K), array(B, H, V), array(H, dtype=wide)
    state, bias = array(B, H, K, V, dtype=wide), array(H, K, dtype=wide)
    yield (
        "step",
        partial(kda_step, scale=scale, lower_bound=-5.0),
        (key, key, value, key, array(B, H), head, bias, state),
    )


def lowered(function: Callable, arguments: tuple) -> bytes:
    """The module of the one kernel that `function` launches."""
    from jax.experimental.mosaic.gpu import core

    card = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    core.KNOWN_KERNELS.clear()
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("one",), abstract_device=card)):
        jax.jit(lambda *x: function(*x)).trace(*arguments).lower(lowering_platforms=("cuda",))
    (module,) = core.KNOWN_KERNELS.values()
    return module


def row(tools: Tools, name: str, shape: str, function: Callable, arguments: tuple, folder: Path) -> Row:
    path = folder / f"{name} {shape}".replace(" ", "_")
    report, lines = tools.compile(lowered(function, arguments), path)
    number = lambda pattern: int(found[1]) if (found := re.search(pattern, report)) else 0
    products, found = hazards.find(lines)
    return Row(
        name, shape, number(r"Used (\d+) registers"), number(r"(\d+) bytes spill stores"),
        sum(1 for line in lines if hazards.LINE.match(line)), products, "C7512" in report, tuple(found),
    )  # fmt: skip


def show(rows: Sequence[Row], console: Console) -> None:
    table = Table()
    for column in ("kernel", "K x V"):
        table.add_column(column)
    for column in ("registers", "spilled bytes", "instructions", "products", "waits after each", "hazards"):
        table.add_column(column, justify="right")
    for x in rows:
        waits = "yes" if x.waits_after_every_product else ""
        numbers = (x.registers, x.spilled, x.instructions, x.products, waits, len(x.hazards))
        table.add_row(x.kernel, x.shape, *map(str, numbers))
    console.print(table)
    for x in rows:
        for hazard in x.hazards:
            console.print(
                f"{x.kernel} {x.shape}: {hazard.address} {hazard.text}: {hazard.what} of {hazard.product}"
            )


def main(argv: Sequence[str] | None = None) -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    names = [name for name, *_ in kernels(128, 128, False)]
    parser.add_argument(
        "--only", nargs="+", choices=names, help="these kernels; nothing is stored without --out"
    )
    parser.add_argument("--keep", type=Path, help="where modules, programs and their text stay")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    rows = []
    with tempfile.TemporaryDirectory() as made:
        folder = args.keep or Path(made)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            tools = Tools.find(folder)
        except Missing as error:
            parser.error(str(error))
        for shape, sizes in SHAPES.items():
            for name, function, arguments in kernels(*sizes):
                if not args.only or name in args.only:
                    rows.append(row(tools, name, shape, function, arguments, folder))
    show(rows, Console(width=None if sys.stdout.isatty() else 110))
    out = args.out or (None if args.only else RESULTS)
    if out:
        out.mkdir(parents=True, exist_ok=True)
        stored = {"environment": environment(), "rows": [asdict(x) for x in rows]}
        (out / "machine_code.json").write_text(json.dumps(stored, indent=1) + "\n")
    return int(any(x.hazards for x in rows))


if __name__ == "__main__":
    sys.exit(main())
