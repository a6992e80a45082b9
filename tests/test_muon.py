import re
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax.contrib import MuonDimensionNumbers

from k3jax.axes import MESH_AXES, Normal, is_weight, make_mesh, make_weight, stacked, weight_shardings
from k3jax.config import Muon
from k3jax.optim.muon import Blocks, muon, newton_schulz

SIZES = {"D": 48, "H": 4, "K": 16, "V": 16, "E": 8, "L": 24, "F": 40, "R": 12}
LAYERS = 3

# float32 Newton-Schulz in two orders of summation: five steps amplify rounding by up to 3.4^5.
CLOSE = {"rtol": 0, "atol": 2e-5}

COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")


def boxed(spec, layers=LAYERS, sizes=SIZES):
    """{"w": Weight} of shapes alone, with a leading layers axis unless layers is None."""
    tree = {"w": jax.eval_shape(lambda key: make_weight(key, spec, sizes, Normal(1.0)), jax.random.key(0))}
    if layers is None:
        return tree
    return jax.tree.map(lambda w: stacked(w, (layers,)), tree, is_leaf=is_weight)


def draw(weights, seed=0, dtype=jnp.float32):
    drawn = np.random.default_rng(seed).normal(size=weights["w"].value.shape)
    return {"w": jnp.asarray(drawn, dtype)}


def first_update(weights, gradients, **settings):
    transform = muon(Muon(**settings), weights)
    update = jax.jit(lambda g: transform.update(g, transform.init(g))[0])
    return np.asarray(update(gradients)["w"])


def oracle(matrix, rows, columns):
    """optax's Muon: at its first step its momentum is a multiple of `matrix`, which cancels."""
    dims = MuonDimensionNumbers(rows, columns)
    transform = optax.contrib.muon(-1.0, muon_weight_dimension_numbers={"w": dims}, consistent_rms=0.2)
    return jax.jit(lambda x: transform.update({"w": x}, transform.init({"w": x}), {"w": x})[0]["w"])(matrix)


def as_matrices(x, weights, split="head"):
    """[matrices, rows, columns]"""
    gathered = Blocks.of(weights["w"], split).gather(np.asarray(x))
    return gathered.reshape(-1, *gathered.shape[-2:])


# (spec, split, rows, columns): the positions, counted behind the layers axis, that optax is told.
CASES = [
    ("D->[H]K", "head", (1,), (3,)),
    ("D->[H]K", "matrix", (1,), (2, 3)),
    ("HV->D", "head", (1, 2), (3,)),
    ("HV->D", "every_head", (2,), (3,)),
    ("D->HV", "head", (1,), (2, 3)),
    ("D->HV", "every_head", (1,), (3,)),
    ("E:L->F", "head", (2,), (3,)),
    ("E:F->L", "matrix", (2,), (3,)),
    ("D->R", "head", (1,), (2,)),
    ("R->[H]K", "head", (1,), (3,)),
]


@pytest.mark.parametrize(
    ("spec", "split", "rows", "columns"), CASES, ids=[f"{case[0]} {case[1]}" for case in CASES]
)
def test_two_steps_agree_with_optax(spec, split, rows, columns):
    weights = boxed(spec)
    first, second = draw(weights, 0), draw(weights, 1)
    transform = muon(Muon(split=split), weights)

    @jax.jit
    def two_steps(first, second):
        one, state = transform.update(first, transform.init(first))
        two, _ = transform.update(second, state)
        return one["w"], two["w"]

    one, two = two_steps(first, second)
    chex.assert_trees_all_close(one, oracle(first["w"], rows, columns), **CLOSE)
    # Moonlight's Nesterov: m2 = 0.95 m1 + g2, and g2 + 0.95 m2 is orthogonalised.
    nesterov = second["w"] + 0.95 * (0.95 * first["w"] + second["w"])
    chex.assert_trees_all_close(two, oracle(nesterov, rows, columns), **CLOSE)


@pytest.mark.parametrize("spec", ["D->[H]K", "E:L->F"])
def test_matrices_side_by_side_are_never_mixed(spec):
    """One layer, head or expert alone gets the update that it gets among the others."""
    weights = boxed(spec)
    gradients = draw(weights)
    together = as_matrices(first_update(weights, gradients), weights)
    alone = jax.jit(partial(newton_schulz, steps=5, operand=jnp.float32))
    for matrix, update in zip(as_matrices(gradients["w"], weights), together, strict=True):
        scale = 0.2 * max(matrix.shape) ** 0.5
        chex.assert_trees_all_close(scale * np.asarray(alone(matrix)), update, **CLOSE)


def test_a_stack_equals_separate_layers():
    gradients = draw(boxed("D->[H]K"))
    together = first_update(boxed("D->[H]K"), gradients)
    layers = np.asarray(gradients["w"])
    apart = [first_update(boxed("D->[H]K", None), {"w": layer}) for layer in layers]
    chex.assert_trees_all_close(together, np.stack(apart), **CLOSE)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("spec", ["D->[H]K", "HV->D", "E:L->F"])
def test_singular_values_come_near_one(spec, precision):
    weights = boxed(spec)
    updates = first_update(weights, draw(weights), precision=precision)
    matrices = as_matrices(updates, weights)
    values = np.linalg.svd(matrices, compute_uv=False) / (0.2 * max(matrices.shape[1:]) ** 0.5)
    # Where five quintic steps take [0.003, 1]; bfloat16 operands blur the ends.
    slack = 0.0 if precision == "float32" else 0.05
    assert values.min() > 0.68 - slack
    assert values.max() < 1.21 + slack


def test_an_update_of_a_head_has_the_rms_of_adamw():
    """Scaled by the whole projection's shape instead of the block's, it would be 0.2 sqrt(4)."""
    weights = boxed("D->[H]K")
    blocks = as_matrices(first_update(weights, draw(weights)), weights)
    np.testing.assert_allclose(np.sqrt(np.mean(blocks**2, axis=(1, 2))), 0.2, rtol=0.15)
    small = as_matrices(first_update(weights, draw(weights), scale=0.05), weights)
    np.testing.assert_allclose(4 * small, blocks, rtol=1e-5)


def test_a_zero_gradient_moves_nothing():
    weights = boxed("D->[H]K")
    gradients = {"w": np.array(draw(weights)["w"])}
    gradients["w"][1] = 0.0
    updates = first_update(weights, gradients)
    assert not np.any(updates[1])
    assert np.all(np.isfinite(updates))
    assert np.all(updates[[0, 2]])


def test_the_update_does_not_know_the_gradients_size():
    weights = boxed("D->R")
    gradients = draw(weights)
    small = first_update(weights, {"w": 1e-4 * gradients["w"]})
    chex.assert_trees_all_close(small, first_update(weights, gradients), **CLOSE)


def test_float64_stays_float64():
    with jax.enable_x64(True):
        weights = boxed("D->[H]K")
        gradients = draw(weights, dtype=jnp.float64)
        updates = first_update(weights, gradients, precision="bfloat16")
        assert updates.dtype == jnp.float64
        chex.assert_trees_all_close(updates, oracle(gradients["w"], (1,), (3,)), rtol=0, atol=1e-6)


def test_momentum_is_float32_whatever_the_gradients_are():
    weights = boxed("D->R")
    transform = muon(Muon(), weights)
    params = draw(weights)
    gradients = draw(weights, 1, jnp.bfloat16)
    updates, state = transform.update(gradients, transform.init(params))
    assert {x.dtype for x in jax.tree.leaves((updates, state))} == {jnp.dtype("float32")}


@pytest.mark.parametrize("split", ["head", "every_head"])
def test_a_projection_to_one_number_a_head_is_refused(split):
    tree = {"kda": {"beta": boxed("D->[H]" if split == "head" else "D->H")["w"]}}
    with pytest.raises(ValueError, match=r"kda\.beta: .*empty"):
        muon(Muon(split=split), tree)
    muon(Muon(split="matrix"), tree)


# ---- the shape of the program ----


def equations(jaxpr):
    """Every equation of a jaxpr, those of its inner jaxprs too."""
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("spec", ["D->[H]K", "E:L->F", "HV->D"])
def test_one_rolled_loop_of_three_products(spec, precision):
    weights = boxed(spec)
    transform = muon(Muon(precision=precision), weights)
    gradients = draw(weights)
    found = list(equations(jax.make_jaxpr(lambda g: transform.update(g, transform.init(g)))(gradients).jaxpr))
    names = [equation.primitive.name for equation in found]
    assert names.count("dot_general") == 3
    assert names.count("scan") + names.count("while") == 1
    products = [equation for equation in found if equation.primitive.name == "dot_general"]
    assert {str(x.aval.dtype) for e in products for x in e.invars} == {precision}
    assert {str(x.aval.dtype) for e in products for x in e.outvars} == {"float32"}


def collectives(text):
    """The collectives of a compiled program: those that run once, and those within its loop."""
    found, where = {"once": [], "loop": []}, "loop"
    for line in text.splitlines():
        if line.endswith("{"):
            where = "once" if line.startswith("ENTRY") else "loop"
        match = re.search(rf" ({'|'.join(COLLECTIVES)})(-start)?\(", line)
        if match:
            found[where].append(match[1])
    return found


def communication(spec, cuts):
    """The collectives of an update on 8 devices, whose result is checked against one device's."""
    weights = boxed(spec, LAYERS, {**SIZES, "H": 8})
    mesh = make_mesh(dict.fromkeys(MESH_AXES, 1) | cuts)
    shardings = weight_shardings(weights, mesh)
    transform = muon(Muon(), weights)
    gradients = draw(weights)
    step = lambda g: transform.update(g, transform.init(g))[0]
    with jax.set_mesh(mesh):
        placed = jax.device_put(gradients, shardings)
        compiled = jax.jit(step, out_shardings=shardings).lower(placed).compile()
        updates = np.asarray(compiled(placed)["w"])
    assert placed["w"].addressable_shards[0].data.size == placed["w"].size // 8
    chex.assert_trees_all_close(updates, first_update(weights, gradients), **CLOSE)
    return collectives(compiled.as_text())


@pytest.mark.parametrize("cuts", [{"expert": 8}, {"fsdp": 8}, {"expert": 4, "fsdp": 2}], ids=str)
def test_experts_on_several_devices_need_no_communication(cuts):
    assert communication("E:L->F", cuts) == {"once": [], "loop": []}


def test_heads_are_spread_over_devices_and_iterated_locally():
    """The weight is cut along the width; its eight heads' matrices go to a device each and back."""
    found = communication("D->[H]K", {"fsdp": 8})
    assert found["loop"] == []
    assert found["once"].count("all-to-all") == 2


@pytest.mark.parametrize("spec", ["HV->D", "D->HV", "D->R"])
def test_a_matrix_that_cannot_be_spread_sums_one_gram_matrix_a_step(spec):
    assert communication(spec, {"fsdp": 8})["loop"] == ["all-reduce"]
