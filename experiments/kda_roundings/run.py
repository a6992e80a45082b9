"""Asks which of the Hopper kernels' roundings the gates' gradients owe their errors to.

    python -m experiments.kda_roundings.run [--draws 24] [--out DIR]

In float64 on any machine, over the benchmark's draws (pallas_kernels/kda/accuracy.py): with all roundings,
with each alone, and with a few otherwise. Errors are relative L2 distances of all draws as one array. The
table is stored in DIR (results/ by default) as roundings.json.
"""

import argparse
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from experiments.kda_roundings.model import EXACT, ROUNDINGS, bfloat16, gradients, two_parts
from k3jax.train.rundir import environment
from pallas_kernels.kda.accuracy import CASE, DRAWS, cotangents, inputs

RESULTS = Path(__file__).parent / "results"
NAMES = ("d gate_logits", "d a_log", "d dt_bias")
VARIANTS = {
    "all": ROUNDINGS,
    "all, columns' factors in one part": ROUNDINGS | {"columns' factors": bfloat16},
    "all, rows' factors in two parts": ROUNDINGS | {"rows' factors": two_parts},
    "all, through in one part": ROUNDINGS | {"through": bfloat16},
    **{f"{name} alone": EXACT | {name: rounding} for name, rounding in ROUNDINGS.items()},
}


def errors(draws: int) -> dict[str, dict[str, float]]:
    """By variant and gradient."""
    compiled = {name: jax.jit(lambda *x, r=r: gradients(r, *x)) for name, r in VARIANTS.items()}
    exact = jax.jit(lambda *x: gradients(EXACT, *x))
    off, size = {name: np.zeros(len(NAMES)) for name in VARIANTS}, np.zeros(len(NAMES))
    squares = lambda tree: np.array([float(jnp.sum(jnp.square(x))) for x in tree])
    for draw in range(draws):
        wide = lambda tree: jax.tree.map(lambda x: jnp.asarray(x).astype(jnp.float64), tree)
        given = wide((tuple(inputs(CASE, draw)), cotangents(CASE)))
        wanted = exact(*given)
        size += squares(wanted)
        for name, run in compiled.items():
            off[name] += squares(jax.tree.map(jnp.subtract, run(*given), wanted))
    return {x: dict(zip(NAMES, np.sqrt(off[x] / size).tolist(), strict=True)) for x in VARIANTS}


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--draws", type=int, default=DRAWS)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    with jax.enable_x64(True):
        found = errors(args.draws)
    table = Table("roundings", *NAMES)
    for variant, of in found.items():
        table.add_row(variant, *(f"{of[name]:.2e}" for name in NAMES))
    Console().print(table)
    args.out.mkdir(parents=True, exist_ok=True)
    stored = {"environment": environment(), "draws": args.draws, "errors": found}
    (args.out / "roundings.json").write_text(json.dumps(stored, indent=1) + "\n")


if __name__ == "__main__":
    main()
