"""Train a config, or go on with a run.

    k3jax train configs/quickstart.py
    k3jax train configs/quickstart.py --with unbounded --set optim.lr=1e-3 --run runs/unbounded
    k3jax train --resume runs/quickstart

Ctrl-C ends a run cleanly after the step at hand; going on from there is exact.
"""

import argparse
from pathlib import Path

from k3jax.cli.options import add_config, load_config
from k3jax.config import ConfigError


def add(parser: argparse.ArgumentParser) -> None:
    add_config(parser, optional=True)
    parser.add_argument(
        "--run", type=Path, metavar="DIR", help="a new directory for the run; runs/NAME if not given"
    )
    parser.add_argument(
        "--resume", type=Path, metavar="DIR", help="go on with this run from its last checkpoint"
    )


def run(args: argparse.Namespace) -> None:
    # Words are checked before jax is imported: a wrong one costs nothing.
    if args.resume is not None:
        if args.config or args.sets or args.ablations or args.run:
            raise ConfigError(
                "--resume goes on with a run as it is and takes no CONFIG, --set, --with or --run"
            )
        from k3jax.train import loop
        from k3jax.train.announce import Announcer

        loop.resume(args.resume, Announcer())
    else:
        cfg = load_config(args)
        from k3jax.train import loop, rundir
        from k3jax.train.announce import Announcer

        loop.start(cfg, args.run or rundir.free_name(Path("runs"), cfg.run.name), Announcer())
