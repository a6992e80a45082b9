"""What every implementation of KDA owes: the reference's values and gradients, and the op's laws."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agreement import assert_agree, assert_finite, cast, relative_error, to_numpy

from pallas_kernels.kda import kda, kda_gated, log_decay
from pallas_kernels.kda.cases import DECAYS, REAL, SMALL, Case, draw, draw_gated

IMPLEMENTATIONS = ("xla",)  # a kernel joins by adding its name

# Relative L2 of one array: (values, gradients, gradients of a_log and dt_bias).
# A_log's and dt_bias's gradients are sums over tokens whose terms mostly cancel, so the same
#   errors are a larger part of them.
# float32: every exponent is a sum of at most 64 steps and every product one of at most 100 terms,
#   so errors are a few roundings, 1e-6. The bound is set by a decay of -1000 spelled as a sum, whose
#   rounding is 6e-5 of what it multiplies ("bursts", "all_scales").
# bfloat16: the reference reads the same rounded inputs but multiplies in float32. Operands of the
#   products are rounded to 8 bits, 2e-3 each, once or twice on the way to a value and up to four
#   times on the way to a gradient, where terms also cancel.
# float64: roundings of 1e-16, times the condition of a state that never forgets.
TOLERANCES = {
    "float32": (5e-5, 1e-4, 3e-4),
    "bfloat16": (1.5e-2, 3e-2, 0.12),
    "float64": (1e-12, 1e-12, 1e-12),
}
DTYPES = tuple(TOLERANCES)
INPUTS = ("query", "key", "value", "log_decay", "beta", "initial_state")
GATED_INPUTS = ("query", "key", "value", "gate_logits", "beta_logits", "a_log", "dt_bias", "initial_state")
OUTPUTS = ("output", "final_state")
PACKED = "over_a_chunk"


each_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES)


@partial(jax.jit, static_argnames=("op", "implementation", "options"))
def program(op, implementation, args, segment_ids, cotangents, options=()):
    """(values, gradients) of an op whose last argument here is its initial state."""

    def run(*args):
        settings = dict(
            options, initial_state=args[-1], segment_ids=segment_ids, implementation=implementation
        )
        return op(*args[:-1], **settings)

    values, pull = jax.vjp(run, *args)
    return values, pull(cotangents)


def pullback(*args):
    return to_numpy(program(*args))


def inputs(op, case, dtype, kind=None, seed=0):
    """Decays, write strengths, A_log, dt_bias and the state are at least float32, as in the layer."""
    if op is kda:
        return cast(draw(case, kind or "random", seed), dtype, wide=(3, 4, 5))
    return cast(draw_gated(case, kind, seed), dtype, wide=(5, 6, 7))


def cotangents(args, seed=1):
    """Of the output and the final state, in their dtypes."""
    normal = np.random.default_rng(seed).normal
    return tuple(normal(size=x.shape).astype(x.dtype) for x in (args[2], args[-1]))


def timed(x, case) -> bool:
    """Whether an input has a value per token."""
    return x.shape[:2] == (case.B, case.T)


def perturbed(case, args, others, mine, factor=1):
    """The inputs, with those of the tokens `mine` taken from `others`."""
    at = lambda x: mine.reshape(mine.shape + (1,) * (x.ndim - 2))
    pairs = zip(args, others, strict=True)
    return tuple(np.where(at(x), factor * y, x).astype(x.dtype) if timed(x, case) else x for x, y in pairs)


def values(op, implementation, args, segment_ids):
    return pullback(op, implementation, args, segment_ids, cotangents(args))[0]


def definition(op, args, segment_ids, cotangents, options=()):
    """The reference's results. Rows are padded to one length, so that few programs are compiled."""
    B, T = args[0].shape[:2]
    per_token = lambda x: x.shape[:2] == (B, T)
    extra = max(SMALL[PACKED].T - T, 0)
    pad = lambda x: np.pad(x, [(0, 0), (0, extra)] + [(0, 0)] * (x.ndim - 2)) if per_token(x) else x
    ids = np.pad(np.ones((B, T), np.int32) if segment_ids is None else segment_ids, [(0, 0), (0, extra)])
    padded, (do, dS) = tuple(map(pad, args)), cotangents
    (o, S), gradients = pullback(op, "reference", padded, ids, (pad(do), dS), options)
    return (o[:, :T], S), tuple(
        dx[:, :T] if per_token(x) else dx for x, dx in zip(args, gradients, strict=True)
    )


def agree(op, implementation, case, dtype, kind=None, segment_ids=None, options=()):
    args = inputs(op, case, dtype, kind)
    cots = cotangents(args)
    expected = definition(op, args, segment_ids, cots, options)
    actual = pullback(op, implementation, args, segment_ids, cots, options)
    of_values, of_gradients, of_sums = TOLERANCES[dtype]
    names = INPUTS if op is kda else GATED_INPUTS
    assert_finite((expected, actual))
    chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)
    assert_agree(actual[0], expected[0], of_values, OUTPUTS)
    allowed = [of_sums if name in ("a_log", "dt_bias") else of_gradients for name in names]
    assert_agree(actual[1], expected[1], allowed, names)


# ---- the definition, from outside ----


def recurrence(q, k, v, g, beta, S, segment_ids, scale):
    """The report's equation 1 in numpy, token by token; a row's first segment continues S."""
    B, T, H, V = v.shape
    out, S, last = np.zeros((B, T, H, V)), S.copy(), np.zeros(B, int)
    for b, t in np.ndindex(B, T):
        name = segment_ids[b, t]
        if name == 0:
            continue
        if last[b] not in (0, name):
            S[b] = 0
        last[b] = name
        for h in range(H):
            S[b, h] *= np.exp(g[b, t, h])[:, None]
            S[b, h] += beta[b, t, h] * np.outer(k[b, t, h], v[b, t, h] - S[b, h].T @ k[b, t, h])
            out[b, t, h] = scale * S[b, h].T @ q[b, t, h]
    return out, S


@pytest.mark.parametrize("name", [PACKED, "under_a_tile", "over_a_tile"])
def test_the_reference_is_the_recurrence(name):
    case = SMALL[name]
    args = draw(case)
    expected = recurrence(*args, case.segment_ids, case.K**-0.5)
    with jax.enable_x64(True):
        actual = values(kda, "reference", cast(args, "float64"), case.segment_ids)
    assert_agree(actual, expected, 1e-13, OUTPUTS)


@each_implementation
def test_the_gated_form_is_the_plain_form_of_prepared_inputs(implementation):
    case = SMALL[PACKED]
    q, k, v, z, beta, a_log, dt_bias, S = args = inputs(kda_gated, case, "float32")
    unit = lambda x: x / np.sqrt(np.sum(x * x, -1, keepdims=True) + 1e-6)
    g = -5 / (1 + np.exp(-np.exp(a_log)[None, None, :, None] * (z + dt_bias[None, None])))
    expected = values(
        kda, implementation, (unit(q), unit(k), v, g, 1 / (1 + np.exp(-beta)), S), case.segment_ids
    )
    actual = values(kda_gated, implementation, args, case.segment_ids)
    assert_agree(actual, expected, 1e-5, OUTPUTS)


# ---- agreement with the definition ----


# Every length in float32 and in one other precision, the two ops by turns; -m slow runs them all.
AGREEMENT = [
    ((kda, kda_gated)[(number + turn) % 2], name, dtype)
    for number, name in enumerate(SMALL)
    for turn, dtype in enumerate(["float32", ("bfloat16", "float64")[number // 2 % 2]])
]


@each_implementation
@pytest.mark.parametrize(("op", "name", "dtype"), AGREEMENT)
def test_agrees_with_the_definition(op, name, dtype, implementation):
    case = SMALL[name]
    with jax.enable_x64(dtype == "float64"):
        agree(op, implementation, case, dtype, segment_ids=case.segment_ids)


@each_implementation
@each_dtype
@pytest.mark.parametrize("decay", DECAYS)
def test_agrees_for_every_decay(decay, dtype, implementation):
    case = SMALL[PACKED]
    with jax.enable_x64(dtype == "float64"):
        agree(kda, implementation, case, dtype, decay, case.segment_ids)


@each_implementation
@pytest.mark.parametrize("logits", [None, 0.0, 6.0, -6.0, 1e4, -1e4])
@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_agrees_for_every_gate(lower_bound, logits, implementation):
    case = SMALL[PACKED]
    agree(
        kda_gated, implementation, case, "float32", logits, case.segment_ids, (("lower_bound", lower_bound),)
    )


@each_implementation
@pytest.mark.parametrize("lower_bound", [-5.0, None])
@pytest.mark.parametrize("logits", [0.5, 1e4, -1e4])
def test_a_huge_rate_saturates_the_gate_without_breaking_it(logits, lower_bound, implementation):
    case, options = SMALL[PACKED], (("lower_bound", lower_bound),)
    args = list(inputs(kda_gated, case, "float32", logits))
    args[5] = np.full_like(args[5], 80.0)
    results = pullback(kda_gated, implementation, tuple(args), case.segment_ids, cotangents(args), options)
    assert_finite(results)


@each_implementation
@pytest.mark.parametrize(
    "packing", ["101", "121", "padding_first", "padding_last", "all_padding", "one_each"]
)
def test_agrees_for_every_packing(packing, implementation):
    case = SMALL[PACKED]
    T, row_T = case.T, np.ones((1, case.T), np.int32)
    match packing:
        case "101":
            row_T[:, 15:40] = 0
        case "121":
            row_T[:, 16:33] = 2
        case "padding_first":
            row_T[:, :33] = 0
        case "padding_last":
            row_T[:, 33:] = 0
        case "all_padding":
            row_T[:] = 0
        case "one_each":
            row_T[0] = np.arange(1, T + 1)
    ids = np.concatenate([case.segment_ids[:1], row_T])
    agree(kda, implementation, case, "float32", segment_ids=ids)


# ---- laws ----


@each_implementation
@pytest.mark.parametrize("op", [kda, kda_gated])
@pytest.mark.parametrize("case", [Case(0, 5, 2, 4, 3), Case(2, 0, 2, 4, 3), Case(0, 0, 1, 4, 3)], ids=repr)
def test_nothing_in_nothing_out(case, op, implementation):
    args, ids = inputs(op, case, "float32"), np.ones((case.B, case.T), np.int32)
    (o, S), gradients = pullback(op, implementation, args, ids, cotangents(args))
    assert o.shape == (case.B, case.T, case.H, case.V)
    chex.assert_trees_all_equal(S, args[-1])
    chex.assert_trees_all_equal_shapes(gradients, args)
    chex.assert_trees_all_equal(gradients[-1], cotangents(args)[1])


@each_implementation
@pytest.mark.parametrize("op", [kda, kda_gated])
def test_only_the_last_gate_changes(op, implementation):
    """A tile rescaled by one of its later tokens would change earlier outputs."""
    case = Case(1, 22, 4, 128, 16)
    args = list(inputs(op, case, "bfloat16", -5.0 if op is kda_gated else "at_the_floor"))
    before = values(op, implementation, tuple(args), None)[0]
    args[3] = args[3].copy()
    args[3][:, 21] = 5.0 if op is kda_gated else -1e-3
    after = values(op, implementation, tuple(args), None)[0]
    chex.assert_trees_all_equal(before[:, :21], after[:, :21])
    assert not np.array_equal(before[:, 21], after[:, 21])


@each_implementation
@each_dtype
@pytest.mark.parametrize("op", [kda, kda_gated])
def test_outputs_are_bitwise_independent_of_the_future(op, dtype, implementation):
    case = SMALL[PACKED]
    with jax.enable_x64(dtype == "float64"):
        args, others = inputs(op, case, dtype), inputs(op, case, dtype, seed=7)
        before = values(op, implementation, args, case.segment_ids)[0]
        for start in (1, 15, 16, 17, 40, 64):
            late = np.broadcast_to(np.arange(case.T) >= start, (case.B, case.T))
            changed = list(perturbed(case, args, others, late, factor=100))
            if op is kda:
                changed[3], changed[4] = args[3].copy(), np.where(late[..., None], others[4], args[4])
                changed[3][:, start:] = -1e4
            after = values(op, implementation, tuple(changed), case.segment_ids)[0]
            np.testing.assert_array_equal(*(np.asarray(x[:, :start]) for x in (before, after)))


@each_implementation
@pytest.mark.parametrize("op", [kda, kda_gated])
def test_gradients_are_exactly_zero_in_the_future(op, implementation):
    case = SMALL[PACKED]
    args = inputs(op, case, "float32")
    (do, dS) = cotangents(args)
    ids = np.ones((case.B, case.T), np.int32)
    for last in (0, 15, 16, 40, 63):
        early = (np.arange(case.T) <= last)[None, :, None, None]
        cots = (np.where(early, do, 0), np.zeros_like(dS))
        for name, x, dx in zip(
            GATED_INPUTS, args, pullback(op, implementation, args, ids, cots)[1], strict=False
        ):
            if x.shape[:2] == (case.B, case.T):
                assert not np.any(dx[:, last + 1 :]), f"{name} after token {last}"
                assert np.any(dx[:, last]) or (name in ("log_decay", "gate_logits") and last == 0)


@each_implementation
@pytest.mark.parametrize(("op", "cut"), [(kda_gated, 1), (kda, 16), (kda_gated, 37)])
def test_a_sequence_may_be_cut_anywhere(cut, op, implementation):
    """Values, final state and every gradient, the initial state's included."""
    case = Case(2, 50, 2, 12, 20)
    args = inputs(op, case, "float32")
    cots = cotangents(args)

    @jax.jit
    def in_two(args, cotangents):
        def run(*args):
            piece = lambda a, b: [x[:, a:b] if timed(x, case) else x for x in args[:-1]]
            first, S = op(*piece(0, cut), initial_state=args[-1], implementation=implementation)
            second, S = op(*piece(cut, case.T), initial_state=S, implementation=implementation)
            return jnp.concatenate([first, second], axis=1), S

        values, pull = jax.vjp(run, *args)
        return values, pull(cotangents)

    whole = pullback(op, implementation, args, None, cots)
    pieces = to_numpy(in_two(args, cots))
    assert_agree(pieces[0], whole[0], 1e-5, OUTPUTS)
    assert_agree(pieces[1], whole[1], 1e-5, INPUTS if op is kda else GATED_INPUTS)


@each_implementation
@pytest.mark.parametrize("op", [kda_gated])
def test_packed_documents_are_documents_alone(op, implementation):
    """40 + 47 tokens in a row equal two calls; the first continues the initial state."""
    case, lengths = Case(1, 87, 2, 12, 20), (40, 47)
    args = inputs(op, case, "float32")
    (do, dS) = cotangents(args)
    ids = np.repeat(np.array([[1, 2]], np.int32), lengths, axis=1)
    (o, S), gradients = pullback(op, implementation, args, ids, (do, dS))
    starts, nothing = (0, 40), np.zeros_like(args[-1])
    for number, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        part = lambda x, start=start, length=length: (
            x[:, start : start + length] if x.shape[:2] == (1, 87) else x
        )
        alone = (*map(part, args[:-1]), nothing if number else args[-1])
        cots = (part(do), dS if number else nothing)
        (o_alone, S_alone), gradients_alone = pullback(op, implementation, alone, None, cots)
        assert_agree([part(o)], [o_alone], 1e-5, ["output"])
        if number:
            assert_agree([S], [S_alone], 1e-5, ["final_state"])
        for x, dx, dx_alone in zip(args, gradients, gradients_alone, strict=True):
            if timed(x, case):
                assert relative_error(part(dx), dx_alone) < 2e-5
        if not number:
            assert relative_error(gradients[-1], gradients_alone[-1]) < 2e-5


@each_implementation
@pytest.mark.parametrize("of_decays", [False, True])
@pytest.mark.parametrize("op", [kda, kda_gated])
def test_documents_are_bitwise_independent(op, of_decays, implementation):
    """Perturbing one document leaves the others' outputs and gradients as they were, to the bit."""
    case = SMALL[PACKED]
    args, others = inputs(op, case, "float32"), inputs(op, case, "float32", seed=7)
    cots = cotangents(args)
    before = pullback(op, implementation, args, case.segment_ids, cots)
    mine = case.segment_ids == 5  # the middle document
    changed = perturbed(case, args, others, mine)
    after = pullback(op, implementation, changed, case.segment_ids, cots)
    assert_same_outside(case, mine, before, after, of_decays)
    np.testing.assert_array_equal(before[0][1], after[0][1])  # the final state is another document's


@each_implementation
@pytest.mark.parametrize("op", [kda, kda_gated])
def test_rows_are_bitwise_independent(op, implementation):
    case = SMALL[PACKED]
    args, others = inputs(op, case, "float32"), inputs(op, case, "float32", seed=7)
    cots = cotangents(args)
    before = pullback(op, implementation, args, case.segment_ids, cots)
    mine = np.arange(case.B)[:, None] == np.ones((1, case.T))
    changed = perturbed(case, args, others, mine)
    after = pullback(op, implementation, changed, case.segment_ids, cots)
    for of_decays in (False, True):
        assert_same_outside(case, mine, before, after, of_decays)
    np.testing.assert_array_equal(before[0][1][0], after[0][1][0])


def assert_same_outside(case, mine, before, after, of_decays):
    """The decay's (or its logits') gradient, or everything else that tokens have."""
    pairs = list(zip((before[0][0], *before[1]), (after[0][0], *after[1]), strict=True))
    for x, y in [pairs.pop(4)] if of_decays else pairs[:4] + pairs[5:]:
        if timed(x, case):
            assert not np.array_equal(x, y)
            np.testing.assert_array_equal(np.asarray(x)[~mine], np.asarray(y)[~mine])


@each_implementation
@pytest.mark.parametrize("op", [kda, kda_gated])
def test_padding_gives_nothing_and_takes_nothing(op, implementation):
    case = SMALL[PACKED]
    args = inputs(op, case, "float32")
    cots = cotangents(args)
    padding = case.segment_ids == 0
    (o, S), gradients = pullback(op, implementation, args, case.segment_ids, cots)
    assert not np.any(np.asarray(o)[padding])
    for x, dx in zip(args, gradients, strict=True):
        if timed(x, case):
            assert not np.any(np.asarray(dx)[padding])
    # The same row with its padding taken out.
    keep = ~padding[0]
    dense = tuple(x[:1, keep] if timed(x, case) else x for x in args[:-1])
    o_dense, S_dense = values(op, implementation, (*dense, args[-1][:1]), case.segment_ids[:1, keep])
    assert_agree((o[:1, keep], S[:1]), (o_dense, S_dense), 1e-5, OUTPUTS)


@each_implementation
def test_a_row_alone_is_the_row_in_its_batch(implementation):
    case = SMALL[PACKED]
    args = inputs(kda_gated, case, "float32")
    together = values(kda_gated, implementation, args, case.segment_ids)
    alone = tuple(x[1:] if x.ndim > 2 else x for x in args)
    alone = values(kda_gated, implementation, alone, case.segment_ids[1:])
    assert_agree(alone, [x[1:] for x in together], 1e-6, OUTPUTS)


@each_implementation
def test_each_channel_of_a_head_forgets_at_its_own_rate(implementation):
    """One decay per head is another mechanism (GDN): here it would read the mean of both rates."""
    rates = np.array([-0.1, -2.0, -5.0], np.float32)
    k = np.zeros((1, 20, 1, 3), np.float32)
    k[:, 0] = 1.0  # one write, then only forgetting
    ones = np.ones((1, 20, 1, 1), np.float32)
    g = np.broadcast_to(rates, k.shape)
    run = jax.jit(lambda q: kda(q, k, ones, g, ones[..., 0], scale=1.0, implementation=implementation)[0])
    for channel, rate in enumerate(rates):
        o = run(np.broadcast_to(np.eye(3, dtype=np.float32)[channel], k.shape))
        np.testing.assert_allclose(o[0, :, 0, 0], np.exp(rate * np.arange(20)), rtol=1e-5, atol=1e-30)


@each_implementation
@pytest.mark.parametrize("zero", ["query", "key", "value"])
def test_zeros_have_finite_gradients(zero, implementation):
    case = SMALL[PACKED]
    args = list(inputs(kda_gated, case, "float32"))
    args[GATED_INPUTS.index(zero)] *= 0
    assert_finite(pullback(kda_gated, implementation, tuple(args), case.segment_ids, cotangents(args)))


@each_implementation
@each_dtype
def test_state_and_its_cotangent_are_at_least_float32(dtype, implementation):
    case = SMALL["over_a_tile"]
    with jax.enable_x64(dtype == "float64"):
        args = inputs(kda_gated, case, dtype)
        cots = cotangents(args)
        run = partial(kda_gated, implementation=implementation)
        o, S = jax.eval_shape(lambda *a: run(*a[:-1], initial_state=a[-1]), *args)
        assert o.dtype == dtype
        assert S.dtype == jnp.promote_types(dtype, jnp.float32)
        assert jax.eval_shape(run, *args[:-1])[1].dtype == S.dtype
        gradients = jax.eval_shape(partial(program, kda_gated, implementation), args, None, cots)[1]
        chex.assert_trees_all_equal_shapes_and_dtypes(gradients, args)


@each_implementation
def test_a_state_and_its_cotangent_are_kept_in_float32_under_bfloat16(implementation):
    """Each of sixteen chunks moves them by half of bfloat16's last place at 1: rounded, they would stay."""
    T, beta, do = 1024, 2.0**-14, 2.0**-13
    x = np.ones((1, T, 1, 1), jnp.bfloat16)
    wide = lambda value, *shape: np.full(shape, value, np.float32)
    args = (x, x, 2 * x, wide(0, *x.shape), wide(beta, 1, T, 1), wide(1, 1, 1, 1, 1))
    cots = (np.full(x.shape, do, jnp.bfloat16), wide(1, 1, 1, 1, 1))
    (_, S), gradients = pullback(kda, implementation, args, None, cots)
    # The state goes towards 2, and so does its cotangent on its way back.
    forgotten = (1 - beta) ** np.arange(T + 1)
    assert_agree([S - 1], [np.full((1, 1, 1, 1), 1 - forgotten[-1])], 1e-2, ["final_state"])
    assert_agree([gradients[5] - 1], [np.full((1, 1, 1, 1), 1 - forgotten[-1])], 1e-2, ["initial_state"])
    d_state = 2 - forgotten[:T][::-1] + do  # after each token, its own read included
    assert_agree([gradients[4][0, :, 0]], [d_state * forgotten[:T]], 1e-2, ["beta"])


@each_implementation
def test_what_a_token_reads_of_itself_is_kept_in_float32_under_bfloat16(implementation):
    """The query's gradient is what was there, -1, and what its own token wrote, 1 + 2^-9."""
    bfloat16 = lambda *values: np.array(values, jnp.bfloat16).reshape(1, 1, 1, -1)
    wide = lambda *values: np.array(values, np.float32)
    args = (bfloat16(1), bfloat16(1), bfloat16(0, 2.0**-9), wide(0).reshape(1, 1, 1, 1))
    args += (wide(1).reshape(1, 1, 1), wide(-1, 0).reshape(1, 1, 1, 2))
    cots = (bfloat16(1, 1), np.zeros_like(args[-1]))
    (o, S), gradients = pullback(kda, implementation, args, None, cots)
    np.testing.assert_array_equal(np.float32(o).reshape(-1), [0, 2.0**-9])
    np.testing.assert_array_equal(S.reshape(-1), [0, 2.0**-9])
    np.testing.assert_array_equal(np.float32(gradients[0]).reshape(-1), [2.0**-9])


@pytest.mark.parametrize("op", [kda, kda_gated])
@each_implementation
def test_pairs_behind_a_decay_say_nothing_of_it_under_bfloat16(op, implementation):
    """They cancel in its gradient, unless they are rounded one way as rows and another as columns."""
    args = list(inputs(op, Case(1, 64, 2, 32, 32), "bfloat16"))
    args[1][:, :40], args[-1] = 0, 0 * args[-1]  # nothing is there to be read or forgotten
    d_gate = np.float32(pullback(op, implementation, tuple(args), None, cotangents(args))[1][3])
    assert np.abs(d_gate[:, :40]).max() < 1e-5 * np.abs(d_gate).max()


@each_implementation
@pytest.mark.parametrize(("T", "K", "V"), [(65, 100, 60), (127, 96, 60), (500, 60, 96)])
def test_odd_sizes_are_exact_and_no_loop_over_tokens(T, K, V, implementation):
    case = Case(1, T, 1, K, V)
    agree(kda_gated, implementation, case, "float32")
    args = inputs(kda_gated, case, "float32")
    run = lambda args, cots: program(kda_gated, implementation, args, None, cots)
    found = equations_within(jax.make_jaxpr(run)(args, cotangents(args)).jaxpr)
    loops = [e.params.get("length", T) for e in found if e.primitive.name in ("scan", "while")]
    assert max(loops, default=0) < T / 4


# ---- memory ----

LONG = Case(1, 256, 2, 32, 32)


def abstract(T, op=kda_gated):
    """The arguments of `pullback` at length T, shapes alone."""
    B, H, K, V = LONG.B, LONG.H, LONG.K, LONG.V
    f = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    x, value, state = f(B, T, H, K), f(B, T, H, V), f(B, H, K, V)
    args = (
        (x, x, value, x, f(B, T, H), state)
        if op is kda
        else (x, x, value, x, f(B, T, H), f(H), f(H, K), state)
    )
    return args, None, (value, state)


@each_implementation
@pytest.mark.parametrize("op", [kda_gated, pytest.param(kda, marks=pytest.mark.slow)])
def test_temporary_memory_is_linear_in_length(op, implementation):
    memory = [
        program.lower(op, implementation, *abstract(T, op)).compile().memory_analysis().temp_size_in_bytes
        for T in (256, 512, 1024)
    ]
    assert memory[2] - memory[1] <= 2.2 * (memory[1] - memory[0])


@each_implementation
def test_the_program_does_not_grow_with_length(implementation):
    texts = [program.lower(kda_gated, implementation, *abstract(T)).as_text() for T in (8192, 2**17, 2**20)]
    lines = [text.count("\n") for text in texts]
    assert lines[0] == lines[1] == lines[2]


def equations_within(jaxpr):
    """Every equation of a program and of the programs inside it."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from equations_within(inner)


@each_implementation
@pytest.mark.parametrize(("op", "share"), [(kda_gated, 1 / 4), (kda, 1)])
def test_no_array_of_token_pairs_times_channels(op, share, implementation):
    """Of a chunk of 64. Decays without a bound may have those of tiles of 16."""
    args, _, cots = abstract(LONG.T, op)
    run = partial(program, op, implementation)
    found = equations_within(jax.make_jaxpr(lambda a, c: run(a, None, c))(args, cots).jaxpr)
    sizes = [out.aval.size for equation in found for out in equation.outvars]
    assert max(sizes) < LONG.B * LONG.H * LONG.T * 64 * LONG.K * share


@each_implementation
def test_only_inputs_are_kept_for_the_backward_pass(implementation):
    """No state per chunk, whose size is K x V: it would dwarf the rest."""
    case = Case(1, 256, 1, 32, 32)
    args = inputs(kda, case, "float32")
    run = lambda *args: kda(*args[:-1], initial_state=args[-1], implementation=implementation)
    kept = jax.tree.leaves(jax.eval_shape(lambda *args: jax.vjp(run, *args)[1], *args))
    assert sum(x.size for x in kept) <= sum(x.size for x in args) + case.T


# ---- gates ----


def test_the_bounded_gate_is_exactly_half_its_floor_at_zero():
    """A clamped softplus would not be."""
    g = log_decay(jnp.zeros((1, 1, 2, 3)), jnp.zeros(2), jnp.zeros((2, 3)), -5.0)
    np.testing.assert_array_equal(g, np.full((1, 1, 2, 3), -2.5))


@pytest.mark.parametrize("logit", [-1e4, -100.0, -20.0, 20.0, 100.0, 1e4])
@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_gates_are_their_formula_where_exponentials_overflow(logit, lower_bound):
    gate = lambda z: log_decay(z, jnp.zeros(1), jnp.zeros((1, 1)), lower_bound)[0, 0, 0, 0]
    g, slope = jax.value_and_grad(gate)(jnp.full((1, 1, 1, 1), logit))
    with np.errstate(over="ignore"):
        sigmoid = lambda x: 1 / (1 + np.exp(-x))
        s, other = sigmoid(np.float64(logit)), sigmoid(-np.float64(logit))
        expected = -5 * s if lower_bound else -np.logaddexp(0, np.float64(logit))
        expected_slope = -5 * s * other if lower_bound else -s
    np.testing.assert_allclose(g, expected, rtol=2e-6, atol=1e-37)
    np.testing.assert_allclose(slope[0, 0, 0, 0], expected_slope, rtol=2e-6, atol=1e-37)


def test_the_bounded_gates_slope_does_not_cancel_at_the_floor():
    """s (1 - s) loses 1e-4 of it where s is nearly 1."""
    z = np.linspace(5, 12, 50).reshape(1, 50, 1, 1)
    slope = jax.grad(lambda z: jnp.sum(log_decay(z, jnp.zeros(1), jnp.zeros((1, 1)), -5.0)))(jnp.float32(z))
    z = np.float64(np.float32(z))
    np.testing.assert_allclose(slope, -5 / (1 + np.exp(-z)) / (1 + np.exp(z)), rtol=2e-6)


@pytest.mark.parametrize("lower_bound", [0.0, 5.0, float("nan")])
def test_a_bound_must_be_negative(lower_bound):
    with pytest.raises(ValueError, match="negative"):
        log_decay(jnp.zeros((1, 1, 1, 1)), jnp.zeros(1), jnp.zeros((1, 1)), lower_bound)


# ---- refusals ----


@pytest.mark.parametrize("name", ["mosaic_tpu", "triton", "fastest"])
def test_an_implementation_that_is_not_built_is_refused_by_name(name):
    args = inputs(kda, SMALL["one_token"], "float32")
    with pytest.raises(ValueError, match=rf"kda.*{name}.*'reference'.*'xla'"):
        kda(*args[:-1], implementation=name)


@pytest.mark.parametrize("which", range(6))
def test_shapes_that_do_not_fit_are_refused(which):
    args = list(inputs(kda, SMALL["one_tile"], "float32"))
    args[which] = args[which][..., :-1]
    with pytest.raises((ValueError, AssertionError)):
        kda(*args[:-1], initial_state=args[-1])


def test_segment_ids_of_another_length_are_refused():
    args = inputs(kda, SMALL["one_tile"], "float32")
    with pytest.raises(AssertionError):
        kda(*args[:-1], segment_ids=np.ones((2, 15), np.int32))


@pytest.mark.slow
@each_implementation
@each_dtype
@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_the_gated_form_agrees_everywhere(lower_bound, name, dtype, implementation):
    case = SMALL[name]
    with jax.enable_x64(dtype == "float64"):
        agree(kda_gated, implementation, case, dtype, None, case.segment_ids, (("lower_bound", lower_bound),))


@pytest.mark.slow
@each_implementation
def test_a_full_sized_head_agrees(implementation):
    real = REAL["k3_layer"]
    agree(kda_gated, implementation, Case(1, 2048, 1, real.K, real.V), "float32")
