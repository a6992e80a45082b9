"""Gated multi-head latent attention."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct

from k3jax.axes import Constant, Normal, project, weight
from k3jax.config import MlaConfig, NoPE, RoPE
from k3jax.layers.gate import gated
from k3jax.layers.norm import rms_norm
from k3jax.parallel.shards import on_each_shard
from k3jax.report import Report
from pallas_kernels.attention import attention

INNER_EPS = 1e-6  # of the norms on the two latents


@struct.dataclass
class MlaState:
    """The latents of the tokens so far: kv latent + shared key, nothing per head.

    Attributes:
      latent_BSC: normalised latents. shared_BSK: the key dims that heads share (rotated, under RoPE).
      open_BS: bool, whether the token belongs to the segment that may still go on.
      count_B: int32, how many real tokens came before.
    """

    latent_BSC: jax.Array
    shared_BSK: jax.Array
    open_BS: jax.Array
    count_B: jax.Array

    @classmethod
    def empty(cls, cfg: MlaConfig, batch: int, dtype) -> "MlaState":
        return cls(
            jnp.zeros((batch, 0, cfg.latent), dtype),
            jnp.zeros((batch, 0, cfg.shared), dtype),
            jnp.zeros((batch, 0), bool),
            jnp.zeros((batch,), jnp.int32),
        )


def rotate(x_BTHK, position_BT, theta):
    """Turns each pair of neighbouring channels by its position (RoPE), in float32 or more."""
    K = x_BTHK.shape[-1]
    wide = jnp.promote_types(x_BTHK.dtype, jnp.float32)
    rate_K = theta ** (-jnp.arange(0, K, 2, dtype=wide) / K)
    angle_BT1K = position_BT[..., None, None].astype(wide) * rate_K[None, None, None]
    even, odd = x_BTHK[..., 0::2].astype(wide), x_BTHK[..., 1::2].astype(wide)
    cos, sin = jnp.cos(angle_BT1K), jnp.sin(angle_BT1K)
    turned = jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1)
    return turned.reshape(x_BTHK.shape).astype(x_BTHK.dtype)


class MLA(nn.Module):
    """Attention whose keys and values are read from one small latent per token (report, 2.1.2)."""

    cfg: MlaConfig
    width: int
    std: float

    @nn.compact
    def __call__(self, x_BTD, state: MlaState | None, segments):
        """(y_BTD, the next state, a Report). No state: the row starts from nothing, none is returned.

        The Report's max_logit_H is the largest logit among pairs that see each other.
        """
        cfg, init = self.cfg, Normal(self.std)
        before = MlaState.empty(cfg, x_BTD.shape[0], x_BTD.dtype) if state is None else state
        sizes = dict(
            D=self.width,
            H=cfg.heads,
            K=cfg.key + cfg.shared,
            V=cfg.value,
            C=cfg.latent,
            A=cfg.latent + cfg.shared,
        )
        linear = lambda name, spec, x, sizes=sizes: project(self, name, spec, sizes, init, x)

        q_BTHK = self._queries(linear, x_BTD, sizes)
        latent_BTC, shared_BTK = jnp.split(linear("latent", "D->A", x_BTD), [cfg.latent], axis=-1)
        latent_BTC = rms_norm(
            latent_BTC, weight(self, "latent_norm", "C", sizes, Constant(1.0), "adamw"), INNER_EPS
        )
        match cfg.positions:
            case RoPE(theta):
                position_BT = before.count_B[:, None] + jnp.arange(x_BTD.shape[1])[None]
                own, turned = jnp.split(q_BTHK, [cfg.key], axis=-1)
                q_BTHK = jnp.concatenate([own, rotate(turned, position_BT, theta)], axis=-1)
                shared_BTK = rotate(shared_BTK[:, :, None], position_BT, theta)[:, :, 0]
            case NoPE():
                pass

        now = self._remember(before, latent_BTC, shared_BTK, segments)
        k_BSHK = linear("key_up", "C->[H]K", now.latent_BSC, dict(sizes, K=cfg.key))
        v_BSHV = linear("value_up", "C->[H]V", now.latent_BSC)
        shared_BSHK = jnp.broadcast_to(now.shared_BSK[:, :, None], (*k_BSHK.shape[:3], cfg.shared))
        k_BSHK = jnp.concatenate([k_BSHK, shared_BSHK], axis=-1)
        o_BTHV, top_BH = self._attend(q_BTHK, k_BSHK, v_BSHV, *self._indexes(before, x_BTD, segments))

        # The gate reads the attention output in float32: rounding it first biases training.
        y_BTHV = gated(self, cfg.gate, sizes, self.std, x_BTD, o_BTHV)
        y_BTD = linear("out", "HV->D", y_BTHV)
        return y_BTD, None if state is None else now, Report(maxima={"max_logit_H": jnp.max(top_BH, axis=0)})

    def _queries(self, linear, x_BTD, sizes):
        cfg = self.cfg
        if cfg.query_rank is None:
            return linear("query", "D->[H]K", x_BTD)
        sizes = dict(sizes, R=cfg.query_rank)
        x_BTR = linear("query_down", "D->R", x_BTD, sizes)
        x_BTR = rms_norm(x_BTR, weight(self, "query_norm", "R", sizes, Constant(1.0), "adamw"), INNER_EPS)
        return linear("query_up", "R->[H]K", x_BTR, sizes)

    def _remember(self, before: MlaState, latent_BTC, shared_BTK, segments) -> MlaState:
        """The latents so far, with those of this piece behind them."""
        B, T = latent_BTC.shape[:2]
        open_BS, open_BT, count_B = before.open_BS, jnp.ones((B, T), bool), T
        if segments is not None:
            open_BS = open_BS & (segments.last_B == 0)[:, None]
            open_BT = segments.real_BT & (segments.index_BT == segments.last_B[:, None])
            count_B = segments.count_B
        after = lambda old, new: jnp.concatenate([old, new.astype(old.dtype)], axis=1)
        return MlaState(
            after(before.latent_BSC, latent_BTC), after(before.shared_BSK, shared_BTK),
            after(open_BS, open_BT), before.count_B + count_B,
        )  # fmt: skip

    def _indexes(self, before: MlaState, x_BTD, segments):
        """Segment indexes of queries and keys; -1 for padding and for what no query may read."""
        B, T, _ = x_BTD.shape
        index_BT = jnp.zeros((B, T), jnp.int32)
        if segments is not None:
            index_BT = jnp.where(segments.real_BT, segments.index_BT, -1)
        return index_BT, jnp.concatenate([jnp.where(before.open_BS, 0, -1), index_BT], axis=1)

    def _attend(self, *inputs):
        """The op itself, each device on its own rows and heads."""
        cfg = self.cfg

        def run(q, k, v, query_index, key_index):
            o_BTHV, top_H = attention(
                q, k, v, query_index=query_index, key_index=key_index, implementation=cfg.implementation
            )
            return o_BTHV, top_H[None]

        return on_each_shard(run, "BTHK B_HK B_HV BT B_", "BTHV BH")(*inputs)
