"""Arguments that several commands share."""

import argparse

from k3jax.config import Config, ConfigError
from k3jax.override import load

CONFIG = "file.py, file.py:name or file.py:name(2)"


def add_config(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    """Declares CONFIG, --with and --set; `optional` is for a command that may do without a CONFIG."""
    parser.add_argument("config", metavar="CONFIG", nargs="?" if optional else None, help=CONFIG)

    def repeated(flag: str, name: str, metavar: str, does: str) -> None:
        parser.add_argument(flag, dest=name, metavar=metavar, action="append", default=[], help=does)

    repeated("--with", "ablations", "NAME", "apply an entry of the file's ABLATIONS; may be repeated")
    repeated("--set", "sets", "PART.SETTING=VALUE", "change one setting, after --with; may be repeated")


def load_config(args: argparse.Namespace) -> Config:
    """The config that the arguments of `add_config` mean.

    Raises:
      ConfigError: they mean none.
    """
    if args.config is None:
        raise ConfigError(f"CONFIG is missing: {CONFIG}")
    return load(args.config, args.sets, args.ablations)
