"""A module of the stack: a read of the residual stream, a norm, a mixer or channel mixer, an addition."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from k3jax.axes import Constant, shard, weight
from k3jax.config import DenseConfig, KdaConfig, MlaConfig, ModelConfig, MoeConfig, Plain
from k3jax.layers.ffn import GLU
from k3jax.layers.kda import KDA, KdaState
from k3jax.layers.mla import MLA, MlaState
from k3jax.layers.moe import MoE
from k3jax.layers.norm import rms_norm
from k3jax.layers.residual import read
from k3jax.report import Report


class Unit(nn.Module):
    """One module of one layer. `part` is the config of a mixer or a channel mixer."""

    part: Any
    cfg: ModelConfig

    @nn.compact
    def __call__(self, bank_SBTD, opens, slot, state, segments):
        """The module's output, to be added to the sum in `slot`.

        Args:
          bank_SBTD: the embedding and the blocks' sums; `slot` is the current block's.
          opens: whether the module opens that block, whose sum then does not exist yet.
          state: the mixer's carried state or None. segments: `Segments` or None.

        Returns:
          ((y_BTD, penalty), (state, Report)); the first pair is differentiable.
        """
        vector = lambda name, value: weight(self, name, "D", dict(D=self.cfg.width), Constant(value), "adamw")
        means = {}
        if isinstance(self.cfg.residual, Plain):
            x_BTD = bank_SBTD[0]
        else:
            query_D, gain_D = vector("read_query", 0.0), vector("read_norm", 1.0)
            count = slot + jnp.where(opens, 0, 1)
            x_BTD, mix_SBT = read(bank_SBTD, query_D, gain_D, count, self.cfg.norm_eps)
            means["read_S"] = mean_over_tokens(mix_SBT, segments)
        x_BTD = shard(rms_norm(x_BTD, vector("norm", 1.0), self.cfg.norm_eps), "BTD")
        (y_BTD, penalty), (state, report) = self._body(x_BTD, state, segments)
        return (shard(y_BTD, "BTD"), penalty), (state, report.with_means(**means))

    def _body(self, x_BTD, state, segments):
        cfg, part = self.cfg, self.part
        wide = jnp.promote_types(x_BTD.dtype, jnp.float32)
        none = jnp.zeros((), wide)
        match part:
            case DenseConfig():
                mlp = GLU(part.hidden, part.activation, cfg.width, cfg.init_std, name="mlp")
                return (mlp(x_BTD), none), (None, Report())
            case MoeConfig():
                moe = MoE(part, cfg.width, cfg.init_std, cfg.norm_eps, name="moe")
                y_BTD, penalty, report = moe(x_BTD, segments)
                return (y_BTD, penalty), (None, report)
            case KdaConfig():
                mixer = KDA(part, cfg.width, cfg.init_std, cfg.norm_eps, name="kda")
            case MlaConfig():
                mixer = MLA(part, cfg.width, cfg.init_std, name="mla")
            case _:
                mixer = Own(part, cfg.width, cfg.init_std, name=part.kind)
        y_BTD, state, report = mixer(x_BTD, state, segments)
        return (y_BTD, none), (state, report)


class Own(nn.Module):
    """A mixer of the user's own, by the protocol of `k3jax.config.Mixer`."""

    part: Any
    width: int
    std: float

    @nn.compact
    def __call__(self, x_BTD, state, segments):
        params = self.param("params", lambda key: self.part.init(key, self.width, self.std))
        before = self.part.empty_state(x_BTD.shape[0], self.width, x_BTD.dtype) if state is None else state
        y_BTD, after, report = self.part.apply(params, x_BTD, before, segments)
        return y_BTD, None if state is None else after, report


def empty_state(part: Any, cfg: ModelConfig, batch: int, dtype) -> Any:
    """What a mixer of this config carries before any token."""
    match part:
        case KdaConfig():
            return KdaState.empty(part, batch, dtype)
        case MlaConfig():
            return MlaState.empty(part, batch, dtype)
        case _:
            return part.empty_state(batch, cfg.width, dtype)


def mean_over_tokens(x_SBT, segments):
    """The mean over real tokens, without gradient."""
    x_SBT = jax.lax.stop_gradient(x_SBT)
    if segments is None:
        return jnp.mean(x_SBT, axis=(1, 2))
    total = jnp.maximum(jnp.sum(segments.real_BT), 1).astype(x_SBT.dtype)
    return jnp.sum(jnp.where(segments.real_BT[None], x_SBT, 0), axis=(1, 2)) / total
