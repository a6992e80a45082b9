"""The laws that every mixer and every balancing rule obeys, ours and yours, as checks to call in tests.

from k3jax.testing import check_mixer, check_balance

def test_my_mixer():
    check_mixer(MyMixer(heads=2))
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from k3jax.config import DenseConfig, ModelConfig, Plain
from k3jax.layers import balance
from k3jax.segments import compact
from k3jax.unit import Unit, empty_state

WIDTH, ROWS, LENGTH = 16, 2, 20
CLOSE = {"rtol": 1e-4, "atol": 1e-5}  # float32, sums in another order


def check_mixer(part: Any, *, length: int = LENGTH) -> None:
    """Causality, state, rows and segments: what a stack relies on in a mixer.

    Args:
      part: a mixer's config. length: tokens per row, at least 12.

    Raises:
      AssertionError: naming the law that fails.
    """
    run, params, x_BTD = _runner(part, length)
    for law in (_causal, _cut_anywhere, _rows_apart, _segments_apart, _padding_is_nothing, _counts):
        try:
            law(part, run, params, x_BTD)
        except AssertionError as error:
            raise AssertionError(f"{type(part).__name__} breaks the law '{law.__doc__}'\n{error}") from error


def _runner(part: Any, length: int) -> tuple[Callable[..., Any], Any, jax.Array]:
    """(run(params, x, state, ids), parameters, inputs); large weights, so that nothing hides near 0."""
    cfg = ModelConfig(
        width=WIDTH, vocabulary=2, depth=1, full=part, dense=DenseConfig(4), residual=Plain(), init_std=0.3
    )
    unit = Unit(part, cfg)

    def run(params, x_BTD, state, ids_BT):
        segments = None
        if ids_BT is not None:
            _, segments, _ = compact(ids_BT, jnp.ones(x_BTD.shape[0], jnp.int32))
        (y_BTD, _), (state, _) = unit.apply(
            {"params": params}, x_BTD[None], jnp.bool_(False), jnp.int32(0), state, segments
        )
        return y_BTD, state

    x_BTD = jax.random.normal(jax.random.key(1), (ROWS, length, WIDTH))
    fixed = (x_BTD[None], jnp.bool_(False), jnp.int32(0), None, None)
    boxes = unit.init(jax.random.key(0), *fixed)["params"]
    params = jax.tree.map(lambda w: w.value, boxes, is_leaf=lambda w: hasattr(w, "rule"))
    return jax.jit(run), params, x_BTD


def _causal(part, run, params, x_BTD):
    """an output says nothing of a later input"""
    at = x_BTD.shape[1] // 2
    early = jax.jit(jax.grad(lambda x: jnp.sum(jnp.square(run(params, x, None, None)[0][:, : at + 1]))))
    np.testing.assert_array_equal(early(x_BTD)[:, at + 1 :], 0)
    changed = x_BTD.at[:, at + 1 :].set(-x_BTD[:, at + 1 :])
    one, other = (run(params, x, None, None)[0][:, : at + 1] for x in (x_BTD, changed))
    np.testing.assert_array_equal(one, other)


def _cut_anywhere(part, run, params, x_BTD):
    """the state carries everything: a row may be cut anywhere"""
    state = empty_state(part, _WIDTH, x_BTD.shape[0], x_BTD.dtype)
    whole, end = run(params, x_BTD, state, None)
    for cut in (1, 5, x_BTD.shape[1] - 1):
        left, middle = run(params, x_BTD[:, :cut], state, None)
        right, last = run(params, x_BTD[:, cut:], middle, None)
        chex.assert_trees_all_close(jnp.concatenate([left, right], axis=1), whole, **CLOSE)
        chex.assert_trees_all_close(last, end, **CLOSE)


def _rows_apart(part, run, params, x_BTD):
    """rows know nothing of each other"""
    both, _ = run(params, x_BTD, None, None)
    alone, _ = run(params, x_BTD[:1], None, None)
    chex.assert_trees_all_close(both[:1], alone, **CLOSE)
    other, _ = run(params, x_BTD.at[1].set(0), None, None)
    np.testing.assert_array_equal(other[0], both[0])


def _segments_apart(part, run, params, x_BTD):
    """documents packed into a row know nothing of each other"""
    T, cut = x_BTD.shape[1], 7
    ids_BT = jnp.broadcast_to(jnp.where(jnp.arange(T) < cut, 1, 2), x_BTD.shape[:2])
    packed, _ = run(params, x_BTD, None, ids_BT)
    for piece in (slice(0, cut), slice(cut, T)):
        alone, _ = run(params, x_BTD[:, piece], None, None)
        chex.assert_trees_all_close(packed[:, piece], alone, **CLOSE)
    changed, _ = run(params, x_BTD.at[:, :cut].multiply(-2), None, ids_BT)
    np.testing.assert_array_equal(changed[:, cut:], packed[:, cut:])


def _padding_is_nothing(part, run, params, x_BTD):
    """padding at a row's end changes neither the outputs before it nor the state"""
    T, real = x_BTD.shape[1], x_BTD.shape[1] - 4
    ids_BT = jnp.broadcast_to((jnp.arange(T) < real).astype(jnp.int32), x_BTD.shape[:2])
    start = empty_state(part, _WIDTH, x_BTD.shape[0], x_BTD.dtype)
    padded, state = run(params, x_BTD, start, ids_BT)
    alone, expected = run(params, x_BTD[:, :real], start, ids_BT[:, :real])
    chex.assert_trees_all_close(padded[:, :real], alone, **CLOSE)
    # Going on from either state gives the same: their arrays may differ in length.
    more = x_BTD[:, :5]
    ones = jnp.ones(more.shape[:2], jnp.int32)
    on, expected = run(params, more, state, ones)[0], run(params, more, expected, ones)[0]
    chex.assert_trees_all_close(on, expected, **CLOSE)


def _counts(part, run, params, x_BTD):
    """a mixer of one's own says what it costs, and how pieces of a row on several devices meet"""
    if hasattr(part, "flops"):
        assert part.flops(WIDTH, x_BTD.shape[1]) > 0, "flops(width, length) must be positive"
        rules = ("state", "gather", "none")
        assert part.context_rule() in rules, f"context_rule() must be one of {rules}"


_WIDTH: Any = SimpleNamespace(width=WIDTH)  # as much of a ModelConfig as an empty state needs


def check_balance(rule: Any, *, experts: int = 8, active: int = 2, tokens: int = 64) -> None:
    """Additive statistics that do not see padding, and an update that keeps the bias usable.

    Raises:
      AssertionError: naming the law that fails.
    """
    scores_ME = jax.nn.sigmoid(jax.random.normal(jax.random.key(0), (tokens, experts)))
    bias_E = 0.1 * jax.random.normal(jax.random.key(1), (experts,))
    biased_ME = scores_ME + bias_E[None]
    best_Mk, chosen_Mk = jax.lax.top_k(biased_ME, active + 1)
    cutoff_M = best_Mk[:, active]
    real_M = jnp.arange(tokens) % 5 != 0

    def stats(chosen):
        return balance.local_stats(rule, scores_ME[chosen], cutoff_M[chosen], bias_E, real_M[chosen])

    whole, half = stats(slice(None)), tokens // 2
    parts = jax.tree.map(jnp.add, stats(slice(0, half)), stats(slice(half, None)))
    chex.assert_trees_all_close(parts, whole, **CLOSE, custom_message="statistics of two halves must add up")
    kept = stats(np.flatnonzero(np.asarray(real_M)))
    chex.assert_trees_all_close(kept, whole, **CLOSE, custom_message="padding must not be counted")

    load_E = jnp.zeros(experts, jnp.int32).at[chosen_Mk[:, :active]].add(real_M[:, None].astype(jnp.int32))
    memory = balance.empty_memory(rule, experts)
    after_E, next_memory = balance.update(rule, bias_E, whole, load_E, memory)
    chex.assert_shape(after_E, (experts,))
    assert after_E.dtype == jnp.float32, f"the bias must stay float32, not {after_E.dtype}"
    assert bool(jnp.all(jnp.isfinite(after_E))), "the bias must stay finite"
    chex.assert_trees_all_equal_shapes_and_dtypes(next_memory, memory)
