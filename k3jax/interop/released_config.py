"""config.json of the released checkpoints, both ways."""

from collections.abc import Mapping
from typing import Any

from k3jax.config import (
    BlockAttnRes,
    Bounded,
    DenseConfig,
    FullAttnRes,
    FullRank,
    KdaConfig,
    LatentMoeConfig,
    LowRank,
    MlaConfig,
    ModelConfig,
    MoeConfig,
    NoGate,
    NoPE,
    Plain,
    RoPE,
    Situ,
    Swiglu,
    Unbounded,
)


class ReleasedConfigError(ValueError):
    """A config.json, or a model, that the other side has no word for; names the field and its value."""


FIXED = {  # what this model always is; another value is another architecture
    "moe_layer_freq": 1,
    "moe_router_activation_func": "sigmoid",
    "num_expert_group": 1,
    "topk_group": 1,
}


def from_released(raw: Mapping[str, Any]) -> ModelConfig:
    """The ModelConfig of a released config.json (of its text part, if it has several).

    Raises:
      ReleasedConfigError: a missing field, or a value that this model cannot be.
    """
    whole, raw = raw, raw.get("text_config", raw)
    packed = raw.get("quantization_config") or whole.get("quantization_config")
    if packed:
        raise ReleasedConfigError(
            f"quantization_config={packed!r}: packed weights (such as MXFP4) are not "
            "read yet; dequantise the checkpoint first"
        )
    for name, value in FIXED.items():
        if raw.get(name, value) != value:
            raise ReleasedConfigError(f"{name}={raw[name]!r}: only {value!r} is this architecture")

    def need(name: str, source: Mapping[str, Any] = raw) -> Any:
        if name not in source:
            raise ReleasedConfigError(f"config.json has no {name!r}")
        return source[name]

    heads = need("num_attention_heads")
    if raw.get("num_key_value_heads", heads) != heads:
        raise ReleasedConfigError(
            f"num_key_value_heads={raw['num_key_value_heads']!r}: {heads} is needed, as many"
        )
    linear = raw.get("linear_attn_config")
    depth, blocks = need("num_hidden_layers"), raw.get("attn_res_block_size")
    full = tuple(sorted(linear["full_attn_layers"])) if linear else tuple(range(1, depth + 1))
    if linear and sorted([*full, *need("kda_layers", linear)]) != list(range(1, depth + 1)):
        raise ReleasedConfigError("kda_layers and full_attn_layers must name each layer once, from 1")
    activation = _activation(raw)
    return ModelConfig(
        width=need("hidden_size"),
        vocabulary=need("vocab_size"),
        depth=depth,
        linear=_kda(linear) if linear else None,
        full=MlaConfig(
            heads=heads,
            key=need("qk_nope_head_dim"),
            shared=need("qk_rope_head_dim"),
            value=need("v_head_dim"),
            latent=need("kv_lora_rank"),
            query_rank=raw.get("q_lora_rank"),
            gate=FullRank() if raw.get("mla_use_output_gate", False) else NoGate(),
            positions=NoPE()
            if raw.get("mla_use_nope", False)
            else RoPE(float(raw.get("rope_theta", 10000.0))),
        ),
        dense=DenseConfig(need("intermediate_size"), activation),
        moe=_moe(raw, activation),
        full_layers=full,
        dense_layers=raw.get("first_k_dense_replace", 0),
        residual=BlockAttnRes(blocks) if blocks else Plain(),
        tie_embeddings=raw.get("tie_word_embeddings", False),
        norm_eps=raw.get("rms_norm_eps", 1e-5),
        init_std=raw.get("initializer_range", 0.02),
    )


def _activation(raw: Mapping[str, Any]) -> Situ | Swiglu:
    match raw.get("hidden_act", "silu"):
        case "silu":
            return Swiglu()
        case "situ":
            return Situ(raw.get("activation_situ_beta", 4.0), raw.get("activation_situ_linear_beta", 25.0))
        case other:
            raise ReleasedConfigError(f"hidden_act={other!r}: 'silu' or 'situ'")


def _kda(linear: Mapping[str, Any]) -> KdaConfig:
    dim, floor = linear["head_dim"], linear.get("gate_lower_bound")
    return KdaConfig(
        heads=linear["num_heads"],
        key=dim,
        value=dim,
        taps=linear["short_conv_kernel_size"],
        decay=Unbounded() if floor is None else Bounded(float(floor)),
        gate=FullRank() if linear.get("use_full_rank_gate", False) else LowRank(dim),
    )


def _moe(raw: Mapping[str, Any], activation) -> MoeConfig:
    common = dict(
        experts=raw["num_experts"],
        active=raw["num_experts_per_token"],
        hidden=raw["moe_intermediate_size"],
        shared=raw.get("num_shared_experts") or 0,
        scale=float(raw.get("routed_scaling_factor", 1.0)),
        normalise=raw.get("moe_renormalize", True),
        activation=activation,
    )
    latent = raw.get("routed_expert_hidden_size")
    if latent is None:
        return MoeConfig(**common)
    return LatentMoeConfig(
        **common, latent=latent, norm="rms" if raw.get("latent_moe_use_norm", True) else "none"
    )


def to_released(cfg: ModelConfig) -> dict[str, Any]:
    """The config.json of a model.

    Raises:
      ReleasedConfigError: a mechanism that the released format has no field for.
    """
    linear, full, dense, moe = cfg.linear, cfg.full, cfg.dense, cfg.moe
    needs = lambda name, part, kind: ReleasedConfigError(
        f"ModelConfig.{name}={part!r}: the released format needs a {kind.__name__}"
    )
    if not isinstance(full, MlaConfig):
        raise needs("full", full, MlaConfig)
    if not isinstance(dense, DenseConfig):
        raise needs("dense", dense, DenseConfig)
    if not isinstance(moe, MoeConfig):
        raise needs("moe", moe, MoeConfig)
    activation = moe.activation
    if dense.activation != activation:
        raise ReleasedConfigError(
            f"activations {dense.activation} and {activation}: the released format has one"
        )
    if isinstance(cfg.residual, FullAttnRes) or not isinstance(getattr(cfg.residual, "opens", 1), int):
        raise ReleasedConfigError(f"residual={cfg.residual!r}: the released format has equal blocks only")
    if isinstance(full.gate, LowRank):
        raise ReleasedConfigError(f"MlaConfig.gate={full.gate!r}: the released format has FullRank or NoGate")
    full_layers = [i for i, (mixer, _) in enumerate(cfg.layers, 1) if mixer == full]
    raw: dict[str, Any] = {
        "model_type": "kimi_linear",
        "vocab_size": cfg.vocabulary,
        "hidden_size": cfg.width,
        "intermediate_size": dense.hidden,
        "num_hidden_layers": cfg.depth,
        "hidden_act": "silu" if isinstance(activation, Swiglu) else "situ",
        "first_k_dense_replace": cfg.dense_layers,
        "moe_layer_freq": 1,
        "kv_lora_rank": full.latent,
        "q_lora_rank": full.query_rank,
        "qk_nope_head_dim": full.key,
        "qk_rope_head_dim": full.shared,
        "v_head_dim": full.value,
        "mla_use_nope": isinstance(full.positions, NoPE),
        "mla_use_output_gate": isinstance(full.gate, FullRank),
        "num_attention_heads": full.heads,
        "num_key_value_heads": full.heads,
        "moe_intermediate_size": moe.hidden,
        "moe_renormalize": moe.normalise,
        "moe_router_activation_func": "sigmoid",
        "num_experts": moe.experts,
        "num_experts_per_token": moe.active,
        "num_expert_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "use_grouped_topk": True,
        "num_shared_experts": moe.shared,
        "routed_scaling_factor": moe.scale,
        "rms_norm_eps": cfg.norm_eps,
        "initializer_range": cfg.init_std,
        "tie_word_embeddings": cfg.tie_embeddings,
        "num_nextn_predict_layers": 0,
    }
    if isinstance(activation, Situ):
        raw |= {"activation_situ_beta": activation.gate, "activation_situ_linear_beta": activation.up}
    if isinstance(full.positions, RoPE):
        raw["rope_theta"] = full.positions.theta
    if isinstance(cfg.residual, BlockAttnRes):
        raw["attn_res_block_size"] = cfg.residual.opens
    if isinstance(moe, LatentMoeConfig):
        raw |= {"routed_expert_hidden_size": moe.latent, "latent_moe_use_norm": moe.norm == "rms"}
    if linear is not None:
        raw["linear_attn_config"] = _from_kda(linear, full_layers, cfg.depth)
    return raw


def _from_kda(linear, full_layers: list[int], depth: int) -> dict[str, Any]:
    if not isinstance(linear, KdaConfig) or linear.key != linear.value:
        raise ReleasedConfigError(f"linear={linear!r}: the released format needs KDA with key = value")
    if linear.gate not in (FullRank(), LowRank(linear.key)):
        raise ReleasedConfigError(f"KdaConfig.gate={linear.gate!r}: FullRank() or LowRank({linear.key})")
    raw = {
        "full_attn_layers": full_layers,
        "kda_layers": [i for i in range(1, depth + 1) if i not in full_layers],
        "head_dim": linear.key,
        "num_heads": linear.heads,
        "short_conv_kernel_size": linear.taps,
    }
    if isinstance(linear.decay, Bounded):
        raw["gate_lower_bound"] = linear.decay.floor
    if isinstance(linear.gate, FullRank):
        raw["use_full_rank_gate"] = True
    return raw
