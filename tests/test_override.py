import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from k3jax.config import (
    AdamW,
    BlockAttnRes,
    Config,
    ConfigError,
    DenseConfig,
    Files,
    KdaConfig,
    LowRank,
    ModelConfig,
    Muon,
    OptimConfig,
    Plain,
    RunConfig,
    Sign,
    Unbounded,
    replace,
)
from k3jax.override import changes, load, put, resolved, sources, write

ROOT = Path(__file__).parents[1]

PLAIN_FILE = """
from k3jax.config import *

def config(heads=2, *, width=16):
    linear = KdaConfig(heads, 4, 4)
    moe = MoeConfig(experts=4, active=2, hidden=8)
    layers = dict(depth=2, full_layers=(), dense_layers=0)
    return Config(model=ModelConfig(width=width, vocabulary=9, linear=linear, moe=moe, **layers))

def broken():
    return 1 / 0

def nothing():
    return None

ABLATIONS = {
    "plain": lambda c: replace(c, model=replace(c.model, residual=Plain())),
    "halved": lambda c: replace(c, optim=replace(c.optim, lr=c.optim.lr / 2)),
    "useless": lambda c: None,
}
"""

OWN_FILE = """
from dataclasses import dataclass
from typing import Any
from part.scale import SCALE
from k3jax.config import *

@dataclass(frozen=True)
class Mean:
    heads: int = 1
    scale: float = SCALE
    kind = "mean"

    def init(self, key: Any, width: int, std: float): ...
    def apply(self, params: Any, x_BTD: Any, state: Any, segments: Any): return x_BTD, state, {}
    def empty_state(self, batch: int, width: int, dtype: Any): ...
    def flops(self, width: int, length: int): return 0.0
    def context_rule(self): return "none"

def config():
    dense = DenseConfig(hidden=8)
    model = ModelConfig(width=8, vocabulary=9, depth=1, full=Mean(), dense=dense, full_layers=1)
    return Config(model=model)
"""


@pytest.fixture
def plain(tmp_path):
    (tmp_path / "plain.py").write_text(PLAIN_FILE)
    return str(tmp_path / "plain.py")


@pytest.fixture
def own(tmp_path):
    """A file with a mixer of its own, in a folder with a helper of its own."""
    folder = tmp_path / "mine"
    (folder / "part").mkdir(parents=True)
    (folder / "part" / "__init__.py").write_text("")
    (folder / "part" / "scale.py").write_text("SCALE = 0.1 + 0.2\n")
    (folder / "config.py").write_text(OWN_FILE)  # the name that the resolved one has, too
    yield folder / "config.py"
    for name in ("part", "part.scale"):
        sys.modules.pop(name, None)


# ---- references ----


def test_a_reference_is_a_file_a_name_or_a_call(plain):
    assert load(plain) == load(f"{plain}:config") == load(f"{plain}:config(2)") == load(f"{plain}:config()")
    cfg = load(f"{plain}:config(3, width=32)")
    assert (cfg.model.linear.heads, cfg.model.width) == (3, 32)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("cnfig", r"no function 'cnfig'; did you mean 'config'\? It has broken, config, nothing"),
        ("_private", "no function '_private'"),
        ("config(2", "a call with literal arguments"),
        ("config(open('x'))", "a call with literal arguments"),
        ("config(**{'heads': 2})", "a call with literal arguments"),
        ("config.model", "a call with literal arguments"),
        ("config(2, 3)", "TypeError: config"),
        ("config(0)", r"line 5: KdaConfig\.heads=0"),
        ("broken", "line 11: ZeroDivisionError: division by zero"),
        ("nothing", "gives a NoneType, not a Config"),
    ],
)
def test_a_reference_that_gives_no_config_says_why(plain, call, message):
    with pytest.raises(ConfigError, match=message):
        load(f"{plain}:{call}")


@pytest.mark.parametrize("reference", ["configs/k3", "configs", "x.py.txt", ":config"])
def test_a_reference_is_to_a_python_file(reference):
    with pytest.raises(ConfigError, match=r"a config is file\.py"):
        load(reference)


def test_a_missing_or_failing_file_says_why(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        load(str(tmp_path / "none.py"))
    for text, message in [
        ("x = 1\nimport nowhere_at_all\n", "line 2: ModuleNotFoundError"),
        ("x = 1\ny = (\n", "line 2: SyntaxError"),
    ]:
        (tmp_path / "bad.py").write_text(text)
        with pytest.raises(ConfigError, match=message) as caught:
            load(str(tmp_path / "bad.py"))
        assert isinstance(caught.value.__cause__, ImportError | SyntaxError)


def test_a_file_that_changed_is_read_again(plain):
    first = load(plain)
    Path(plain).write_text(PLAIN_FILE.replace("heads=2", "heads=7"))
    assert (first.model.linear.heads, load(plain).model.linear.heads) == (2, 7)


def test_files_of_one_name_do_not_meet(tmp_path):
    """Not each other's, and not a module's that everybody imports."""
    for heads, folder in enumerate("ab", 1):
        (tmp_path / folder).mkdir()
        for name in ("same.py", "random.py"):
            (tmp_path / folder / name).write_text(PLAIN_FILE.replace("heads=2", f"heads={heads}"))
    for name in ("same", "random"):
        found = [load(str(tmp_path / folder / f"{name}.py")).model.linear.heads for folder in "aba"]
        assert found == [1, 2, 1]
    import random

    assert hasattr(random, "shuffle")


def test_a_neighbour_of_another_folder_is_never_taken_for_ones_own(tmp_path):
    for number, folder in enumerate("ab"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "k3jax_test_neighbour.py").write_text(f"HEADS = {number + 1}\n")
        text = "from k3jax_test_neighbour import HEADS\n" + PLAIN_FILE.replace("heads=2", "heads=HEADS")
        (tmp_path / folder / "first.py").write_text(text)
    assert load(str(tmp_path / "a" / "first.py")).model.linear.heads == 1
    with pytest.raises(ConfigError, match="k3jax_test_neighbour, which this process already has"):
        load(str(tmp_path / "b" / "first.py"))


# ---- ablations and settings ----


def test_ablations_come_first_then_settings_each_left_to_right(plain):
    cfg = load(plain, ["optim.lr=8.0", "optim.lr=0.5"], ["halved", "plain"])
    assert (cfg.optim.lr, cfg.model.residual) == (0.5, Plain())
    assert load(plain, [], ["halved", "halved"]).optim.lr == load(plain).optim.lr / 4
    with pytest.raises(ConfigError, match=r"--with plian: not an ablation .* did you mean 'plain'"):
        load(plain, [], ["plian"])
    with pytest.raises(ConfigError, match="--with useless gives a NoneType"):
        load(plain, [], ["useless"])


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("model.linear.heads=4", 4),
        ("optim.lr=1", 1.0),
        ("optim.lr=-1e-3", None),
        ("optim.lr=1e-3", 1e-3),
        ("optim.clip=None", None),
        ("optim.clip=2", 2.0),
        ("model.tie_embeddings=True", True),
        ("model.dtype=bfloat16", "bfloat16"),
        ("model.dtype='float32'", "float32"),
        ("model.linear.rate_init=uniform", "uniform"),
        ("run.name=a-b.c", "a-b.c"),
        ("run.name=2024", "2024"),
        ("run.name='quoted'", "quoted"),
        ("run.name = spaced", "spaced"),
        ("data.corpus=Files('/data', pattern='*.md')", Files("/data", "*.md")),
        ("model.full_layers=(1,)", (1,)),
        ("model.residual=BlockAttnRes(opens=(0, 1))", BlockAttnRes((0, 1))),
        ("model.moe.balance=Sign(0.01)", Sign(0.01)),
        ("optim.matrices=AdamW()", AdamW()),
        ("optim.matrices=Muon(split=matrix, scale=1)", Muon(split="matrix", scale=1.0)),
        ("model.linear=KdaConfig(2, gate=LowRank(3), decay=Unbounded())", None),
    ],
)
def test_a_setting_takes_literals_words_and_constructors(plain, text, value):
    path = text.partition("=")[0].strip()
    if path == "model.full_layers":
        with pytest.raises(ConfigError, match=r"ModelConfig\.full=None"):  # every check runs again
            load(plain, [text])
        return
    if text == "optim.lr=-1e-3":
        with pytest.raises(ConfigError, match=r"OptimConfig\.lr=-0\.001"):
            load(plain, [text])
        return
    if path == "model.linear":
        value = KdaConfig(2, gate=LowRank(3), decay=Unbounded())
    found = load(plain, [text])
    for name in path.split("."):
        found = getattr(found, name)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model.width", "write it as part"),
        ("model.widht=3", r"ModelConfig has no 'widht'; did you mean 'width'\? It has width, vocabulary"),
        ("modl.width=3", "Config has no 'modl'; did you mean 'model'"),
        ("=3", "Config has no ''"),
        ("model.linear.kind=x", "KdaConfig has no 'kind'"),
        ("model.width=3.5", r"ModelConfig\.width takes a whole number, not 3\.5"),
        ("model.width=True", "takes a whole number, not True"),
        ("model.width=wide", "takes a whole number, not 'wide'"),
        ("model.width=2 ** 4", r"takes a whole number, not 2 \*\* 4"),
        ("model.width=(", r"takes a whole number, not '\('"),
        ("model.width=", "takes a whole number, not ''"),
        ("optim.lr=True", "takes a number, not True"),
        ("optim.clip=big", "takes a number or None, not 'big'"),
        ("model.tie_embeddings=1", "takes True or False, not 1"),
        ("model.dtype=int8", "takes 'float32' or 'bfloat16' or 'float64' or None, not 'int8'"),
        ("model.full_layers=[1]", r"a whole number or a tuple \(a whole number, \.\.\.\), not \[1\]"),
        ("model.full_layers=(1.0,)", r"not \(1\.0,\)"),
        ("model.residual=Plain", r"takes Plain\(\) or BlockAttnRes\(opens\) or FullAttnRes\(\), not 'Plain'"),
        ("model.residual=Sign()", r"takes Plain\(\).* not Sign"),
        ("model.residual=BlockAttnRes(0)", r"BlockAttnRes\.opens=0"),
        ("model.residual=BlockAttnRes('a')", r"BlockAttnRes\.opens takes a whole number"),
        ("model.residual=BlockAttnRes(opns=1)", "BlockAttnRes has no 'opns'; did you mean 'opens'"),
        ("model.residual=BlockAttnRes(1, 2)", "takes 1 values by position"),
        ("model.residual=BlockAttnRes(1, opens=2)", "each setting once"),
        ("model.linear=KdaConfig()", "KdaConfig needs heads"),
        ("model.linear=KdaConfg(2)", "no config type is called 'KdaConfg'; did you mean 'KdaConfig'"),
        ("model.linear=__import__('os')", "no config type is called '__import__'"),
        ("model.linear=Config", "or a Mixer of your own or None, not 'Config'"),
        ("model.full.heads=2", r"model\.full is None, with nothing inside: give it whole, KdaConfig\("),
        ("model.width.x=2", r"model\.width is 16, which has no settings"),
        ("model.residual.blocks=2", "BlockAttnRes has no 'blocks'; It has opens"),
        ("model.moe.active=4", "below experts=4"),
    ],
)
def test_a_setting_that_cannot_be_made_says_what_can(plain, text, message):
    with pytest.raises(ConfigError, match=message) as caught:
        load(plain, [text])
    assert str(caught.value).startswith(f"--set {text}")


def test_settings_reach_types_of_the_users_own(own):
    cfg = load(str(own), ["model.full.scale=2", "model.width=16"])
    assert (cfg.model.full.scale, cfg.model.width) == (2.0, 16)
    assert load(str(own), ["model.full=Mean(heads=3)"]).model.full.heads == 3
    with pytest.raises(ConfigError, match=r"Mean\.heads takes a whole number"):
        load(str(own), ["model.full.heads=x"])


def test_put_checks_as_settings_do(plain):
    cfg = load(plain)
    assert put(cfg, "model.residual", Plain()) == load(plain, ["model.residual=Plain()"])
    assert put(cfg, "optim.lr", 1).optim.lr == 1.0
    for path, value, message in [("optim.lr", "a", "takes a number"), ("optim.rate", 1.0, "no 'rate'")]:
        with pytest.raises(ConfigError, match=message):
            put(cfg, path, value)


# ---- configs as text ----


def test_resolved_text_reproduces_every_bit(plain, tmp_path):
    cfg = load(plain)
    cfg = replace(cfg, optim=OptimConfig(lr=0.1 + 0.2, z_loss=5e-324), run=RunConfig(name='it\'s "é"\\'))
    path = write(cfg, tmp_path)
    assert path.read_text(encoding="utf-8") == resolved(cfg)
    assert load(str(path)) == cfg
    assert not sources(cfg)
    assert resolved(load(str(path))) == resolved(cfg)


def test_resolved_text_has_one_setting_a_line(plain):
    lines = resolved(load(plain)).splitlines()
    assert "            width=16," in lines
    assert "            residual=BlockAttnRes(opens=12)," in lines
    assert max(map(len, lines)) <= 110


def test_a_numpy_number_is_spelled_as_the_number_it_is(plain, tmp_path):
    cfg = load(plain)
    cfg = replace(cfg, optim=replace(cfg.optim, lr=np.float64(0.1)))
    assert "lr=0.1," in resolved(cfg)
    assert load(str(write(cfg, tmp_path))) == cfg


def test_types_of_the_users_own_are_the_same_beside_a_run(own, tmp_path):
    """In this process the copy's type is the original's; in a fresh one the copy is enough."""
    cfg = load(str(own))
    run = tmp_path / "run"
    run.mkdir()
    path = write(cfg, run)
    copies = {"source/config.py", "source/part/__init__.py", "source/part/scale.py"}
    assert set(sources(cfg)) == copies == {str(x.relative_to(run)) for x in (run / "source").rglob("*.py")}
    again = load(str(path))
    assert again == cfg
    assert type(again.model.full) is type(cfg.model.full)
    write(again, run)  # a run that goes on
    own.rename(own.with_suffix(".gone"))
    code = (
        "import sys; from k3jax.override import load, resolved; sys.stdout.write(resolved(load(sys.argv[1])))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == resolved(cfg)


def test_a_copy_that_was_edited_is_another_type(own, tmp_path):
    cfg = load(str(own))
    path = write(cfg, tmp_path)
    copy = tmp_path / "source" / "config.py"
    copy.write_text(copy.read_text().replace("return 0.0", "return 1.0"))
    again = load(str(path))
    assert again.model.full.flops(1, 1) == 1.0
    assert cfg.model.full.flops(1, 1) == 0.0
    (difference,) = changes(cfg, again)
    assert difference.startswith("model.full: Mean(")
    assert difference.endswith("another source")


def test_what_text_cannot_spell_is_an_error(plain):
    @dataclass(frozen=True)
    class Local(DenseConfig):
        pass

    cfg = load(plain)
    local = replace(cfg.model, dense=Local(hidden=4))
    with pytest.raises(ConfigError, match="cannot be found again: define it at the top of a file"):
        resolved(Config(model=local))
    odd = replace(cfg.optim, z_loss=0.0)
    object.__setattr__(odd, "z_loss", np.zeros(1))
    with pytest.raises(ConfigError, match=r"config\.optim\.z_loss"):
        resolved(replace(cfg, optim=odd))


def test_changes_are_paths_with_both_values(plain):
    cfg = load(plain)
    assert changes(cfg, cfg) == []
    other = load(plain, ["optim.lr=1", "model.linear.decay=Unbounded()", "model.moe.balance.bins=10"])
    assert changes(cfg, other) == [
        "model.linear.decay: Bounded(floor=-5.0) -> Unbounded()",
        "model.moe.balance.bins: 1000 -> 10",
        "optim.lr: 0.002 -> 1.0",
    ]
    assert isinstance(cfg.model, ModelConfig)


def test_no_jax_is_imported(plain):
    code = (
        "import sys; from k3jax.override import load, resolved; resolved(load(sys.argv[1], ['optim.lr=1']));"
        "sys.exit('jax' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, plain], cwd=ROOT, check=True)
