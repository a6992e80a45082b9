"""What a run reads: an endless, exactly resumable stream to train on, and fixed rows to validate on."""

import hashlib
import heapq
from collections.abc import Iterator, Sequence
from typing import Any

import grain
import numpy as np

from k3jax.config import ConfigError, DataConfig
from k3jax.data.corpus import DataError, Document, Manifest
from k3jax.data.packing import Batch, EndlessRows, Line, blank, make_row

# One thread makes a few batches ahead; they come in order, and the state counts those handed out.
READ_AHEAD = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)


class TrainStream:
    """Batches without end: this process's rows of step 0, 1, 2, ... of a run.

    The state is a small dict of JSON values that is the same on every process, so one copy serves
    all. It can be taken and set between any two batches.
    """

    def __init__(self, rows: EndlessRows, batch: int, settings: dict[str, Any]):
        # A batch is small and the rows of one are independent: grain reads, stacks, looks ahead and counts.
        dataset = grain.MapDataset.source(rows).batch(batch).to_iter_dataset(READ_AHEAD)
        self._iterator = iter(dataset)
        self._settings = settings

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        return next(self._iterator)

    def get_state(self) -> dict[str, Any]:
        """Where the stream stands, and the settings under which that place means anything."""
        return {**self._settings, "position": dict(self._iterator.get_state())}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes to a place that `get_state` told: the next batch is the one that was next there.

        Raises:
          ConfigError: the state was taken under other settings.
          DataError: the state was taken over another corpus, or is no state of a stream.
        """
        missing = {*self._settings, "position"} - state.keys()
        if missing:
            raise DataError(f"this is no state of a training stream: it lacks {', '.join(sorted(missing))}")
        for name, value in self._settings.items():
            if state[name] == value:
                continue
            if name == "corpus":
                raise DataError(f"the stream was saved over corpus {state[name]}, and reads corpus {value}")
            where = "processes" if name == "processes" else f"DataConfig.{name}"
            raise ConfigError(
                f"{where}={value!r}: the stream was saved under {state[name]!r}, and needs the same"
            )
        self._iterator.set_state(state["position"])


def train_stream(cfg: DataConfig, corpus: Manifest, *, process: int = 0, processes: int = 1) -> TrainStream:
    """An endless iterator over process `process`'s rows of each step, [batch / processes, length].

    Every process has documents of its own (see `deal`), which it repeats for ever, each epoch in a
    new order. Every position holds a pair: all weights are 1. Batches depend on nothing but the
    arguments and their number.

    Raises:
      ConfigError: `batch` does not divide over the processes, or there are fewer documents than those.
      DataError: from the iterator, if a file cannot be read any more.
    """
    _check_process(process, processes)
    if cfg.batch % processes:
        raise ConfigError(f"DataConfig.batch={cfg.batch}: a multiple of the {processes} processes")
    documents = deal(corpus.train, processes)[process]
    rows = EndlessRows(corpus.root, documents, cfg.length, (cfg.seed, process))
    settings = {
        "corpus": corpus.digest,
        "seed": cfg.seed,
        "length": cfg.length,
        "batch": cfg.batch,
        "processes": processes,
    }
    return TrainStream(rows, cfg.batch // processes, settings)


def deal(documents: Sequence[Document], processes: int) -> list[list[Document]]:
    """Each document to one process, largest first to whoever has the fewest bytes.

    So their epochs are nearly as long, and no document is repeated much more often than another.

    Raises:
      ConfigError: fewer documents than processes: one would have nothing to read.
    """
    if len(documents) < processes:
        raise ConfigError(
            f"DataConfig.corpus: its {len(documents)} training documents cannot be dealt to {processes} "
            f"processes; at least {processes} are needed"
        )
    hands: list[list[Document]] = [[] for _ in range(processes)]
    loads = [(0, process) for process in range(processes)]
    for document in sorted(documents, key=lambda d: (-d.size, d.name)):
        load, process = heapq.heappop(loads)
        hands[process].append(document)
        heapq.heappush(loads, (load + document.size, process))
    return hands


def validation_rows(
    cfg: DataConfig, corpus: Manifest, rows: int, *, process: int = 0, processes: int = 1
) -> Batch:
    """Process `process`'s share of `rows` rows of held-out text, [ceil(rows / processes), length].

    All held-out documents are laid end to end in the order of their names, cut into rows, and of
    those `rows` are taken at even distances: every part of the held-out set counts by its size, and
    nothing is drawn, so that runs of any seed are measured on the same text. The line's last row may
    end in padding. Where the text gives fewer rows, or they do not divide over the processes, whole
    rows are padding: their segment ids and weights are 0.

    Raises:
      ConfigError: rows below 1, or no such process.
      DataError: a file cannot be read, or has changed.
    """
    _check_process(process, processes)
    if rows < 1:
        raise ConfigError(f"rows={rows!r}: a whole number of at least 1 is needed")
    line = Line(corpus.held_out)
    available = -(-line.length // cfg.length)
    chosen = [i * available // rows for i in range(rows)] if rows < available else list(range(available))
    share = -(-rows // processes)
    batch = blank(share, cfg.length)
    for i, number in enumerate(chosen[process * share : (process + 1) * share]):
        start = number * cfg.length
        row = make_row(corpus.root, line.pieces(start, start + cfg.length), cfg.length)
        for name, values_T in row.items():
            batch[name][i] = values_T
    return batch


def in_batches(rows: Batch, size: int) -> Iterator[Batch]:
    """Rows in batches of `size`, all of one shape: the last is filled up with rows of padding."""
    count, length = rows["tokens"].shape
    padding = blank(-count % size, length)
    padded = {name: np.concatenate([rows[name], padding[name]]) for name in rows}
    for start in range(0, count, size):
        yield {name: values_BT[start : start + size] for name, values_BT in padded.items()}


def fingerprint(batch: Batch) -> str:
    """A sha256 of a batch, by which streams are compared."""
    whole = hashlib.sha256()
    for name in sorted(batch):
        values_BT = np.ascontiguousarray(batch[name])
        whole.update(f"{name} {values_BT.dtype} {values_BT.shape}".encode())
        whole.update(values_BT.tobytes())
    return whole.hexdigest()


def _check_process(process: int, processes: int) -> None:
    if not 0 <= process < processes:
        raise ConfigError(f"process={process!r}: one of the {processes} processes, counted from 0")
