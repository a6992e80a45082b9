"""A config as Python text that makes it again, and what differs between two. Imports no jax."""

import dataclasses
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from k3jax import config as schema
from k3jax.config import Config, ConfigError
from k3jax.user_files import OURS, needed, place

COPIES = "source"  # the folder beside a resolved config that its own types are read from
HEADER = '"""A resolved config, every setting spelled out: `k3jax train THIS_FILE` runs it again."""\n'
WIDE = 88  # columns that a short constructor may take
PLAIN: tuple[Any, ...] = (int, float, str, bytes)


def resolved(cfg: Config) -> str:
    """Source of a config file whose `config()` equals `cfg`, to the last bit of every float.

    A type of the user's own is read from the copy of its file that `sources` asks for.

    Raises:
      ConfigError: a value that source cannot spell, or a type that no file defines.
    """
    names = _names(cfg)
    builtin = sorted({cls.__name__ for cls in names if _home(cls) is None} | {"Config"})
    lines = [HEADER, "from k3jax.config import (", *(f"    {name}," for name in builtin), ")"]
    own = {cls: name for cls, name in names.items() if _home(cls) is not None}
    if any(isinstance(_home(cls), Path) for cls in own):
        lines.append("from k3jax.user_files import beside")
    lines.append("")
    for cls, name in own.items():
        home = _home(cls)
        if isinstance(home, Path):
            file = f"{COPIES}/{home.relative_to(place(home)[0]).as_posix()}"
            lines.append(f'{name} = beside(__file__, "{file}").{cls.__name__}')
        else:
            lines.append(f"from {home} import {cls.__name__}{f' as {name}' if name != cls.__name__ else ''}")
    lines += [""] * (2 if own else 1)
    return "\n".join([*lines, "def config() -> Config:", f"    return {_spell(cfg, names, 4, 'config')}", ""])


def sources(cfg: Config) -> dict[str, Path]:
    """Files to copy beside the resolved config: their names there -> where they are now.

    They are the files that define the user's own types, and what those import from their own folder.

    Raises:
      ConfigError: two of them would have one name.
    """
    found: dict[str, Path] = {}
    for cls in _names(cfg):
        home = _home(cls)
        if isinstance(home, Path):
            for relative, file in needed(home).items():
                before = found.setdefault(f"{COPIES}/{relative}", file)
                if before.read_bytes() != file.read_bytes():
                    raise ConfigError(
                        f"{before} and {file} would both become {COPIES}/{relative}: rename one"
                    )
    return found


def write(cfg: Config, folder: str | Path) -> Path:
    """Writes `config.py` and the files it needs into an existing folder; returns its path."""
    folder = Path(folder)
    text, copies = resolved(cfg), sources(cfg)
    for name, file in copies.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if (folder / name).resolve() != file.resolve():  # a run that goes on has them already
            shutil.copyfile(file, folder / name)
    target = folder / "config.py"
    target.write_text(text, encoding="utf-8")
    return target


def changes(a: Any, b: Any) -> list[str]:
    """Where two configs differ, in order: `model.width: 64 -> 128`."""
    return list(_changes(a, b, ""))


def _changes(a: Any, b: Any, path: str) -> Iterator[str]:
    if a == b:
        return
    if type(a) is type(b) and dataclasses.is_dataclass(a):
        parts = list(_settings(a))
        inside = [x for name in parts for x in _changes(getattr(a, name), getattr(b, name), f"{path}.{name}")]
        if inside:
            yield from inside
            return
    text = f"{a!r} -> {b!r}"
    if repr(a) == repr(b):  # the same type by name, out of files that differ
        text = f"{a!r} of {type(a).__module__} -> of {type(b).__module__}, another source"
    yield f"{path.lstrip('.')}: {text}"


def _settings(x: Any) -> Iterator[str]:
    return (f.name for f in dataclasses.fields(x) if f.init)


def _names(cfg: Config) -> dict[type, str]:
    """The types of a config in order of use, each with a name that no other has."""
    names: dict[type, str] = {}
    used = {name for name in vars(schema) if name[0].isupper()} | {"beside", "config"}

    def visit(x: Any) -> None:
        if isinstance(x, tuple | list):
            for part in x:
                visit(part)
        elif isinstance(x, dict):
            visit([*x, *x.values()])
        elif dataclasses.is_dataclass(x) and not isinstance(x, type):
            cls = type(x)
            if cls not in names:
                name, number = cls.__name__, 2
                while _home(cls) is not None and name in used:
                    name, number = f"{cls.__name__}{number}", number + 1
                used.add(name)
                names[cls] = name
            for name in _settings(x):
                visit(getattr(x, name))

    visit(cfg)
    return names


def _home(cls: type) -> Path | str | None:
    """Where a type is found again: None for k3jax.config, an installed module, or a user's file.

    Raises:
      ConfigError: nowhere.
    """
    if cls.__module__ == schema.__name__:
        return None
    module = sys.modules.get(cls.__module__)
    file = getattr(module, "__file__", None)
    if getattr(module, cls.__qualname__, None) is not cls or file is None or cls.__module__ == "__main__":
        raise ConfigError(
            f"{cls.__module__}.{cls.__qualname__} cannot be found again: define it at the top of a file"
        )
    path = Path(file).resolve()
    installed = any(path.is_relative_to(Path(x).resolve()) for x in _installed())
    return cls.__module__ if installed or cls.__module__.partition(".")[0] in OURS else path


def _installed() -> list[str]:
    paths = sysconfig.get_paths()
    return [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]


def _spell(x: Any, names: dict[type, str], indent: int, where: str) -> str:
    """Source of a value; a type with more than two settings, or with parts, has one to a line."""
    deeper = lambda y, name: _spell(y, names, indent + 4, f"{where}.{name}")
    if x is None or isinstance(x, bool):
        return repr(x)
    for kind in PLAIN:
        if isinstance(x, kind):  # a subclass's value (a numpy float, say) as the plain one it equals
            text = kind.__repr__(x)
            return f'float("{text}")' if text.lstrip("-") in ("inf", "nan") else _quoted(text)
    if isinstance(x, tuple):
        return f"({', '.join(deeper(y, str(i)) for i, y in enumerate(x))}{',' if len(x) == 1 else ''})"
    if isinstance(x, list):
        return f"[{', '.join(deeper(y, str(i)) for i, y in enumerate(x))}]"
    if isinstance(x, dict):
        return f"{{{', '.join(f'{deeper(k, k)}: {deeper(v, k)}' for k, v in x.items())}}}"
    if type(x) not in names:
        spelled = "numbers, text, None, tuples, lists, dicts and dataclasses"
        raise ConfigError(f"{where}={x!r}: a resolved config can hold {spelled}")
    settings = [(name, getattr(x, name)) for name in _settings(x)]
    inside = [f"{name}={deeper(value, name)}" for name, value in settings]
    short = f"{names[type(x)]}({', '.join(inside)})"
    parts = any(dataclasses.is_dataclass(value) for _, value in settings)
    if not settings or (len(settings) <= 2 and not parts and len(short) + indent <= WIDE):
        return short
    lines = "".join(f"{' ' * (indent + 4)}{text},\n" for text in inside)
    return f"{names[type(x)]}(\n{lines}{' ' * indent})"


def _quoted(text: str) -> str:
    """repr's text in double quotes where that changes nothing inside."""
    if text[0] == "'" and '"' not in text and "\\" not in text:
        return f'"{text[1:-1]}"'
    return text
