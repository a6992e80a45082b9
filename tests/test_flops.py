import functools
from dataclasses import dataclass, fields

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from configs import k3
from k3jax.config import (
    BlockAttnRes,
    DenseConfig,
    FullAttnRes,
    KdaConfig,
    LatentMoeConfig,
    LowRank,
    MlaConfig,
    ModelConfig,
    MoeConfig,
    NoGate,
    Plain,
    replace,
)
from k3jax.flops import CHUNK, Flops, Parts, kda_chunkwise, kda_recurrence, model_flops, si, utilisation
from k3jax.layers.residual import read
from k3jax.model import K3
from k3jax.parameters import counts, shapes
from k3jax.unit import Unit
from pallas_kernels.grouped_matmul import alignment

ROWS, LENGTH, WIDTH = 2, 64, 256
MLA = MlaConfig(heads=4, key=64, shared=32, value=64, latent=64, query_rank=96, implementation="reference")
KDA = KdaConfig(heads=2, key=64, value=64)
DENSE = DenseConfig(hidden=512)
LATENT = LatentMoeConfig(experts=4, active=2, hidden=128, latent=128, shared=2)


def single(mixer=MLA, channel=DENSE, **kw):
    """A model of one layer with these parts."""
    dense, moe = (channel, None) if isinstance(channel, DenseConfig) else (None, channel)
    settings = {"width": WIDTH, "vocabulary": 512, "depth": 1, "full_layers": 1, "residual": Plain()} | kw
    return ModelConfig(**settings, full=mixer, dense=dense, moe=moe, dense_layers=int(moe is None))


def xla_flops(f, *args, compiled=True):
    """XLA's own count. (It counts a loop's body once: nothing here loops more than once.)"""
    lowered = jax.jit(f).lower(*args)
    return (lowered.compile() if compiled else lowered).cost_analysis()["flops"]


def unit_flops(cfg, part, length):
    """XLA's count per token of one module."""
    unit = Unit(part, cfg)
    rest = (jnp.bool_(True), jnp.int32(0), None, None)
    bank = jax.ShapeDtypeStruct((1, ROWS, length, cfg.width), jnp.float32)
    params = nn.meta.unbox(jax.eval_shape(lambda x: unit.init(jax.random.key(0), x, *rest), bank)["params"])
    f = lambda params, bank: unit.apply({"params": params}, bank, *rest)[0]
    return xla_flops(f, params, bank) / (ROWS * length)


def as_computed(parts, length, moe=LATENT):
    """The closed form with what these implementations do beside it: masked pairs, rows that fill a block."""
    slots = ROWS * length * moe.active
    block = alignment(slots, moe.experts)
    rows = (slots + moe.experts * (block - 1)) // block * block
    return parts.total + parts.attention * (2 * length / (length + 1) - 1) + parts.routed * (rows / slots - 1)


SINGLE = {
    "mla": single(),
    "mla_wide_query": single(replace(MLA, query_rank=None, key=32, value=96)),
    "mla_low_rank_gate": single(replace(MLA, gate=LowRank(32))),
    "mla_no_gate": single(replace(MLA, gate=NoGate(), heads=2)),
    "latent_moe": single(channel=LATENT),
    "moe": single(channel=MoeConfig(experts=4, active=2, hidden=128, shared=1)),
    "no_shared": single(channel=replace(LATENT, shared=0)),
}


@pytest.mark.parametrize("case", SINGLE)
def test_modules_are_what_xla_counts(case):
    """Beside products XLA counts elementwise work, which falls with the width."""
    cfg = SINGLE[case]
    mixer, channel = cfg.layers[0]
    length = 512 if isinstance(channel, MoeConfig) else LENGTH
    closed = replace(model_flops(cfg, length).parts, head=0.0)
    if case.startswith("mla"):
        counted, closed = unit_flops(cfg, mixer, length), replace(closed, dense=0.0)
    else:
        counted, closed = (
            unit_flops(cfg, channel, length),
            replace(closed, mla_projections=0.0, attention=0.0),
        )
    moe = channel if isinstance(channel, MoeConfig) else LATENT
    assert counted == pytest.approx(as_computed(closed, length, moe), rel=0.05)
    assert counted > as_computed(closed, length, moe)


def test_a_dense_module_is_what_xla_counts():
    parts = model_flops(single(), LENGTH).parts
    assert unit_flops(single(), DENSE, LENGTH) == pytest.approx(parts.dense, rel=0.01)


@pytest.mark.parametrize("kda", [KDA, replace(KDA, gate=LowRank(64), key=32)], ids=["full", "low_rank"])
def test_kda_projections_are_what_xla_counts(kda):
    """The op itself is left out of both: zero heads' worth of pairs would be zero work."""
    cfg, parts = single(kda), model_flops(single(kda), LENGTH).parts
    wide = replace(cfg, width=2 * WIDTH)
    difference = unit_flops(wide, kda, LENGTH) - unit_flops(cfg, kda, LENGTH)
    assert difference == pytest.approx(
        model_flops(wide, LENGTH).parts.kda_projections - parts.kda_projections, rel=0.02
    )


def test_the_recurrence_is_what_xla_counts():
    def token(S_KV, q_K, k_K, v_V, decay_K, beta):
        S_KV = decay_K[:, None] * S_KV
        S_KV = S_KV + (beta * k_K)[:, None] * (v_V - k_K @ S_KV)[None]
        return S_KV, q_K @ S_KV

    K, V = 128, 96
    S, k, v = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((K, V), (K,), (V,)))
    counted = xla_flops(token, S, k, k, v, k, jax.ShapeDtypeStruct((), jnp.float32), compiled=False)
    assert counted == pytest.approx(kda_recurrence(KdaConfig(heads=1, key=K, value=V)), rel=0.01)


def test_the_chunkwise_form_is_what_xla_counts():
    """One chunk written out row by row, so that no masked pair is computed."""
    C, K, V = 8, 48, 32

    def chunk(q, k, v, S):
        dot = lambda a, b: jnp.dot(a, b)
        A = [dot(k[:i], k[i]) for i in range(C)]
        T = {(i, i): 1.0 for i in range(C)}
        for i in range(C):
            for j in range(i):
                T[i, j] = -dot(A[i][j:i], jnp.stack([jnp.asarray(T[m, j]) for m in range(j, i)]))
        kv = jnp.concatenate([k, v], axis=1)
        wu = jnp.stack(
            [dot(jnp.stack([jnp.asarray(T[i, j]) for j in range(i + 1)]), kv[: i + 1]) for i in range(C)]
        )
        v_new = wu[:, K:] - dot(wu[:, :K], S)
        o = dot(q, S) + jnp.stack([dot(dot(k[: i + 1], q[i]), v_new[: i + 1]) for i in range(C)])
        return o, S + dot(k.T, v_new)

    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)
    counted = xla_flops(chunk, shape(C, K), shape(C, K), shape(C, V), shape(K, V), compiled=False)
    assert counted / C == pytest.approx(kda_chunkwise(KdaConfig(heads=1, key=K, value=V), C), rel=0.03)


def test_both_forms_of_kda_are_of_a_size():
    """At K = V = 128 chunks of 64 cost a fifth more than the recurrence, and are matrix products."""
    cfg = KdaConfig(heads=3)
    assert 1.1 < kda_chunkwise(cfg, 8192) / kda_recurrence(cfg) < 1.3
    assert kda_chunkwise(cfg, CHUNK) == kda_chunkwise(cfg, 2**20)


@pytest.mark.parametrize("sources", [2, 9])
def test_reads_are_what_xla_counts(sources):
    bank = jax.ShapeDtypeStruct((sources, 1, 8, WIDTH), jnp.float32)
    vector = jax.ShapeDtypeStruct((WIDTH,), jnp.float32)
    counted = xla_flops(lambda x, q, g: read(x, q, g, sources, 1e-5)[0], bank, vector, vector) / 8
    assert counted == pytest.approx(6 * WIDTH * sources, rel=0.05)


def test_every_read_weighs_what_came_before():
    """K3's plan at 5 layers, blocks of 2: the embedding, then as many sums as have been started."""
    moe = single(channel=LATENT, depth=5, residual=BlockAttnRes(2))
    reads = [0, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4]  # mixer and channel mixer of each layer, and the last
    assert model_flops(moe, LENGTH).parts.reads == 6 * WIDTH * sum(reads)
    full = replace(moe, depth=2, residual=FullAttnRes())
    assert model_flops(full, LENGTH).parts.reads == 6 * WIDTH * sum([0, 2, 3, 4, 5])
    assert model_flops(replace(moe, residual=Plain()), LENGTH).parts.reads == 0


# Two layers, every mechanism, each compiled apart: no loop hides a layer.
TWO = ModelConfig(
    width=WIDTH, vocabulary=512, depth=2, linear=replace(MLA, query_rank=None), full=MLA, full_layers=2,
    dense=DENSE, moe=LATENT, residual=Plain(), remat="none",
)  # fmt: skip


@functools.lru_cache
def whole_flops(cfg, gradient, compiled):
    """XLA's count per token of a model."""
    tokens = jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.int32)
    weigh = jax.ShapeDtypeStruct((ROWS, LENGTH, cfg.vocabulary), jnp.float32)
    f = lambda params, tokens, weigh: jnp.sum(K3(cfg).apply({"params": params}, tokens).logits * weigh)
    f = jax.grad(f) if gradient else f
    return xla_flops(f, nn.meta.unbox(shapes(cfg)), tokens, weigh, compiled=compiled) / (ROWS * LENGTH)


def test_a_model_is_what_xla_counts():
    """Its second layer is the difference of two depths."""
    one, both = (replace(TWO, depth=depth, full_layers=(2,)[: depth - 1]) for depth in (1, 2))
    parts = [model_flops(cfg, LENGTH).parts for cfg in (one, both)]
    counted = [whole_flops(cfg, False, True) for cfg in (one, both)]
    expected = [as_computed(p, LENGTH) for p in parts]
    assert counted[1] == pytest.approx(expected[1], rel=0.05)
    assert counted[1] - counted[0] == pytest.approx(expected[1] - expected[0], rel=0.05)


def test_a_gradient_is_twice_the_forward_pass():
    flops = model_flops(TWO, LENGTH)
    assert flops.training == 3 * flops.forward
    assert flops.recomputed == 0
    assert whole_flops(TWO, True, True) == pytest.approx(3 * as_computed(flops.parts, LENGTH), rel=0.05)


@pytest.mark.parametrize("remat", ["products", "ops", "module"])
def test_recomputation_is_what_xla_counts(remat):
    """As XLA gets it, with the attention that keeps its results. Norms and gates are computed again too."""
    fast = replace(MLA, implementation="xla")
    cfg = replace(TWO, linear=replace(fast, query_rank=None), full=fast)
    again = whole_flops(replace(cfg, remat=remat), True, False) - whole_flops(cfg, True, False)
    flops = model_flops(replace(cfg, remat=remat), LENGTH)
    parts = flops.parts
    extra = as_computed(parts, LENGTH) - parts.total
    if remat == "ops":
        extra -= parts.attention * (2 * LENGTH / (LENGTH + 1) - 1)
    assert again == pytest.approx(flops.recomputed + extra, rel=0.08)


def test_full_k3_by_hand():
    """Twice the active parameters, then what no parameter tells: pairs of tokens, KDA's state, reads."""
    flops = model_flops(k3.model(), 8192)
    D, HK = 7168, 96 * 128
    vectors = 93 * 2 * 3 * D + 3 * D  # norms, and a query and a norm for each read
    vectors += 69 * (96 + HK + 128) + 24 * (512 + 1536) + 92 * (896 + 3584)
    assert flops.weights == counts(k3.model()).active - vectors == 104_189_612_640 - vectors
    assert flops.parts.attention == 24 * 96 * (192 + 128) * 8193
    assert flops.parts.routed == 92 * 16 * 2 * 3 * 3584 * 3072
    assert flops.parts.kda_recurrence == pytest.approx(
        69 * 96 * (6 * 128**2 + (5 * 64 + 3) * 128 + 64**2 / 3)
    )
    assert flops.forward == pytest.approx(2 * 104.19e9 + 6.04e9 + 0.934e9 + 0.043e9, rel=1e-3)
    assert flops.recurrence == 69 * 96 * 7 * 128**2
    assert 2 * flops.weights / flops.forward > 0.96
    assert flops.six_n == 6 * flops.weights
    at_a_million = model_flops(k3.model(), 2**20)
    assert at_a_million.parts.attention > 0.75 * at_a_million.forward  # where 6N misleads


@dataclass(frozen=True)
class Convolution:
    """A mixer of one's own."""

    taps: int = 8
    kind = "convolution"
    init = apply = empty_state = context_rule = lambda self, *args: None

    def flops(self, width, length):
        return 2 * width * min(self.taps, length)


def test_a_mixer_of_ones_own_says_what_it_costs():
    cfg = single(Convolution())
    assert model_flops(cfg, 100).parts.own_mixers == 2 * WIDTH * 8
    assert model_flops(cfg, 4).parts.own_mixers == 2 * WIDTH * 4
    assert model_flops(cfg, 100).six_n == model_flops(cfg, 4).six_n


def test_an_empty_row_is_refused():
    with pytest.raises(ValueError, match="length=0"):
        model_flops(TWO, 0)


def test_tied_embeddings_still_have_a_head():
    tied = model_flops(replace(TWO, tie_embeddings=True), LENGTH)
    assert tied == model_flops(TWO, LENGTH)
    assert tied.parts.embedding == 0
    assert tied.parts.head == 2 * WIDTH * 512


def test_utilisation_names_the_device():
    flops = Flops(length=1, parts=Parts(head=1e9), recomputed=1e9, recurrence=0, weights=5e8)
    assert utilisation(flops, 1e6, 4, "NVIDIA H200") == {
        "mfu (NVIDIA H200)": pytest.approx(3e15 / (4 * 989e12))
    }
    assert utilisation(flops, 1e6, 1, "TPU v5 lite") == {"mfu (TPU v5 lite)": pytest.approx(3e15 / 197e12)}
    assert utilisation(flops, 1e6, 1, "cpu") == {}
    assert utilisation(flops, 1e6, 1, "NVIDIA H100 with a difference") == {}


def test_lines_for_people():
    first, second = model_flops(k3.model(), 8192).lines()
    assert first.startswith("646 GFLOP a token to train at length 8,192 (6N: 625 GFLOP)")
    assert second.startswith("215 GFLOP forward: routed 45.1%, kda projections 28.4%, shared 11.3%")
    names = {x.name for x in fields(Parts)} - {"embedding", "own_mixers"}
    assert all(name.replace("_", " ") in second for name in names)
    assert [si(x) for x in (0.0, 999.0, 1e3, 2.5e12, 3e18)] == [
        "0 FLOP",
        "999 FLOP",
        "1 kFLOP",
        "2.5 TFLOP",
        "3 EFLOP",
    ]


def test_parts_add_up():
    ones = Parts(*np.ones(len(fields(Parts))).tolist())
    assert (ones + ones).total == 2 * len(fields(Parts))
