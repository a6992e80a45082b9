"""KDA's share of a training step's time on the device, without its kernels and with them.

    python -m experiments.kda_training.profile [--set data.batch=4] [--out DIR]

Programs are compiled without command buffers, inside which a profile does not say what a kernel stems from;
that makes a step slower on the host, not a kernel. Writes profile.json to results/ (or DIR).
"""

import argparse
import json
import os
import re
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

from experiments.kda_training.variants import CONFIG, HERE, IMPLEMENTATIONS, variant
from experiments.profiles import device_events
from k3jax.override import load
from k3jax.train.rundir import environment
from k3jax.train.setup import Setup, prepare
from k3jax.train.state import initial

SCOPE = "kda_gated"  # what the op calls its part of a program
WARM, PROFILED = 3, 3  # steps before the profile, and in it


def in_scope(program: str) -> set[str]:
    """Names of the instructions of a compiled program that stem from the op."""
    pattern = rf'^\s*(?:ROOT )?%?([\w.\-]+) = .*op_name="[^"]*{SCOPE}'
    return set(re.findall(pattern, program, re.MULTILINE))


def shares(events: Sequence[dict[str, Any]], program: str) -> dict[str, float]:
    """Milliseconds of a step on the device: all, the op's, and what names no instruction of the program."""
    named = set(re.findall(r"^\s*(?:ROOT )?%?([\w.\-]+) = ", program, re.MULTILINE))
    ours, total = in_scope(program), {"all": 0.0, "kda": 0.0, "unnamed": 0.0}
    for event in events:
        facts, ms = event.get("args", {}), event["dur"] / 1e3
        instruction = facts.get("hlo_op", "")
        total["all"] += ms
        if instruction in ours or SCOPE in json.dumps(facts) or event["name"].startswith("kda_"):
            total["kda"] += ms
        elif instruction not in named:
            total["unnamed"] += ms
    return {name: ms / PROFILED for name, ms in total.items()}


def profiled(setup: Setup, step: Any) -> dict[str, float]:
    state, stream = initial(setup.cfg, setup.optimiser, setup.mesh), setup.stream()
    batches = [setup.on_mesh(next(stream)) for _ in range(WARM + PROFILED)]
    for batch in batches[:WARM]:
        state, _ = step(state, batch)
    jax.block_until_ready(state)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for batch in batches[WARM:]:
                state, _ = step(state, batch)
            jax.block_until_ready(state)
        found = shares(device_events(Path(folder)), step.as_text())
    return {name: round(ms, 2) for name, ms in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--set", dest="sets", action="append", default=[])
    args = parser.parse_args()
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_enable_command_buffer="
    args.out.mkdir(parents=True, exist_ok=True)
    cfg = load(str(CONFIG), args.sets)
    setups = {name: prepare(variant(cfg, name, 0)) for name in IMPLEMENTATIONS}
    with ThreadPoolExecutor() as pool:
        steps = dict(zip(setups, pool.map(Setup.compile_step, setups.values()), strict=True))
    found = {name: profiled(setup, steps[name]) for name, setup in setups.items()}
    print(json.dumps(found))
    facts = {"rows": cfg.data.batch, "length": cfg.data.length, "device": jax.devices()[0].device_kind}
    facts |= {"environment": environment(), "device_ms_per_step": found}
    (args.out / "profile.json").write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
