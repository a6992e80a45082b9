"""Released checkpoints: what is read is what is written, and what cannot be read is named."""

import json
import re
import shutil
import warnings
from functools import cache
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax.linen import meta
from safetensors.numpy import load_file, save_file

from k3jax.config import (
    BlockAttnRes,
    Bounded,
    DenseConfig,
    FullAttnRes,
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
    replace,
)
from k3jax.interop.huggingface import CheckpointError, SkippedTensors, load, save
from k3jax.interop.released_config import ReleasedConfigError, from_released, to_released
from k3jax.interop.released_names import tensors
from k3jax.model import K3

GOLDEN = Path(__file__).parent / "golden"
NAMES = ("k3_tiny", "kimi_linear_tiny")
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
EXTRAS = {  # what a text-only load passes over
    "vision_tower.blocks.0.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
    "mm_projector.weight": np.ones(3, np.float32),
    "mtp.head.weight": np.ones((2, 2), np.float32),
    "model.layers.9.enorm.weight": np.full(64, 2.0, np.float32),
}


@cache
def stored(name):
    """(config.json, tensors) of a golden checkpoint, from outside."""
    return json.loads((GOLDEN / name / "config.json").read_text()), load_file(GOLDEN / name / SINGLE)


def write(directory, config, *files):
    """A checkpoint of one or more files, with an index if there are several."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    names = (
        [SINGLE]
        if len(files) == 1
        else [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    )
    for name, held in zip(names, files, strict=True):
        save_file(held, directory / name, metadata={"format": "pt"})
    if len(files) > 1:
        weight_map = {key: name for name, held in zip(names, files, strict=True) for key in held}
        (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory


def contents(directory):
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def small(**changes) -> ModelConfig:
    """Five layers: kda dense, kda moe, mla moe, kda moe, mla moe."""
    parts = dict(
        linear=KdaConfig(heads=2, key=4, value=4),
        full=MlaConfig(heads=2, key=4, shared=2, value=6, latent=8, query_rank=5),
        dense=DenseConfig(24),
        moe=LatentMoeConfig(experts=6, active=2, hidden=8, shared=2, latent=7),
    )
    return ModelConfig(
        **(
            dict(width=16, vocabulary=32, depth=5, full_layers=(3, 5), residual=BlockAttnRes(2))
            | parts
            | changes
        )
    )


CONFIGS = {
    "k3": small(),
    "kimi_linear": small(
        linear=KdaConfig(heads=2, key=4, value=4, decay=Unbounded(), gate=LowRank(4), taps=3),
        full=MlaConfig(heads=3, key=4, shared=2, value=6, latent=8, query_rank=None, gate=NoGate()),
        dense=DenseConfig(24, Swiglu()),
        moe=MoeConfig(experts=5, active=2, hidden=8, shared=1, scale=2.446, activation=Swiglu()),
        residual=Plain(),
    ),
    "k2": small(
        linear=None,
        full=MlaConfig(heads=2, key=4, shared=2, value=6, latent=8, gate=NoGate(), positions=RoPE(50000.0)),
        dense=DenseConfig(24, Swiglu()),
        moe=MoeConfig(experts=5, active=2, hidden=8, shared=1, activation=Swiglu()),
        full_layers=(1, 2, 3, 4, 5),
        residual=Plain(),
    ),
    "others": small(
        linear=KdaConfig(heads=2, key=4, value=4, decay=Bounded(-3.0)),
        dense=DenseConfig(24, Situ(2.0, 9.0)),
        moe=LatentMoeConfig(
            experts=4,
            active=1,
            hidden=8,
            shared=0,
            latent=7,
            norm="none",
            normalise=False,
            activation=Situ(2.0, 9.0),
        ),
        dense_layers=2,
        residual=BlockAttnRes(3),
        tie_embeddings=True,
        norm_eps=1e-6,
        init_std=0.01,
    ),
}  # fmt: skip


def drawn(cfg):
    """Parameters with every number its own."""
    shapes = meta.unbox(
        jax.eval_shape(K3(cfg).init, jax.random.key(0), jax.ShapeDtypeStruct((1, 1), np.int32))
    )
    leaves, tree = jax.tree.flatten(shapes["params"])
    rng = np.random.default_rng(0)
    return jax.tree.unflatten(tree, [jnp.asarray(rng.normal(size=x.shape), jnp.float32) for x in leaves])


# ---- both ways ----


@pytest.mark.parametrize("name", NAMES)
def test_saving_what_was_loaded_is_byte_for_byte(name, tmp_path):
    cfg, params = load(GOLDEN / name)
    save(tmp_path / "out", cfg, params, like=GOLDEN / name)
    before = {key: value for key, value in contents(GOLDEN / name).items() if not key.startswith("expected")}
    assert contents(tmp_path / "out") == before


@pytest.mark.parametrize("name", NAMES)
def test_saving_alone_keeps_every_tensor_and_the_config(name, tmp_path):
    cfg, params = load(GOLDEN / name)
    save(tmp_path / "out", cfg, params)
    flat = lambda tensors: {key: x.reshape(-1) if key.endswith("A_log") else x for key, x in tensors.items()}
    chex.assert_trees_all_equal(flat(load_file(tmp_path / "out" / SINGLE)), flat(stored(name)[1]))
    again_cfg, again = load(tmp_path / "out")
    assert again_cfg == cfg
    chex.assert_trees_all_equal(again, params)
    raw, released = (
        json.loads((where / "config.json").read_text()) for where in (tmp_path / "out", GOLDEN / name)
    )
    differing = {key for key, value in released.items() if raw.get(key) != value}
    assert differing <= {"max_position_embeddings"}


@pytest.mark.parametrize("name", CONFIGS)
def test_every_model_survives_the_round_trip(name, tmp_path):
    cfg = CONFIGS[name]
    params = drawn(cfg)
    save(tmp_path / "out", cfg, params)
    again_cfg, again = load(tmp_path / "out")
    assert again_cfg == cfg
    chex.assert_trees_all_equal(again, params)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_number_of_every_parameter_is_stored_once(name):
    """Parameters of consecutive integers come out as those integers, none twice."""
    cfg = CONFIGS[name]
    leaves, tree = jax.tree.flatten(drawn(cfg))
    ends = np.cumsum([x.size for x in leaves])
    params = [np.arange(end - x.size, end).reshape(x.shape) for end, x in zip(ends, leaves, strict=True)]
    params = jax.tree.unflatten(tree, params)
    out = []
    for tensor in tensors(cfg):
        parts = []
        for part in tensor.parts:
            leaf = params
            for key in part.path:
                leaf = leaf[key]
            parts.append(leaf[part.index])
        out.append(tensor.to_stored(parts))
        assert out[-1].shape == tensor.shape
        back = dict(tensor.to_ours(out[-1]))
        for part, x in zip(tensor.parts, parts, strict=True):
            np.testing.assert_array_equal(back[part], x)
    np.testing.assert_array_equal(np.sort(np.concatenate([x.reshape(-1) for x in out])), np.arange(ends[-1]))


def test_stored_matrices_are_torchs():
    """[out, in], heads outermost, against hand-written slices."""
    cfg, params = load(GOLDEN / "k3_tiny")
    raw = stored("k3_tiny")[1]
    first = params["1_kda_dense"]["mixer"]["kda"]
    np.testing.assert_array_equal(
        first["query"][:, 1, 3], raw["model.layers.0.self_attn.q_proj.weight"][16 + 3]
    )
    np.testing.assert_array_equal(
        first["value_taps"][2, 5], raw["model.layers.0.self_attn.v_conv1d.weight"][37, 0]
    )
    np.testing.assert_array_equal(
        first["out"][3, 7], raw["model.layers.0.self_attn.o_proj.weight"][:, 3 * 16 + 7]
    )
    mla = next(leaf["mixer"]["mla"] for name, leaf in params.items() if name.startswith("4_mla"))
    kv_b = raw["model.layers.3.self_attn.kv_b_proj.weight"].reshape(4, 16 + 16, 32)
    at = lambda x: x.reshape(-1, *x.shape[-3:])[0]
    np.testing.assert_array_equal(at(mla["key_up"])[:, 2, 5], kv_b[2, 5])
    np.testing.assert_array_equal(at(mla["value_up"])[:, 2, 5], kv_b[2, 16 + 5])
    np.testing.assert_array_equal(params["embedding"], raw["model.embed_tokens.weight"])
    np.testing.assert_array_equal(params["head"], raw["lm_head.weight"].T)
    assert cfg.depth == 9


def test_shards_and_their_index(tmp_path):
    config, raw = stored("k3_tiny")
    names = sorted(raw)
    parts = [{name: raw[name] for name in names[i::3]} for i in range(3)]
    like = write(tmp_path / "like", config, *parts)
    cfg, params = load(like)
    chex.assert_trees_all_equal(params, load(GOLDEN / "k3_tiny")[1])
    save(tmp_path / "out", cfg, params, like=like)
    assert contents(tmp_path / "out") == contents(like)


def test_bfloat16_checkpoints_keep_their_bits(tmp_path):
    config, raw = stored("kimi_linear_tiny")
    low = lambda name: not name.endswith(("A_log", "dt_bias", "conv1d.weight", "e_score_correction_bias"))
    mixed = {name: x.astype(ml_dtypes.bfloat16) if low(name) else x for name, x in raw.items()}
    like = write(tmp_path / "like", config, mixed)
    cfg, params = load(like)
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    save(tmp_path / "out", cfg, params, like=like)
    assert contents(tmp_path / "out") == contents(like)


def test_float64_checkpoints_stay_float64(tmp_path):
    config, raw = stored("kimi_linear_tiny")
    like = write(tmp_path / "like", config, {name: x.astype(np.float64) + 1e-12 for name, x in raw.items()})
    with jax.enable_x64(True):
        cfg, params = load(like)
        assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("float64")}
        save(tmp_path / "out", cfg, params, like=like)
    assert contents(tmp_path / "out") == contents(like)


@pytest.mark.parametrize("form", ["padded to 128", "[1, 1, H, 1]", "both"])
def test_a_log_is_read_in_every_form_it_is_stored_in(form, tmp_path):
    config, raw = stored("k3_tiny")

    def change(x):
        x = x if form == "[1, 1, H, 1]" else np.concatenate([x, np.full(128 - x.size, 7, x.dtype)])
        return x if form == "padded to 128" else x.reshape(1, 1, -1, 1)

    changed = {name: change(x) if name.endswith("A_log") else x for name, x in raw.items()}
    like = write(tmp_path / "like", config, changed)
    cfg, params = load(like)
    chex.assert_trees_all_equal(params, load(GOLDEN / "k3_tiny")[1])
    save(tmp_path / "out", cfg, params, like=like)
    assert contents(tmp_path / "out") == contents(like)


# ---- what a text model passes over ----


@pytest.mark.parametrize("prefix", ["", "language_model."])
def test_vision_and_mtp_tensors_are_skipped_aloud_and_kept(prefix, tmp_path):
    config, raw = stored("k3_tiny")
    extras = {(prefix + name if name.startswith("model.") else name): x for name, x in EXTRAS.items()}
    like = write(tmp_path / "like", config, {prefix + name: x for name, x in raw.items()} | extras)
    with pytest.warns(SkippedTensors, match="4 tensors") as caught:
        cfg, params = load(like)
    assert all(name in str(caught[0].message) for name in extras)
    chex.assert_trees_all_equal(params, load(GOLDEN / "k3_tiny")[1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save(tmp_path / "out", cfg, params, like=like)
    assert contents(tmp_path / "out") == contents(like)


def test_the_text_part_of_a_multimodal_config_is_read(tmp_path):
    config, raw = stored("k3_tiny")
    like = write(
        tmp_path / "like", {"model_type": "kimi_k3", "text_config": config, "vision_config": {}}, raw
    )
    assert load(like)[0] == load(GOLDEN / "k3_tiny")[0]


# ---- refusals ----


def altered(tmp_path, change, name="k3_tiny"):
    config, raw = stored(name)
    config, raw = dict(config), dict(raw)
    change(config, raw)
    return write(tmp_path / "like", config, raw)


def test_missing_and_unexpected_tensors_are_all_listed(tmp_path):
    lost = ("model.layers.2.self_attn.A_log", "model.layers.5.block_sparse_moe.experts.7.w2.weight")

    def change(config, raw):
        for name in lost:
            del raw[name]
        raw["model.layers.1.surprise.weight"] = np.ones(3, np.float32)
        raw["another"] = np.ones(3, np.float32)

    with pytest.raises(CheckpointError) as error:
        load(altered(tmp_path, change))
    said = str(error.value)
    missing, unexpected = said.split("unexpected:")
    assert all(name in missing for name in lost)
    assert all(name in unexpected for name in ("model.layers.1.surprise.weight", "another"))


@pytest.mark.parametrize("axis", [0, 1])
def test_a_tensor_of_another_size_is_named(axis, tmp_path):
    def change(config, raw):
        x = raw["model.layers.1.self_attn.q_proj.weight"]
        raw["model.layers.1.self_attn.q_proj.weight"] = np.ascontiguousarray(np.delete(x, 0, axis))

    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.q_proj\.weight has shape"):
        load(altered(tmp_path, change))


def test_a_tensor_of_another_shape_and_the_same_size_is_named(tmp_path):
    """A transposed matrix would be read as another matrix."""

    def change(config, raw):
        x = raw["model.layers.0.mlp.gate_proj.weight"]
        raw["model.layers.0.mlp.gate_proj.weight"] = np.ascontiguousarray(x.T)

    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.gate_proj\.weight"):
        load(altered(tmp_path, change))


def test_all_misshapen_tensors_are_listed(tmp_path):
    names = ("model.layers.1.self_attn.q_proj.weight", "model.layers.6.input_layernorm.weight")

    def change(config, raw):
        for name in names:
            raw[name] = np.ascontiguousarray(raw[name][1:])

    with pytest.raises(CheckpointError) as error:
        load(altered(tmp_path, change))
    assert all(name in str(error.value) for name in names)


def test_too_few_heads_in_a_log_are_refused(tmp_path):
    def change(config, raw):
        raw["model.layers.0.self_attn.A_log"] = raw["model.layers.0.self_attn.A_log"][:-1]

    with pytest.raises(CheckpointError, match=r"A_log has shape \(3,\)"):
        load(altered(tmp_path, change))


@pytest.mark.parametrize("end", [4, 100, -1, -100])
def test_a_file_that_is_cut_off_is_named(end, tmp_path):
    like = altered(tmp_path, lambda config, raw: None)
    (like / SINGLE).write_bytes((like / SINGLE).read_bytes()[:end])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged or cut off"):
        load(like)


def test_a_directory_without_its_files_is_refused(tmp_path):
    like = altered(tmp_path, lambda config, raw: None)
    (like / "config.json").rename(like / "other.json")
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        load(like)
    (like / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json is not JSON"):
        load(like)
    shutil.move(like / "other.json", like / "config.json")
    (like / SINGLE).unlink()
    with pytest.raises(CheckpointError, match=r"lacks model\.safetensors"):
        load(like)
    with pytest.raises(CheckpointError, match="no config"):
        load(tmp_path / "nowhere")


def test_a_missing_shard_is_named(tmp_path):
    config, raw = stored("k3_tiny")
    names = sorted(raw)
    like = write(tmp_path / "like", config, *({name: raw[name] for name in names[i::2]} for i in range(2)))
    (like / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks model-00001-of-00002\.safetensors"):
        load(like)


def test_packed_weights_are_refused_clearly(tmp_path):
    def config_says_so(config, raw):
        config["quantization_config"] = {"format": "mxfp4-pack-quantized"}

    with pytest.raises(ReleasedConfigError, match="MXFP4"):
        load(altered(tmp_path, config_says_so))
    with np.load(GOLDEN / "mxfp4.npz") as packed:
        packed = dict(packed)

    def tensors_say_so(config, raw):
        expert = "model.layers.1.block_sparse_moe.experts.0.w1"
        del raw[f"{expert}.weight"]
        raw |= {f"{expert}.{name}": packed[name] for name in ("weight_packed", "weight_scale")}

    shutil.rmtree(tmp_path / "like")
    with pytest.raises(CheckpointError, match=r"MXFP4.*experts\.0\.w1\.weight_packed"):
        load(altered(tmp_path, tensors_say_so))


def test_a_quantised_multimodal_checkpoint_is_refused():
    config = stored("k3_tiny")[0]
    with pytest.raises(ReleasedConfigError, match="MXFP4"):
        from_released({"text_config": config, "quantization_config": {"format": "mxfp4-pack-quantized"}})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_act", "gelu"),
        ("moe_layer_freq", 2),
        ("moe_router_activation_func", "softmax"),
        ("num_expert_group", 4),
        ("num_key_value_heads", 2),
        ("hidden_size", None),
        ("kv_lora_rank", None),
    ],
)
def test_a_config_of_another_architecture_is_refused_by_field(field, value):
    config = dict(stored("k3_tiny")[0]) | {field: value}
    if value is None:
        del config[field]
    with pytest.raises(ReleasedConfigError, match=field):
        from_released(config)


def test_layer_lists_must_name_each_layer_once():
    config = json.loads(json.dumps(stored("k3_tiny")[0]))
    config["linear_attn_config"]["kda_layers"].append(4)
    with pytest.raises(ReleasedConfigError, match="kda_layers and full_attn_layers"):
        from_released(config)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"residual": FullAttnRes()}, "residual"),
        ({"residual": BlockAttnRes((0, 1, 3))}, "residual"),
        ({"linear": KdaConfig(heads=2, key=4, value=6)}, "linear"),
        ({"linear": KdaConfig(heads=2, key=4, value=4, gate=LowRank(3))}, "gate"),
        ({"dense": DenseConfig(24, Swiglu())}, "activations"),
        ({"full": MlaConfig(heads=2, gate=LowRank(3), positions=NoPE())}, "gate"),
    ],
)
def test_a_model_without_words_in_the_released_format_is_refused(change, said):
    with pytest.raises(ReleasedConfigError, match=said):
        to_released(small(**change))


# ---- where it is written ----


def test_a_directory_in_use_is_left_alone(tmp_path):
    cfg, params = load(GOLDEN / "kimi_linear_tiny")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="is not empty"):
        save(tmp_path / "out", cfg, params)
    assert contents(tmp_path / "out") == {"mine.txt": b"mine"}
    assert sorted(tmp_path.iterdir()) == [tmp_path / "out"]


def test_an_empty_directory_is_filled(tmp_path):
    cfg, params = load(GOLDEN / "kimi_linear_tiny")
    (tmp_path / "out").mkdir()
    save(tmp_path / "out", cfg, params)
    assert sorted(contents(tmp_path / "out")) == ["config.json", SINGLE]
    assert sorted(tmp_path.iterdir()) == [tmp_path / "out"]


@pytest.mark.parametrize("failure", ["no words", "another model", "damaged"])
def test_a_failed_save_leaves_nothing_behind(failure, tmp_path):
    cfg, params = load(GOLDEN / "kimi_linear_tiny")
    like = None
    if failure == "no words":
        cfg = replace(cfg, residual=FullAttnRes())
    elif failure == "another model":
        like = GOLDEN / "k3_tiny"
    else:
        like = write(tmp_path / "like", *stored("kimi_linear_tiny"))
        (like / SINGLE).write_bytes((like / SINGLE).read_bytes()[:-1])
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ValueError):  # noqa: PT011 (which one, the tests above say)
        save(tmp_path / "out", cfg, params, like=like)
    assert sorted(tmp_path.iterdir()) == before


def test_a_neighbour_of_the_scratch_name_is_left_alone(tmp_path):
    cfg, params = load(GOLDEN / "kimi_linear_tiny")
    (tmp_path / "out.part").mkdir()
    (tmp_path / "out.part" / "mine.txt").write_text("mine")
    save(tmp_path / "out", cfg, params)
    assert contents(tmp_path / "out.part") == {"mine.txt": b"mine"}


def test_a_model_of_other_sizes_is_not_written_into_like(tmp_path):
    cfg = small(dense=DenseConfig(12))
    save(tmp_path / "large", small(), drawn(small()))
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp"):
        save(tmp_path / "out", cfg, drawn(cfg), like=tmp_path / "large")


def test_every_tensor_name_is_a_released_one():
    """The names follow one grammar; a typo would only show against a real checkpoint."""
    pattern = re.compile(
        r"(model\.embed_tokens|lm_head|model\.norm|model\.output_attn_res_(proj|norm)|"
        r"model\.layers\.\d+\.(input_layernorm|post_attention_layernorm|(self_attention|mlp)_res_(proj|norm)|"
        r"self_attn\.\w+|mlp\.(gate|up|down)_proj|block_sparse_moe\.(gate|routed_expert_(down_proj|up_proj|norm)|"
        r"experts\.\d+\.w[123]|shared_experts\.(gate|up|down)_proj)))(\.weight|\.e_score_correction_bias)?"
    )
    for cfg in CONFIGS.values():
        names = [tensor.name for tensor in tensors(cfg)]
        assert len(set(names)) == len(names)
        assert all(pattern.fullmatch(name) for name in names)
