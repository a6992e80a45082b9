"""Errors of `kda_gated` in bfloat16 against its definition in float64, which the benchmark shows."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.kda.cases import Case, draw_gated

CASE = Case(1, 1024, 16, 128, 128)
DRAWS = 24  # of inputs. The gradient of a_log is one number a head, of which a few draws say little
INPUTS = ("query", "key", "value", "gate_logits", "beta_logits", "a_log", "dt_bias", "initial_state")
OUTPUTS = ("output", "final_state")
WIDE = {"a_log", "dt_bias", "initial_state"}  # float32 whatever the others are

Run = Callable[[Sequence[Any], Sequence[Any]], Any]  # (inputs, cotangents) -> (outputs, gradients)


class Errors(NamedTuple):
    """Relative L2 errors of outputs and gradients, by name."""

    pooled: dict[str, float]  # of all draws as one array
    draws: list[dict[str, float]]


def inputs(case: Case, draw: int) -> list[jax.Array]:
    """Of `kda_gated` in order, the initial state last."""
    kinds = [jnp.float32 if name in WIDE else jnp.bfloat16 for name in INPUTS]
    return [jnp.asarray(x, kind) for x, kind in zip(draw_gated(case, seed=draw), kinds, strict=True)]


def cotangents(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Of output and final state, in float32; the first are bfloat16 numbers.

    Ones would not do: all channels of a value would have one gradient, and its one rounding would be found.
    Nor would a state's of the output's size: what a later token asks of a state is its query with the scale,
    1 / K, times the output's. Of more than that, most of all gradients would be the last token's.
    """
    B, T, H, K, V = case.B, case.T, case.H, case.K, case.V
    normal = np.random.default_rng(1).normal
    output = normal(size=(B, T, H, V)).astype(jnp.bfloat16).astype(np.float32)
    return output, (normal(size=(B, H, K, V)) / K).astype(np.float32)


def errors(runs: Mapping[str, Run], definition: Run) -> dict[str, Errors]:
    """Of each of `runs`, draw by draw beside `definition` in float64."""
    names = (*OUTPUTS, *(f"d {name}" for name in INPUTS))
    off = {run: np.zeros((DRAWS, len(names))) for run in runs}
    size = np.zeros((DRAWS, len(names)))
    squares = lambda arrays: [np.sum(np.square(x)) for x in arrays]
    for draw in range(DRAWS):
        given = inputs(CASE, draw), cotangents(CASE)
        wanted = _exact(definition, given)
        size[draw] = squares(wanted)
        for name, run in runs.items():
            found = to_numpy(run(*given))
            off[name][draw] = squares(x - y for x, y in zip(found, wanted, strict=True))
    named = lambda ratios: dict(zip(names, np.sqrt(ratios).tolist(), strict=True))
    return {
        name: Errors(named(x.sum(0) / size.sum(0)), [named(draw) for draw in x / size])
        for name, x in off.items()
    }


def _exact(definition: Run, given: tuple[Any, Any]) -> list[np.ndarray]:
    with jax.enable_x64(True):
        wide = lambda x: jnp.asarray(np.asarray(jnp.asarray(x, jnp.float32)), jnp.float64)
        return to_numpy(definition(*jax.tree.map(wide, given)))


def to_numpy(tree: Any) -> list[np.ndarray]:
    """In float64, in order."""
    return [np.asarray(x).astype(np.float64) for x in jax.tree.leaves(tree)]
