"""Which documents there are: files found, hashed, and told apart into training and held-out ones.

Imports no jax. A corpus is described once, at the start of a run; the description is stored beside
the run and compared when it is resumed, so that a run never goes on over other text.
"""

import hashlib
import json
import math
import os
import sysconfig
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from k3jax.config import ConfigError, DataConfig, Files, StandardLibrary

# Folders of a standard library that hold no library: other people's packages, tests, caches.
NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
SHOWN = 5  # differing files that an error names


class DataError(RuntimeError):
    """Files on disk are not what they were or should be: says which."""


@dataclass(frozen=True)
class Document:
    """One file: its POSIX name relative to the corpus's root, its size in bytes, its content's hash."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The documents of a corpus on both sides of the split, each side sorted by name.

    `root` is where they lie on this machine; it is no part of what the corpus is.
    """

    root: str
    train: tuple[Document, ...]
    held_out: tuple[Document, ...]

    @property
    def digest(self) -> str:
        """One sha256 over both sides' names, sizes and contents."""
        lines = [json.dumps([side, *asdict(d).values()]) for side, d in _sided(self)]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def describe(cfg: DataConfig) -> Manifest:
    """Finds, hashes and splits the documents of `cfg.corpus`. Reads every file once; empty ones are left out.

    Raises:
      ConfigError: no such folder, nothing matches, or one side of the split would be empty.
      DataError: a file or folder cannot be read.
    """
    root, names = _find(cfg.corpus)
    found = (_document(root, name) for name in names)
    documents = [document for document in found if document.size]
    if len(documents) < 2:
        raise ConfigError(
            f"DataConfig.corpus={cfg.corpus!r}: at least two non-empty files are needed, one to train on "
            f"and one to hold out; {len(documents)} found in {root}"
        )
    sides = [position(d.name) < cfg.held_out for d in documents]
    if all(sides) or not any(sides):
        places = [position(d.name) for d in documents]
        least, most = math.ceil(min(places) * 1e6) / 1e6, math.floor(max(places) * 1e6) / 1e6
        raise ConfigError(
            f"DataConfig.held_out={cfg.held_out!r}: {'all' if all(sides) else 'none'} of the "
            f"{len(documents)} files would be held out, which their names decide; these files need a share "
            f"above {least} and of at most {most}, or there must be more of them"
        )
    train = tuple(d for d, held in zip(documents, sides, strict=True) if not held)
    held_out = tuple(d for d, held in zip(documents, sides, strict=True) if held)
    return Manifest(str(root), train, held_out)


def position(name: str) -> float:
    """A place in [0, 1) that a document's name alone decides: files added later move no other."""
    raw = hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest()
    return (int.from_bytes(raw, "big") >> 11) / 2**53  # 53 bits are what a float holds exactly


def read_whole(root: str, document: Document) -> bytes:
    """The document's content, checked against its hash.

    Raises:
      DataError: the file cannot be read, or is not the one described.
    """
    content = read_part(root, document, 0, document.size)
    if hashlib.sha256(content).hexdigest() != document.sha256:
        raise DataError(
            f"{Path(root, document.name)}: its content has changed since the corpus was described"
        )
    return content


def read_part(root: str, document: Document, start: int, stop: int) -> bytes:
    """Bytes `start` to `stop` of a document. Checks the file's size, which costs nothing, not its hash.

    Raises:
      DataError: the file cannot be read, or its size is not the one described.
    """
    path = Path(root, document.name)
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(start)
            content = file.read(stop - start)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    if size != document.size or len(content) != stop - start:
        raise DataError(
            f"{path}: has {size} bytes, and had {document.size} when the corpus was described: "
            "files must not change while a run reads them"
        )
    return content


def as_json(manifest: Manifest) -> dict[str, Any]:
    """The description as plain lists and strings, for json.dump."""
    return {"digest": manifest.digest, **asdict(manifest)}


def from_json(stored: Mapping[str, Any]) -> Manifest:
    """What `as_json` wrote.

    Raises:
      DataError: `stored` is no description, or its digest is not that of its files.
    """
    try:
        sides = [tuple(Document(**d) for d in stored[side]) for side in ("train", "held_out")]
        manifest, digest = Manifest(stored["root"], *sides), stored["digest"]
    except (KeyError, TypeError) as error:
        raise DataError(f"the stored description of the corpus is incomplete: {error!r}") from error
    if manifest.digest != digest:
        raise DataError(
            f"the stored description of the corpus is damaged: digest {digest!r} is not its files'"
        )
    return manifest


def check_same(stored: Manifest, now: Manifest) -> None:
    """Passes if both describe the same documents on the same sides, wherever they lie.

    Raises:
      DataError: names the first files that are missing, added, changed or on the other side.
    """
    if stored.digest == now.digest:
        return
    before = {document.name: (side, document) for side, document in _sided(stored)}
    after = {document.name: (side, document) for side, document in _sided(now)}
    differences = []
    for name in sorted(before.keys() | after.keys()):
        if name not in after:
            differences.append(f"missing {name!r}")
        elif name not in before:
            differences.append(f"added {name!r}")
        elif before[name][1] != after[name][1]:
            differences.append(f"changed {name!r}")
        elif before[name] != after[name]:
            differences.append(f"moved {name!r} from {before[name][0]} to {after[name][0]}")
    shown = ", ".join(differences[:SHOWN]) + (", ..." if len(differences) > SHOWN else "")
    raise DataError(
        f"the corpus is not the stored one ({stored.root} then, {now.root} now): "
        f"{len(differences)} of {len(before)} files differ: {shown}"
    )


def _sided(manifest: Manifest) -> Iterable[tuple[str, Document]]:
    yield from (("train", document) for document in manifest.train)
    yield from (("held_out", document) for document in manifest.held_out)


def _find(corpus: StandardLibrary | Files) -> tuple[Path, list[str]]:
    """The root, and the sorted POSIX names of the files below it."""
    match corpus:
        case StandardLibrary():
            root = Path(sysconfig.get_path("stdlib"))
            paths = list(_library_sources(root))
        case Files(folder, pattern):
            root = Path(folder).absolute()
            if not root.is_dir():
                raise ConfigError(f"Files.root={folder!r}: a folder that exists")
            paths = _matches(root, pattern)
            if not paths:
                raise ConfigError(
                    f"Files.pattern={pattern!r}: a glob that matches files below {root}; none does"
                )
    return root, sorted(path.relative_to(root).as_posix() for path in paths)


def _library_sources(root: Path) -> Iterable[Path]:
    for folder, folders, files in os.walk(root, onerror=_unlistable):
        folders[:] = [name for name in folders if name not in NOT_LIBRARY]
        yield from (Path(folder, name) for name in files if name.endswith(".py"))


def _matches(root: Path, pattern: str) -> list[Path]:
    if Path(pattern).is_absolute() or ".." in Path(pattern).parts:
        raise ConfigError(f"Files.pattern={pattern!r}: a glob that stays below root")
    if "**" in pattern:
        # pathlib passes over folders it may not list, and documents would be missing without a word.
        for _ in os.walk(root, onerror=_unlistable):
            pass
    try:
        found = set(root.glob(pattern))
    except ValueError as error:
        raise ConfigError(f"Files.pattern={pattern!r}: a glob such as '**/*.txt' ({error})") from error
    # A link that leads nowhere stays in the list, and reading it says so.
    return [path for path in found if path.is_file() or (path.is_symlink() and not path.exists())]


def _unlistable(error: OSError) -> None:
    raise DataError(f"{error.filename}: this folder cannot be listed: {error}") from error


def _document(root: Path, name: str) -> Document:
    try:
        with open(root / name, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            return Document(name, file.tell(), digest)
    except OSError as error:
        raise DataError(f"{root / name}: cannot be read: {error}") from error
