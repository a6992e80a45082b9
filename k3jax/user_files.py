"""Python files of the user's own: imported by path, and gathered to be copied beside a run.

A file is imported under the name it has from the first folder above it that is no package, so that
`from configs.k3 import model` works wherever the command is started; where that name already means
something else, it gets one of its own and nothing is shadowed. Imports no jax.
"""

import ast
import hashlib
import importlib
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from k3jax.config import ConfigError

OURS = ("k3jax", "pallas_kernels")  # never copied: a run directory names their commit

_read: dict[str, bytes] = {}  # module name -> the source it was made from
_used: dict[str, list[ModuleType]] = {}  # a file's own name -> the modules of such files, last used first


class _Loader(importlib.machinery.SourceFileLoader):
    """Compiles what is there now: bytecode is told apart by whole seconds, and an edit is quicker."""

    def get_code(self, fullname: str):
        return self.source_to_code(self.get_data(self.path), self.path)


def place(path: Path) -> tuple[Path, str]:
    """(the folder its imports start from, its dotted name from there)."""
    root, parts = path.parent, [path.stem]
    while (root / "__init__.py").exists():
        parts.insert(0, root.name)
        root = root.parent
    return root, ".".join(parts)


def imported(path: str | Path) -> ModuleType:
    """The module of a file, made anew if the file has changed since it was last asked for.

    Raises:
      ConfigError: no such file, or it fails; names the line, and the failure is the cause. Also one
        that would get another folder's module of the same name for one of its own.
    """
    shown, path = path, Path(path).resolve()
    try:
        source = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{shown}: {(error.strerror or str(error)).lower()}") from None
    root, name = place(path)
    for module in _known(name):
        if _file(module) == path and _source(module) == source:
            return _use(name, module)
    with explained(path, shown), _first_on_path(root):
        module = _load(path, name, natural=_is_free(root, name))
    _read[module.__name__] = source
    neighbours = needed(path)
    _check_neighbours(path, module, neighbours)
    if len(neighbours) > 1 and str(root) not in sys.path:
        sys.path.append(str(root))  # for imports inside functions, behind everything else
    return _use(name, module)


def beside(file: str, name: str) -> ModuleType:
    """The module of the file `name` in the folder of `file`; resolved configs find their types so.

    A module already made from files of the same content is taken, wherever they lie: a type is the
    same in the user's folder and in its copy beside a run. Of several the last used is taken.
    """
    path = (Path(file).parent / name).resolve()
    if path.exists():
        now = {relative: x.read_bytes() for relative, x in needed(path).items()}
        for module in _known(place(path)[1]):
            if (other := _file(module)) is None or _source(module) != path.read_bytes():
                continue
            if {relative: x.read_bytes() for relative, x in needed(other).items()} == now:
                return module
    return imported(path)


def needed(path: Path) -> dict[str, Path]:
    """The file and all that it imports below its root: name from there -> file.

    Raises:
      ConfigError: one of them cannot be read or is not Python.
    """
    root, name = place(path)
    found: dict[str, Path] = {}

    def visit(name: str) -> None:
        parts = name.split(".")
        for length in range(1, len(parts) + 1):  # a module, after the packages it is in
            part = "/".join(parts[:length])
            for relative in (f"{part}.py", f"{part}/__init__.py"):
                if relative not in found and (root / relative).is_file():
                    found[relative] = root / relative
                    for other in _imports(root / relative, ".".join(parts[:length])):
                        visit(other)

    if name.partition(".")[0] not in OURS:
        visit(name)
        found.setdefault(path.relative_to(root).as_posix(), path)
    return found


@contextmanager
def explained(path: str | Path, shown: str | Path) -> Iterator[None]:
    """Turns a failure of a user's file into a ConfigError that says where; its cause is the failure."""
    root = place(Path(path).resolve())[0]
    try:
        yield
    except Exception as error:
        where, step = str(shown), error.__traceback__
        if isinstance(error, SyntaxError) and error.filename:
            where = f"{error.filename}, line {error.lineno}"
        while step is not None:
            file = step.tb_frame.f_code.co_filename
            theirs = Path(file).is_relative_to(root) and Path(file).relative_to(root).parts[0] not in OURS
            if theirs and not isinstance(error, SyntaxError):
                where = f"{file}, line {step.tb_lineno}"
            step = step.tb_next
        kind = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
        raise ConfigError(f"{where}: {kind}{error}") from error


def _known(name: str) -> list[ModuleType]:
    used = _used.get(name, [])
    natural = sys.modules.get(name)
    return used if natural is None or natural in used else [*used, natural]


def _use(name: str, module: ModuleType) -> ModuleType:
    _used[name] = [module, *(other for other in _used.get(name, []) if other is not module)]
    return module


def _file(module: ModuleType) -> Path | None:
    file = getattr(module, "__file__", None)
    return Path(file).resolve() if file else None


def _source(module: ModuleType) -> bytes | None:
    """What a module was made from; for one that python imported itself, what its file holds now."""
    if module.__name__ in _read:
        return _read[module.__name__]
    file = _file(module)
    return file.read_bytes() if file and file.is_file() else None


def _is_free(root: Path, name: str) -> bool:
    """Whether an import of `name` can mean nothing but the file below `root`."""
    top = name.partition(".")[0]
    if not all(part.isidentifier() for part in name.split(".")) or name in sys.modules:
        return False
    old, sys.path = sys.path, [*sys.path, str(root)]  # last: whatever else has the name is found first
    try:
        importlib.invalidate_caches()
        found = importlib.util.find_spec(top)
    except ValueError:  # a module without a spec has the name
        found = None
    finally:
        sys.path = old
    origin = Path(found.origin).resolve() if found and found.origin else None
    return origin in (root / f"{top}.py", root / top / "__init__.py")


def _load(path: Path, name: str, natural: bool) -> ModuleType:
    parent, _, child = name.rpartition(".")
    known_as = name
    if not natural:
        digest = hashlib.sha256(str(path).encode() + path.read_bytes()).hexdigest()[:8]
        known_as = "".join(c if c.isalnum() else "_" for c in name) + f"_{digest}"
    elif parent:
        importlib.import_module(parent)
        if name in sys.modules:  # the package's own imports have made it
            return sys.modules[name]
    spec = importlib.util.spec_from_file_location(known_as, path, loader=_Loader(known_as, str(path)))
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[known_as] = module  # dataclasses look their module up while it is being made
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[known_as]
        raise
    if natural and parent:
        setattr(sys.modules[parent], child, module)
    return module


@contextmanager
def _first_on_path(root: Path) -> Iterator[None]:
    """As python itself does with a script's folder."""
    sys.path.insert(0, str(root))
    try:
        yield
    finally:
        sys.path.remove(str(root))


def _imports(file: Path, name: str) -> Iterator[str]:
    """The dotted names that a module imports, and those that may be modules."""
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    try:
        tree = ast.parse(file.read_bytes(), str(file))
    except (SyntaxError, ValueError, OSError) as error:
        raise ConfigError(f"{file}: {error}") from error
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            names = [base, *(f"{base}.{alias.name}" for alias in node.names)] if base else []
        yield from (x for x in names if x.partition(".")[0] not in OURS)


def _check_neighbours(path: Path, module: ModuleType, neighbours: dict[str, Path]) -> None:
    """A neighbour imported by name must be this folder's, not one of the same name seen earlier."""
    for relative, file in neighbours.items():
        name = relative.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        other = _file(sys.modules[name]) if name in sys.modules else None
        if file == path or other is None or other.read_bytes() == file.read_bytes():
            continue
        del sys.modules[module.__name__]
        raise ConfigError(
            f"{path} imports {name}, which this process already has from {other}, and {file} differs: "
            "rename one, or load them in separate processes"
        )
