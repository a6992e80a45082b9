"""Every config and every ablation, and the golden text of two.

python -m tests.test_configs    # writes tests/golden/text anew, to be read as a diff
"""

from pathlib import Path

import pytest

from k3jax import layout
from k3jax.cli.params import plain, rows
from k3jax.config import BlockAttnRes, ConfigError, LatentMoeConfig, Plain
from k3jax.override import changes, load, resolved, write
from k3jax.parameters import counts
from k3jax.user_files import imported

ROOT = Path(__file__).parents[1]
GOLDEN = Path(__file__).parent / "golden" / "text"
FILES = [path for path in sorted((ROOT / "configs").glob("*.py")) if hasattr(imported(path), "config")]
REFERENCES = [str(path) for path in FILES] + [
    f"{ROOT}/configs/{name}.py:rung({n})" for name in ("ladder", "k2") for n in (1, 2, 5)
]
ABLATIONS = [(path, name) for path in FILES for name in getattr(imported(path), "ABLATIONS", {})]
ABLATION_IDS = [f"{path.stem}-{name}" for path, name in ABLATIONS]


def texts(name):
    """File name -> golden text of one config."""
    cfg = load(f"{ROOT}/configs/{name}.py")
    return {
        f"{name}.params.txt": plain(cfg, list(rows(cfg)), counts(cfg.model)) + "\n",
        f"{name}.resolved.txt": resolved(cfg),
    }


@pytest.mark.parametrize("name", ["tiny", "k3"])
def test_golden_text(name):
    for file, text in texts(name).items():
        command = "python -m tests.test_configs rewrites it"
        assert (GOLDEN / file).read_text(encoding="utf-8").splitlines() == text.splitlines(), command


@pytest.mark.parametrize("reference", REFERENCES, ids=lambda x: Path(x).name)
def test_a_config_round_trips_through_its_text(reference, tmp_path):
    cfg = load(reference)
    assert load(str(write(cfg, tmp_path))) == cfg


@pytest.mark.parametrize(("path", "name"), ABLATIONS, ids=ABLATION_IDS)
def test_an_ablation_changes_something_and_round_trips(path, name, tmp_path):
    cfg = load(str(path), [], [name])
    assert changes(load(str(path)), cfg)
    assert load(str(write(cfg, tmp_path))) == cfg


@pytest.mark.parametrize("name", imported(ROOT / "configs" / "tiny.py").ABLATIONS)
def test_every_parameter_of_a_tiny_ablation_has_its_optimiser(name):
    cfg = load(f"{ROOT}/configs/tiny.py", [], [name])
    if "model" in " ".join(changes(load(f"{ROOT}/configs/tiny.py"), cfg)):
        assert all(row.optimiser and row.init for row in rows(cfg))


def test_tiny_has_every_mechanism():
    model = load(f"{ROOT}/configs/tiny.py").model
    groups = layout.plan(model)
    assert {leaf.mixer.kind for group in groups for leaf in group.leaves} == {"kda", "mla"}
    assert {len(leaf.repeats) for group in groups for leaf in group.leaves} == {0, 1, 2}
    assert isinstance(model.residual, BlockAttnRes)
    assert isinstance(model.moe, LatentMoeConfig)


def test_exact_counts_of_k3():
    count = counts(load(f"{ROOT}/configs/k3.py").model)
    assert (count.total, count.active) == (2_779_484_476_000, 104_189_612_640)
    assert sum(x.total for x in count.parts.values()) == count.total
    assert count.active - count.body == 163840 * 7168
    assert 0.46 < count.routed_share < 0.47


def test_counts_of_the_published_baselines():
    """Within a few per cent: reports round, and differ on embeddings and MTP layers."""
    for name, total, active in (("k2", 1.04e12, 32.6e9), ("kimi_linear", 48e9, 3e9)):
        count = counts(load(f"{ROOT}/configs/{name}.py").model)
        assert count.total == pytest.approx(total, rel=0.03)
        assert count.active == pytest.approx(active, rel=0.04)


def test_a_tied_table_is_counted_once_and_as_the_head():
    untied, tied = (counts(load(f"{ROOT}/configs/tiny.py", [], x).model) for x in ([], ["tied"]))
    table = untied.parts["embedding"].total
    assert (tied.total, tied.active, tied.body) == (untied.total - table, untied.active, untied.body)
    dense = counts(load(f"{ROOT}/configs/tiny.py", [], ["all_dense"]).model)
    assert dense.active == dense.total - table
    assert dense.routed_share == 0


@pytest.mark.parametrize("n", [1, 2, 8])
def test_a_rung_keeps_k3s_proportions(n):
    model = load(f"{ROOT}/configs/ladder.py:rung({n})").model
    assert 0.43 < counts(model).routed_share < 0.48
    assert model.moe.latent * 2 == model.width
    assert model.moe.experts == 56 * model.moe.active
    assert layout.bank_size(model) == 9
    kinds = [mixer.kind for mixer, _ in model.layers]
    assert kinds == [*(["kda"] * 3 + ["mla"]) * (n + 1), "mla"]


@pytest.mark.parametrize("n", [1, 4])
def test_the_k2_ladder_has_the_same_widths(n):
    k2, k3 = (load(f"{ROOT}/configs/{name}.py:rung({n})") for name in ("k2", "ladder"))
    assert (k2.model.width, k2.model.vocabulary) == (k3.model.width, k3.model.vocabulary)
    assert (k2.data, k2.optim.schedule, k2.optim.lr) == (k3.data, k3.optim.schedule, k3.optim.lr)
    assert isinstance(k2.model.residual, Plain)
    assert layout.describe(k2.model) == f"mla dense | {k2.model.depth - 1} mla moe"


@pytest.mark.parametrize("n", ["0", "-1", "1.5", "'a'"])
def test_a_rung_is_a_whole_number(n):
    for name in ("k2", "ladder"):
        with pytest.raises(ConfigError, match="a whole number of at least 1"):
            load(f"{ROOT}/configs/{name}.py:rung({n})")


if __name__ == "__main__":
    GOLDEN.mkdir(parents=True, exist_ok=True)
    for name in ("tiny", "k3"):
        for file, text in texts(name).items():
            (GOLDEN / file).write_text(text, encoding="utf-8")
