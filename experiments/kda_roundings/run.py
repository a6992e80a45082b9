"""Asks which of the Hopper kernels' roundings the gates' gradients owe their errors to.

    python -m experiments.kda_roundings.run [--draws 24] [--out DIR]

In float64 on any machine, over the benchmark's draws (pallas_kernels/kda/accuracy.py): with all roundings,
with each alone, and with a few otherwise. Errors are relative L2 distances of all draws as one array. The
table is stored in DIR (results/ by default) as roundings.json.
"""

import argparse
import json
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from experiments.kda_roundings.model import EXACT, MIDDLE, ROUNDINGS, bfloat16, gradients, two_parts
from k3jax.train.rundir import environment
from pallas_kernels.kda.accuracy import CASE, DRAWS, cotangents, inputs

RESULTS = Path(__file__).parent / "results"
NAMES = ("d gate_logits", "d a_log", "d dt_bias")
ONE_PART = ROUNDINGS | {"columns' factors": bfloat16}
VARIANTS = {
    "all": partial(gradients, ROUNDINGS),
    "all, columns' factors in one part": partial(gradients, ONE_PART),
    "the same, middle a token later": partial(gradients, ONE_PART, middle=MIDDLE + 1),
    "the same, middle a token earlier": partial(gradients, ONE_PART, middle=MIDDLE - 1),
    "all, rows' factors in two parts": partial(gradients, ROUNDINGS | {"rows' factors": two_parts}),
    "all, through in one part": partial(gradients, ROUNDINGS | {"through": bfloat16}),
    "columns' factors in one part alone": partial(gradients, EXACT | {"columns' factors": bfloat16}),
    **{f"{name} alone": partial(gradients, EXACT | {name: ROUNDINGS[name]}) for name in ROUNDINGS},
}


def errors(draws: int) -> dict[str, dict[str, float]]:
    """By variant and gradient."""
    compiled = {name: jax.jit(run) for name, run in VARIANTS.items()}
    exact = jax.jit(partial(gradients, EXACT))
    off, size = {name: np.zeros(len(NAMES)) for name in VARIANTS}, np.zeros(len(NAMES))
    squares = lambda tree: np.array([float(jnp.sum(jnp.square(x))) for x in tree])
    wide = lambda tree: jax.tree.map(lambda x: jnp.asarray(x).astype(jnp.float64), tree)
    for draw in range(draws):
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
