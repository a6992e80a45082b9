"""The Kimi Delta Attention mixer."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct
from jax.ad_checkpoint import checkpoint_name

from k3jax.axes import Constant, Normal, Uniform, project, weight
from k3jax.config import KdaConfig
from k3jax.layers.conv import conv_tail, short_conv
from k3jax.layers.gate import gated
from k3jax.layers.norm import rms_norm
from k3jax.parallel.shards import on_each_shard
from k3jax.report import Report
from pallas_kernels.kda import kda_gated


@struct.dataclass
class KdaState:
    """What a KDA layer carries from one piece of a row to the next; its size knows no length.

    Attributes:
      tail_BWHX: the last W - 1 convolution inputs: query, key and value channels side by side.
      S_BHKV: the memory, at least float32.
    """

    tail_BWHX: jax.Array
    S_BHKV: jax.Array

    @classmethod
    def empty(cls, cfg: KdaConfig, batch: int, dtype) -> "KdaState":
        B, H, K, V = batch, cfg.heads, cfg.key, cfg.value
        tail_BWHX = jnp.zeros((B, cfg.taps - 1, H, 2 * K + V), dtype)
        return cls(tail_BWHX, jnp.zeros((B, H, K, V), jnp.promote_types(dtype, jnp.float32)))


@dataclass(frozen=True)
class StepBias:
    """softplus^-1 of a step drawn log-uniformly from [low, high]."""

    low: float = 1e-3
    high: float = 0.1
    elementwise = True

    def __call__(self, key, shape, dtype):
        log_step = jax.random.uniform(key, shape, dtype, math.log(self.low), math.log(self.high))
        return jnp.log(jnp.expm1(jnp.exp(log_step)))

    def __str__(self):
        return f"softplus^-1(log-uniform [{self.low:g}, {self.high:g}])"


@dataclass(frozen=True)
class LogUniformRate:
    """log of U(low, high)."""

    low: float = 1.0
    high: float = 16.0
    elementwise = True

    def __call__(self, key, shape, dtype):
        return jnp.log(jax.random.uniform(key, shape, dtype, self.low, self.high))

    def __str__(self):
        return f"log U({self.low:g}, {self.high:g})"


class KDA(nn.Module):
    """A delta rule whose memory forgets each key channel at its own rate (K3 report, 2.1.1)."""

    cfg: KdaConfig
    width: int
    std: float
    norm_eps: float

    @nn.compact
    def __call__(self, x_BTD, state: KdaState | None, segments):
        """(y_BTD, the next state, a Report). No state: the row starts from nothing, none is returned."""
        cfg, init = self.cfg, Normal(self.std)
        sizes = dict(D=self.width, H=cfg.heads, K=cfg.key, V=cfg.value, W=cfg.taps, R=cfg.key)
        linear = lambda name, spec, x: project(self, name, spec, sizes, init, x)
        # One convolution serves all three: every channel has its own taps. They start at torch's own
        # scale: at 0.02 the head norm's eps would swallow the output.
        names = ("query", "key", "value")
        raw_BTHX = jnp.concatenate(
            [
                linear(name, spec, x_BTD)
                for name, spec in zip(names, ("D->[H]K", "D->[H]K", "D->[H]V"), strict=True)
            ],
            axis=-1,
        )
        taps = Uniform(cfg.taps**-0.5)
        taps_HXW = jnp.concatenate(
            [
                weight(self, f"{name}_taps", spec, sizes, taps, "adamw")
                for name, spec in zip(names, ("HKW", "HKW", "HVW"), strict=True)
            ],
            axis=1,
        )
        tail_BWHX = None if state is None else state.tail_BWHX
        mixed_BTHX = jax.nn.silu(short_conv(raw_BTHX, taps_HXW, tail_BWHX, segments)).astype(x_BTD.dtype)
        q, k, v = jnp.split(mixed_BTHX, [cfg.key, 2 * cfg.key], axis=-1)
        z_BTHK = linear("decay_up", "R->HK", linear("decay_down", "D->R", x_BTD))
        beta_BTH = project(self, "beta", "D->H", sizes, init, x_BTD, "adamw")
        rate = Constant(0.0) if cfg.rate_init == "one" else LogUniformRate()
        a_log_H = weight(self, "a_log", "H", sizes, rate, "adamw")
        dt_bias_HK = weight(self, "dt_bias", "HK", sizes, StepBias(), "adamw")

        S_BHKV = KdaState.empty(cfg, x_BTD.shape[0], x_BTD.dtype).S_BHKV if state is None else state.S_BHKV
        ids_BT = None
        if segments is not None:
            S_BHKV = jnp.where(segments.continues_B[:, None, None, None], S_BHKV, 0)
            ids_BT = segments.ids_BT
        o_BTHV, S_BHKV = self._recall(q, k, v, z_BTHK, beta_BTH, a_log_H, dt_bias_HK, S_BHKV, ids_BT)

        o_BTHV = checkpoint_name(o_BTHV, "op")
        o_BTHV = o_BTHV.astype(jnp.promote_types(o_BTHV.dtype, jnp.float32))
        o_BTHV = rms_norm(o_BTHV, weight(self, "norm", "V", sizes, Constant(1.0), "adamw"), self.norm_eps)
        y_BTHV = gated(self, cfg.gate, sizes, self.std, x_BTD, o_BTHV)
        y_BTD = project(self, "out", "HV->D", sizes, init, y_BTHV)
        if state is None:
            return y_BTD, None, Report()
        return y_BTD, KdaState(conv_tail(raw_BTHX, cfg.taps, tail_BWHX, segments), S_BHKV), Report()

    def _recall(self, *inputs):
        """The op itself, each device on its own rows and heads."""

        def run(q, k, v, z, beta, a_log, dt_bias, S, ids):
            return kda_gated(
                q, k, v, z, beta, a_log, dt_bias,
                lower_bound=self.cfg.decay.lower_bound, initial_state=S, segment_ids=ids,
                implementation=self.cfg.implementation,
            )  # fmt: skip

        letters = "BTHK BTHK BTHV BTHK BTH H HK BHKV BT"
        return on_each_shard(run, letters, "BTHV BHKV")(*inputs)
