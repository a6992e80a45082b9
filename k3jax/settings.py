"""What a setting takes: its type, that type in words, and values of it read off text. Imports no jax."""

import ast
import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from types import ModuleType, NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from k3jax.config import ConfigError

WORDS = {int: "a whole number", float: "a number", bool: "True or False", str: "text", NoneType: "None"}


def config_types(module: ModuleType) -> dict[str, type]:
    """The dataclasses that a module names."""
    named = vars(module).items()
    return {name: x for name, x in named if isinstance(x, type) and dataclasses.is_dataclass(x)}


def guess(name: str, there: Iterable[str]) -> str:
    """The end of a message about an unknown name: the likeliest one meant, if any."""
    close = difflib.get_close_matches(name, list(there), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def nearest(name: str, there: Iterable[str]) -> str:
    """`guess`, and all there are."""
    there = list(there)
    return f"{guess(name, there) or ';'} It has {', '.join(there) or 'none'}"


def settings(cls: type) -> dict[str, Any]:
    """What can be set on a config type -> the type it takes."""
    try:
        hints = get_type_hints(cls)
    except NameError as error:
        raise ConfigError(f"{cls.__name__}: its annotations cannot be read: {error}") from error
    return {f.name: hints.get(f.name, Any) for f in dataclasses.fields(cls) if f.init}


def fit(value: Any, kind: Any) -> Any:
    """The value as a setting of this type takes it: an int becomes a float there, a bool never an int.

    Raises:
      TypeError: it does not fit.
    """
    origin, args = get_origin(kind), get_args(kind)
    misfit = TypeError(f"not {value!r}")
    if origin in (Union, UnionType):
        for each in sorted(args, key=lambda k: k is float):  # an int stays one where it may
            try:
                return fit(value, each)
            except TypeError:
                continue
        raise misfit
    if origin is Literal:
        if not any(type(value) is type(x) and value == x for x in args):
            raise misfit
        return value
    if origin is tuple:
        if not isinstance(value, tuple):
            raise misfit
        kinds = (args[0],) * len(value) if args[1:] == (Ellipsis,) else args
        if len(kinds) != len(value):
            raise misfit
        return tuple(map(fit, value, kinds))
    if kind is float and type(value) is int:
        return float(value)
    if kind is int and isinstance(value, bool):
        raise misfit
    plain = origin or kind
    if isinstance(plain, type) and plain is not Any and not isinstance(value, plain):
        raise misfit
    return value


def allowed(kind: Any) -> str:
    """A type in words, for messages."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(allowed(each) for each in args))
    if origin is Literal:
        return " or ".join(map(repr, args))
    if origin is tuple:
        return f"a tuple ({', '.join('...' if x is Ellipsis else allowed(x) for x in args)})"
    if kind in WORDS:
        return WORDS[kind]
    if dataclasses.is_dataclass(kind):
        names = ", ".join(f.name for f in dataclasses.fields(kind) if f.init)
        own = f"{getattr(kind, '__name__', kind)}({names})"
        return " or ".join([own, *map(allowed, type.__subclasses__(kind))])
    name = getattr(kind, "__name__", str(kind))
    return f"a {name} of your own" if getattr(kind, "_is_protocol", False) else f"a {name}"


class _NotLiteral(TypeError):
    """Text that is no literal and no constructor."""


def read(text: str, types: Mapping[str, type], kind: Any) -> Any:
    """The value that `text` spells for a setting of type `kind`: a literal, a bare word, or a constructor
    of one of `types`. Where a setting takes text, what is none of these is the text itself.

    Raises:
      TypeError: it fits nowhere. ConfigError: a constructor that is wrong inside.
    """
    try:
        return fit(_parse(text, types), kind)
    except TypeError:
        if kind is str or str in get_args(kind):
            return text
        raise


def _parse(text: str, types: Mapping[str, type]) -> Any:
    try:
        return _value(ast.parse(text, mode="eval").body, types)
    except (SyntaxError, RecursionError, MemoryError):
        raise _NotLiteral(f"not {text!r}") from None


def _value(node: ast.expr, types: Mapping[str, type]) -> Any:
    match node:
        case ast.Name(id=word):
            return word
        case ast.Tuple(elts=parts):
            return tuple(_value(x, types) for x in parts)
        case ast.Call(func=ast.Name(id=name)):
            return _construct(name, node, types)
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise _NotLiteral(f"not {ast.unparse(node)}") from None


def _construct(name: str, call: ast.Call, types: Mapping[str, type]) -> Any:
    if name not in types:
        raise _NotLiteral(f"not {ast.unparse(call)}: no config type is called {name!r}{guess(name, types)}")
    cls = types[name]
    kinds = settings(cls)
    places = [f.name for f in dataclasses.fields(cls) if f.init and not f.kw_only]
    if len(call.args) > len(places):
        raise ConfigError(f"{name} takes {len(places)} values by position, {', '.join(places)}")
    given = [*zip(places, call.args, strict=False), *((k.arg, k.value) for k in call.keywords)]
    values: dict[str, Any] = {}
    for key, node in given:
        if key is None or key in values:
            raise ConfigError(f"{ast.unparse(call)}: each setting once, by its name")
        if key not in kinds:
            raise ConfigError(f"{name} has no {key!r}{nearest(key, kinds)}")
        try:
            values[key] = fit(_value(node, types), kinds[key])
        except TypeError as error:
            raise ConfigError(f"{name}.{key} takes {allowed(kinds[key])}, {error}") from None
    required = [
        f.name
        for f in dataclasses.fields(cls)
        if f.init and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    missing = [x for x in required if x not in values]
    if missing:
        raise ConfigError(f"{name} needs {', '.join(missing)}")
    return cls(**values)
