"""The bar a model has to pass: the next byte from the byte before it, counted on the training text."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from k3jax.data.corpus import Document, Manifest, read_whole
from k3jax.data.packing import Batch
from k3jax.data.tokens import BEGIN, VOCABULARY, encode


@dataclass(frozen=True)
class Interpolated:
    """`strength` imaginary pairs after every token, spread as the bytes are in all of the text."""

    strength: float


@dataclass(frozen=True)
class Additive:
    """`count` imaginary pairs of every kind."""

    count: float


Smoothing = Interpolated | Additive

# The first one is taken where the training text cannot tell them apart (a single document).
CANDIDATES: tuple[Smoothing, ...] = (
    *(Interpolated(strength) for strength in (1.0, 10.0, 100.0, 1000.0)),
    *(Additive(count) for count in (0.01, 0.1, 1.0)),
)


@dataclass(frozen=True, eq=False)
class Bigram:
    """log_probs_YY: log P(next | token) in nats, [VOCABULARY, VOCABULARY] float64; BEGIN never comes next."""

    log_probs_YY: np.ndarray
    smoothing: Smoothing


def fit_bigram(corpus: Manifest) -> Bigram:
    """Counts the pairs of all training documents.

    The smoothing is the best of CANDIDATES at telling each half of the training documents by the
    other half's counts (every second document by name is one half). Held-out text takes no part.

    Raises:
      DataError: a file cannot be read, or has changed.
    """
    halves = [count_pairs(corpus.root, corpus.train[i::2]) for i in range(2)]

    def nats(smoothing: Smoothing) -> float:
        return sum(
            _nats(log_probs(counted_YY, smoothing), told_YY) for counted_YY, told_YY in (halves, halves[::-1])
        )

    best = min(CANDIDATES, key=nats)
    return Bigram(log_probs(halves[0] + halves[1], best), best)


def cross_entropy(bigram: Bigram, rows: Batch) -> float:
    """Mean nats per predicted token: over all positions by weight, not a mean of rows' means.

    Raises:
      ValueError: no position has a weight.
    """
    weights_BT = rows["weights"].astype(np.float64)
    if not weights_BT.sum():
        raise ValueError("rows: at least one position with a target is needed")
    # Padding is a pair (0, 0): finite, and of weight 0.
    log_probs_BT = bigram.log_probs_YY[rows["tokens"], rows["targets"]]
    return float(-(weights_BT * log_probs_BT).sum() / weights_BT.sum())


def count_pairs(root: str, documents: Sequence[Document]) -> np.ndarray:
    """counts_YY: how often each token was followed by each; int64."""
    counts_YY = np.zeros((VOCABULARY, VOCABULARY), np.int64)
    for document in documents:
        ids_T = encode(read_whole(root, document)).astype(np.int64)
        pairs_T = ids_T[:-1] * VOCABULARY + ids_T[1:]
        counts_YY += np.bincount(pairs_T, minlength=VOCABULARY**2).reshape(counts_YY.shape)
    return counts_YY


def log_probs(counts_YY: np.ndarray, smoothing: Smoothing) -> np.ndarray:
    """log P(next | token) under a smoothing; float64, -inf where next is BEGIN."""
    is_byte_Y = np.arange(VOCABULARY) != BEGIN
    match smoothing:
        case Interpolated(strength):
            unigram_Y = is_byte_Y * (counts_YY.sum(axis=0) + 1.0)
            prior_Y = strength * unigram_Y / unigram_Y.sum()
        case Additive(count):
            prior_Y = count * is_byte_Y
    smoothed_YY = counts_YY + prior_Y
    with np.errstate(divide="ignore"):  # log 0 at BEGIN is meant
        return np.log(smoothed_YY / smoothed_YY.sum(axis=1, keepdims=True))


def _nats(log_probs_YY: np.ndarray, counts_YY: np.ndarray) -> float:
    seen = counts_YY > 0  # 0 * -inf is no number
    return float(-(counts_YY[seen] * log_probs_YY[seen]).sum())
