"""Mixtures of experts: the router, the dispatch, Stable LatentMoE and its full-width sibling."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import linen as nn

from k3jax.axes import Constant, Normal, project, weight
from k3jax.config import Activation, LatentMoeConfig, MoeConfig
from k3jax.layers import balance
from k3jax.layers.activations import glu
from k3jax.layers.ffn import GLU
from k3jax.layers.norm import rms_norm
from k3jax.parallel.shards import on_each_shard
from k3jax.report import Report
from pallas_kernels.grouped_matmul import alignment, grouped_matmul


class MoE(nn.Module):
    """y = Shared(x) + W_up RMSNorm(sum_chosen p_i E_i(W_down x)) (K3 report, eq. 11).

    With a plain MoeConfig the experts read x itself and W_down, W_up and the norm are not there.
    Dropless: every real token reaches every expert it chose.
    """

    cfg: MoeConfig
    width: int
    std: float
    norm_eps: float

    @nn.compact
    def __call__(self, x_BTD, segments):
        """(y_BTD, the balancing penalty summed over tokens, a Report: load_E and the rule's sums)."""
        cfg, init = self.cfg, Normal(self.std)
        sizes = dict(D=self.width, E=cfg.experts, F=cfg.hidden)
        real_BT = jnp.ones(x_BTD.shape[:2], bool) if segments is None else segments.real_BT

        # The router runs in float32 whatever the rest does: scores 1e-3 apart decide who is chosen.
        wide = jnp.promote_types(x_BTD.dtype, jnp.float32)
        logits_BTE = project(self, "router", "D->E", sizes, init, x_BTD.astype(wide), precision="highest")
        bias_E = weight(self, "router_bias", "E", sizes, Constant(0.0), "balance")
        scores_BTE = jax.nn.sigmoid(logits_BTE)
        # On each device's own rows: XLA's top_k would gather the scores of all devices on each.
        choose = on_each_shard(partial(chosen_and_counted, cfg), "BT_ _ BT", "BT_ BT_ B B")
        chosen_BTk, p_BTk, load_1E, stats = choose(scores_BTE, bias_E, real_BT)
        penalty = balance.penalty(cfg.balance, scores_BTE, chosen_BTk, real_BT)

        match cfg:
            case LatentMoeConfig(latent=latent):
                sizes["L"], inner = latent, "L"
                u_BTL = project(self, "down", "D->L", sizes, init, x_BTD)
            case _:
                inner, u_BTL = "D", x_BTD
        expert = lambda name, spec: weight(self, f"experts_{name}", spec, sizes, init).astype(x_BTD.dtype)
        run = partial(routed, cfg.activation, cfg.implementation)
        u_BTL = on_each_shard(run, "BT_ BT_ BT_ BT ___ ___ ___", "BT_")(
            u_BTL, chosen_BTk, p_BTk, real_BT,
            expert("gate", f"E:{inner}->F"), expert("up", f"E:{inner}->F"), expert("down", f"E:F->{inner}"),
        )  # fmt: skip
        y_BTD = u_BTL
        if isinstance(cfg, LatentMoeConfig):
            if cfg.norm == "rms":
                gain_L = weight(self, "norm", "L", sizes, Constant(1.0), "adamw")
                u_BTL = rms_norm(u_BTL, gain_L, self.norm_eps)
            y_BTD = project(self, "up", "L->D", sizes, init, u_BTL)
        if cfg.shared:
            # The shared experts are one MLP of their summed width.
            shared = GLU(cfg.shared * cfg.hidden, cfg.activation, self.width, self.std, name="shared")
            y_BTD = y_BTD + shared(x_BTD)
        return y_BTD, penalty, Report(sums={"load_E": load_1E, "balance": stats})


def chosen_and_counted(cfg: MoeConfig, scores_BTE, bias_E, real_BT):
    """(chosen experts, their weights, tokens per expert, the balancing rule's statistics) of one device.

    Counts lead with an axis of one, for the device: they are added up once a step, not here.
    """
    chosen_BTk, p_BTk, cutoff_BT = route(cfg, scores_BTE, bias_E)
    load_E = jnp.zeros(cfg.experts, jnp.int32).at[chosen_BTk].add(real_BT[..., None].astype(jnp.int32))
    flat = lambda x: jax.lax.stop_gradient(x.reshape(-1, *x.shape[2:]))
    stats = balance.local_stats(cfg.balance, flat(scores_BTE), flat(cutoff_BT), bias_E, real_BT.reshape(-1))
    return chosen_BTk, p_BTk, *jax.tree.map(lambda x: x[None], (load_E, stats))


def route(cfg: MoeConfig, scores_BTE, bias_E):
    """(chosen experts [B, T, k], their mixture weights, the best biased score not chosen [B, T]).

    The bias decides who is chosen and nothing else (report, eq. 13).
    """
    biased_BTE = jax.lax.stop_gradient(scores_BTE + bias_E[None, None])
    best_BTk, chosen_BTk = jax.lax.top_k(biased_BTE, cfg.active + 1)
    chosen_BTk = chosen_BTk[..., : cfg.active]
    p_BTk = jnp.take_along_axis(scores_BTE, chosen_BTk, axis=-1)
    if cfg.normalise:
        # Scores may vanish, sigmoid(-112) being 0; and 1e-15 leaves room for its square in the gradient.
        p_BTk = p_BTk / jnp.maximum(jnp.sum(p_BTk, axis=-1, keepdims=True), 1e-15)
    return chosen_BTk, cfg.scale * p_BTk, best_BTk[..., cfg.active]


def routed(
    activation: Activation, implementation, x_BTL, chosen_BTk, p_BTk, real_BT, gate_ELF, up_ELF, down_EFL
):
    """sum_i p_i E_i(x) for the tokens of one device: sort by expert, multiply, weigh, add up."""
    B, T, L = x_BTL.shape
    E, k = gate_ELF.shape[0], chosen_BTk.shape[-1]
    chosen_Mk = jnp.where(real_BT[..., None], chosen_BTk, E).reshape(-1, k)  # padding goes nowhere
    block = alignment(chosen_Mk.size, E)
    place_Mk, source_R, sizes_E = dispatch_plan(chosen_Mk, E, block)
    multiply = partial(grouped_matmul, group_sizes=sizes_E, alignment=block, implementation=implementation)
    rows_RL = spread(x_BTL.reshape(-1, L), place_Mk, source_R)
    rows_RF = glu(activation, multiply(rows_RL, gate_ELF), multiply(rows_RL, up_ELF))
    rows_RL = multiply(rows_RF, down_EFL)
    return gather_back(rows_RL, p_BTk.reshape(-1, k), place_Mk, source_R).reshape(B, T, L)


def dispatch_plan(chosen_Mk, experts: int, block: int):
    """Where each (token, choice) goes in rows sorted by expert, each expert's part a whole number
    of blocks.

    Args:
      chosen_Mk: expert numbers; `experts` sends a choice nowhere.

    Returns:
      (place_Mk: the row of each choice, R where it goes nowhere; source_R: the choice in each row,
      M k where there is none; sizes_E: rows per expert, multiples of `block`). R is static.
    """
    M, k = chosen_Mk.shape
    E, slots = experts, M * k
    R = (slots + E * (block - 1)) // block * block
    chosen_S = chosen_Mk.reshape(-1)
    order_S = jnp.argsort(chosen_S, stable=True)
    sorted_S = chosen_S[order_S]
    counts_E = jnp.zeros(E, jnp.int32).at[chosen_S].add(1, mode="drop")
    sizes_E = _whole(counts_E + (block - 1), block) * block
    padding_E = sizes_E - counts_E
    shift_E = jnp.cumsum(padding_E, dtype=jnp.int32) - padding_E
    order_S = order_S.astype(jnp.int32)
    position_S = jnp.arange(slots, dtype=jnp.int32)
    row_S = jnp.where(sorted_S < E, position_S + shift_E[jnp.minimum(sorted_S, E - 1)], R)
    place_S = jnp.zeros(slots, jnp.int32).at[order_S].set(row_S, unique_indices=True)
    source_R = jnp.full(R, slots, jnp.int32).at[row_S].set(order_S, mode="drop")
    return place_S.reshape(M, k), source_R, sizes_E


def _whole(x, by: int):
    """x // by where nothing is negative: `//` would compile a case for each sign."""
    return jax.lax.div(x, jnp.asarray(by, x.dtype))


def _take(x, index):
    """x[index] for indexes from 0, zero where one is beyond the end."""
    if not x.shape[0]:
        return jnp.zeros((*index.shape, *x.shape[1:]), x.dtype)
    return x.at[index].get(mode="fill", fill_value=0, wrap_negative_indices=False)


@jax.custom_vjp
def spread(x_ML, place_Mk, source_R):
    """The rows of x that `dispatch_plan` asks for, zeros where a row has no source."""
    return _take(x_ML, _whole(source_R, place_Mk.shape[1]))


def _spread_forward(x_ML, place_Mk, source_R):
    return spread(x_ML, place_Mk, source_R), place_Mk


def _spread_backward(place_Mk, d_RL):
    return jnp.sum(_take(d_RL, place_Mk), axis=1), None, None


spread.defvjp(_spread_forward, _spread_backward)  # both ways a gather: a scatter would be serial


@jax.custom_vjp
def gather_back(rows_RL, p_Mk, place_Mk, source_R):
    """sum_j p_mj rows[place_mj], summed in p's precision, in the rows' dtype."""
    return jnp.einsum("mkl,mk->ml", _take(rows_RL, place_Mk), p_Mk).astype(rows_RL.dtype)


def _gather_back_forward(rows_RL, p_Mk, place_Mk, source_R):
    return gather_back(rows_RL, p_Mk, place_Mk, source_R), (rows_RL, p_Mk, place_Mk, source_R)


def _gather_back_backward(residuals, d_ML):
    rows_RL, p_Mk, place_Mk, source_R = residuals
    d_rows_RL = _take(p_Mk.reshape(-1), source_R)[:, None] * _take(d_ML, _whole(source_R, p_Mk.shape[1]))
    d_p_Mk = jnp.einsum("mkl,ml->mk", _take(rows_RL, place_Mk), d_ML.astype(p_Mk.dtype))
    return d_rows_RL.astype(rows_RL.dtype), d_p_Mk.astype(p_Mk.dtype), None, None


gather_back.defvjp(_gather_back_forward, _gather_back_backward)
