"""The bigram baseline: a distribution, fitted on training text alone, measured by the token."""

import math

import numpy as np
import pytest

from k3jax.config import DataConfig, Files
from k3jax.data.bigram import (
    CANDIDATES,
    Additive,
    Bigram,
    Interpolated,
    count_pairs,
    cross_entropy,
    fit_bigram,
    log_probs,
)
from k3jax.data.corpus import DataError, describe
from k3jax.data.loader import validation_rows
from k3jax.data.packing import blank
from k3jax.data.tokens import BEGIN, VOCABULARY


@pytest.fixture
def cfg(tmp_path):
    for number in range(20):
        (tmp_path / f"{number}.txt").write_bytes(b"abab" * (number + 1))
    return DataConfig(corpus=Files(str(tmp_path)), length=8, held_out=0.3)


def test_pairs_are_counted_inside_documents(cfg):
    manifest = describe(cfg)
    counts_YY = count_pairs(manifest.root, manifest.train)
    fours = sum(d.size for d in manifest.train) // 4
    assert counts_YY[BEGIN, ord("a")] == len(manifest.train)
    assert counts_YY[ord("a"), ord("b")] == 2 * fours
    assert counts_YY[ord("b"), ord("a")] == 2 * fours - len(manifest.train)
    assert counts_YY.sum() == 4 * fours  # and nothing else


@pytest.mark.parametrize("smoothing", CANDIDATES, ids=repr)
def test_every_token_has_a_distribution_over_bytes(cfg, smoothing):
    manifest = describe(cfg)
    probs_YY = np.exp(log_probs(count_pairs(manifest.root, manifest.train), smoothing))
    np.testing.assert_allclose(probs_YY.sum(axis=1), 1, rtol=1e-12)
    assert (probs_YY[:, :BEGIN] > 0).all()
    assert not probs_YY[:, BEGIN].any()


def test_smoothing_is_what_it_says():
    counts_YY = np.zeros((VOCABULARY, VOCABULARY), np.int64)
    counts_YY[1, 2], counts_YY[1, 3] = 3, 1
    added_YY = np.exp(log_probs(counts_YY, Additive(0.5)))
    np.testing.assert_allclose(added_YY[1, 2], 3.5 / (4 + 128), rtol=1e-12)
    mixed_YY = np.exp(log_probs(counts_YY, Interpolated(10.0)))
    np.testing.assert_allclose(mixed_YY[1, 3], (1 + 10 * 2 / 260) / 14, rtol=1e-12)
    np.testing.assert_allclose(mixed_YY[7, 2], 4 / 260, rtol=1e-12)  # never seen: as in all of the text


def test_the_mean_is_over_tokens_not_over_rows():
    """11 tokens of ln 3 and 101 of ln 2: weighing the rows alike would give another number."""
    log_probs_YY = np.zeros((VOCABULARY, VOCABULARY))
    log_probs_YY[1], log_probs_YY[2] = -math.log(3), -math.log(2)
    rows = blank(2, 128)
    for row, (count, token) in enumerate([(11, 1), (101, 2)]):
        rows["tokens"][row, :count] = token
        rows["weights"][row, :count] = 1
    loss = cross_entropy(Bigram(log_probs_YY, Additive(1.0)), rows)
    assert loss == pytest.approx((11 * math.log(3) + 101 * math.log(2)) / 112, rel=1e-12)


def test_padding_does_not_count(cfg):
    manifest = describe(cfg)
    bigram = fit_bigram(manifest)
    exact = cross_entropy(bigram, validation_rows(cfg, manifest, 1))
    padded = {name: np.pad(v, ((0, 3), (0, 5))) for name, v in validation_rows(cfg, manifest, 1).items()}
    assert cross_entropy(bigram, padded) == pytest.approx(exact, rel=1e-12)
    with pytest.raises(ValueError, match="at least one position"):
        cross_entropy(bigram, blank(2, 8))


def test_held_out_text_takes_no_part(cfg):
    before = fit_bigram(describe(cfg))
    manifest = describe(cfg)
    for document in manifest.held_out:
        with open(f"{manifest.root}/{document.name}", "wb") as file:
            file.write(b"something else")
    after = fit_bigram(describe(cfg))
    assert before.smoothing == after.smoothing
    assert (before.log_probs_YY == after.log_probs_YY).all()


def test_a_changed_training_file_is_noticed(cfg):
    manifest = describe(cfg)
    document = manifest.train[0]
    with open(f"{manifest.root}/{document.name}", "wb") as file:
        file.write(b"x" * document.size)
    with pytest.raises(DataError, match="content has changed"):
        fit_bigram(manifest)


def test_one_training_document_is_enough(tmp_path):
    for name in ("0", "1", "2", "3", "4"):
        (tmp_path / f"{name}.txt").write_text("some text")
    manifest = describe(DataConfig(corpus=Files(str(tmp_path)), held_out=0.5))
    one = type(manifest)(manifest.root, manifest.train[:1], manifest.held_out)
    assert fit_bigram(one).smoothing == CANDIDATES[0]


def test_on_the_library_it_is_a_strong_bar():
    cfg = DataConfig()
    manifest = describe(cfg)
    bigram = fit_bigram(manifest)
    rows = validation_rows(cfg, manifest, 10_000)  # all that is held out
    loss = cross_entropy(bigram, rows)
    assert 2.2 < loss < 2.6
    counts_YY = count_pairs(manifest.root, manifest.train)
    unigram = cross_entropy(Bigram(log_probs(counts_YY, Interpolated(1e12)), Interpolated(1e12)), rows)
    assert loss < unigram - 0.5
    # No candidate would have done much better on the held-out text either.
    others = [cross_entropy(Bigram(log_probs(counts_YY, s), s), rows) for s in CANDIDATES]
    assert loss < min(others) + 0.001
