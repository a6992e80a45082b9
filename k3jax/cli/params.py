"""List every parameter of a config, and count them; nothing is allocated.

    k3jax params configs/k3.py
    k3jax params configs/tiny.py --with full_width --set "optim.matrices=AdamW()" --plain

A line a parameter: its shape and axes, what it is drawn from, who moves it (Muon's matrices as
rows x columns x batch), and which axes the config's mesh cuts. Layers that are alike are stacked.
"""

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from k3jax import layout
from k3jax.axes import Weight, weight_cuts
from k3jax.cli.options import add_config, load_config
from k3jax.config import Config, ConfigError, MeshConfig
from k3jax.optim import build
from k3jax.parameters import Counts, counts, leaves, shapes


@dataclass(frozen=True)
class Row:
    """One parameter, in text."""

    path: str
    shape: str
    axes: str
    init: str
    optimiser: str
    sharding: str


def add(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument("--plain", action="store_true", help="tab-separated text, one fact a line")


def run(args: argparse.Namespace) -> None:
    cfg = load_config(args)
    listed, counted = list(rows(cfg)), counts(cfg.model)
    if args.plain:
        print(plain(cfg, listed, counted))
    else:
        _print_tables(cfg, listed, counted)


def rows(cfg: Config) -> Iterator[Row]:
    """Every parameter of the model, in the tree's order.

    Raises:
      ConfigError: a weight that nothing moves, or that the mesh does not divide.
    """
    weights = shapes(cfg.model)
    try:
        build.labels(cfg.optim, weights)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    for path, w in leaves(weights):
        name = ".".join(path)
        shape = "x".join(map(str, w.value.shape))
        optimiser = build.describe(cfg.optim, w)
        yield Row(
            name, shape, " ".join(map(str, w.names)), str(w.init), optimiser, sharding(name, w, cfg.mesh)
        )


def sharding(name: str, w: Weight, mesh: MeshConfig) -> str:
    """Which axes of a weight the mesh cuts, in how many pieces: `embed/fsdp=8`, or `whole`.

    Raises:
      ConfigError: one that it does not divide.
    """
    shown = []
    for axis, size, cuts in zip(w.names, w.value.shape, weight_cuts(w), strict=True):
        over = {cut: getattr(mesh, cut) for cut in cuts if (getattr(mesh, cut) or 1) > 1}
        text = " ".join(f"{cut}={parts}" for cut, parts in over.items())
        if size % math.prod(over.values()):
            raise ConfigError(f"{name}: axis {axis}={size} does not divide over {text}")
        if over:
            shown.append(f"{axis}/{text}")
    return ", ".join(shown) or "whole"


def plain(cfg: Config, listed: list[Row], counted: Counts) -> str:
    """The plan, every parameter and the counts as tab-separated lines; golden tests pin it."""
    lines = [["plan", layout.describe(cfg.model)]]
    lines += [[r.path, r.shape, r.axes, r.init, r.optimiser, r.sharding] for r in listed]
    lines += [[f"count {name}", str(x.total), str(x.active)] for name, x in counted.parts.items()]
    lines += [["count all", str(counted.total), str(counted.active)]]
    return "\n".join("\t".join(line) for line in lines)


def _print_tables(cfg: Config, listed: list[Row], counted: Counts) -> None:
    console = Console(width=240, markup=False, highlight=False)  # a long line may wrap; none is cut short
    table = Table("parameter", "shape", "axes", "from", "moved by", "cut", box=None, header_style="bold")
    for row in listed:
        table.add_row(row.path, row.shape, row.axes, row.init, row.optimiser, row.sharding)
    console.print(table, "", sep="\n")
    table = Table("part", "parameters", "active per token", "share", box=None, header_style="bold")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, x in counted.parts.items():
        table.add_row(name, f"{x.total:,}", f"{x.active:,}", f"{x.active / counted.active:.1%}")
    table.add_row("all", f"{counted.total:,}", f"{counted.active:,}", "", style="bold")
    console.print(table, "")
    console.print(f"{cfg.model.depth} layers: {layout.describe(cfg.model)}")
