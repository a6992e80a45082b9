"""The training stream and the validation rows: complete, disjoint, resumable, never across documents."""

import itertools
import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from k3jax.config import ConfigError, DataConfig, Files
from k3jax.data.corpus import DataError, Document, Manifest, describe, read_whole
from k3jax.data.loader import deal, fingerprint, in_batches, train_stream, validation_rows
from k3jax.data.packing import EndlessRows, Line, make_row, permutation
from k3jax.data.tokens import BEGIN

SIZES = [1, 2, 3, 5, 8, 9, 11, 13, 14, 15, 15, 15]  # at most 15, so that a byte occurs once


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """File i holds the bytes 16 i, 16 i + 1, ...: a byte tells its document and its place."""
    root = tmp_path_factory.mktemp("corpus")
    for number, size in enumerate(SIZES):
        (root / f"{number:02}.txt").write_bytes(bytes(16 * number + i for i in range(size)))
    return root


@pytest.fixture(scope="module")
def cfg(folder):
    return DataConfig(corpus=Files(str(folder)), length=8, batch=12, held_out=0.35)


@pytest.fixture(scope="module")
def manifest(cfg):
    manifest = describe(cfg)
    assert len(manifest.train) >= 6
    assert len(manifest.held_out) >= 3
    return manifest


def take(stream, count):
    return list(itertools.islice(stream, count))


def pairs(batch):
    """All supervised (token, target) pairs of a batch, counted."""
    real_BT = batch["weights"] > 0
    return Counter(zip(batch["tokens"][real_BT].tolist(), batch["targets"][real_BT].tolist(), strict=True))


def pairs_of(manifest, documents):
    """The pairs that the documents have, counted."""
    contents = [read_whole(manifest.root, document) for document in documents]
    return sum((Counter(itertools.pairwise([BEGIN, *content])) for content in contents), Counter())


def documents_in(batch):
    real_BT = batch["weights"] > 0
    return set((batch["targets"][real_BT] // 16).tolist())


def same(left, right):
    return len(left) == len(right) and all(
        a.keys() == b.keys() and all(a[name].tobytes() == b[name].tobytes() for name in a)
        for a, b in zip(left, right, strict=True)
    )


def test_a_batch_is_full_rows_of_int32(cfg, manifest):
    for batch in take(train_stream(cfg, manifest), 20):
        assert set(batch) == {"tokens", "targets", "segment_ids", "weights"}
        for name, values_BT in batch.items():
            assert values_BT.shape == (12, 8)
            assert values_BT.dtype == (np.float32 if name == "weights" else np.int32)
        assert (batch["weights"] == 1).all()
        # Ids count 1, 2, ... along a row: they tell segments apart and weigh nothing.
        steps_BT = np.diff(batch["segment_ids"], axis=1, prepend=0)
        assert (steps_BT[:, 0] == 1).all()
        assert set(np.unique(steps_BT)) <= {0, 1}


def test_no_target_is_of_another_document(cfg, manifest):
    last = {read_whole(manifest.root, d)[-1] for d in manifest.train}
    for batch in take(train_stream(cfg, manifest), 50):
        tokens_BT, targets_BT, ids_BT = batch["tokens"], batch["targets"], batch["segment_ids"]
        opens_BT = tokens_BT == BEGIN
        assert (targets_BT[opens_BT] % 16 == 0).all()
        assert (targets_BT[~opens_BT] == tokens_BT[~opens_BT] + 1).all()
        assert not np.isin(tokens_BT, list(last)).any()  # a document's last token has no target
        # Inside a segment each target is the next position's token; a new document is a new segment.
        follows_BT = ids_BT[:, 1:] == ids_BT[:, :-1]
        assert (tokens_BT[:, 1:] == targets_BT[:, :-1])[follows_BT].all()
        assert not (opens_BT[:, 1:] & follows_BT).any()


@pytest.mark.parametrize("length", [1, 7, 8, 500])
def test_every_pair_is_read_once_an_epoch(manifest, length):
    """As many rows as an epoch has pairs are exactly `length` epochs."""
    rows = EndlessRows(manifest.root, manifest.train, length, (0, 0))
    total = Counter()
    count = sum(d.size for d in manifest.train)
    for index in range(count):
        total += pairs(rows[index])
    assert total == Counter({p: n * length for p, n in pairs_of(manifest, manifest.train).items()})


def test_an_epoch_ends_before_the_next_begins(manifest):
    """Rows are shuffled inside an epoch only: at its end each pair was read, at most once too often."""
    rows = EndlessRows(manifest.root, manifest.train, 8, (3, 0))
    epoch = pairs_of(manifest, manifest.train)
    seen, index = Counter(), 0
    for done in range(1, 8):
        while index * 8 < done * epoch.total():
            seen += pairs(rows[index])
            index += 1
        assert all(seen[pair] - done in (0, 1) for pair in epoch)  # 1: of the row that reaches over
        assert seen.total() == index * 8


def test_a_document_goes_on_in_another_row_with_its_true_next_token(manifest):
    document = max(manifest.train, key=lambda d: d.size)
    content = list(read_whole(manifest.root, document))
    line = Line([document])
    rows = [make_row(manifest.root, line.pieces(start, start + 4), 4) for start in (0, 4, 8, 12)]
    assert [row["tokens"].tolist() for row in rows[:2]] == [[BEGIN, *content[:3]], content[3:7]]
    assert [row["targets"].tolist() for row in rows[:2]] == [content[:4], content[4:8]]
    assert all(row["segment_ids"].max() == 1 for row in rows)  # a new segment, counted in its own row
    rest = document.size - 12
    assert rows[3]["weights"].tolist() == rows[3]["segment_ids"].tolist() == [1] * rest + [0] * (4 - rest)


def test_begin_is_placed_by_position_and_never_read(tmp_path):
    spelled = b"<|begin|>256\x00\x01\x01\x00"
    for name in range(20):
        (tmp_path / f"{name}.txt").write_bytes(spelled)
    cfg = DataConfig(corpus=Files(str(tmp_path)), length=len(spelled), batch=1, held_out=0.3)
    manifest = describe(cfg)
    for batch in take(train_stream(cfg, manifest), 30):
        assert batch["tokens"][0, 0] == BEGIN
        assert bytes(batch["targets"][0].tolist()) == spelled
        assert (batch["tokens"][0, 1:] < 256).all()


def test_the_stream_depends_on_its_arguments_alone(cfg, manifest):
    first = take(train_stream(cfg, manifest), 30)
    assert same(first, take(train_stream(cfg, manifest), 30))
    assert not same(first, take(train_stream(replace(cfg, seed=1), manifest), 30))


def test_a_permutation_is_one_and_is_pinned():
    assert permutation(0, (1,)).tolist() == []
    assert sorted(permutation(100, (1, 2))) == list(range(100))
    # Resumed runs rely on it, whatever numpy they are resumed with.
    assert permutation(8, (0, 0, 0, 0)).tolist() == [3, 2, 1, 6, 0, 7, 4, 5]


def test_every_epoch_has_its_own_order_of_documents(manifest):
    size = sum(d.size for d in manifest.train)
    rows = EndlessRows(manifest.root, manifest.train, size, (0, 0))  # one row is one epoch
    orders = [[piece.document.name for piece in rows.pieces(epoch)] for epoch in range(4)]
    assert all(sorted(order) == [d.name for d in manifest.train] for order in orders)
    assert all(a != b for a, b in itertools.combinations(orders, 2))


def test_a_batch_mixes_documents(tmp_path):
    for number in range(20):
        (tmp_path / f"{number}.txt").write_bytes(bytes([number]) * 4096)
    cfg = DataConfig(corpus=Files(str(tmp_path)), length=16, batch=16, held_out=0.3)
    for batch in take(train_stream(cfg, describe(cfg)), 20):
        assert len(np.unique(batch["targets"])) > 4


# 0; inside the first epoch; at and around its end; epochs later. An epoch is under one batch here.
@pytest.mark.parametrize("done", [0, 1, 2, 3, 7, 40])
def test_a_resumed_stream_goes_on_bit_for_bit(cfg, manifest, done):
    whole = take(train_stream(cfg, manifest), done + 12)
    stream = train_stream(cfg, manifest)
    take(stream, done)
    state = json.loads(json.dumps(stream.get_state()))
    assert same(take(stream, 3), whole[done : done + 3])  # taking the state disturbed nothing

    fresh = train_stream(cfg, manifest)
    fresh.set_state(state)
    assert fresh.get_state() == state
    assert same(take(fresh, 12), whole[done:])
    fresh.set_state(state)  # back again, with batches read ahead
    assert same(take(fresh, 2), whole[done : done + 2])


@pytest.mark.parametrize("length", [3, 200])
def test_resuming_inside_long_and_short_epochs(cfg, manifest, length):
    cfg = replace(cfg, length=length, batch=1)
    whole = take(train_stream(cfg, manifest), 90)
    stream = train_stream(cfg, manifest)
    for done in range(0, 80, 9):
        fresh = train_stream(cfg, manifest)
        fresh.set_state(stream.get_state())
        assert same(take(fresh, 9), whole[done : done + 9])
        take(stream, 9)


def test_another_interpreter_goes_on_bit_for_bit(cfg, manifest):
    stream = train_stream(cfg, manifest)
    take(stream, 5)
    state = stream.get_state()
    code = f"""
import json, sys
from k3jax.config import DataConfig, Files
from k3jax.data.corpus import describe
from k3jax.data.loader import fingerprint, train_stream
cfg = {cfg!r}
stream = train_stream(cfg, describe(cfg))
stream.set_state(json.loads(sys.argv[1]))
print(*[fingerprint(next(stream)) for _ in range(4)])
"""
    command = [sys.executable, "-c", code, json.dumps(state)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout.split() == [fingerprint(batch) for batch in take(stream, 4)]


@pytest.mark.parametrize("name", ["seed", "length", "batch"])
def test_a_state_of_other_settings_is_refused(cfg, manifest, name):
    other = replace(cfg, **{name: 2 * getattr(cfg, name) + 2})
    state = train_stream(cfg, manifest).get_state()
    with pytest.raises(ConfigError, match=rf"DataConfig\.{name}=.*saved under {getattr(cfg, name)}"):
        train_stream(other, manifest).set_state(state)


def test_a_state_of_another_corpus_or_number_of_processes_is_refused(cfg, manifest):
    state = train_stream(cfg, manifest).get_state()
    with pytest.raises(ConfigError, match="processes=2: the stream was saved under 1"):
        train_stream(cfg, manifest, processes=2).set_state(state)
    fewer = replace(manifest, train=manifest.train[1:])
    with pytest.raises(DataError, match=f"saved over corpus {manifest.digest}"):
        train_stream(cfg, fewer).set_state(state)
    with pytest.raises(DataError, match="lacks batch, corpus"):
        train_stream(cfg, manifest).set_state({"position": {}})


@pytest.mark.parametrize("processes", [1, 2, 3, 4, 6])
def test_processes_read_disjoint_documents_and_together_all(cfg, manifest, processes):
    streams = [train_stream(cfg, manifest, process=p, processes=processes) for p in range(processes)]
    seen = []
    for stream in streams:
        batches = take(stream, 60)
        assert all(batch["tokens"].shape == (12 // processes, 8) for batch in batches)
        seen.append(set.union(*map(documents_in, batches)))
    assert all(not a & b for a, b in itertools.combinations(seen, 2))
    assert set.union(*seen) == {int(d.name[:2]) for d in manifest.train}
    # One copy of the state serves all processes.
    states = [stream.get_state() for stream in streams]
    assert all(state == states[0] for state in states)
    marks = [fingerprint(next(stream)) for stream in streams]
    assert len(set(marks)) == processes


def test_documents_are_dealt_once_and_evenly(manifest):
    for processes in range(1, len(manifest.train) + 1):
        hands = deal(manifest.train, processes)
        assert sorted(d.name for hand in hands for d in hand) == [d.name for d in manifest.train]
        loads = [sum(d.size for d in hand) for hand in hands]
        assert min(loads) > 0
        assert max(loads) - min(loads) <= max(d.size for d in manifest.train)
        assert hands == deal(manifest.train[::-1], processes)  # whatever order they come in


def test_a_large_document_is_dealt_first():
    documents = [Document(str(number), size, "") for number, size in enumerate([1, 1, 1, 1, 4])]
    assert [[d.size for d in hand] for hand in deal(documents, 2)] == [[4], [1, 1, 1, 1]]


def test_what_cannot_be_shared_out_is_said_before_training(cfg, manifest):
    many = len(manifest.train) + 1
    with pytest.raises(
        ConfigError, match=f"{many - 1} training documents cannot be dealt to {many} processes"
    ):
        train_stream(replace(cfg, batch=many), manifest, process=many - 1, processes=many)
    with pytest.raises(ConfigError, match=r"DataConfig\.batch=12: a multiple of the 5 processes"):
        train_stream(cfg, manifest, processes=5)
    for process in (-1, 2):
        with pytest.raises(ConfigError, match=f"process={process}: one of the 2 processes"):
            train_stream(cfg, manifest, process=process, processes=2)
        with pytest.raises(ConfigError, match=f"process={process}: one of the 2 processes"):
            validation_rows(cfg, manifest, 4, process=process, processes=2)


def test_a_file_that_changes_under_a_run_stops_it(tmp_path):
    for number in range(10):
        (tmp_path / f"{number}.txt").write_text("text")
    cfg = DataConfig(corpus=Files(str(tmp_path)), held_out=0.3)
    stream = train_stream(cfg, describe(cfg))
    for number in range(10):
        (tmp_path / f"{number}.txt").write_text("other text")
    with pytest.raises(DataError, match="has 10 bytes, and had 4"):
        next(stream)


def test_validation_rows_are_the_same_for_all_seeds_and_calls(cfg, manifest):
    rows = validation_rows(cfg, manifest, 3)
    assert same([rows], [validation_rows(cfg, manifest, 3)])
    assert same([rows], [validation_rows(replace(cfg, seed=5, batch=4), manifest, 3)])


@pytest.mark.parametrize("length", [1, 4, 8, 300])
def test_enough_validation_rows_are_the_whole_held_out_set_once(cfg, manifest, length):
    rows = validation_rows(replace(cfg, length=length), manifest, 200)
    assert pairs(rows) == pairs_of(manifest, manifest.held_out)
    assert rows["tokens"].shape == (200, length)


def test_padding_is_zero_everywhere(cfg, manifest):
    rows = validation_rows(cfg, manifest, 200)
    padding_BT = rows["segment_ids"] == 0
    assert padding_BT.any()
    assert (rows["weights"] == ~padding_BT).all()
    assert not rows["tokens"][padding_BT].any()
    assert not rows["targets"][padding_BT].any()


def test_a_few_validation_rows_are_spread_over_the_held_out_set(tmp_path):
    for number in range(40):
        (tmp_path / f"{number:02}.txt").write_bytes(bytes([number]) * 160)
    cfg = DataConfig(corpus=Files(str(tmp_path)), length=16, held_out=0.3)
    manifest = describe(cfg)
    count = len(manifest.held_out)
    rows = validation_rows(cfg, manifest, count)
    assert set(np.unique(rows["targets"])) == {int(d.name[:2]) for d in manifest.held_out}
    assert (rows["weights"] == 1).all()


@pytest.mark.parametrize("processes", [2, 3, 7])
@pytest.mark.parametrize("count", [1, 5, 9])
def test_processes_together_hold_all_validation_rows(cfg, manifest, count, processes):
    whole = validation_rows(cfg, manifest, count)
    parts = [validation_rows(cfg, manifest, count, process=p, processes=processes) for p in range(processes)]
    joined = {name: np.concatenate([part[name] for part in parts]) for name in whole}
    assert len(joined["tokens"]) == -(-count // processes) * processes
    assert all((joined[name][:count] == whole[name]).all() for name in whole)
    assert not any(joined[name][count:].any() for name in whole)


def test_no_validation_rows_is_an_error(cfg, manifest):
    with pytest.raises(ConfigError, match="rows=0: a whole number of at least 1"):
        validation_rows(cfg, manifest, 0)


def test_rows_in_batches_have_one_shape_and_lose_nothing(cfg, manifest):
    rows = validation_rows(cfg, manifest, 5)
    for size in (1, 2, 5, 7):
        batches = list(in_batches(rows, size))
        assert all(values_BT.shape == (size, 8) for batch in batches for values_BT in batch.values())
        assert sum(map(pairs, batches), Counter()) == pairs(rows)


def test_fingerprints_tell_batches_apart(cfg, manifest):
    batch = next(train_stream(cfg, manifest))
    mark = fingerprint(batch)
    assert mark == fingerprint({name: values_BT.copy() for name, values_BT in batch.items()})
    for name in batch:
        changed = {**batch, name: batch[name].copy()}
        changed[name][-1, -1] += 1
        assert fingerprint(changed) != mark


def test_the_default_run_reads_the_library():
    cfg = DataConfig()
    manifest = describe(cfg)
    assert isinstance(manifest, Manifest)
    batch = next(train_stream(cfg, manifest))
    assert batch["tokens"].shape == (8, 512)
    assert validation_rows(cfg, manifest, 64)["weights"].all()
