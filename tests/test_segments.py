"""Who belongs together: packed rows, padding, and rows that come in pieces, from ids to whole models."""

from functools import cache, partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen import meta

from k3jax.config import (
    BlockAttnRes,
    KdaConfig,
    LatentMoeConfig,
    MlaConfig,
    ModelConfig,
    replace,
)
from k3jax.model import K3
from k3jax.segments import compact, reorder
from pallas_kernels.segments import segment_index

PATTERNS = {
    "101 is one": [1, 0, 1, 1],
    "121 is three": [1, 2, 1, 1],
    "102 is two": [1, 0, 0, 2],
    "padding first": [0, 0, 3, 3],
    "padding last": [3, 3, 0, 0],
    "all padding": [0, 0, 0, 0],
    "negative is padding": [-1, 2, -5, 2],
}


def runs(ids, last_id=0):
    """For each real token, the number of its segment: from 0 where it continues `last_id`, else 1."""
    numbers, current, number = [], last_id, 0
    for name in ids:
        if name <= 0:
            numbers.append(None)
            continue
        number += name != current
        current = name
        numbers.append(number)
    return numbers, current


def rows(length, seed):
    """Random rows with short runs and much padding."""
    rng = np.random.default_rng(seed)
    return np.repeat(rng.integers(0, 3, size=(6, length)), 3, axis=1)[:, :length]


# ---- ids ----


@pytest.mark.parametrize("ids", PATTERNS.values(), ids=PATTERNS)
def test_an_index_is_the_number_of_its_segment(ids):
    check_index(np.array([ids]))


def test_indexes_of_random_rows():
    for seed in range(5):
        check_index(rows(11, seed))


def check_index(ids):
    index, real = map(np.asarray, jax.jit(segment_index)(jnp.asarray(ids, jnp.int32)))
    np.testing.assert_array_equal(real, ids > 0)
    for b, row in enumerate(ids):
        numbers = [number for number in runs(row)[0] if number is not None]
        np.testing.assert_array_equal(index[b, real[b]], np.array(numbers, int) - 1)
        assert np.all(np.diff(index[b]) >= 0)


def test_compacting_puts_padding_last_and_keeps_the_order():
    ids = np.concatenate([rows(11, 0), np.array([[0] * 11, [1, 0] * 5 + [1], [0, 2] * 5 + [2]])])
    order, segments, last = map_numpy(jax.jit(compact)(jnp.asarray(ids, jnp.int32)))
    for b, row in enumerate(ids):
        real = np.flatnonzero(row > 0)
        np.testing.assert_array_equal(order[b], np.concatenate([real, np.flatnonzero(row <= 0)]))
        np.testing.assert_array_equal(segments.real_BT[b], np.arange(11) < len(real))
        numbers = np.array([number for number in runs(row)[0] if number is not None], int)
        np.testing.assert_array_equal(segments.index_BT[b, : len(real)], numbers - 1)
        assert set(segments.index_BT[b, len(real) :]) <= {segments.index_BT[b, max(len(real) - 1, 0)]}
        assert last[b] == (row[real[-1]] if len(real) else 0)
        assert segments.count_B[b] == len(real)


def map_numpy(tree):
    return jax.tree.map(np.asarray, tree)


@pytest.mark.parametrize(
    ("ids", "last_id", "index", "now"),
    [
        ([2, 2, 3, 0], 2, [0, 0, 1, 1], 3),
        ([2, 2, 3, 0], 3, [1, 1, 2, 2], 3),
        ([2, 2, 3, 0], 0, [1, 1, 2, 2], 3),
        ([0, 2, 0, 2], 2, [0, 0, 0, 0], 2),
        ([0, 0, 0, 0], 2, [0, 0, 0, 0], 2),
        ([0, 0, 0, 0], 0, [0, 0, 0, 0], 0),
    ],
)
def test_the_first_segment_continues_exactly_if_its_id_is_the_last_one(ids, last_id, index, now):
    _, segments, last = compact(jnp.array([ids]), jnp.array([last_id]))
    np.testing.assert_array_equal(segments.index_BT, [index])
    np.testing.assert_array_equal(last, [now])
    np.testing.assert_array_equal(segments.continues_B, [index[0] == 0])


def test_reordering_is_a_gather_both_ways():
    ids = jnp.asarray(rows(11, 3), jnp.int32)
    order = compact(ids)[0]
    inverse = jnp.argsort(order, axis=1)
    x, d = (jnp.asarray(np.random.default_rng(i).normal(size=(6, 11, 4)), jnp.float32) for i in range(2))
    plain = lambda x: jnp.take_along_axis(x, order[..., None], axis=1)
    (y, pull), (y_plain, pull_plain) = (jax.vjp(f, x) for f in (lambda x: reorder(x, order, inverse), plain))
    chex.assert_trees_all_equal((y, pull(d)), (y_plain, pull_plain(d)))
    chex.assert_trees_all_equal(reorder(reorder(x, order, inverse), inverse, order), x)


# ---- models ----

T = 24
CFG = ModelConfig(
    width=16,
    vocabulary=2 * T,
    depth=3,
    linear=KdaConfig(heads=2, key=4, value=6),
    full=MlaConfig(heads=2, key=4, shared=2, value=6, latent=8, query_rank=8),
    moe=LatentMoeConfig(experts=6, active=2, hidden=8, shared=1, latent=8),
    full_layers=(3,),  # the first two are scanned, and the second opens a block
    dense_layers=0,
    residual=BlockAttnRes((0, 1)),
)
MODEL = K3(CFG)
ROUNDING = 1e-11  # relative L2 in float64: other lengths and neighbours, other orders of summation
# One row per document, so that the same program serves the packed row and its documents alone.
LENGTHS = (9, 14)
PACKED = np.array([[1] * 9 + [2] * 14 + [0], [0] * T])
ALONE = np.array([[1] * 9 + [0] * 15, [0] * 9 + [1] * 14 + [0]])


@pytest.fixture(autouse=True)
def float64():
    """Everything is float64 here, so that a law that holds only nearly does not pass for rounding."""
    with jax.enable_x64(True):
        yield


@cache
def params():
    shapes = meta.unbox(jax.eval_shape(MODEL.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32)))["params"]
    rng = np.random.default_rng(3)
    return jax.tree.map(lambda x: jnp.asarray(0.3 * rng.normal(size=x.shape)), shapes)


def tokens(seed=0):
    """Two rows, in which no token occurs twice."""
    return np.random.default_rng(seed).permutation(CFG.vocabulary).reshape(2, T).astype(np.int32)


@jax.jit
def apply(params, tokens, segment_ids, states):
    return MODEL.apply({"params": params}, tokens, segment_ids, states)


@jax.jit
@partial(jax.grad, has_aux=True)
def pull(params, tokens, segment_ids, cotangent):
    out = MODEL.apply({"params": params}, tokens, segment_ids)
    return jnp.sum(out.logits * cotangent) + out.penalty, out


def forward(tokens, segment_ids, states):
    return apply(params(), tokens, segment_ids, states)


def gradients(tokens, segment_ids, cotangent):
    """(Output, gradients of sum(logits * cotangent) + penalty)."""
    d, out = pull(params(), tokens, segment_ids, cotangent)
    return out, d


def cotangent(seed=1):
    return np.random.default_rng(seed).normal(size=(2, T, CFG.vocabulary))


def empty_states(batch=2):
    return MODEL.empty_states(batch, jnp.float64)


def norm(tree):
    return np.sqrt(sum(np.sum(np.square(np.asarray(x, np.float64))) for x in jax.tree.leaves(tree)))


def assert_close(actual, expected, tolerance=ROUNDING):
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert norm(np.asarray(x) - np.asarray(y)) <= tolerance * norm(y) + 1e-13


def test_packed_documents_are_documents_alone():
    """Logits and gradients; the documents' lengths are no multiples of anything."""
    text, d = tokens(), cotangent()
    packed, d_packed = gradients(np.stack([text[0], text[1]]), PACKED, d)
    alone, d_alone = gradients(np.stack([text[0], text[0]]), ALONE, np.stack([d[0], d[0]]))
    assert_close(packed.logits[0, :9], alone.logits[0, :9])
    assert_close(packed.logits[0, 9:23], alone.logits[1, 9:23])
    assert_close(d_packed, d_alone)
    # And without any padding or ids, each in a row of its own length.
    assert_close(packed.logits[0, :9], forward(text[:1, :9], None, None).logits[0])


@pytest.mark.parametrize("document", [1, 2])
def test_documents_are_bitwise_independent(document):
    before, _ = gradients(tokens(), PACKED, cotangent())
    changed = np.where(document == PACKED, tokens(5), tokens())
    after, _ = gradients(changed, PACKED, cotangent())
    other = (document != PACKED) & (PACKED > 0)
    np.testing.assert_array_equal(np.asarray(before.logits)[other], np.asarray(after.logits)[other])
    assert not np.array_equal(before.logits, after.logits)


def test_rows_are_independent():
    """One row's text and packing move nothing in the other; alone in its batch, it is the same row."""
    ids = np.concatenate([PACKED[:1], np.ones((1, T), int)])
    before, _ = gradients(tokens(), ids, cotangent())
    after, _ = gradients(np.stack([tokens()[0], tokens(5)[1]]), PACKED, cotangent())
    assert_close(after.logits[0], before.logits[0])
    alone = forward(tokens()[1:, :9], None, None).logits
    assert_close(alone[0], before.logits[1, :9])


@pytest.mark.parametrize("where", ["front", "middle", "both", "scattered"])
def test_padding_may_be_anywhere(where):
    """The real tokens' logits and every gradient are those of the row without its padding."""
    at = {"front": np.arange(1, 24), "middle": np.r_[:5, 6:24], "both": np.r_[1:11, 11:24]}
    at["scattered"] = np.sort(np.random.default_rng(2).permutation(T)[:23])
    text, ids, d = (np.zeros_like(x) for x in (tokens(), PACKED, cotangent()))
    text[0, at[where]], ids[0, at[where]], d[0, at[where]] = (
        tokens()[0, :23],
        PACKED[0, :23],
        cotangent()[0, :23],
    )
    expected, d_expected = gradients(tokens(), PACKED, cotangent())
    actual, d_actual = gradients(text, ids, d)
    assert_close(actual.logits[0, at[where]], expected.logits[0, :23])
    assert_close(d_actual, d_expected)


def test_zeros_do_not_end_a_segment_and_other_ids_do():
    rows = [7] * 12 + [0] * 12, [7] * 6 + [0] * 5 + [7] * 6 + [0] * 7, [7] * 6 + [3] * 6 + [7] * 12
    one, gap, three = (np.array([row, [0] * T]) for row in rows)
    text = np.concatenate([tokens()[:1, :6], tokens()[:1, :5], tokens()[:1, 6:]], axis=1)[:, :T]
    whole = gradients(tokens(), one, cotangent())[0].logits[0, :12]
    with_gap = gradients(np.concatenate([text, tokens()[1:]]), gap, cotangent())[0].logits[0]
    assert_close(jnp.concatenate([with_gap[:6], with_gap[11:17]]), whole)
    apart = gradients(tokens(), three, cotangent())[0].logits[0]
    assert_close(apart[:6], whole[:6])
    assert norm(apart[6:12] - whole[6:12]) > 0.01 * norm(whole[6:12])


def test_padding_gives_no_logits_no_statistics_and_no_gradient():
    ids, d = PACKED.copy(), cotangent()
    ids[1, 3:10] = 1
    out, d_params = gradients(tokens(), ids, d)
    assert not np.any(np.asarray(out.logits)[ids == 0])
    real = int(np.sum(ids > 0))
    loads = [report["channel"].sums["load_E"] for name, report in out.reports.items() if "moe" in name]
    assert [int(np.sum(load)) // CFG.moe.active for load in loads] == [2 * real, real]
    for name, report in out.reports.items():
        if "moe" in name:
            histogram = np.asarray(report["channel"].sums["balance"])
            np.testing.assert_array_equal(histogram.sum(-1), np.full(histogram.shape[:-1], real))
    # Another text and another cotangent in the padding: the same statistics, the same gradients.
    text, other = np.where(ids > 0, tokens(), tokens(5)), np.where(ids[..., None] > 0, d, 100 * d)
    again, d_again = gradients(text, ids, other)
    chex.assert_trees_all_equal(jax.tree.leaves(again.reports), jax.tree.leaves(out.reports))
    chex.assert_trees_all_equal(d_again, d_params)
    absent = np.setdiff1d(np.arange(CFG.vocabulary), tokens()[ids > 0])
    assert not np.any(np.asarray(d_params["embedding"])[absent])


@pytest.mark.parametrize("last", [0, 5, 16, 22])
def test_no_gradient_comes_from_the_future(last):
    """Every token has its own embedding: rows of tokens after `last` must have exactly none."""
    d = cotangent()
    d[:, last + 1 :] = 0
    ids = np.ones((2, T), int)
    moved = np.any(np.asarray(gradients(tokens(), ids, d)[1]["embedding"]) != 0, axis=1)
    np.testing.assert_array_equal(np.flatnonzero(moved), np.sort(tokens()[:, : last + 1].reshape(-1)))


def test_the_same_prompt_twice_gives_the_same_logits():
    """Nothing is carried from one request into the next, unless it is handed over."""
    states = empty_states()
    first = forward(tokens()[:, :8], None, states)
    second = forward(tokens()[:, :8], None, states)
    chex.assert_trees_all_equal(first, second)


def in_pieces(text, ids, pieces=3, length=8):
    """Logits of pieces of `length`, each from the last one's states."""
    states, out = empty_states(), []
    for i in range(pieces):
        now = slice(i * length, (i + 1) * length)
        result = forward(text[:, now], None if ids is None else ids[:, now], states)
        states, _ = result.states, out.append(result.logits)
    return jnp.concatenate(out, axis=1), states


CUT_ROWS = {
    "one document": np.array([[1] * 24, [5] * 24]),
    "a document ends at a cut": np.array([[1] * 8 + [2] * 16, [1] * 16 + [2] * 8]),
    "documents end inside pieces": np.array([[1] * 3 + [2] * 10 + [3] * 11, [4] * 20 + [5] * 4]),
    "the same id goes on, another starts anew": np.array([[1] * 7 + [2] + [1] * 16, [3] * 16 + [4] * 8]),
    "padding at the cuts": np.array([[1] * 5 + [0] * 5 + [1] * 14, [0] * 8 + [2] * 4 + [0] * 8 + [2] * 4]),
    "a piece of padding": np.array([[1] * 8 + [0] * 8 + [1] * 8, [1] * 8 + [0] * 8 + [2] * 8]),
}


@pytest.mark.parametrize("ids", CUT_ROWS.values(), ids=CUT_ROWS)
def test_a_row_in_pieces_is_the_row_in_one_pass(ids):
    whole = gradients(tokens(), ids, cotangent())[0].logits
    pieces, states = in_pieces(tokens(), ids)
    assert_close(pieces, whole)
    np.testing.assert_array_equal(states.last_id_B, [row[row > 0][-1] for row in ids])


def test_pieces_may_be_of_any_length():
    """A piece of n real tokens and padding is a piece of n tokens."""
    for lengths in ((3, 8, 8), (8, 1, 6), (2, 2, 0)):
        total = sum(lengths)
        ids, text = np.zeros((2, T), int), np.zeros((2, T), np.int32)
        starts = np.cumsum((0, *lengths))
        where = np.concatenate([8 * i + np.arange(n) for i, n in enumerate(lengths)])
        ids[:, where], text[:, where] = 1, tokens()[:, :total]
        pieces, _ = in_pieces(text, ids)
        whole = gradients(tokens(), np.broadcast_to(np.arange(T) < total, (2, T)).astype(int), cotangent())[0]
        assert_close(pieces[:, where], whole.logits[:, : starts[-1]])


def test_states_without_ids_go_on_with_one_document():
    """Prefill, then a token of decoding."""
    whole = gradients(tokens(), np.ones((2, T), int), cotangent())[0].logits
    first = forward(tokens()[:, :8], None, empty_states())
    token = forward(tokens()[:, 8:9], None, first.states)
    assert_close(first.logits, whole[:, :8])
    assert_close(token.logits[:, 0], whole[:, 8])


def test_the_carried_memory_is_that_of_the_last_document():
    """What is handed on after a packed row is what its last document alone leaves behind."""
    _, packed = in_pieces(tokens(), np.array([[1] * 10 + [2] * 14, [1] * 24]))
    ids = np.array([[0] * 10 + [2] * 14, [1] * 24])
    _, alone = in_pieces(tokens(), ids)
    for name, state in packed.layers.items():
        if "kda" in name:
            assert_close(state, alone.layers[name])


BATCHES = [
    (shape, packed, carried)
    for shape in ((1, 1), (2, 0), (0, 5))
    for packed in (False, True)
    for carried in (False, True)
]


@pytest.mark.parametrize(("shape", "packed", "carried"), BATCHES)
def test_short_and_empty_batches(shape, packed, carried):
    B, length = shape
    text, ids = np.zeros(shape, np.int32), np.ones(shape, int) if packed else None
    run = partial(MODEL.apply, {"params": params()})
    out = jax.eval_shape(run, text, ids, empty_states(B) if carried else None)
    assert out.logits.shape == (B, length, CFG.vocabulary)


@pytest.mark.parametrize("shape", [(2, 0), (0, 5)])
def test_an_empty_batch_has_zero_gradients(shape):
    out, d = gradients(np.zeros(shape, np.int32), np.ones(shape, int), np.zeros((*shape, CFG.vocabulary)))
    assert not any(np.any(x) for x in jax.tree.leaves(d))
    assert not any(np.any(np.isnan(x)) for x in jax.tree.leaves(out.reports))


@pytest.mark.parametrize("shape", [(2, 7), (2, 9)])
def test_ids_of_another_shape_than_the_tokens_are_refused(shape):
    run = partial(MODEL.apply, {"params": params()})
    with pytest.raises((AssertionError, ValueError)):
        jax.eval_shape(run, tokens()[:, :8], np.ones(shape, int))


def test_states_keep_their_types():
    """A decode step that is compiled once, or scanned, hands on what it was handed."""
    low = K3(replace(CFG, dtype="bfloat16"))
    before = low.empty_states(2)
    after = jax.eval_shape(low.apply, {"params": params()}, tokens()[:, :1], None, before).states
    assert [x.dtype for x in jax.tree.leaves(after)] == [x.dtype for x in jax.tree.leaves(before)]
