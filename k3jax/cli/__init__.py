"""The `k3jax` command. A sub-command's module is imported when it is chosen, so that help is quick.

A module has `add(parser)`, which declares its arguments, and `run(args)`, which returns an exit code
or None for 0; its docstring is its help.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from types import ModuleType

COMMANDS = {  # name: (module, what it does)
    "train": ("k3jax.cli.train", "train a config, or go on with a run"),
    "eval": ("k3jax.cli.evaluate", "measure a run on held-out data"),
    "sample": ("k3jax.cli.sample", "continue a prompt with a run's model"),
    "params": ("k3jax.cli.params", "list and count a config's parameters"),
    "convert": ("k3jax.cli.convert", "rewrite a checkpoint in the released format"),
}
USER_ERROR = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code. Errors meant for users are one line and code 2.

    Those are the errors that this package defines and the system's own, such as a full disk: any
    other is a fault of ours and keeps its traceback, as all do under --debug.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    chosen = next((x for x in argv if not x.startswith("-")), None)
    module = importlib.import_module(COMMANDS[chosen][0]) if chosen in COMMANDS else None
    try:
        args = _parser(chosen, module).parse_args(argv)
    except SystemExit as stop:  # argparse has printed why
        return int(stop.code or 0)
    try:
        return module.run(args) or 0 if module is not None else USER_ERROR
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader has gone, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if args.debug or not _is_for_users(error):
            raise
        print(f"k3jax {chosen}: {error}", file=sys.stderr)
        return USER_ERROR


def _parser(chosen: str | None, module: ModuleType | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("k3jax", description="Train and measure scaled-down Kimi K3 models.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (_, does) in COMMANDS.items():
        command = commands.add_parser(name, help=does, formatter_class=argparse.RawDescriptionHelpFormatter)
        if name == chosen and module is not None:
            command.description = module.__doc__
            module.add(command)
            command.add_argument("--debug", action="store_true", help="show errors with their tracebacks")
    return parser


def _is_for_users(error: Exception) -> bool:
    """Told by where the type is defined, which needs no import of the module that defines it."""
    return isinstance(error, OSError) or any(
        cls.__module__.partition(".")[0] == "k3jax" for cls in type(error).__mro__
    )
