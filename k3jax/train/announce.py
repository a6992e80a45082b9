"""What a run says on the terminal."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from k3jax.memory import human

FACTS = ("model", "layers", "devices", "mesh", "compute", "implementations", "memory", "work", "data")


class Announcer:
    """Speaks for process 0, and keeps quiet for the others.

    On a terminal there is one live line; elsewhere (a log file) a line per record.
    """

    def __init__(self, console: Console | None = None):
        self._console = console or Console(quiet=jax.process_index() != 0)
        self._progress: Progress | None = None
        self._task: Any = None
        self._shown: dict[str, str] = {}

    def line(self, text: str) -> None:
        (self._progress.console if self._progress else self._console).print(text, highlight=False)

    def setup(self, facts: dict[str, Any]) -> None:
        """The model, the devices, and what was chosen to run on them."""
        table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
        for name in FACTS:
            value = facts[name]
            table.add_row(name, "\n".join(value) if isinstance(value, list) else str(value))
        self._console.print(table, highlight=False)

    def compiling(self, *compilers: Callable[[], Any]) -> list[Any]:
        """Runs the compilers, and says how long they took and what the programs need."""
        began = time.perf_counter()
        programs = [compiler() for compiler in compilers]
        need = programs[0].memory_analysis()
        held = ""
        if need is not None:
            held = f"; a step holds {human(need.argument_size_in_bytes + need.temp_size_in_bytes)} a device"
        self.line(f"compiled in {time.perf_counter() - began:.1f} s{held}")
        return programs

    @contextmanager
    def progress(self, step: int, steps: int) -> Iterator[None]:
        """A live line while steps are made, where there is a terminal."""
        if not self._console.is_terminal:
            yield
            return
        columns = (
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(compact=True),
        )
        with Progress(*columns, console=self._console) as self._progress:
            self._task = self._progress.add_task("", total=steps, completed=step)
            yield
        self._progress = None

    def advance(self, step: int, numbers: dict[str, float], worth_a_line: bool = False) -> None:
        """Shows a step's numbers: all of them where they are all there, else the loss alone."""
        forms = {
            "loss": ("loss", "{:.4f}"),
            "tokens_per_second": ("tokens/s", "{:,.0f}"),
            "max_vio": ("MaxVio", "{:.2f}"),
            "dead_experts": ("dead", "{:.0f}"),
        }
        self._shown |= {
            label: form.format(numbers[name]) for name, (label, form) in forms.items() if name in numbers
        }
        text = "  ".join(f"{label} {value}" for label, value in self._shown.items())
        if self._progress:
            self._progress.update(self._task, completed=step, description=text)
        elif worth_a_line:
            self.line(f"step {step}  {text}")

    def finished(self, step: int, steps: int, path: Path, pictures: list[Path]) -> None:
        """Where everything is."""
        if step < steps:
            self.line(f"stopped at step {step} of {steps}; go on with `k3jax train --resume {path}`")
        self.line(f"run directory: {path} ({len(pictures)} plots in {path / 'plots'})")
