"""The last kernel backwards: what every chunk's cotangents say about its inputs (README.md)."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.kda.mosaic_gpu import decay
from pallas_kernels.kda.mosaic_gpu.decay import HALF, QUARTER
from pallas_kernels.kda.mosaic_gpu.form import UNIT, Form
from pallas_kernels.kda.mosaic_gpu.gradients_memory import Memory, Sources, fetch, scratch
from pallas_kernels.kda.mosaic_gpu.prepare import Inputs, Prepared
from pallas_kernels.kda.mosaic_gpu.scan import Cotangents, Kept
from pallas_kernels.kda.mosaic_gpu.terms import (
    APART,
    BEFORE,
    OWN,
    WIDTH,
    Part,
    of_decays,
    of_halves,
    of_leaving,
    of_pairs,
    of_state,
)
from pallas_kernels.kda.mosaic_gpu.warpgroup import (
    CHUNK,
    MATRIX,
    PARAMS,
    ROWS,
    TILE,
    bfloat16,
    channels,
    float32,
    load,
    positions,
    products,
    rows,
    turned,
    zero,
)


class Gradients(NamedTuple):
    """Of q, k, v and z in bfloat16 (with finished log-decays, of these).

    For each part of channels and token, `beta_BHNXC`: of beta, times beta; `rate_BHNXC`: of a_log.
    """

    q_BTHK: jax.Array
    k_BTHK: jax.Array
    v_BTHV: jax.Array
    z_BTHK: jax.Array
    beta_BHNXC: jax.Array
    rate_BHNXC: jax.Array


def _put_scores(x, sums, size: int, apart_s, own_s):
    """Cotangents of the scores of pairs below the diagonal: those apart, and those in one block of a size."""
    i, j = sums.i, sums.j
    before = j < i if sums.same is None else (j < i) & sums.same
    own = i // size == j // size
    apart_s[...] = jnp.where(before & ~own, x, 0.0).astype(jnp.bfloat16)
    own_s[...] = jnp.where(before & own, x, 0.0).astype(jnp.bfloat16)


def _share_out(own_s, finer, sums, own: int):
    """Pairs of one quarter: to each place in `finer` those of its blocks; here stay those of tiles `own`."""
    x, i, j = load(own_s), sums.i, sums.j
    for size, place in finer:
        chosen = (i // (2 * size) == j // (2 * size)) & (i // size != j // size)
        place[...] = jnp.where(chosen, x, 0.0).astype(jnp.bfloat16)
    own_s[...] = jnp.where(i // own == j // own, x, 0.0).astype(jnp.bfloat16)


def _diagonal(x, sums):
    return jnp.sum(jnp.where(sums.i == sums.j, x, 0.0), axis=1)


def _of_scores(m: Memory, me, nk: int, nv: int, form: Form, sums, finished):
    """Leaves R in the place of dv', and the cotangents of scores of pairs in four tiles; shares out the work.

    With R = Diag(beta) T^t dv', the cotangent of v is R itself, that of scores of keys is -R v'^t, and that
    of beta, times beta, is R times what the token missed: v, whose part is left in `dot`, less what its key
    reads. The pair of a token with itself is not decayed: it stands apart.
    """

    def put_sums(who: int, at: int, matrix):
        @pl.when(me == who)
        def _():
            m.sums[at] = matrix(sums())

    for v in range(nv):

        @pl.when(me == v)
        def _(v=v):
            (x,) = products([(turned(m.inverse), turned(m.R.at[v]))])
            x = x * rows(load(m.of_channel.at[3, channels(0)], ROWS))
            plgpu.commit_smem()
            m.R[v] = x.astype(jnp.bfloat16)
            plgpu.commit_smem()
            finished(v)
            v_s = plgpu.layout_cast(m.sums[APART + v], MATRIX)
            m.dot[3, v] = jnp.sum(x * lax.bitcast_convert_type(v_s, jnp.bfloat16).astype(jnp.float32), axis=1)

    @pl.when(me >= nv)
    def _():
        m.dot[3, me] = plgpu.layout_cast(jnp.zeros(CHUNK, jnp.float32), ROWS)

    put_sums(nk - 2, BEFORE, lambda of: of.before())

    @pl.when(me == nk - 1)
    def _():
        chosen = sums()
        (x,) = products([(m.do.at[v], m.written.at[v]) for v in range(nv)])
        m.of_token[2] = _diagonal(x, chosen)
        _put_scores(x, chosen, form.together, m.qk, m.own_qk)

    m.meet(0)

    @pl.when(me == 0)
    def _():
        chosen = sums()
        (x,) = products([(m.R.at[v], m.written.at[v]) for v in range(nv)])
        _put_scores(-x, chosen, form.together, m.kk, m.inverse)

    halves = form.together == HALF
    put_sums(1, APART, lambda of: of.ahead(HALF) if halves else of.joined(QUARTER))
    put_sums(nk - 1, OWN, lambda of: of.around(HALF) if halves else of.own(form.own))


def _put_held(m: Memory, me, nv: int, sums) -> None:
    """What the state itself says about all log-decays."""

    @pl.when(me % 2 == 1)
    def _():
        pair = me // 2
        (x,) = products([(turned(m.S.at[pair]), m.dS.at[pair, pl.ds(0, nv * TILE)])])
        whole = load(m.of_channel.at[1, channels(pair)], ROWS)
        m.of_channel[2, channels(pair)] = _diagonal(x, sums()) * whole


def _finer(m: Memory, me, nk: int, form: Form, sums):
    """Of pairs of blocks inside a quarter: the matrix of sums, cotangents of scores of keys, of queries.

    These are in the memory of pairs apart and of the state, which nobody needs any more.
    """
    sizes = [size for size in form.joined if size < QUARTER]
    of_keys, of_queries = (m.kk, m.late.at[1]), (m.qk, m.late.at[2])
    m.meet(3)
    for who, own_s, places in ((0, m.inverse, of_keys), (nk - 1, m.own_qk, of_queries)):

        @pl.when(me == who)
        def _(own_s=own_s, places=places):
            _share_out(own_s, zip(sizes, places, strict=True), sums(), form.own)

    m.meet(4)
    for size, *scores in zip(sizes, of_keys, of_queries, strict=True):
        yield sums().joined(size), *scores


def _anew(part: Part, m: Memory, me, stage: int):
    """`part` with addresses made anew, and places of decayed keys, of queries, and of the first half's keys.

    The last is where scores of small blocks are of finished inputs.
    """
    at = me + zero(part.rate, stage)
    tiles = part._replace(q_s=m.q.at[at], k_s=m.k.at[at], z_s=m.z.at[at], g_s=m.g.at[at])
    return tiles, (m.key.at[at], m.query.at[at], m.late.at[1 + at // 2, :, pl.ds(at % 2 * WIDTH, WIDTH)])


def _through_norms(part: Part, m: Memory, me, nk: int, scale: float, dq, dk):
    """Gradients of unit vectors, less what lies along these; the query's has the scale in it."""
    m.dot[0, me] = jnp.sum(part.query() * dq, axis=1)
    m.dot[1, me] = jnp.sum(part.key() * dk, axis=1)
    m.meet(2)
    along = lambda x: rows(sum(load(m.dot.at[x, at], ROWS) for at in range(nk)), WIDTH)
    return dq - part.query() * (along(0) * (1.0 / scale**2)), dk - part.key() * along(1)


def _kernel(sizes, scale, form, packed, *refs):
    """One chunk of one head of one row."""
    nk, nv = sizes[3] // WIDTH, sizes[4] // TILE
    rate_g, *refs = refs
    g, refs = Sources(*refs[:14], ids=tuple(refs[14 : 14 + 2 * packed])), refs[14 + 2 * packed :]
    dq_g, dk_g, dv_g, dz_g, dbeta_g, drate_g = refs[:6]
    m = Memory.of(refs[6:])
    b, h, n = where = tuple(lax.axis_index(name) for name in ("row", "head", "chunk"))
    me = lax.axis_index("warpgroup")
    tokens, mine = pl.ds(n * CHUNK, CHUNK), pl.ds(me * WIDTH, WIDTH)
    pair, side = me // 2, pl.ds(me % 2 * WIDTH, WIDTH)
    fetch(m, me, where, g)

    rate = rate_g[h]
    ids_s = m.index, m.of_token.at[3]
    segments = lambda: decay.segments(g.ids[0], ids_s, b, n) if packed else decay.NONE
    places = lambda: (positions((rate < 0).astype(jnp.int32)), segments().same)
    sums = lambda: decay.Sums(*places(), UNIT, jnp.float16)
    if packed:
        plgpu.barrier_wait(m.shared)
    part = Part(
        m.q.at[me], m.k.at[me], m.z.at[me], m.g.at[me], None, None, m.of_channel.at[0, mine], rate, form,
        segments(),
    )  # fmt: skip
    plgpu.barrier_wait(m.gate.at[me])
    part.put_decays()
    if not packed:
        plgpu.barrier_wait(m.shared)
    finished = lambda v: plgpu.copy_smem_to_gmem(m.R.at[v], dv_g.at[b, tokens, h, channels(v)])
    _of_scores(m, me, nk, nv, form, sums, finished)
    plgpu.barrier_wait(m.states.at[pair])
    _put_held(m, me, nv, sums)
    plgpu.barrier_wait(m.raw.at[me])
    q_C, k_C = (load(m.of_token.at[x], ROWS) for x in range(2))
    part = part._replace(q_C=q_C, k_C=k_C)
    each = lambda x: [x.at[v] for v in range(nv)]
    d = of_state(part, m.sums.at[BEFORE], m.S.at[pair, :, side], each(m.R), each(m.do))

    # Once all are here, the memory of S, R and the output's cotangent is free.
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    m.meet(1)

    @pl.when(me == 1)
    def _():
        m.late[0] = decay.Sums(*places()).before()
        plgpu.commit_smem()
        plgpu.barrier_arrive(m.summing)

    scores = m.kk, m.qk, m.inverse, m.own_qk
    if form.together == HALF:
        anew = partial(_anew, part, m, me)
        d = of_halves(anew, d, m.sums, scores)
        part, (*free, _) = anew(3)
    else:
        free = m.key.at[me], m.query.at[me]
        d = of_pairs(part, d, m.sums, scores, _finer(m, me, nk, form, sums), free)
    left = of_leaving(part, m.sums.at[BEFORE], m.dS.at[pair, :, side], each(m.written))
    plgpu.commit_smem()  # log-decays and the state's cotangent were read for the last time
    if form.raw:
        plgpu.copy_gmem_to_smem(g.z.at[b, tokens, h, mine], m.z.at[me], m.again.at[me])
    kept = [m.dS.at[pair, channels(0), side]]
    plgpu.barrier_wait(m.summing)
    dg = of_decays(part, d, left, m.late.at[0], m.of_channel.at[2, mine], (*free, *kept))
    itself = rows(load(m.of_token.at[2], ROWS), WIDTH)
    dq, dk = d.query + itself * part.key(), d.key + left + itself * part.query()
    if packed:
        dq = dq * rows(part.seg.real_C, WIDTH)
    if form.raw:
        plgpu.barrier_wait(m.again.at[me])
    dz, m.dot[2, me] = form.through(dg, *part.gate())
    m.dot[3, me] = load(m.dot.at[3, me], ROWS) + d.missed
    if form.raw:
        dq, dk = _through_norms(part, m, me, nk, scale, dq, dk)
    dq, dk = rows(q_C, WIDTH) * dq, rows(k_C, WIDTH) * dk
    targets = (part.q_s, dq_g, dq), (part.k_s, dk_g, dk), (part.z_s, dz_g, dz)
    for place, _, x in targets:
        place[...] = x.astype(jnp.bfloat16)
    plgpu.commit_smem()
    for place, target, _ in targets:
        plgpu.copy_smem_to_gmem(place, target.at[b, tokens, h, mine])
    plgpu.copy_smem_to_gmem(m.dot.at[2, me], drate_g.at[b, h, n, me])
    plgpu.copy_smem_to_gmem(m.dot.at[3, me], dbeta_g.at[b, h, n, me])
    plgpu.wait_smem_to_gmem(0)


def gradients(
    x: Inputs,
    p: Prepared,
    kept: Kept,
    d: Cotangents,
    do_BTHV,
    scale: float,
    form: Form,
    interpret=None,
) -> Gradients:
    """Everything that each chunk's cotangents say about the inputs."""
    B, T, H, K, V = x.sizes
    N, nk, packed = T // CHUNK, K // WIDTH, x.index_BT is not None
    out_type = Gradients(
        bfloat16(B, T, H, K), bfloat16(B, T, H, K), bfloat16(B, T, H, V), bfloat16(B, T, H, K),
        float32(B, H, N, nk, CHUNK), float32(B, H, N, nk, CHUNK),
    )  # fmt: skip
    launch = plgpu.kernel(
        partial(_kernel, x.sizes, scale, form, packed), out_type=out_type,
        scratch_types=scratch(K, V, packed),
        grid=(N, H, B), grid_names=("chunk", "head", "row"), num_threads=nk, thread_name="warpgroup",
        kernel_name="kda_gradients",
        compiler_params=PARAMS, interpret=interpret,
    )  # fmt: skip
    ids = (x.index_BT, x.real_BT) if packed else ()
    return Gradients(*launch(
        x.rate_H, x.q_BTHK, x.k_BTHK, x.z_BTHK, x.bias_HK, p.whole_BHNK, p.inverse_BHNCC, p.norm_BHNXC,
        x.regained_BHT, lax.bitcast_convert_type(x.v_BTHV, jnp.float16), kept.S_BHNVK,
        kept.written_BHNVC, d.dS_BHNVK, d.d_written_BHNVC, do_BTHV, *ids,
    ))  # fmt: skip
