import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import jax
import numpy as np
import pytest
from flax.linen import meta
from safetensors.numpy import load_file, save_file

from configs import tiny
from k3jax import cli
from k3jax.config import ConfigError, replace
from k3jax.interop import huggingface
from k3jax.model import K3

ROOT = Path(__file__).parents[1]
TINY = f"{ROOT}/configs/tiny.py"


def k3jax(capsys, *argv):
    """(exit code, stdout, stderr) of a command in this process."""
    code = cli.main(list(argv))
    out, err = capsys.readouterr()
    return code, out, err


# ---- the command ----


def test_help_names_every_command_and_imports_none_of_them():
    code = (
        "import sys; from k3jax.cli import main; code = main(['--help']);"
        "heavy = {'jax', 'flax', 'numpy', 'rich'} & set(sys.modules);"
        "sys.exit(str(heavy) if heavy else code)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert all(
        re.search(rf"^ +{name} +{re.escape(does)}", done.stdout, re.M)
        for name, (_, does) in cli.COMMANDS.items()
    )


def test_a_command_has_its_own_help(capsys):
    code, out, _ = k3jax(capsys, "params", "--help")
    assert code == 0
    assert "    k3jax params configs/k3.py\n" in out
    assert all(flag in out for flag in ("CONFIG", "--set", "--with", "--plain", "--debug"))


@pytest.mark.parametrize(
    "argv", [[], ["paramz"], ["params"], ["params", "a.py", "--plian"], ["params", "a.py", "b.py"]]
)
def test_a_wrong_command_line_is_code_2_with_the_usage(capsys, argv):
    code, out, err = k3jax(capsys, *argv)
    assert (code, out) == (2, "")
    assert err.startswith("usage: k3jax")


def test_python_runs_the_same_command():
    done = subprocess.run(
        [sys.executable, "-m", "k3jax", "params", "no.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "k3jax params: no.py: no such file or directory\n"


def test_an_error_of_the_system_is_one_line(capsys, tmp_path):
    (tmp_path / "runs").write_text("a file where a folder is needed")
    code, _, err = k3jax(capsys, "train", TINY, "--run", str(tmp_path / "runs" / "new"))
    assert code == 2
    assert err.count("\n") == 1
    assert "runs" in err


def test_an_error_for_users_is_one_line_unless_debugged(capsys):
    argv = ["params", TINY, "--set", "model.width=x"]
    code, out, err = k3jax(capsys, *argv)
    assert (code, out) == (2, "")
    assert err == "k3jax params: --set model.width=x: ModelConfig.width takes a whole number, not 'x'\n"
    with pytest.raises(ConfigError, match="takes a whole number"):
        cli.main([*argv, "--debug"])


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (ConfigError("a"), 2),
        (huggingface.CheckpointError("a"), 2),
        (KeyboardInterrupt(), 130),
        (ValueError("a"), ValueError),
        (KeyError("a"), KeyError),
    ],
    ids=repr,
)
def test_only_errors_of_this_package_are_for_users(monkeypatch, error, outcome):
    def fail(args):
        raise error

    monkeypatch.setattr("k3jax.cli.params.run", fail)
    if isinstance(outcome, int):
        assert cli.main(["params", TINY]) == outcome
    else:
        with pytest.raises(outcome):
            cli.main(["params", TINY])


def test_a_reader_that_leaves_early_is_no_error():
    command = f"{sys.executable} -m k3jax params {TINY} --plain"
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        command.split(), cwd=ROOT, stdout=write, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")


# ---- params ----


def test_params_counts_full_k3(capsys):
    code, out, _ = k3jax(capsys, "params", f"{ROOT}/configs/k3.py")
    assert code == 0
    assert re.search(r"all +2,779,484,476,000 +104,189,612,640", out)
    assert re.search(
        r"02_kda_moe\.channel\.moe\.experts_gate +2x896x3584x3072 +layers experts latent hidden", out
    )
    assert "93 layers: kda dense | 2 kda moe | 22 x (mla moe, 3 kda moe) | 2 mla moe" in out


def test_params_follow_ablations_settings_and_the_mesh(capsys):
    argv = ["--plain", "--with", "adamw", "--with", "tied", "--set", "mesh.fsdp=4"]
    _, out, _ = k3jax(capsys, "params", TINY, *argv)
    lines = dict(line.split("\t", 1) for line in out.splitlines())
    assert "head" not in lines
    assert lines["embedding"].split("\t")[-2:] == ["adamw decayed", "embed/fsdp=4"]
    assert lines["3_mla_moe.mixer.mla.query_norm"].split("\t")[-2:] == ["adamw", "whole"]
    assert lines["1_kda_dense.mixer.kda.query"].split("\t")[-2:] == ["adamw decayed", "embed/fsdp=4"]


def test_params_refuses_a_mesh_that_does_not_divide(capsys):
    code, _, err = k3jax(capsys, "params", TINY, "--set", "data.batch=3", "--set", "mesh.fsdp=3")
    assert code == 2
    assert re.search(r"axis embed=32 does not divide over fsdp=3", err)


# ---- convert ----


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    """A small released checkpoint with a tensor that is no part of a text model."""
    model = tiny.model()
    cfg = replace(model, depth=2, full_layers=(2,), vocabulary=16, residual=replace(model.residual, opens=1))
    params = meta.unbox(K3(cfg).init(jax.random.key(0), np.zeros((1, 1), np.int32))["params"])
    directory = tmp_path_factory.mktemp("checkpoints") / "released"
    huggingface.save(directory, cfg, params)
    file = directory / "model.safetensors"
    save_file({**load_file(file), "vision_tower.patch": np.ones(3, np.float32)}, file)
    return directory


def test_convert_writes_what_it_read_and_says_what_it_skipped(capsys, released, tmp_path):
    code, out, _ = k3jax(capsys, "convert", str(released), str(tmp_path / "new"))
    assert code == 0
    assert "skipped: 1 tensors of the vision tower" in out
    assert "vision_tower.patch" in out
    before, after = (load_file(x / "model.safetensors") for x in (released, tmp_path / "new"))
    del before["vision_tower.patch"]
    assert before.keys() == after.keys()
    for name, x in before.items():
        np.testing.assert_array_equal(after[name], x)


def test_convert_like_another_is_bitwise_that_one(capsys, released, tmp_path):
    code, _, _ = k3jax(capsys, "convert", str(released), str(tmp_path / "new"), "--like", str(released))
    assert code == 0
    for file in released.iterdir():
        if file.suffix == ".safetensors":
            before, after = load_file(file), load_file(tmp_path / "new" / file.name)
            assert all(np.array_equal(before[name], after[name]) for name in before | after)
        else:
            assert (tmp_path / "new" / file.name).read_bytes() == file.read_bytes()


def test_convert_overwrites_nothing_and_needs_a_checkpoint(capsys, released, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        code, _, err = k3jax(capsys, "convert", str(released), str(released))
        assert (code, "nothing is overwritten" in err) == (2, True)
        code, _, err = k3jax(capsys, "convert", str(tmp_path), str(tmp_path / "new"))
        assert (code, "not a checkpoint directory" in err) == (2, True)
