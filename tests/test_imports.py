"""Imports point one way, and no file outside axes.py names a mesh axis."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# A module may import those on its own level's right. `a.b` stands for all below it.
LEVELS = [
    ["experiments"],
    ["configs"],
    ["k3jax.cli"],
    ["k3jax.train", "k3jax.plots", "k3jax.generate", "k3jax.evaluate", "k3jax.interop", "k3jax.memory"],
    ["k3jax.testing", "k3jax.parameters"],
    ["k3jax.model"],
    ["k3jax.depth", "k3jax.state"],
    ["k3jax.unit"],
    ["k3jax.flops"],
    ["k3jax.layers"],
    ["k3jax.parallel", "k3jax.segments", "k3jax.report"],
    ["k3jax.optim"],
    ["k3jax.axes", "k3jax.layout", "k3jax.override", "k3jax.data"],
    ["k3jax.resolved"],
    ["k3jax.settings", "k3jax.user_files"],
    ["k3jax.config"],
    ["pallas_kernels"],
]
OURS = ("experiments", "configs", "k3jax", "pallas_kernels", "tests")


def modules():
    for folder in ("k3jax", "pallas_kernels", "configs", "experiments"):
        yield from sorted((ROOT / folder).rglob("*.py"))


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def level(module: str) -> int | None:
    for at, names in enumerate(LEVELS):
        if any(module == name or module.startswith(name + ".") for name in names):
            return at
    return None


def imports(path: Path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@pytest.mark.parametrize("path", list(modules()), ids=name_of)
def test_imports_point_one_way(path):
    mine = level(name_of(path))
    if mine is None:
        assert name_of(path) in ("k3jax", "k3jax.__main__"), f"{name_of(path)} has no level: give it one"
        return
    for module in imports(path):
        if module.split(".")[0] in OURS:
            assert module.split(".")[0] != "tests"
            theirs = level(module)
            assert theirs is None or theirs >= mine, f"{name_of(path)} may not import {module}"


def test_config_and_the_command_line_import_no_jax():
    for name in ("config", "override", "resolved", "settings", "user_files"):
        assert "jax" not in {module.split(".")[0] for module in imports(ROOT / "k3jax" / f"{name}.py")}


@pytest.mark.parametrize("path", list(modules()), ids=name_of)
def test_only_axes_names_mesh_axes(path):
    """Everything else speaks in letters; the config that sizes a mesh, and what reads it, aside."""
    allowed = {"k3jax.axes", "k3jax.config", "k3jax.train.setup", "k3jax.cli.params", "k3jax.memory"}
    if name_of(path) in allowed:
        return
    strings = {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)}
    assert not strings & {"fsdp", "tensor"}, "a mesh axis is named outside axes.py"
