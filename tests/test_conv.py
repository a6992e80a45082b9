"""The short convolution against a loop over each segment's own tokens."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.layers.conv import conv_tail, short_conv
from k3jax.segments import compact

B, T, H, K = 2, 13, 2, 3
PACKED = np.array([[1] * 5 + [2] * 1 + [3] * 2 + [2] * 2 + [0] * 3, [4] * 13])
conv, last = jax.jit(short_conv), jax.jit(conv_tail, static_argnums=1)


def draw(taps, seed=0, length=T):
    normal = np.random.default_rng(seed).normal
    arrays = normal(size=(B, length, H, K)), normal(size=(H, K, taps)), normal(size=(B, taps - 1, H, K))
    return tuple(np.float32(x) for x in arrays)


def segments_of(ids, last_id=None):
    """Of rows whose padding is last, as the model hands them to its layers."""
    order_BT, segments, _ = compact(jnp.asarray(ids, jnp.int32), last_id)
    np.testing.assert_array_equal(order_BT, np.broadcast_to(np.arange(ids.shape[1]), ids.shape))
    return segments


def loop(x, taps, tail, ids, last_id):
    """(outputs, next tail): each row's inputs segment by segment; the tail precedes the carried one."""
    reach = taps.shape[-1] - 1
    out, next_tail = np.zeros_like(x), np.zeros_like(tail)
    for b in range(B):
        past, current = list(tail[b]), last_id[b]
        for t in range(x.shape[1]):
            if ids[b, t] == 0:
                continue
            if ids[b, t] != current:
                past, current = [np.zeros((H, K))] * reach, ids[b, t]
            past.append(x[b, t])
            out[b, t] = sum(taps[:, :, -1 - j] * past[-1 - j] for j in range(reach + 1))
        next_tail[b] = np.reshape(past[len(past) - reach :], (reach, H, K))
    return out, next_tail


@pytest.mark.parametrize("taps", [1, 2, 4])
@pytest.mark.parametrize("last_id", [(1, 4), (7, 7), (0, 0)], ids=["goes on", "starts anew", "from nothing"])
def test_is_the_loop_over_each_segment(taps, last_id):
    x, w, tail = draw(taps)
    if last_id == (0, 0):
        tail = np.zeros_like(tail)
    segments = segments_of(PACKED, jnp.array(last_id, jnp.int32))
    expected, expected_tail = loop(x, w, tail, PACKED, last_id)
    real = PACKED > 0
    np.testing.assert_allclose(
        np.asarray(conv(x, w, tail, segments))[real], expected[real], rtol=1e-5, atol=1e-6
    )
    np.testing.assert_array_equal(last(x, taps, tail, segments), expected_tail)


def test_without_segments_a_row_goes_on_from_its_tail():
    x, w, tail = draw(4)
    expected, expected_tail = loop(x, w, tail, np.ones((B, T), int), (1, 1))
    np.testing.assert_allclose(conv(x, w, tail, None), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(last(x, 4, tail, None), expected_tail)
    expected, _ = loop(x, w, 0 * tail, np.ones((B, T), int), (1, 1))
    np.testing.assert_allclose(conv(x, w, None, None), expected, rtol=1e-5, atol=1e-6)


def test_a_row_of_padding_keeps_its_tail():
    x, _, tail = draw(4)
    segments = segments_of(np.zeros((B, T), int), jnp.array([3, 0], jnp.int32))
    np.testing.assert_array_equal(last(x, 4, tail, segments), tail)


@pytest.mark.parametrize("cut", [1, 6, 12])
def test_a_row_may_be_cut_anywhere(cut):
    x, w, _ = draw(4)
    segments = segments_of(PACKED)
    whole, end = conv(x, w, None, segments), last(x, 4, np.zeros((B, 3, H, K), np.float32), segments)
    first = segments_of(PACKED[:, :cut], jnp.zeros(B, jnp.int32))
    tail = last(x[:, :cut], 4, np.zeros((B, 3, H, K), np.float32), first)
    second = segments_of(PACKED[:, cut:], jnp.asarray(PACKED[:, cut - 1], jnp.int32))
    real = PACKED[:, cut:] > 0
    np.testing.assert_array_equal(
        np.asarray(conv(x[:, cut:], w, tail, second))[real], np.asarray(whole[:, cut:])[real]
    )
    np.testing.assert_array_equal(last(x[:, cut:], 4, tail, second), end)


def test_a_piece_shorter_than_the_reach_passes_older_inputs_on():
    x, _, tail = draw(4, length=1)
    np.testing.assert_array_equal(last(x, 4, tail, None), np.concatenate([tail[:, 1:], x], axis=1))
    np.testing.assert_array_equal(last(x[:, :0], 4, tail, None), tail)


def test_no_gradient_crosses_a_boundary_or_comes_from_the_future():
    x, w, tail = draw(4)
    segments = segments_of(PACKED, jnp.array([1, 4], jnp.int32))
    jacobian = jax.jit(jax.jacrev(lambda x: short_conv(x, w, tail, segments)[:, :, 0, 0]))(x)
    for b, t in np.ndindex(B, T):
        reached = np.any(np.asarray(jacobian)[b, t] != 0, axis=(2, 3))
        now = np.asarray(segments.index_BT)
        allowed = (np.arange(T) <= t) & (np.arange(T) > t - 4) & (now[b] == now[b, t])
        np.testing.assert_array_equal(reached[b] & ~allowed, False)
        assert not np.any(reached[1 - b])
        assert PACKED[b, t] == 0 or np.array_equal(reached[b], allowed)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_sums_are_float32_and_the_tail_keeps_its_dtype(dtype):
    x, w, tail = draw(4)
    x, tail = jnp.asarray(x, dtype), jnp.asarray(tail, dtype)
    assert jax.eval_shape(partial(short_conv, segments=None), x, w, tail).dtype == jnp.float32
    assert jax.eval_shape(partial(conv_tail, taps=4, segments=None), x, tail_BWHK=tail).dtype == dtype
