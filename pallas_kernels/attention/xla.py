"""Blockwise attention in plain jax.numpy: running softmax forward, written backward.

One scan walks the block pairs (i, j) that hold any causal pair, row by row, so memory is linear in
T and the upper half is never computed.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.products import wide_einsum

BLOCK = 512
MASKED = -1e30  # finite: the difference of two of them is 0, not NaN


class Blocks(NamedTuple):
    """Inputs cut into blocks, [blocks, B, H, block, .] and [blocks, B, block] for the indexes."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    query_index: jax.Array
    key_index: jax.Array


def _cut(x, block, fill=0):
    """[B, T, H, X] -> [T / block, B, H, block, X], or [B, T] -> [T / block, B, block], padded."""
    extra = -x.shape[1] % block
    x = jnp.pad(x, [(0, 0), (0, extra), *[(0, 0)] * (x.ndim - 2)], constant_values=fill)
    x = x.reshape(x.shape[0], -1, block, *x.shape[2:])
    x = jnp.moveaxis(x, 1, 0)
    return jnp.moveaxis(x, 3, 2) if x.ndim == 5 else x


def _uncut(x, length):
    x = jnp.moveaxis(jnp.moveaxis(x, 2, 3), 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :length]


def _blocks(q, k, v, query_index, key_index) -> Blocks:
    across, along = min(BLOCK, q.shape[1]), min(BLOCK, k.shape[1])
    return Blocks(
        _cut(q, across), _cut(k, along), _cut(v, along),
        _cut(query_index, across, -1), _cut(key_index, along, -1),
    )  # fmt: skip


def _pairs(blocks: Blocks, offset: int) -> np.ndarray:
    """The (i, j) of every query block and each key block that its last query may see."""
    across, along = blocks.q.shape[3], blocks.k.shape[3]
    last = lambda i: min((offset + (i + 1) * across - 1) // along, blocks.k.shape[0] - 1)
    return np.array([(i, j) for i in range(blocks.q.shape[0]) for j in range(last(i) + 1)], np.int32)


def _logits(blocks: Blocks, i, j, offset, scale):
    """[B, H, block, block] scaled logits of a block pair, MASKED where they do not count."""
    q, k = blocks.q[i], blocks.k[j]
    across, along = q.shape[2], k.shape[2]
    row = offset + i * across + jnp.arange(across)[:, None]
    past = j * along + jnp.arange(along)[None, :] <= row
    query_index, key_index = blocks.query_index[i][:, :, None], blocks.key_index[j][:, None, :]
    seen = past[None] & (query_index == key_index) & (key_index >= 0)
    return jnp.where(seen[:, None], scale * wide_einsum("bhtk,bhsk->bhts", q, k), MASKED)


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def attention(q_BTHK, k_BSHK, v_BSHV, query_index_BT, key_index_BS, scale):
    """As `reference.attention`; differentiable in q, k and v."""
    return _forward(q_BTHK, k_BSHK, v_BSHV, query_index_BT, key_index_BS, scale)[0]


def _forward(q_BTHK, k_BSHK, v_BSHV, query_index_BT, key_index_BS, scale):
    T, offset = q_BTHK.shape[1], k_BSHK.shape[1] - q_BTHK.shape[1]
    x = _blocks(q_BTHK, k_BSHK, v_BSHV, query_index_BT, key_index_BS)
    dtype = jnp.promote_types(v_BSHV.dtype, jnp.float32)
    rows = x.q.shape[:-1]

    def pair(carry, ij):
        out, log_sum, top = carry  # finished and current rows: exp(log_sum) normalises them
        i, j = ij
        fresh = j == 0
        o, l, m = out[i], log_sum[i], top[i]  # noqa: E741 (the usual names: sum l, maximum m)
        o, l, m = (jnp.where(fresh, start, y) for start, y in ((0, o), (0, l), (MASKED, m)))  # noqa: E741
        logits = _logits(x, i, j, offset, scale)
        new_m = jnp.maximum(m, jnp.max(logits, axis=-1))
        p = jnp.where(logits > MASKED / 2, jnp.exp(logits - new_m[..., None]), 0)
        shrink = jnp.exp(m - new_m)
        l = l * shrink + jnp.sum(p, axis=-1)  # noqa: E741 (as above)
        o = o * shrink[..., None] + wide_einsum("bhts,bhsv->bhtv", p.astype(x.v.dtype), x.v[j])
        return (out.at[i].set(o), log_sum.at[i].set(l), top.at[i].set(new_m)), None

    start = (jnp.zeros((*rows, x.v.shape[-1]), dtype), jnp.zeros(rows, dtype), jnp.full(rows, MASKED, dtype))
    (out, total, top), _ = jax.lax.scan(pair, start, _pairs(x, offset))
    some = total > 0
    total = jnp.where(some, total, 1)
    out = jnp.where(some[..., None], out / total[..., None], 0)
    log_sum = jnp.where(some, top + jnp.log(total), 0)
    top_H = jnp.max(jnp.where(some, top, -jnp.inf), axis=(0, 1, 3))
    # Named for remat policies: with these two kept, the forward pass need not run again.
    o_BTHV, log_sum = checkpoint_name(_uncut(out, T), "op"), checkpoint_name(log_sum, "op")
    residuals = (q_BTHK, k_BSHK, v_BSHV, query_index_BT, key_index_BS, o_BTHV, log_sum)
    return (o_BTHV, top_H), residuals


def _backward(scale, residuals, cotangents):
    q_BTHK, k_BSHK, v_BSHV, query_index_BT, key_index_BS, o_BTHV, log_sum = residuals
    do_BTHV = cotangents[0]
    T, S = q_BTHK.shape[1], k_BSHK.shape[1]
    x = _blocks(q_BTHK, k_BSHK, v_BSHV, query_index_BT, key_index_BS)
    across = x.q.shape[3]
    low = x.q.dtype
    do = _cut(do_BTHV, across).astype(low)  # rounded in both terms of dp - delta, which cancel
    delta = jnp.sum(do * _cut(o_BTHV, across), axis=-1)

    def pair(carry, ij):
        dq, dk, dv = carry
        i, j = ij
        logits = _logits(x, i, j, S - T, scale)
        p = jnp.where(logits > MASKED / 2, jnp.exp(logits - log_sum[i][..., None]), 0)
        do_i = do[i]
        dp = wide_einsum("bhtv,bhsv->bhts", do_i, x.v[j])
        ds = (p * (dp - delta[i][..., None]) * scale).astype(low)
        dq = dq.at[i].add(wide_einsum("bhts,bhsk->bhtk", ds, x.k[j]))
        dk = dk.at[j].add(wide_einsum("bhts,bhtk->bhsk", ds, x.q[i]))
        dv = dv.at[j].add(wide_einsum("bhts,bhtv->bhsv", p.astype(low), do_i))
        return (dq, dk, dv), None

    start = tuple(jnp.zeros(y.shape, delta.dtype) for y in (x.q, x.k, x.v))
    (dq, dk, dv), _ = jax.lax.scan(pair, start, _pairs(x, S - T))
    back = ((dq, T, q_BTHK), (dk, S, k_BSHK), (dv, S, v_BSHV))
    return *(_uncut(d, length).astype(y.dtype) for d, length, y in back), None, None


attention.defvjp(_forward, _backward)
