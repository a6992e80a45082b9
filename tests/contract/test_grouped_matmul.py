"""What every implementation of the grouped product owes: the reference's values and gradients, and laws."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agreement import assert_agree, cast, to_numpy

from pallas_kernels.grouped_matmul import alignment, grouped_matmul
from pallas_kernels.grouped_matmul.cases import SMALL, Case, draw

IMPLEMENTATIONS = ("reference", "xla")  # a kernel joins by adding its name

# Relative L2 of one array against numpy's float64 product of the same inputs. A dot product of at
# most 40 terms: float32 and float64 round a few times; bfloat16 results are rounded to 8 bits once.
TOLERANCES = {"float32": 1e-6, "bfloat16": 5e-3, "float64": 1e-15}


each_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


@partial(jax.jit, static_argnames=("alignment", "implementation"))
def pullback(rows, weights, group_sizes, cotangent, alignment, implementation):
    run = lambda rows, weights: grouped_matmul(
        rows, weights, group_sizes, alignment=alignment, implementation=implementation
    )
    out, pull = jax.vjp(run, rows, weights)
    return out, *pull(cotangent)


def run(implementation, case, dtype="float32", change=lambda rows: rows):
    rows, weights, sizes = draw(case)
    args = cast((change(rows), weights, cotangent(case)), dtype)
    return to_numpy(pullback(*args[:2], sizes, args[2], case.alignment, implementation))


def cotangent(case):
    return np.random.default_rng(1).normal(size=(case.rows, case.Y))


def direct(case, rows, weights, d_out):
    """Group by group in numpy: the product and its gradients."""
    out, d_rows, d_weights = np.zeros((case.rows, case.Y)), np.zeros_like(rows), np.zeros_like(weights)
    start = 0
    for e, size in enumerate(case.sizes):
        mine = slice(start, start + size)
        out[mine], d_rows[mine] = rows[mine] @ weights[e], d_out[mine] @ weights[e].T
        d_weights[e] = rows[mine].T @ d_out[mine]
        start += size
    return out, d_rows, d_weights


@each_implementation
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", SMALL)
def test_is_each_groups_own_product(name, dtype, implementation):
    case = SMALL[name]
    with jax.enable_x64(dtype == "float64"):
        actual = run(implementation, case, dtype)
        args = cast((*draw(case)[:2], cotangent(case)), dtype)
    expected = direct(case, *(np.asarray(x).astype(np.float64) for x in args))
    assert {x.dtype for x in actual} == {jnp.dtype(dtype)}
    assert_agree(actual, expected, TOLERANCES[dtype], ("product", "rows", "weights"))


@each_implementation
def test_empty_groups_have_exactly_zero_gradient(implementation):
    case = SMALL["empty_groups"]
    _, _, d_weights = run(implementation, case)
    empty = np.array(case.sizes) == 0
    assert not np.any(np.asarray(d_weights)[empty])
    assert all(np.any(x) for x in np.asarray(d_weights)[~empty])


@each_implementation
@pytest.mark.parametrize("name", ["rows_of_no_group", "all_empty"])
def test_rows_of_no_group_are_never_read(name, implementation):
    """On a device they may hold anything; neither results nor gradients may show it."""
    case = SMALL[name]
    end = sum(case.sizes)

    def poison(rows):
        rows[end:] = np.nan
        return rows

    poisoned, clean = run(implementation, case, change=poison), run(implementation, case)
    assert not np.any(np.asarray(poisoned[0])[end:])
    assert not np.any(np.asarray(poisoned[1])[end:])
    chex.assert_trees_all_equal(poisoned, clean)


@each_implementation
def test_rows_are_bitwise_independent_of_each_other(implementation):
    case = SMALL["empty_groups"]

    def change(rows):
        rows[8:] *= 3
        return rows

    before, after = run(implementation, case), run(implementation, case, change=change)
    for x, y in zip(before[:2], after[:2], strict=True):
        chex.assert_trees_all_equal(x[:8], y[:8])
    chex.assert_trees_all_equal(before[2][:2], after[2][:2])


@each_implementation
def test_groups_may_be_permuted(implementation):
    """Other sizes are data: the same program serves, and the products move with their rows."""
    case = Case(16, 5, 3, (4, 8, 4), 4)
    rows, weights, _ = cast(draw(case), "float32")
    call = jax.jit(partial(grouped_matmul, alignment=4, implementation=implementation))
    order = np.r_[4:12, 12:16, 0:4]
    there = call(rows, weights, np.array([4, 8, 4]))
    back = call(rows[order], weights[np.array([1, 2, 0])], np.array([8, 4, 4]))
    assert_agree([there[order]], [back], 1e-6, ["product"])
    assert call._cache_size() == 1


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_no_rows_give_no_products(implementation):
    case = Case(0, 5, 3, (0, 0), 4)
    out, d_rows, d_weights = run(implementation, case)
    assert out.shape == (0, 3)
    assert d_rows.shape == (0, 5)
    assert not np.any(d_weights)


@each_implementation
def test_products_have_the_rows_dtype(implementation):
    rows, weights, sizes = draw(SMALL["full"])
    call = partial(grouped_matmul, alignment=8, implementation=implementation)
    out = jax.eval_shape(call, jnp.asarray(rows, jnp.bfloat16), jnp.asarray(weights, jnp.float32), sizes)
    assert out.dtype == jnp.bfloat16


def test_the_work_does_not_grow_with_the_number_of_groups():
    """Most experts of a device may be idle."""

    def flops(groups):
        args = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((256, 32), (groups, 32, 48))]
        sizes = jax.ShapeDtypeStruct((groups,), jnp.int32)
        call = jax.jit(partial(grouped_matmul, alignment=32, implementation="xla"))
        return call.lower(*args, sizes).compile().cost_analysis()["flops"]

    product = 2 * 256 * 32 * 48
    assert flops(64) - flops(4) < 0.1 * product
    assert flops(64) < 1.2 * product


@pytest.mark.parametrize(("rows", "groups"), [(0, 8), (1, 8), (100, 8), (4096, 8), (10**7, 896)])
def test_the_alignment_is_a_power_of_two_of_about_a_groups_size(rows, groups):
    block = alignment(rows, groups)
    assert block.bit_count() == 1
    assert block <= max(alignment(0, 1), rows // groups)


def test_an_implementation_that_is_not_built_is_refused_by_name():
    rows, weights, sizes = draw(SMALL["full"])
    with pytest.raises(ValueError, match=r"grouped_matmul.*mosaic_tpu.*'reference'.*'xla'"):
        grouped_matmul(rows, weights, sizes, alignment=8, implementation="mosaic_tpu")


def test_rows_that_are_no_multiple_of_the_alignment_are_refused():
    rows, weights, sizes = draw(SMALL["full"])
    with pytest.raises(ValueError, match="24 rows are no multiple of alignment=16"):
        grouped_matmul(rows, weights, sizes, alignment=16)


def test_shapes_that_do_not_fit_are_refused():
    rows, weights, sizes = draw(SMALL["full"])
    with pytest.raises(AssertionError):
        grouped_matmul(rows[:, 1:], weights, sizes, alignment=8)
    with pytest.raises(AssertionError):
        grouped_matmul(rows, weights, sizes[1:], alignment=8)
