"""A mixer and a balancing rule as a user would write them: outside the package, by its protocols."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from k3jax.axes import Normal, make_weight
from k3jax.report import Report


@dataclass(frozen=True)
class RunningMean:
    """y_t = W_out (mean of W_in x over the segment so far)."""

    channels: int = 8

    kind = "mean"

    def init(self, key, width, std):
        sizes = {"D": width, "R": self.channels}
        into, out = jax.random.split(key)
        return {
            "into": make_weight(into, "D->R", sizes, Normal(std)),
            "out": make_weight(out, "R->D", sizes, Normal(std)),
        }

    def apply(self, params, x_BTD, state, segments):
        sum_BR, count_B = state
        u_BTR = jnp.einsum("btd,dr->btr", x_BTD, params["into"].astype(x_BTD.dtype)).astype(jnp.float32)
        real_BT = jnp.ones(x_BTD.shape[:2]) if segments is None else segments.real_BT.astype(jnp.float32)
        index_BT = jnp.zeros(x_BTD.shape[:2], jnp.int32) if segments is None else segments.index_BT
        same_BTS = (index_BT[:, :, None] == index_BT[:, None, :]) & jnp.tri(x_BTD.shape[1], dtype=bool)[None]
        seen_BTS = same_BTS * real_BT[:, None, :]
        carried_BT = (index_BT == 0).astype(jnp.float32)
        total_BTR = jnp.einsum("bts,bsr->btr", seen_BTS, u_BTR) + carried_BT[..., None] * sum_BR[:, None]
        count_BT = jnp.sum(seen_BTS, axis=-1) + carried_BT * count_B[:, None]
        mean_BTR = total_BTR / jnp.maximum(count_BT, 1)[..., None]
        y_BTD = jnp.einsum("btr,rd->btd", mean_BTR.astype(x_BTD.dtype), params["out"].astype(x_BTD.dtype))
        return y_BTD, (total_BTR[:, -1], count_BT[:, -1]), Report()

    def empty_state(self, batch, width, dtype):
        return jnp.zeros((batch, self.channels)), jnp.zeros(batch)

    def flops(self, width, length):
        return 4.0 * width * self.channels + length * self.channels

    def context_rule(self):
        return "state"


@dataclass(frozen=True)
class Proportional:
    """Moves each bias by `rate` times its expert's relative lack of tokens."""

    rate: float = 0.1

    def local_stats(self, scores_ME, cutoff_M, bias_E, real_M):
        return {"score": jnp.sum(jnp.where(real_M[:, None], scores_ME, 0), axis=0)}

    def update(self, bias_E, stats, load_E, memory):
        share_E = load_E / jnp.maximum(jnp.mean(load_E.astype(jnp.float32)), 1)
        return bias_E + self.rate * (1 - share_E), {"updates": memory["updates"] + 1}

    def empty_memory(self, experts):
        return {"updates": jnp.zeros((), jnp.int32)}
