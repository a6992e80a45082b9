"""What a warpgroup of `gradients` has in registers: terms of its key channels' gradients (README.md)."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.kda.mosaic_gpu import decay
from pallas_kernels.kda.mosaic_gpu.decay import HALF
from pallas_kernels.kda.mosaic_gpu.form import UNIT, Form
from pallas_kernels.kda.mosaic_gpu.warpgroup import (
    CHUNK,
    COLUMNS,
    MATRIX,
    channels,
    columns,
    load,
    products,
    rounded,
    rows,
    split,
    turned,
    zero,
)

WIDTH = 32  # key channels of a warpgroup: with four of them a thread has 128 registers
FIRST, SECOND = pl.ds(0, HALF), pl.ds(HALF, HALF)
BEFORE, APART, OWN = range(3)  # matrices that sum log-decays: `decay.Sums`


class Part(NamedTuple):
    """A warpgroup's key channels of a chunk, [64, 32]."""

    q_s: Any
    k_s: Any
    z_s: Any
    g_s: Any
    q_C: Any  # 1 / |q|, with the scale
    k_C: Any
    bias_s: Any
    rate: Any
    form: Form
    seg: decay.Segments

    def query(self):
        return load(self.q_s) * rows(self.q_C, WIDTH)

    def key(self):
        return load(self.k_s) * rows(self.k_C, WIDTH)

    def gate(self):
        """What log-decays are made of."""
        return self.z_s, load(self.bias_s, COLUMNS), self.rate

    def put_decays(self):
        steps = self.form.steps(*self.gate())
        steps = steps if self.seg.real_C is None else steps * rows(self.seg.real_C, WIDTH)
        self.g_s[...] = steps.astype(jnp.float16)
        plgpu.commit_smem()

    def decays(self):
        """To base 2, as what is summed."""
        return load(self.g_s) * UNIT

    def summed(self, matrix):
        """Sums of log-decays over the tokens that the matrix chooses."""
        (x,) = products([(matrix, self.g_s)])
        return x

    def to_middle(self, before_s):
        """Sums between a token and the end of the first half."""
        after, upto = turned(before_s.at[FIRST]), before_s.at[:, SECOND]
        (x,) = products([(after, self.g_s.at[FIRST]), (upto, self.g_s.at[SECOND])])
        return x + jnp.where(_second_half(), self.decays(), 0.0)


class Terms(NamedTuple):
    """Gradients, as far as tokens decay: of queries (with the scale in them), of keys, and `through`.

    That is what comes to a token by decays up to it, less what others read of it by decays after it: the
    gradients of log-decays are sums of it. Most of such a sum cancels, as a pair of tokens both of which lie
    behind a decay says nothing of it. So each pair must come in and go out as the same number: of the factors
    that `query` and `key` are made of, `through` takes those that products have, rounded; but those of
    columns in one block, which products have in two parts, as they are.
    """

    query: Any
    key: Any
    through: Any
    missed: Any  # of each token: its key times the key's gradient by what it read


def _held(d: Terms) -> Terms:
    """d, added up. Left to itself, the compiler keeps terms and factors instead, in more registers."""
    return Terms(*lax.optimization_barrier(tuple(d)))


def _put(x, high_s, low_s):
    """x into shared memory, for sums over tokens."""
    high_s[...], low_s[...] = split(x)
    plgpu.commit_smem()


def _second_half():
    """Whether a row of a [64, 32] matrix is of the second half of the chunk."""
    return plgpu.broadcasted_iota(jnp.int32, (CHUNK, WIDTH), 0, layout=MATRIX) >= HALF


def of_state(part: Part, before_s, S_s, R_s, do_s) -> Terms:
    """By what the chunk's state gave its tokens."""
    enter = jnp.exp2(part.summed(before_s) + part.decays())
    if part.seg.enters_C is not None:
        enter = enter * rows(part.seg.enters_C, WIDTH)
    of = lambda left: [(x, S_s.at[channels(v)]) for v, x in enumerate(left)]
    (x,) = products(of(R_s))
    (y,) = products(of(do_s))
    query, key = y * enter, -(x * enter)
    of_key = part.key() * key
    return _held(Terms(query, key, part.query() * query + of_key, jnp.sum(of_key, axis=1)))


def of_pairs(part: Part, d: Terms, sums_s, scores, finer, free) -> Terms:
    """By the scores of pairs, factored as in `prepare`: of halves, quarters and so on (finished inputs).

    Args:
      sums_s: the matrices of sums. scores: cotangents (of keys apart, of queries apart, of keys in one
        block, of queries in one block). finer: a generator of (matrix of sums, cotangents of keys, of
        queries) of pairs of blocks inside a quarter, which are shared out when it is first asked.
        free: two tiles of shared memory.
    """
    kk_s, qk_s, own_kk_s, own_qk_s = scores
    key_s, query_s = free
    second = _second_half()

    def put(x):
        """Keys and queries decayed by x, once all warps have done with the last."""
        plgpu.commit_smem()
        key_s[...] = (part.key() * x).astype(jnp.bfloat16)
        query_s[...] = (part.query() * x).astype(jnp.bfloat16)
        plgpu.commit_smem()

    def both(at):
        """Keys' and queries' sums over columns of one half, as rows; and the sums over its rows."""
        by_rows = [(kk_s.at[:, at], key_s.at[at])], [(qk_s.at[:, at], key_s.at[at])]
        by_columns = [(turned(kk_s.at[at]), key_s.at[at]), (turned(qk_s.at[at]), query_s.at[at])]
        return by_rows, by_columns

    # Products with the factors in memory, whose own factors those are too.
    def add_to_query(d, x, y):
        return _held(d._replace(query=d.query + x * y, through=d.through + load(query_s) * y))

    def add_to_key(d, x, y):
        z = load(key_s) * y
        missed = d.missed + jnp.sum(z, axis=1)
        return _held(d._replace(key=d.key + x * y, through=d.through + z, missed=missed))

    def add_column(d, x, y):
        return _held(d._replace(key=d.key + x * y, through=d.through - load(key_s) * y))

    # Rows of the second half, columns of the first.
    x = jnp.exp2(part.to_middle(sums_s.at[BEFORE]))
    put(x)
    keys, queries = both(FIRST)[0]
    (y,) = products(keys)
    d = add_to_key(d, x, jnp.where(second, y, 0.0))
    (y,) = products(queries)
    d = add_to_query(d, x, jnp.where(second, y, 0.0))
    (y,) = products(both(SECOND)[1])
    d = add_column(d, x, jnp.where(second, 0.0, y))

    # Rows of a half's second quarter, columns of its first.
    x = jnp.exp2(part.summed(sums_s.at[APART]))
    put(x)
    halves = lambda first, later: jnp.where(second, later, first)
    (keys, queries), of_columns = both(FIRST)
    (later_keys, later_queries), of_later_columns = both(SECOND)
    d = add_to_key(d, x, halves(*products(keys, later_keys)))
    d = add_to_query(d, x, halves(*products(queries, later_queries)))
    d = add_column(d, x, halves(*products(of_columns, of_later_columns)))

    # Rows of the second of a pair of smaller blocks, columns of its first.
    for matrix, finer_kk_s, finer_qk_s in finer:
        x = jnp.exp2(part.summed(matrix))
        put(x)
        d = add_to_key(d, x, *products([(finer_kk_s, key_s)]))
        d = add_to_query(d, x, *products([(finer_qk_s, key_s)]))
        of_columns = [(turned(finer_kk_s), key_s), (turned(finer_qk_s), query_s)]
        d = add_column(d, x, *products(of_columns))

    # In one block. Nothing is made anew: that takes longer here (README.md).
    x = part.summed(sums_s.at[OWN])
    return _of_one_block(lambda _: (part, free), lambda x, _: x, d, x, (own_kk_s, own_qk_s))


def of_halves(anew, d: Terms, sums_s, scores) -> Terms:
    """By the scores of pairs, those of a half factored around its middle.

    Rows of the second half, as they are for that, serve for columns of the first too, which decay up to that
    middle (`ahead`).

    Args:
      anew: gives, for a stage, `Part` and places of decayed keys, of queries (before, of the second part of
        keys), and of the first half's keys, at addresses that the compiler does not know from another stage.
        sums_s, scores: see `of_pairs`.
    """
    kk_s, qk_s, own_kk_s, own_qk_s = scores
    part, (*_, far_s) = anew(1)
    later = lambda x, stage: x + zero(part.rate, stage).astype(jnp.float32)
    x, far = products(*([(sums_s.at[which], part.g_s)] for which in (OWN, APART)))
    apart = tuple([(x_s.at[:, FIRST], far_s.at[FIRST])] for x_s in (kk_s, qk_s))
    d = _of_one_block(anew, later, d, x, (own_kk_s, own_qk_s), [(far_s, far)], apart)

    part, (key_s, query_s, far_s) = anew(2)
    of_second = [(turned(x_s.at[SECOND]), y_s.at[SECOND]) for x_s, y_s in ((kk_s, key_s), (qk_s, query_s))]
    y, far = products(of_second, [(sums_s.at[APART], part.g_s)])  # `far` again: no registers to keep it
    return _held(d._replace(key=d.key + jnp.exp2(far) * y, through=d.through - load(far_s) * y))


def _of_one_block(anew, later, d: Terms, x, own, others=(), apart=((), ())) -> Terms:
    """By pairs in one block, whose columns' factors are not its rows', but these inverted.

    Rows sum these in two parts, the second in the place of decayed queries. Leaves its rows' factors in their
    places.

    Args:
      anew: see `of_halves`. later: exponents that the compiler does not know from another stage, or it would
        keep exponentials. x: exponents of rows. own: cotangents of the block's scores of keys, of queries.
        others: (place, exponents) of more decayed keys. apart: the products with these that keys and that
        queries sum.
    """
    part, (key_s, low_s, *_) = anew(1)
    of_keys, of_queries = ([(x_s, key_s), (x_s, low_s), *y] for x_s, y in zip(own, apart, strict=True))
    plgpu.commit_smem()  # all warps have done with the last
    key_s[...], low_s[...] = split(part.key() * jnp.exp2(-x))
    for place, exponents in others:
        place[...] = (part.key() * jnp.exp2(exponents)).astype(jnp.bfloat16)
    plgpu.commit_smem()
    (y,) = products(of_keys)
    x = later(x, 1)
    z = rounded(part.key() * jnp.exp2(x)) * y
    missed = d.missed + jnp.sum(z, axis=1)
    d = _held(d._replace(key=d.key + jnp.exp2(x) * y, through=d.through + z, missed=missed))
    (y,) = products(of_queries)
    x = later(x, 2)
    through = d.through + rounded(part.query() * jnp.exp2(x)) * y
    d = _held(d._replace(query=d.query + jnp.exp2(x) * y, through=through))

    x, (part, (key_s, query_s, *_)) = later(x, 3), anew(2)
    plgpu.commit_smem()
    key_s[...] = (part.key() * jnp.exp2(x)).astype(jnp.bfloat16)
    query_s[...] = (part.query() * jnp.exp2(x)).astype(jnp.bfloat16)
    plgpu.commit_smem()
    (y,) = products([(turned(x_s), y_s) for x_s, y_s in zip(own, (key_s, query_s), strict=True)])
    through = d.through - part.key() * jnp.exp2(-x) * y
    return _held(d._replace(key=d.key + jnp.exp2(-x) * y, through=through))


def of_leaving(part: Part, before_s, dS_s, written_s):
    """The gradient of keys by what they left to the state after the chunk."""
    leave = jnp.exp2(part.summed(turned(before_s)))
    if part.seg.leaves_C is not None:
        leave = leave * rows(part.seg.leaves_C, WIDTH)
    (left,) = products([(turned(x_s), dS_s.at[channels(v)]) for v, x_s in enumerate(written_s)])
    return left * leave


def of_decays(part: Part, d: Terms, left, before_s, held_s, free):
    """The gradient of log-decays: a token's lie between every pair that it decays.

    Args:
      left: of keys, by what they left. free: three tiles of shared memory.
    """
    *through_s, left_s = free
    left_s[...] = (part.key() * left).astype(jnp.bfloat16)
    _put(d.through, *through_s)
    onward = [(turned(before_s), x_s) for x_s in through_s]
    (x,) = products([*onward, (before_s, left_s)])
    x = x + (load(through_s[0]) + load(through_s[1])) + columns(load(held_s, COLUMNS))
    return x if part.seg.real_C is None else x * rows(part.seg.real_C, WIDTH)
