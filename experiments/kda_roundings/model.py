"""One head of `kda_gated` and its gates' gradients in float64, with the Hopper kernels' roundings by name.

The letters are those of pallas_kernels/kda/README.md. Packed rows and pieces are left out, and so are what
float32 rounds and the float16 operands of the inverse, which make 3e-6.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.kda.gate import log_decay

# The kernels' own numbers; they themselves cannot be imported with every jax that runs this.
CHUNK, HALF, QUARTER = 64, 32, 16
MIDDLE = HALF // 2 - 1  # the token of a half that its pairs factor at in `gradients`
LOWER_BOUND = -5.0
UNIT = 2.0**-10  # of log-decays to base 2

Rounding = Callable[[jax.Array], jax.Array]


def bfloat16(x):
    return x.astype(jnp.float32).astype(jnp.bfloat16).astype(x.dtype)


def float16(x):
    return x.astype(jnp.float16).astype(x.dtype)


def two_parts(x):
    """A bfloat16 number and what is left, another."""
    high = bfloat16(x)
    return high + bfloat16(x - high)


ROUNDINGS: dict[str, Rounding] = {  # as the kernels do
    "log-decays": float16,
    "factors of scores": bfloat16,  # of pairs in one quarter
    "factors of scores apart": float16,
    "Aqk": bfloat16,
    "inverse": bfloat16,
    "k_in, q_in, k_out": bfloat16,
    "w, u": bfloat16,
    "S": bfloat16,
    "v'": bfloat16,
    "dS": bfloat16,
    "dv'": bfloat16,
    "R": bfloat16,
    "d scores": bfloat16,
    "rows' factors": bfloat16,
    "columns' factors": two_parts,
    "far columns' factors": bfloat16,
    "left": bfloat16,
    "through": two_parts,
    "d logits": bfloat16,
}
EXACT = dict.fromkeys(ROUNDINGS, lambda x: x)


def _span(G_CK, size: int):
    """Decays between tokens and the end of the first block of their pair of blocks of this size."""
    i = jnp.arange(CHUNK)
    x = G_CK - G_CK[i // (2 * size) * (2 * size) + size - 1]
    return jnp.exp(jnp.where(((i & size) != 0)[:, None], x, -x))


def _scores(r: Mapping[str, Rounding], x_CK, k_CK, G_CK):
    """Of pairs below the diagonal, decayed."""
    i = jnp.arange(CHUNK)
    x = G_CK - G_CK[i // QUARTER * QUARTER]
    near = r["factors of scores"]
    found = near(x_CK * jnp.exp(x)) @ near(k_CK * jnp.exp(-x)).T
    far = r["factors of scores apart"]
    for size in (QUARTER, HALF):
        decay = far(_span(G_CK, size))
        here = far(far(x_CK) * decay) @ far(far(k_CK) * decay).T
        found = jnp.where(_in_one_block(size), found, here)
    return jnp.tril(found, -1)


def _in_one_block(size: int):
    of = jnp.arange(CHUNK) // size
    return of[:, None] == of[None]


class Prepared(NamedTuple):
    """What chunks need besides their state, and their tokens need backwards."""

    q: Any
    k: Any
    G: Any
    w: Any
    u: Any
    q_in: Any
    k_out: Any
    whole: Any
    Aqk: Any
    T: Any
    regained: Any


def _prepare(r: Mapping[str, Rounding], q_CK, k_CK, v_CV, g_CK, beta_C) -> Prepared:
    to_units = 1 / (UNIT * math.log(2))
    G = jnp.cumsum(r["log-decays"](g_CK * to_units) / to_units, 0)
    Aqk = r["Aqk"](_scores(r, q_CK, k_CK, G) + jnp.diag(jnp.sum(q_CK * k_CK, 1)))
    inverse = jnp.linalg.inv(jnp.eye(CHUNK) + beta_C[:, None] * _scores(r, k_CK, k_CK, G))
    narrow = r["inverse"](beta_C)
    T = r["inverse"](inverse * narrow[None])
    regained = (beta_C / narrow)[:, None]
    enter, leave = jnp.exp(G), jnp.exp(G[-1:] - G)
    q_in, k_in, k_out = (r["k_in, q_in, k_out"](x) for x in (q_CK * enter, k_CK * enter, k_CK * leave))
    w, u = (r["w, u"](regained * (T @ x)) for x in (k_in, v_CV))
    return Prepared(q_CK, k_CK, G, w, u, q_in, k_out, jnp.exp(G[-1])[:, None], Aqk, T, regained)


def _walks(r: Mapping[str, Rounding], p: Prepared, S_KV, dS_KV, do_NCV):
    """(S, v', dS, dv') of every chunk."""

    def forth(S, p):
        narrow = r["S"](S)
        written = r["v'"](p.u - p.w @ narrow)
        return p.whole * S + p.k_out.T @ written, (narrow, written)

    def back(dS, x):
        p, do = x
        narrow = r["dS"](dS)
        d_written = r["dv'"](p.Aqk.T @ do + p.k_out @ narrow)
        return p.whole * dS + p.q_in.T @ do - p.w.T @ d_written, (narrow, d_written)

    _, of_states = lax.scan(forth, S_KV, p)
    _, of_cotangents = lax.scan(back, dS_KV, (p, do_NCV), reverse=True)
    return *of_states, *of_cotangents


def _by_pairs(r: Mapping[str, Rounding], middle: int, p: Prepared, dkk_CC, dqk_CC):
    """What comes to tokens by pairs of the chunk, less what leaves them."""
    i = jnp.arange(CHUNK)
    x = p.G - p.G[i // HALF * HALF + middle]
    rows, columns = r["rows' factors"], r["columns' factors"]
    query, key, column = rows(p.q * jnp.exp(x)), rows(p.k * jnp.exp(x)), columns(p.k * jnp.exp(-x))
    ahead = jnp.where((i < HALF)[:, None], p.G[None, HALF + middle] - p.G, -jnp.inf)
    far = r["far columns' factors"](p.k * jnp.exp(ahead))
    through = jnp.zeros_like(p.G)
    for scores, row in ((dkk_CC, key), (dqk_CC, query)):
        near, apart = jnp.where(_in_one_block(HALF), scores, 0), jnp.where(_in_one_block(HALF), 0, scores)
        through += row * (near @ column + apart @ far)
        through -= column * (near.T @ row) + far * (apart.T @ row)
    return through


def _of_chunk(
    r: Mapping[str, Rounding], middle: int, p: Prepared, do_CV, S_KV, written_CV, dS_KV, d_written_CV
):
    """The gradient of its log-decays."""
    R = r["R"](p.regained * (p.T.T @ d_written_CV))
    dqk, dkk = (r["d scores"](jnp.tril(x @ written_CV.T, -1)) for x in (do_CV, -R))
    by_state = (p.q * (do_CV @ S_KV.T) - p.k * (R @ S_KV.T)) * jnp.exp(p.G)
    through = r["through"](by_state + _by_pairs(r, middle, p, dkk, dqk))
    left = r["left"](p.k * (written_CV @ dS_KV.T) * jnp.exp(p.G[-1:] - p.G))
    held = jnp.sum(S_KV * dS_KV, 1) * p.whole[:, 0]
    return jnp.cumsum(through[::-1], 0)[::-1] + jnp.cumsum(left, 0) - left + held[None]


def d_log_decays(r: Mapping[str, Rounding], middle: int, q_TK, k_TK, v_TV, g_TK, beta_T, do_TV, S_KV, dS_KV):
    """The gradient of one head's log-decays, of queries with unit length times the scale, and unit keys."""
    *tokens, do = (x.reshape(-1, CHUNK, *x.shape[1:]) for x in (q_TK, k_TK, v_TV, g_TK, beta_T, do_TV))
    p = jax.vmap(partial(_prepare, r))(*tokens)
    dg = jax.vmap(partial(_of_chunk, r, middle))(p, do, *_walks(r, p, S_KV, dS_KV, do))
    return dg.reshape(g_TK.shape)


def gradients(r: Mapping[str, Rounding], inputs, cotangents, middle: int = MIDDLE):
    """(of gate logits, of a_log, of dt_bias) from `kda_gated`'s inputs, the initial state last, with B = 1.

    T is a multiple of 64. `cotangents` are of output and final state. `middle`: see MIDDLE.
    """
    q, k, v, z, beta_logits, a_log, dt_bias, S = inputs
    unit = lambda x: x * lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + 1e-6)
    g, pull = jax.vjp(lambda *x: log_decay(*x, LOWER_BOUND), z, a_log, dt_bias)
    tokens = (unit(q) * q.shape[-1] ** -0.5, unit(k), v, g, jax.nn.sigmoid(beta_logits), cotangents[0])
    of_head = jax.vmap(partial(d_log_decays, r, middle), in_axes=(1,) * 6 + (0, 0), out_axes=1)
    dz, d_a_log, _ = pull(of_head(*(x[0] for x in (*tokens, S, cotangents[1])))[None])
    dz = r["d logits"](dz)
    return dz, d_a_log, jnp.sum(dz, (0, 1))
