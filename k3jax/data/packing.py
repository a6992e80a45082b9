"""Documents as rows: which pieces of which documents lie in which row, by arithmetic alone.

A document of n bytes has n pairs (token, next token): BEGIN and the first byte, up to its last two
bytes. Pairs are laid end to end and cut every `length` pairs. So no pair crosses a document, none is
lost at a cut, every packed position has a target, and any row can be made without the rows before it.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from k3jax.data.corpus import Document, read_part
from k3jax.data.tokens import encode

ENDLESS = 2**53  # rows that grain is told of; it divides the number as a float, exact up to here

# Rows of pairs by name, each array [B, T], or [T] for one row:
#   tokens, targets  int32; the target is the token after it in the same document
#   segment_ids      int32; pieces of documents count from 1 within their row, and padding is 0
#   weights          float32; 1 where there is a target, 0 at padding
Batch = dict[str, np.ndarray]


@dataclass(frozen=True)
class Piece:
    """Pairs `start` to `stop` of a document."""

    document: Document
    start: int
    stop: int


class Line:
    """Documents laid end to end, each as its pairs."""

    def __init__(self, documents: Sequence[Document]):
        self.documents = documents
        # Where each document begins, and last the length of the whole line.
        self.starts = np.concatenate([[0], np.cumsum([d.size for d in documents], dtype=np.int64)])
        self.length = int(self.starts[-1])

    def pieces(self, start: int, stop: int) -> list[Piece]:
        """What lies between two places of the line; a stop beyond its end means its end."""
        pieces = []
        stop = min(stop, self.length)
        while start < stop:
            number = int(np.searchsorted(self.starts, start, side="right")) - 1
            first, end = int(self.starts[number]), min(stop, int(self.starts[number + 1]))
            pieces.append(Piece(self.documents[number], start - first, end - first))
            start = end
        return pieces


class EndlessRows:
    """Row i of a stream without end, for any i: a random-access source for grain.

    Every epoch puts the documents in a new order, and the epochs follow each other on one line that
    is cut into full rows; a row may hold one epoch's end and the next one's beginning. Rows that
    begin in the same epoch are then shuffled, because neighbours on the line are mostly pieces of
    one document, and a batch of them would be one document's gradient.
    """

    def __init__(self, root: str, documents: Sequence[Document], length: int, key: Sequence[int]):
        self._root, self._documents, self._length, self._key = root, documents, length, tuple(key)
        self._epoch_pairs = sum(d.size for d in documents)
        self._line = functools.lru_cache(maxsize=4)(self._lay_out)
        self._order = functools.lru_cache(maxsize=4)(self._shuffle_rows)

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> Batch:
        return make_row(self._root, self.pieces(index), self._length)

    def pieces(self, index: int) -> list[Piece]:
        """What row `index` holds, in order."""
        epoch = index * self._length // self._epoch_pairs
        first = self._first_row(epoch)
        start = (first + int(self._order(epoch)[index - first])) * self._length
        stop = start + self._length
        pieces = []
        while start < stop:  # epochs can be shorter than a row
            epoch, within = divmod(start, self._epoch_pairs)
            taken = min(stop - start, self._epoch_pairs - within)
            pieces += self._line(epoch).pieces(within, within + taken)
            start += taken
        return pieces

    def _first_row(self, epoch: int) -> int:
        """The first row that begins in this epoch or later."""
        return -(-epoch * self._epoch_pairs // self._length)

    def _lay_out(self, epoch: int) -> Line:
        order = permutation(len(self._documents), (*self._key, epoch, 0))
        return Line([self._documents[number] for number in order])

    def _shuffle_rows(self, epoch: int) -> np.ndarray:
        rows = self._first_row(epoch + 1) - self._first_row(epoch)
        return permutation(rows, (*self._key, epoch, 1))


def permutation(size: int, key: Sequence[int]) -> np.ndarray:
    """0 to `size` - 1 in an order drawn from the key; int64.

    Sorts the raw bits of PCG64, which numpy promises never to change; Generator.permutation has no
    such promise, and a resumed run must see the order it began with.
    """
    bits = np.random.PCG64(np.random.SeedSequence(list(key)))
    return np.argsort(bits.random_raw(size), kind="stable")


def make_row(root: str, pieces: Sequence[Piece], length: int) -> Batch:
    """One row, [length]: the pieces as segments 1, 2, ..., then padding.

    Raises:
      DataError: a file cannot be read, or has changed.
    """
    row = blank(length)
    end = 0
    for segment, piece in enumerate(pieces, 1):
        start, end = end, end + piece.stop - piece.start
        row["tokens"][start:end], row["targets"][start:end] = _pairs(root, piece)
        row["segment_ids"][start:end] = segment
        row["weights"][start:end] = 1
    return row


def blank(*shape: int) -> Batch:
    """Rows of padding only."""
    row = {name: np.zeros(shape, np.int32) for name in ("tokens", "targets", "segment_ids")}
    return {**row, "weights": np.zeros(shape, np.float32)}


def _pairs(root: str, piece: Piece) -> tuple[np.ndarray, np.ndarray]:
    # Pair i is (byte i - 1, byte i), with BEGIN in the place of byte -1.
    inside = piece.start > 0
    ids_T = encode(read_part(root, piece.document, piece.start - inside, piece.stop))[int(inside) :]
    return ids_T[:-1], ids_T[1:]
