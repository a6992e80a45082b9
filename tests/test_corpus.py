"""Documents found, hashed, split by name, and recognised when a run goes on."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import PurePosixPath

import pytest

from k3jax.config import ConfigError, DataConfig, Files, StandardLibrary
from k3jax.data import corpus
from k3jax.data.corpus import DataError, as_json, check_same, describe, from_json, read_part, read_whole

NAMES = [f"{letter}/{number}.txt" for letter in "abc" for number in range(8)]


@pytest.fixture
def folder(tmp_path):
    for number, name in enumerate(NAMES):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes([number]) * (number + 1))
    return tmp_path


def config(folder, **changes):
    return DataConfig(corpus=Files(str(folder)), held_out=0.25, **changes)


def test_the_library_is_there_without_tests_and_packages():
    manifest = describe(DataConfig())
    names = [d.name for d in manifest.train + manifest.held_out]
    assert {"argparse.py", "json/decoder.py"} <= set(names)
    assert not corpus.NOT_LIBRARY & {part for name in names for part in PurePosixPath(name).parts[:-1]}
    assert all(name.endswith(".py") for name in names)
    assert all(d.size > 0 for d in manifest.train + manifest.held_out)
    for side in (manifest.train, manifest.held_out):
        assert [d.name for d in side] == sorted(d.name for d in side)
    share = len(manifest.held_out) / len(names)
    assert 0.02 < share < 0.08


def test_describing_twice_says_the_same(folder):
    assert describe(config(folder)) == describe(config(folder, seed=7, batch=2))
    assert StandardLibrary() == DataConfig().corpus


def test_no_jax_is_imported():
    code = "import sys, k3jax.data.corpus; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_sides_share_no_document_and_lose_none(folder):
    manifest = describe(config(folder))
    train, held_out = ({d.name for d in side} for side in (manifest.train, manifest.held_out))
    assert not train & held_out
    assert sorted(train | held_out) == sorted(NAMES)


def test_files_added_later_move_no_other(folder):
    before = describe(config(folder))
    for number in range(20):
        (folder / f"new{number}.txt").write_text("new")
    after = describe(config(folder))
    assert set(before.train) < set(after.train)
    assert set(before.held_out) < set(after.held_out)


def test_a_larger_share_only_adds_to_the_held_out_side(folder):
    small, large = (
        describe(DataConfig(corpus=Files(str(folder)), held_out=share)).held_out for share in (0.25, 0.5)
    )
    assert set(small) < set(large)


def test_names_fall_evenly():
    places = [corpus.position(f"{number}.py") for number in range(2000)]
    assert all(0 <= place < 1 for place in places)
    assert abs(sum(place < 0.1 for place in places) / 2000 - 0.1) < 0.03
    # Pinned: another rule would move the files of stored runs.
    assert corpus.position("argparse.py") == 0.33931810356806646


def test_empty_files_are_left_out_and_undecodable_ones_are_not(folder):
    (folder / "empty.txt").touch()
    (folder / "binary.txt").write_bytes(b"\xff\xfe\x00\x80")
    manifest = describe(config(folder))
    found = {d.name: d for d in manifest.train + manifest.held_out}
    assert "empty.txt" not in found
    assert read_whole(manifest.root, found["binary.txt"]) == b"\xff\xfe\x00\x80"
    assert read_part(manifest.root, found["binary.txt"], 1, 3) == b"\xfe\x00"


def test_the_description_survives_json(folder):
    manifest = describe(config(folder))
    stored = json.loads(json.dumps(as_json(manifest)))
    assert from_json(stored) == manifest
    check_same(from_json(stored), manifest)
    stored["train"][0]["size"] += 1
    with pytest.raises(DataError, match="damaged"):
        from_json(stored)
    with pytest.raises(DataError, match=r"incomplete.*held_out"):
        from_json({"root": "", "digest": "", "train": []})


def test_the_same_files_elsewhere_are_the_same_corpus(folder, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "copy"
    folder.rename(elsewhere)
    moved = describe(config(elsewhere))
    elsewhere.rename(folder)
    check_same(moved, describe(config(folder)))


@pytest.mark.parametrize("kind", ["missing", "added", "changed"])
def test_a_differing_file_is_named(folder, kind):
    stored = describe(config(folder))
    name = {"missing": "b/3.txt", "added": "b/30.txt", "changed": "b/5.txt"}[kind]
    if kind == "missing":
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(b"\0\1\2\3\4\5")
    with pytest.raises(DataError, match=rf"1 of 24 files differ: {kind} '{name}'$"):
        check_same(stored, describe(config(folder)))


def test_a_file_on_the_other_side_is_named(folder):
    stored = describe(config(folder))
    first = stored.train[0]
    now = replace(stored, train=stored.train[1:], held_out=(*stored.held_out, first))
    with pytest.raises(DataError, match=f"moved '{first.name}' from train to held_out"):
        check_same(stored, now)


def test_of_many_differing_files_the_first_are_named(folder):
    stored = describe(config(folder))
    for name in NAMES[2:20]:
        (folder / name).write_text("other")
    with pytest.raises(DataError) as caught:
        check_same(stored, describe(config(folder)))
    assert "18 of 24 files differ: changed 'a/2.txt', changed 'a/3.txt'" in str(caught.value)
    assert str(caught.value).count("changed") == corpus.SHOWN
    assert str(caught.value).endswith(", ...")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (Files("nowhere"), "Files.root='nowhere': a folder that exists"),
        (Files(".", "*.none"), "Files.pattern='\\*.none': a glob that matches files below"),
        (Files(".", "../*"), "Files.pattern='../\\*': a glob that stays below root"),
        (Files(".", "/etc/*"), "Files.pattern='/etc/\\*': a glob that stays below root"),
        (Files(".", "**x"), "Files.pattern='\\*\\*x': a glob"),
    ],
)
def test_a_source_that_is_not_there_is_an_error(folder, monkeypatch, files, message):
    monkeypatch.chdir(folder)
    with pytest.raises(ConfigError, match=message):
        describe(DataConfig(corpus=files))


def test_a_file_that_cannot_be_read_is_an_error(folder):
    (folder / "broken.txt").symlink_to(folder / "nowhere")
    with pytest.raises(DataError, match=r"broken\.txt: cannot be read: .*No such file"):
        describe(config(folder))


def test_a_folder_that_cannot_be_listed_is_an_error(folder, monkeypatch):
    def walk(top, onerror):
        onerror(PermissionError(13, "Permission denied", f"{top}/a"))
        return []

    monkeypatch.setattr(corpus.os, "walk", walk)
    with pytest.raises(DataError, match="/a: this folder cannot be listed"):
        describe(config(folder))


@pytest.mark.parametrize(("share", "side"), [(1e-9, "none"), (0.5, "all")])
def test_a_side_without_files_is_an_error(tmp_path, share, side):
    low = [name for name in map(str, range(40)) if corpus.position(f"{name}.txt") < 0.4][:3]
    for name in low:
        (tmp_path / f"{name}.txt").write_text(name)
    cfg = DataConfig(corpus=Files(str(tmp_path)), held_out=share)
    with pytest.raises(ConfigError, match=rf"DataConfig.held_out={share}: {side} of the 3 files") as caught:
        describe(cfg)
    # What the message asks for works.
    most = float(str(caught.value).split("at most ")[1].split(",")[0])
    assert len(describe(replace(cfg, held_out=most)).train) == 1


def test_one_file_cannot_be_split(tmp_path):
    (tmp_path / "only.txt").write_text("only")
    with pytest.raises(ConfigError, match=r"at least two non-empty files are needed.*1 found"):
        describe(DataConfig(corpus=Files(str(tmp_path))))


def test_reading_notices_that_a_file_has_changed(folder):
    manifest = describe(config(folder))
    document = manifest.train[-1]
    path = folder / document.name
    path.write_bytes(b"?" * document.size)
    with pytest.raises(DataError, match="its content has changed"):
        read_whole(manifest.root, document)
    path.write_bytes(b"?" * (document.size + 1))
    with pytest.raises(DataError, match=f"has {document.size + 1} bytes, and had {document.size}"):
        read_part(manifest.root, document, 0, 1)
    path.unlink()
    with pytest.raises(DataError, match="cannot be read"):
        read_part(manifest.root, document, 0, 1)
