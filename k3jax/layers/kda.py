"""The Kimi Delta Attention mixer."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct

from k3jax.axes import Init, constant, normal, project, uniform, weight
from k3jax.config import Bounded, KdaConfig, Unbounded
from k3jax.layers.conv import conv_tail, short_conv
from k3jax.layers.gate import gated
from k3jax.layers.norm import rms_norm
from k3jax.parallel.shards import on_each_shard
from pallas_kernels.kda import kda_gated


@struct.dataclass
class KdaState:
    """What a KDA layer carries from one piece of a row to the next; its size knows no length.

    Attributes:
      query_tail_BWHK, key_tail_BWHK, value_tail_BWHV: the last W - 1 convolution inputs.
      S_BHKV: the memory, at least float32.
    """

    query_tail_BWHK: jax.Array
    key_tail_BWHK: jax.Array
    value_tail_BWHV: jax.Array
    S_BHKV: jax.Array

    @classmethod
    def empty(cls, cfg: KdaConfig, batch: int, dtype) -> "KdaState":
        B, H, K, V, W = batch, cfg.heads, cfg.key, cfg.value, cfg.taps
        tail = lambda X: jnp.zeros((B, W - 1, H, X), dtype)
        return cls(tail(K), tail(K), tail(V), jnp.zeros((B, H, K, V), jnp.promote_types(dtype, jnp.float32)))


def _dt_bias(key, shape, dtype):
    """softplus^-1 of a step drawn log-uniformly from [1e-3, 0.1]."""
    low, high = jnp.log(1e-3), jnp.log(0.1)
    return jnp.log(jnp.expm1(jnp.exp(jax.random.uniform(key, shape, dtype, low, high))))


DT_BIAS = Init("softplus^-1(log-uniform [1e-3, 0.1])", _dt_bias)
LOG_UNIFORM_RATE = Init(
    "log U(1, 16)", lambda key, shape, dtype: jnp.log(jax.random.uniform(key, shape, dtype, 1.0, 16.0))
)


class KDA(nn.Module):
    """A delta rule whose memory forgets each key channel at its own rate (K3 report, 2.1.1)."""

    cfg: KdaConfig
    width: int
    std: float
    norm_eps: float

    @nn.compact
    def __call__(self, x_BTD, state: KdaState | None, segments):
        """(y_BTD, the next state, metrics). No state: the row starts from nothing, none is returned."""
        cfg, init = self.cfg, normal(self.std)
        sizes = dict(D=self.width, H=cfg.heads, K=cfg.key, V=cfg.value, W=cfg.taps, R=cfg.key)
        linear = lambda name, spec, x: project(self, name, spec, sizes, init, x)
        tails = [None] * 3
        if state is not None:
            tails = [state.query_tail_BWHK, state.key_tail_BWHK, state.value_tail_BWHV]

        raw = [linear("query", "D->[H]K", x_BTD), linear("key", "D->[H]K", x_BTD), linear("value", "D->[H]V", x_BTD)]
        # Taps start at torch's own scale: at 0.02 the head norm's eps would swallow the output.
        taps = [
            weight(self, f"{name}_taps", spec, sizes, uniform(cfg.taps**-0.5), "adamw")
            for name, spec in (("query", "HKW"), ("key", "HKW"), ("value", "HVW"))
        ]
        q, k, v = (
            jax.nn.silu(short_conv(x, w, tail, segments)).astype(x_BTD.dtype)
            for x, w, tail in zip(raw, taps, tails, strict=True)
        )
        z_BTHK = linear("decay_up", "R->HK", linear("decay_down", "D->R", x_BTD))
        beta_BTH = project(self, "beta", "D->H", sizes, init, x_BTD, "adamw")
        rate = constant(0.0) if cfg.rate_init == "one" else LOG_UNIFORM_RATE
        a_log_H = weight(self, "a_log", "H", sizes, rate, "adamw")
        dt_bias_HK = weight(self, "dt_bias", "HK", sizes, DT_BIAS, "adamw")

        S_BHKV = KdaState.empty(cfg, x_BTD.shape[0], x_BTD.dtype).S_BHKV if state is None else state.S_BHKV
        ids_BT = None
        if segments is not None:
            S_BHKV = jnp.where(segments.continues_B[:, None, None, None], S_BHKV, 0)
            ids_BT = segments.ids_BT
        o_BTHV, S_BHKV = self._recall(q, k, v, z_BTHK, beta_BTH, a_log_H, dt_bias_HK, S_BHKV, ids_BT)

        o_BTHV = o_BTHV.astype(jnp.promote_types(o_BTHV.dtype, jnp.float32))
        o_BTHV = rms_norm(o_BTHV, weight(self, "norm", "V", sizes, constant(1.0), "adamw"), self.norm_eps)
        y_BTHV = gated(self, cfg.gate, sizes, self.std, x_BTD, o_BTHV)
        y_BTD = project(self, "out", "HV->D", sizes, init, y_BTHV)
        if state is None:
            return y_BTD, None, {}
        tails = [conv_tail(x, cfg.taps, tail, segments) for x, tail in zip(raw, tails, strict=True)]
        return y_BTD, KdaState(*tails, S_BHKV), {}

    def _recall(self, *inputs):
        """The op itself, each device on its own rows and heads."""
        match self.cfg.decay:
            case Bounded(floor):
                lower_bound = floor
            case Unbounded():
                lower_bound = None

        def run(q, k, v, z, beta, a_log, dt_bias, S, ids):
            return kda_gated(
                q, k, v, z, beta, a_log, dt_bias,
                lower_bound=lower_bound, initial_state=S, segment_ids=ids, implementation=self.cfg.implementation,
            )  # fmt: skip

        letters = "BTHK BTHK BTHV BTHK BTH H HK BHKV BT"
        return on_each_shard(run, letters, "BTHV BHKV")(*inputs)
