"""Configs from the command line: `file.py:name(2)`, `--with` and `--set`. Imports no jax.

Nothing that is typed there is evaluated: arguments and values are Python literals, bare words, or
constructors of config types, all read off the syntax tree.
"""

import ast
import dataclasses
import inspect
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from k3jax import config as schema
from k3jax.config import Config, ConfigError
from k3jax.resolved import changes, resolved, sources, write
from k3jax.settings import allowed, config_types, fit, nearest, read, settings
from k3jax.user_files import explained, imported

__all__ = ["changes", "load", "put", "resolved", "sources", "write"]


def load(reference: str, sets: Sequence[str] = (), ablations: Sequence[str] = ()) -> Config:
    """The config that a command line means.

    Args:
      reference: `file.py` (its `config()`), `file.py:name` or `file.py:name(2, wide=True)`.
      sets: `part.setting=value` each, applied last, left to right; every check runs again after each.
      ablations: names in the file's ABLATIONS, functions from a Config to a Config.

    Raises:
      ConfigError: always this; says what was asked for, what is wrong and what there is instead. A
        failure of the file's own code is its cause.
    """
    file, factory, args, kwargs = _parse_reference(reference)
    module = imported(file)
    make = getattr(module, factory, None)
    if not callable(make) or factory.startswith("_"):
        functions = inspect.getmembers(module, inspect.isfunction)
        own = [x for x, function in functions if function.__module__ == module.__name__]
        raise ConfigError(f"{file} has no function {factory!r}{nearest(factory, own)}")
    with explained(file, reference):
        cfg = make(*args, **kwargs)
    cfg = _checked(cfg, reference)
    table = getattr(module, "ABLATIONS", {})
    for name in ablations:
        if name not in table:
            raise ConfigError(f"--with {name}: not an ablation of {file}{nearest(name, table)}")
        with explained(file, f"--with {name}"):
            cfg = table[name](cfg)
        cfg = _checked(cfg, f"--with {name}")
    types = config_types(schema) | config_types(module)
    for text in sets:
        path, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"--set {text}: write it as part.setting=value")
        try:
            cfg = _replaced(cfg, path.strip().split("."), partial(read, value.strip(), types))
        except (ValueError, TypeError) as error:  # a user's type may check itself with either
            order = " (settings are made left to right)" if len(sets) > 1 else ""
            raise ConfigError(f"--set {text}: {error}{order}") from error
    return cfg


def put(cfg: Any, path: str, value: Any) -> Any:
    """`cfg` with the setting at a dotted path replaced, for ablations: `put(c, "optim.lr", 1e-3)`.

    Raises:
      ConfigError: no such setting, or a value of another type than it takes.
    """
    return _replaced(cfg, path.split("."), lambda kind: fit(value, kind))


def _checked(cfg: Any, source: str) -> Config:
    if not isinstance(cfg, Config):
        raise ConfigError(f"{source} gives a {type(cfg).__name__}, not a Config")
    return cfg


def _parse_reference(reference: str) -> tuple[str, str, list[Any], dict[str, Any]]:
    split = re.fullmatch(r"(.+?\.py)(?::(.+))?", reference)
    if split is None:
        raise ConfigError(f"{reference}: a config is file.py, file.py:name or file.py:name(2)")
    file, call = split[1], split[2] or "config"
    try:
        node = ast.parse(call, mode="eval").body
        if isinstance(node, ast.Name):
            return file, node.id, [], {}
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            args = [ast.literal_eval(x) for x in node.args]
            kwargs = {x.arg: ast.literal_eval(x.value) for x in node.keywords if x.arg}
            if len(kwargs) == len(node.keywords):
                return file, node.func.id, args, kwargs
    except (SyntaxError, ValueError):
        pass
    raise ConfigError(f"{reference}: after the colon, a name or a call with literal arguments is needed")


def _replaced(part: Any, keys: list[str], make: Callable[[Any], Any], trail: str = "") -> Any:
    """`part` with the setting under `keys` made anew from its type."""
    name, rest = keys[0], keys[1:]
    kinds = settings(type(part))
    if name not in kinds:
        raise ConfigError(f"{type(part).__name__} has no {name!r}{nearest(name, kinds)}")
    trail = f"{trail}.{name}".lstrip(".")
    before = getattr(part, name)
    if not rest:
        try:
            value = make(kinds[name])
        except TypeError as error:
            raise ConfigError(f"{type(part).__name__}.{name} takes {allowed(kinds[name])}, {error}") from None
    elif before is None:
        raise ConfigError(f"{trail} is None, with nothing inside: give it whole, {allowed(kinds[name])}")
    elif not dataclasses.is_dataclass(before):
        raise ConfigError(f"{trail} is {before!r}, which has no settings of its own")
    else:
        value = _replaced(before, rest, make, trail)
    return dataclasses.replace(part, **{name: value})
