"""The model of the Hopper kernels' roundings: without any of them it is the definition."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.kda_roundings.model import EXACT, MIDDLE, ROUNDINGS, gradients
from experiments.kda_roundings.run import VARIANTS
from pallas_kernels.kda import kda_gated
from pallas_kernels.kda.cases import Case, draw_gated

CASE = Case(1, 192, 2, 16, 24)


@pytest.fixture(scope="module")
def wide():
    with jax.enable_x64(True):
        given = tuple(map(jnp.asarray, draw_gated(CASE)))
        normal = np.random.default_rng(1).normal
        cotangents = tuple(jnp.asarray(normal(size=x.shape)) for x in (given[2], given[7]))

        def op(*x):
            return kda_gated(*x[:7], initial_state=x[7], implementation="reference")

        _, pull = jax.vjp(op, *given)
        wanted = pull(cotangents)
        yield given, cotangents, (wanted[3], wanted[5], wanted[6])


def errors(run, wide):
    given, cotangents, wanted = wide
    found = run(given, cotangents)
    return [float(jnp.linalg.norm(x - y) / jnp.linalg.norm(y)) for x, y in zip(found, wanted, strict=True)]


def test_without_roundings_it_is_the_definition(wide):
    for middle in (MIDDLE, MIDDLE + 1):
        assert max(errors(partial(gradients, EXACT, middle=middle), wide)) < 1e-12


def test_each_rounding_says_something(wide):
    alone = {name: errors(VARIANTS[f"{name} alone"], wide)[0] for name in ROUNDINGS}
    assert {name: x for name, x in alone.items() if not 1e-7 < x < 4e-3} == {}
    assert errors(VARIANTS["all"], wide)[0] < errors(VARIANTS["all, columns' factors in one part"], wide)[0]
