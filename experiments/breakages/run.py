"""Breaks a copy of the repository, one way at a time, and records which test notices.

    python -m experiments.breakages.run [--only NAME ...] [--out DIR]

The copy's chosen tests must pass before anything is broken. The exit status is 1 if a breakage goes
unnoticed. The whole list is stored in DIR (results/ by default) and its table in README.md; a part of
it (--only) is stored only where --out says.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from experiments.breakages.breakages import BREAKAGES, Breakage
from k3jax.train.rundir import environment

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
RESULTS = HERE / "results"
SOURCES = ("k3jax", "pallas_kernels", "configs", "experiments", "tests", "pyproject.toml", "README.md")
SKIPPED = shutil.ignore_patterns("__pycache__", "results", "runs")
PATIENCE = 900  # seconds for one call of pytest
MESSAGE = 200  # characters of a failure's message
ESCAPES = re.compile(r"(?:\x1b|#x1B)\[[0-9;]*m")


class StudyError(RuntimeError):
    """Nothing can be said: a breakage does not apply, or tests fail or do not run without one."""


@dataclass(frozen=True)
class Failure:
    """A test that failed: its pytest id, and the beginning of why."""

    test: str
    why: str


@dataclass(frozen=True)
class Row:
    """What became of one breakage; an empty `caught_by` says that all its tests passed."""

    name: str
    what: str
    file: str
    tests: tuple[str, ...]
    caught_by: tuple[Failure, ...]
    seconds: float


class Copy:
    """A copy of the repository that may be broken."""

    def __init__(self, folder: Path):
        self.root = folder / "repository"
        self._report = folder / "report.xml"
        # Programs that a breakage leaves as they were are compiled once for the whole study.
        self._environment = os.environ | {
            "PYTHONPATH": str(self.root),
            "PYTHONDONTWRITEBYTECODE": "1",  # what is put back may be as old and as long as what it replaces
            "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "1",
        }
        self.root.mkdir()
        for name in SOURCES:
            source, target = REPOSITORY / name, self.root / name
            if source.is_dir():
                shutil.copytree(source, target, ignore=SKIPPED)
            else:
                shutil.copy(source, target)

    def check_imports(self) -> None:
        """Raises StudyError if Python would find the packages anywhere but in the copy."""
        program = "import k3jax, pallas_kernels; print(k3jax.__file__, pallas_kernels.__file__)"
        found = self._python("-c", program).stdout.split()
        if len(found) != 2 or not all(Path(path).is_relative_to(self.root) for path in found):
            raise StudyError(f"the packages come from {found}, not from the copy {self.root}")

    def test(self, tests: Sequence[str]) -> tuple[Failure, ...]:
        """Runs `tests` up to the first that fails.

        Raises:
          StudyError: pytest did not run them, as when none has such a name or a module does not import.
        """
        report = ("-o", "junit_family=xunit1", f"--junitxml={self._report}")
        done = self._python("-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *report, *tests)
        if done.returncode not in (0, 1):
            raise StudyError(f"pytest {' '.join(tests)}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
        return tuple(self._failures())

    def _failures(self) -> Iterator[Failure]:
        for case in ElementTree.parse(self._report).iter("testcase"):
            for kind in ("failure", "error"):
                for found in case.iter(kind):
                    why = ESCAPES.sub("", found.get("message", "")).replace(f"{self.root}/", "")
                    yield Failure(f"{case.get('file')}::{case.get('name')}", " ".join(why.split())[:MESSAGE])

    def _python(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=self.root,
            env=self._environment,
            timeout=PATIENCE,
            capture_output=True,
            text=True,
            check=False,
        )


def replaced(text: str, breakage: Breakage) -> str:
    """`text` broken.

    Raises:
      StudyError: what is to be replaced does not stand there exactly once.
    """
    if (count := text.count(breakage.old)) != 1:
        raise StudyError(f"{breakage.name}: {breakage.file} has {count} places that read {breakage.old!r}")
    return text.replace(breakage.old, breakage.new)


def study(copy: Copy, breakage: Breakage) -> Row:
    """Breaks the copy, runs the tests that ought to notice, and mends it."""
    path = copy.root / breakage.file
    intact = path.read_text()
    path.write_text(replaced(intact, breakage))
    began = time.perf_counter()
    try:
        failures = copy.test(breakage.tests)
    finally:
        path.write_text(intact)
    seconds = round(time.perf_counter() - began, 1)
    return Row(breakage.name, breakage.what, breakage.file, breakage.tests, failures, seconds)


def check_intact(copy: Copy, breakages: Sequence[Breakage]) -> None:
    """Raises StudyError unless every breakage applies, and every test passes with none of them."""
    copy.check_imports()
    for breakage in breakages:
        replaced((copy.root / breakage.file).read_text(), breakage)
    tests = sorted({test for breakage in breakages for test in breakage.tests})
    for failure in copy.test(tests):
        raise StudyError(f"{failure.test} fails before anything is broken: {failure.why}")


def chosen(names: Sequence[str]) -> tuple[Breakage, ...]:
    """The breakages of these names; all of them if there are no names."""
    known = {breakage.name: breakage for breakage in BREAKAGES}
    if unknown := set(names) - known.keys():
        raise StudyError(f"no breakage {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    return tuple(known[name] for name in names) or BREAKAGES


def verdict(row: Row) -> str:
    """The tests that noticed, for people."""
    names = [failure.test.removeprefix("tests/") for failure in row.caught_by]
    return ", ".join(names) or "NOT CAUGHT"


def table(rows: Sequence[Row], seconds: float) -> str:
    """The README's table, and a line that sums it up."""
    cell = lambda text: text.replace("|", r"\|")
    caught = sum(bool(row.caught_by) for row in rows)
    lines = [
        f"{caught} of {len(rows)} caught, in {seconds / 60:.0f} minutes on {os.cpu_count()} CPU cores.",
        "",
        "| breakage | what it does | caught by, in `tests/` |",
        "| --- | --- | --- |",
    ]
    for row in rows:
        test = f"`{cell(verdict(row))}`" if row.caught_by else f"**{verdict(row)}**"
        lines.append(f"| {row.name} | {cell(row.what)} | {test} |")
    return "\n".join(lines)


def store(rows: Sequence[Row], seconds: float, folder: Path) -> None:
    """Writes the rows and where they come from."""
    whole = {"seconds": round(seconds), "environment": environment(), "rows": [asdict(row) for row in rows]}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "breakages.json").write_text(json.dumps(whole, indent=1) + "\n")


def show_in_readme(text: str) -> None:
    """Puts a table in the place of the one in README.md."""
    path = HERE / "README.md"
    begin, end = "<!-- table -->\n", "<!-- end of table -->\n"
    before, _, rest = path.read_text().partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise StudyError(f"{path.name} has no {begin.strip()} and {end.strip()}")
    path.write_text(f"{before}{begin}{text}\n{end}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    breakages, rows, began = chosen(args.only), [], time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="k3jax-breakages-") as folder:
        copy = Copy(Path(folder).resolve())
        check_intact(copy, breakages)
        print(f"{time.perf_counter() - began:6.1f} s  intact: all pass", flush=True)
        for breakage in breakages:
            rows.append(study(copy, breakage))
            print(f"{rows[-1].seconds:6.1f} s  {breakage.name}: {verdict(rows[-1])}", flush=True)
    seconds = time.perf_counter() - began
    if args.out or not args.only:
        store(rows, seconds, args.out or RESULTS)
    if not args.out and not args.only:
        show_in_readme(table(rows, seconds))
    sys.exit(not all(row.caught_by for row in rows))


if __name__ == "__main__":
    main()
