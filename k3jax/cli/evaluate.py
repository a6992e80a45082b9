"""Measure a run's last checkpoint on held-out rows.

    k3jax eval runs/quickstart --rows 256

The byte-bigram model's loss on the same rows stands beside it.
"""

import argparse
import dataclasses
from pathlib import Path

from k3jax.config import replace


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="a run directory")
    parser.add_argument(
        "--rows", type=int, help="how many validation rows; the run's own number if not given"
    )
    parser.add_argument("--step", type=int, help="which checkpoint; the last one if not given")


def run(args: argparse.Namespace) -> None:
    from k3jax.data.bigram import cross_entropy, fit_bigram
    from k3jax.evaluate import mean_loss
    from k3jax.train import restore

    setup, state, step = restore.load(args.run, args.step)
    if args.rows is not None:
        cfg = replace(setup.cfg, run=replace(setup.cfg.run, evaluate_rows=args.rows))
        setup = dataclasses.replace(setup, cfg=cfg)
    loss = mean_loss(setup.compile_evaluation(), state.params, setup.validation())
    bigram = cross_entropy(fit_bigram(setup.manifest), setup.validation_rows())
    measured = f"validation loss {loss:.4f}, byte-bigram {bigram:.4f}, ratio {loss / bigram:.3f}"
    print(f"step {step}, {setup.cfg.run.evaluate_rows} rows: {measured}")
