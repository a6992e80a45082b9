"""The benchmark's own arithmetic, and a run of it on small shapes."""

import contextlib
import json
import os
import time

import jax
import numpy as np
import pytest

from pallas_kernels import bench
from pallas_kernels.kda import accuracy, bench_step
from pallas_kernels.kda import bench as kda
from pallas_kernels.kda.cases import Case

SMALL = {"small": Case(1, 32, 1, 16, 16), "packed": Case(2, 32, 1, 16, 16, ((1, 20), (2, 9), (0, 3)))}


def test_the_floor_is_every_input_and_output_once():
    forward, both = kda.traffic(Case(1, 1, 1, 128, 128))
    assert forward == 4 * 256 + 2 + 256  # q, k, z, v, beta; the output
    assert both == forward + 4 * 256 + 2 + 256 + 4 * 256 + 2  # read again, with a cotangent; gradients


def test_a_run_leaves_a_table_rows_and_a_picture(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(kda, "CASES", SMALL)
    monkeypatch.setattr(accuracy, "CASE", SMALL["small"])
    monkeypatch.setattr(bench, "ENOUGH", 0.0)
    monkeypatch.setitem(bench.LARGE, "cpu", (1 << 16, 64))
    for _ in range(2):
        assert bench.main(["kda", "--out", str(tmp_path)]) == 0
    assert "relative errors against float64" in capsys.readouterr().out
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [(r["case"], r["direction"]) for r in rows] == 2 * [
        ("small", "forward"), ("small", "both"), ("packed", "forward"), ("packed", "both"),
    ]  # fmt: skip
    assert all(r["ms"] > 0 and r["floor_ms"] > 0 for r in rows)
    errors = [json.loads(line) for line in (tmp_path / "errors.jsonl").read_text().splitlines()]
    assert [found["implementation"] for found in errors] == ["xla", "xla"]
    assert len(errors[0]["draws"]) == accuracy.DRAWS
    for found in (errors[0]["pooled"], *errors[0]["draws"]):
        assert found.keys() == {*accuracy.OUTPUTS, *(f"d {name}" for name in accuracy.INPUTS)}
        assert all(0 < error < 0.05 for error in found.values())
    assert (tmp_path / "roofline.png").stat().st_size > 1000


class Twice:
    """A peer that is our own definition, and takes a while."""

    name = "twice"

    def random(self, case):
        return kda.inputs(case)

    def inputs(self, arrays):
        return arrays

    def forward(self, case, inputs):
        run = jax.jit(kda.forward("reference", case))
        return lambda: time.sleep(0.05) or run(*inputs)

    def both(self, case, inputs, cotangents=None):
        run = jax.jit(kda.both("reference", case))
        return lambda: time.sleep(0.05) or run(*inputs, cotangents=cotangents)

    def replayed(self, run):
        return run

    def wait(self, out):
        jax.block_until_ready(out)

    def numpy(self, out):
        return [np.asarray(x, np.float64) for x in jax.tree.leaves(out)]

    def extra_bytes(self, run):
        return 2**30


def test_a_peer_is_timed_beside_ours(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(kda, "CASES", {"small": SMALL["small"]})
    monkeypatch.setattr(accuracy, "CASE", SMALL["small"])
    monkeypatch.setitem(kda.PEERS, "twice", Twice)
    monkeypatch.setitem(kda.PEERS, "again", type("Again", (Twice,), {"name": "again"}))
    monkeypatch.setattr(bench, "ENOUGH", 0.0)
    monkeypatch.setitem(bench.LARGE, "cpu", (1 << 16, 64))
    assert bench.main(["kda", "--peer", "twice", "again", "--out", str(tmp_path)]) == 0
    assert "twice, relative errors against float64" in capsys.readouterr().out
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    ours, theirs = rows[:2], rows[2:4]
    assert [(r["implementation"], r["direction"]) for r in rows[2:]] == [
        ("twice", "forward"),
        ("twice", "both"),
        ("again", "forward"),
        ("again", "both"),
    ]
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["over_peer"] == pytest.approx(other["ms"] / mine["ms"])
        assert other["ms"] > 50
        assert (other["over_peer"], other["extra_gib"]) == (None, 1)
    _, errors, _ = [json.loads(line) for line in (tmp_path / "errors.jsonl").read_text().splitlines()]
    assert errors["implementation"] == "twice"
    assert errors["pooled"]["output"] < 1e-5  # the definition in float32, from what was rounded already


def test_a_peer_tunes_in_this_run(monkeypatch):
    """Not by what another left on disk, which may never have been timed, or on a busy card."""
    monkeypatch.setenv("FLA_CACHE_RESULTS", "1")
    with contextlib.suppress(ImportError):
        kda.PEERS["fla_kept"]()
    assert os.environ["FLA_CACHE_RESULTS"] == "0"


def test_pooled_errors_are_those_of_all_draws_as_one_array(monkeypatch):
    monkeypatch.setattr(accuracy, "CASE", SMALL["small"])
    monkeypatch.setattr(accuracy, "DRAWS", 2)
    definition = lambda inputs, cotangents: (*cotangents, *inputs)
    doubled = iter([False, True])  # in the second draw all is off by as much as there is

    def run(inputs, cotangents):
        times = 2 if next(doubled) else 1
        return [times * x for x in definition(inputs, cotangents)]

    pooled, (first, second) = accuracy.errors({"doubled": run}, definition)["doubled"]
    assert set(first.values()) == {0}
    assert set(second.values()) == {1}
    norms = [np.linalg.norm(np.float64(accuracy.inputs(SMALL["small"], draw)[0])) for draw in range(2)]
    assert pooled["d query"] == pytest.approx(norms[1] / np.hypot(*norms))


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["kda", "--implementation", "xls"], "--implementation xls: one of xla"),
        (["kda", "--implementation", "mosaic_gpu"], "mosaic_gpu cannot run here: it needs an NVIDIA GPU"),
        (["kda", "--case", "no"], "--case no: one of"),
        (["kda", "--peer", "flash"], "--peer flash: one of fla"),
        (["kda", "--peer", "fla"], "--peer fla cannot run here: "),
    ],
)
def test_what_is_not_there_is_refused_by_name(argv, says, capsys):
    with pytest.raises(SystemExit, match="2"):
        bench.main(argv)
    assert says in capsys.readouterr().err


def test_a_run_of_steps_leaves_a_table_and_rows(tmp_path, monkeypatch, capsys):
    for name, size in {"H": 2, "K": 16, "V": 8, "ROWS": 4}.items():
        monkeypatch.setattr(bench_step, name, size)
    monkeypatch.setattr(bench, "ENOUGH", 0.0)
    monkeypatch.setitem(bench.LARGE, "cpu", (1 << 16, 64))
    assert bench_step.traffic(3) == 3 * 2 * (2 * (3 * 16 + 8 + 1 + 8) + 2 * 4 * 16 * 8)
    assert bench_step.main(["--rows", "1", "8", "--out", str(tmp_path)]) == 0
    assert "x floor" in capsys.readouterr().out
    rows = [json.loads(line) for line in (tmp_path / "step.jsonl").read_text().splitlines()]
    assert [(r["implementation"], r["B"], r["K"]) for r in rows] == [("xla", 1, 16), ("xla", 8, 16)]
    assert all(r["ms"] > 0 and r["floor_ms"] > 0 for r in rows)
    with pytest.raises(SystemExit):
        bench_step.main(["--implementation", "mosaic_gpu"])
    assert "mosaic_gpu cannot run here: it needs an NVIDIA GPU" in capsys.readouterr().err
