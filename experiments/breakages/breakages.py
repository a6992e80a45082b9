"""The wrong programs: what is replaced by what, and the tests that ought to notice."""

from dataclasses import dataclass

KDA = "tests/contract/test_kda.py"
KDA_GATE = (
    f"{KDA}::test_the_gated_form_is_the_plain_form_of_prepared_inputs",
    f"{KDA}::test_each_channel_of_a_head_forgets_at_its_own_rate",
    f"{KDA}::test_the_bounded_gate_is_exactly_half_its_floor_at_zero",
    f"{KDA}::test_the_bounded_gates_slope_does_not_cancel_at_the_floor",
)
KDA_AGREEMENT = (f"{KDA}::test_agrees_with_the_definition",)
SWITCHES = ("tests/test_step.py::test_every_switch_trains[kimi_linear_like]",)
RESIDUAL = (
    "tests/test_residual.py::test_a_read_is_its_formula_and_so_is_its_gradient",
    "tests/test_residual.py::test_a_scanned_stack_is_the_plain_loop",
)
ACCUMULATION = ("tests/test_step.py::test_accumulation_changes_nothing",)
OBJECTIVE = ("tests/test_step.py::test_the_gradient_is_that_of_the_loss_and_of_what_is_added_to_it",)


@dataclass(frozen=True)
class Breakage:
    """One replacement in one file.

    Attributes:
      name: for the command line. what: the behaviour it breaks, for people.
      file: relative to the repository. old: occurs in it exactly once. new: what then stands there.
      tests: pytest's arguments: files or tests, quick ones.
    """

    name: str
    what: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


BREAKAGES: tuple[Breakage, ...] = (
    # ---- the KDA op ----
    Breakage(
        "decay-per-head",
        "all channels of a head forget at their mean rate",
        "pallas_kernels/kda/gate.py",
        "return lower_bound * _sigmoid(rate_11H1 * z_BTHK)",
        "g_BTHK = lower_bound * _sigmoid(rate_11H1 * z_BTHK)\n"
        "    return jnp.broadcast_to(jnp.mean(g_BTHK, axis=-1, keepdims=True), g_BTHK.shape)",
        KDA_GATE,
    ),
    Breakage(
        "clamped-softplus-gate",
        "the bounded gate is the unbounded one, cut off at the floor",
        "pallas_kernels/kda/gate.py",
        "return lower_bound * _sigmoid(rate_11H1 * z_BTHK)",
        "return jnp.maximum(-rate_11H1 * jax.nn.softplus(z_BTHK), lower_bound)",
        KDA_GATE,
    ),
    Breakage(
        "cancelling-gate-slope",
        "the gate's slope is s (1 - s), which cancels near the floor",
        "pallas_kernels/kda/gate.py",
        "s * jax.nn.sigmoid(-y) * dy",
        "s * (1 - s) * dy",
        KDA_GATE,
    ),
    Breakage(
        "no-rate-gradient",
        "`a_log` gets no gradient",
        "pallas_kernels/kda/gate.py",
        "jnp.exp(a_log.astype(dtype))",
        "jnp.exp(jax.lax.stop_gradient(a_log).astype(dtype))",
        SWITCHES,
    ),
    Breakage(
        "decay-after-correction",
        "the delta rule corrects the memory first and decays it afterwards",
        "pallas_kernels/kda/reference.py",
        "        S = jnp.exp(g_BHK)[..., None] * S  # forget\n"
        '        miss_BHV = v_BHV - jnp.einsum("bhk,bhkv->bhv", k_BHK, S)  # what memory gets wrong\n'
        '        S = S + jnp.einsum("bh,bhk,bhv->bhkv", beta_BH, k_BHK, miss_BHV)  # correct\n',
        '        miss_BHV = v_BHV - jnp.einsum("bhk,bhkv->bhv", k_BHK, S)\n'
        '        S = S + jnp.einsum("bh,bhk,bhv->bhkv", beta_BH, k_BHK, miss_BHV)\n'
        "        S = jnp.exp(g_BHK)[..., None] * S\n",
        (f"{KDA}::test_the_reference_is_the_recurrence",),
    ),
    Breakage(
        "undecayed-correction",
        "a chunk's corrections read its incoming memory without the decay up to each token",
        "pallas_kernels/kda/xla.py",
        "k_in = x.k * decay.enter_NBHCK",
        "k_in = x.k",
        KDA_AGREEMENT,
    ),
    Breakage(
        "memory-across-documents",
        "the memory is not reset where a document begins",
        "pallas_kernels/kda/api.py",
        "xla.kda(q, k, v, g, beta, S, index_BT, scale, bounded)",
        "xla.kda(q, k, v, g, beta, S, None, scale, bounded)",
        (f"{KDA}::test_packed_documents_are_documents_alone", f"{KDA}::test_agrees_for_every_packing"),
    ),
    Breakage(
        "dense-tiles-always",
        "tiles of unbounded decays are dense products too, whose exponentials overflow",
        "pallas_kernels/kda/api.py",
        "implementation, bounded=False",
        "implementation, bounded=True",
        (f"{KDA}::test_agrees_for_every_decay",),
    ),
    Breakage(
        "difference-of-sums",
        "the decay between two tokens is a difference of running sums, which other documents are part of",
        "pallas_kernels/kda/tiles.py",
        "return jnp.exp(jnp.where(near[..., None], steps, -jnp.inf))",
        "sums_to = jnp.cumsum(g, axis=-2)\n"
        "    decay = jnp.exp(sums_to[..., :, None, :] - sums_to[..., None, :, :])\n"
        "    return jnp.where(near[..., None], decay, 0)",
        (f"{KDA}::test_documents_are_bitwise_independent",),
    ),
    Breakage(
        "state-cotangent-dropped",
        "the backward pass ignores the cotangent of the final state",
        "pallas_kernels/kda/xla.py",
        "do_BTHV, dS_BHKV = cotangents",
        "do_BTHV, dS_BHKV = cotangents[0], jnp.zeros_like(cotangents[1])",
        KDA_AGREEMENT,
    ),
    # ---- the KDA layer ----
    Breakage(
        "conv-across-documents",
        "the short convolution reads over the beginning of a document",
        "k3jax/layers/conv.py",
        "same_BT = index_BS[:, w : w + T] == segments.index_BT",
        "same_BT = jnp.ones_like(segments.real_BT)",
        ("tests/test_conv.py",),
    ),
    Breakage(
        "carried-memory-kept",
        "a memory that is handed over serves another document than its own",
        "k3jax/layers/kda.py",
        "jnp.where(segments.continues_B[:, None, None, None], S_BHKV, 0)",
        "S_BHKV",
        ("tests/test_kda_layer.py",),
    ),
    Breakage(
        "kda-gate-after-rounding",
        "KDA's normalised output is rounded to bfloat16 before it is gated",
        "k3jax/layers/kda.py",
        "self.std, x_BTD, o_BTHV)",
        "self.std, x_BTD, o_BTHV.astype(x_BTD.dtype))",
        ("tests/test_kda_layer.py",),
    ),
    # ---- attention and MLA ----
    Breakage(
        "attention-across-documents",
        "queries see the keys of earlier documents",
        "pallas_kernels/attention/xla.py",
        "past[None] & (query_index == key_index) & (key_index >= 0)",
        "past[None] & (query_index >= 0) & (key_index >= 0)",
        ("tests/contract/test_attention.py",),
    ),
    Breakage(
        "softmax-from-zero",
        "the running maximum of the logits starts at 0",
        "pallas_kernels/attention/xla.py",
        "for start, y in ((0, o), (0, l), (MASKED, m))",
        "for start, y in ((0, o), (0, l), (0, m))",
        ("tests/contract/test_attention.py",),
    ),
    Breakage(
        "mean-of-masked",
        "a query that sees nothing averages over what it must not see",
        "pallas_kernels/attention/xla.py",
        "p = jnp.where(logits > MASKED / 2, jnp.exp(logits - new_m[..., None]), 0)",
        "p = jnp.exp(logits - new_m[..., None])",
        ("tests/contract/test_attention.py",),
    ),
    Breakage(
        "no-mla-gate",
        "MLA's output gate is not applied",
        "k3jax/layers/mla.py",
        'linear("out", "HV->D", y_BTHV)',
        'linear("out", "HV->D", o_BTHV.astype(y_BTHV.dtype))',
        ("tests/test_mla.py",),
    ),
    Breakage(
        "mla-gate-twice",
        "MLA's output gate is applied twice",
        "k3jax/layers/gate.py",
        "y_BTHV.astype(wide) * jax.nn.sigmoid(z_BTHV.astype(wide))",
        "y_BTHV.astype(wide) * jnp.square(jax.nn.sigmoid(z_BTHV.astype(wide)))",
        ("tests/test_mla.py",),
    ),
    Breakage(
        "positions-from-zero",
        "rotary positions start anew in every piece of a row",
        "k3jax/layers/mla.py",
        "before.count_B[:, None] + jnp.arange(x_BTD.shape[1])[None]",
        "0 * before.count_B[:, None] + jnp.arange(x_BTD.shape[1])[None]",
        ("tests/test_mla.py",),
    ),
    Breakage(
        "latents-of-closed-document",
        "a carried cache still serves after its document has ended",
        "k3jax/layers/mla.py",
        "open_BS & (segments.last_B == 0)[:, None]",
        "open_BS",
        ("tests/test_mla.py",),
    ),
    Breakage(
        "mla-gate-after-rounding",
        "MLA's output is rounded to bfloat16 before it is gated",
        "k3jax/layers/mla.py",
        "self.std, x_BTD, o_BTHV)",
        "self.std, x_BTD, o_BTHV.astype(x_BTD.dtype))",
        ("tests/test_mla.py::test_bfloat16_layers_gate_what_attention_gives_unrounded",),
    ),
    Breakage(
        "logits-of-one-device",
        "the largest logit is that of the first device's rows",
        "k3jax/layers/mla.py",
        "jnp.max(top_BH, axis=0)",
        "top_BH[0]",
        ("tests/test_mla.py::test_the_largest_logit_is_that_of_all_devices",),
    ),
    # ---- experts and their balance ----
    Breakage(
        "bias-in-mixture",
        "the router's bias is part of the mixture weights",
        "k3jax/layers/moe.py",
        "p_BTk = jnp.take_along_axis(scores_BTE, chosen_BTk, axis=-1)",
        "p_BTk = jnp.take_along_axis(scores_BTE + bias_E[None, None], chosen_BTk, axis=-1)",
        ("tests/test_moe.py",),
    ),
    Breakage(
        "mixture-not-normalised",
        "the mixture weights are the scores themselves",
        "k3jax/layers/moe.py",
        "if cfg.normalise:",
        "if False:",
        ("tests/test_moe.py",),
    ),
    Breakage(
        "narrow-router",
        "the router's scores are computed in bfloat16 where the rest is",
        "k3jax/layers/moe.py",
        'x_BTD.astype(wide), precision="highest"',
        'x_BTD, precision="highest"',
        ("tests/test_moe.py",),
    ),
    Breakage(
        "padding-in-loads",
        "padding counts as a load of the experts",
        "k3jax/layers/moe.py",
        "add(real_BT[..., None].astype(jnp.int32))",
        "add(1)",
        ("tests/test_moe.py",),
    ),
    Breakage(
        "fixed-histogram",
        "the histogram of required biases covers [-1, 1], whatever the biases",
        "k3jax/layers/balance.py",
        "    low = jnp.min(bias_E) - 1\n    return low, (jnp.max(bias_E) + 1 - low) / bins\n",
        "    return -1.0, 2.0 / bins\n",
        ("tests/test_balance.py",),
    ),
    Breakage(
        "bias-not-centred",
        "the router's biases drift together",
        "k3jax/layers/balance.py",
        "target_E - jnp.mean(target_E), bias_E)",
        "target_E, bias_E)",
        ("tests/test_balance.py",),
    ),
    Breakage(
        "balance-of-one-micro-batch",
        "biases move by the counts of the last micro-batch alone",
        "k3jax/train/step.py",
        "seen = merge(seen, seen_more, sums.tokens, sums_more.tokens)",
        "seen = seen_more",
        ACCUMULATION,
    ),
    Breakage(
        "bias-from-zero",
        "a rule moves biases from 0, whatever they are",
        "k3jax/train/step.py",
        'channel["moe"]["router_bias"], sums["balance"]',
        'jnp.zeros_like(channel["moe"]["router_bias"]), sums["balance"]',
        ("tests/test_step.py::test_a_rule_goes_on_from_the_bias_in_use",),
    ),
    Breakage(
        "no-balancing-loss",
        "the loss of a balancing rule gives no gradient",
        "k3jax/train/step.py",
        " + sums.penalty) / tokens",
        ") / tokens",
        OBJECTIVE,
    ),
    Breakage(
        "no-up-cap",
        "SiTU does not cap its up branch",
        "k3jax/layers/activations.py",
        "* b2 * jnp.tanh(u / b2)",
        "* u",
        ("tests/test_activations.py",),
    ),
    # ---- Attention Residuals ----
    Breakage(
        "block-opens-late",
        "an AttnRes block opens one layer late",
        "k3jax/layout.py",
        "tuple((i in chosen, False) for i in range(cfg.depth))",
        "tuple((i - 1 in chosen, False) for i in range(cfg.depth))",
        ("tests/test_layout.py", *RESIDUAL),
    ),
    Breakage(
        "bank-unmasked",
        "a read weighs sums that do not exist yet",
        "k3jax/layers/residual.py",
        "jnp.arange(x_SBTD.shape[0]) < count)",
        "jnp.arange(x_SBTD.shape[0]) >= 0)",
        RESIDUAL,
    ),
    Breakage(
        "unnormalised-sources",
        "a read's scores are made without the RMSNorm on its sources",
        "k3jax/layers/residual.py",
        "raw_SBT * scale_SBT, -jnp.inf)",
        "raw_SBT, -jnp.inf)",
        RESIDUAL,
    ),
    Breakage(
        "backward-from-final-sums",
        "the backward pass reads a block's final sum where the layer read an earlier one",
        "k3jax/depth.py",
        "bank = _put(bank, sum_before, slot)",
        "bank = _put(bank, _get(bank, slot), slot)",
        RESIDUAL,
    ),
    # ---- the optimiser ----
    Breakage(
        "whole-matrix-muon",
        "Muon orthogonalises all heads of a projection together",
        "k3jax/optim/muon.py",
        '"head": apart,',
        '"head": apart - heads,',
        ("tests/test_muon.py",),
    ),
    Breakage(
        "scale-of-whole-matrix",
        "a head's update is scaled by the shape of all heads' projection",
        "k3jax/optim/muon.py",
        "_, rows, columns = blocks.sizes(x.shape)",
        "batch, rows, columns = blocks.sizes(x.shape)\n    columns *= batch[-1] if batch else 1",
        ("tests/test_muon.py",),
    ),
    Breakage(
        "no-nesterov",
        "Muon orthogonalises the momentum itself, without a step ahead",
        "k3jax/optim/muon.py",
        "nesterov=True",
        "nesterov=False",
        ("tests/test_muon.py",),
    ),
    Breakage(
        "decay-on-vectors",
        "weight decay reaches norms, biases and taps",
        "k3jax/optim/build.py",
        '"adamw": adam(cfg.adam),',
        '"adamw": optax.chain(adam(cfg.adam), decay),',
        ("tests/test_optim_build.py",),
    ),
    Breakage(
        "muon-on-embedding",
        "the embedding is declared as a matrix for Muon",
        "k3jax/model.py",
        'table("embedding", "YD")',
        'weight(self, "embedding", "Y->D", sizes, Normal(cfg.init_std))',
        ("tests/test_configs.py::test_golden_text",),
    ),
    Breakage(
        "idle-first-step",
        "warm-up starts at a rate of 0, one step late",
        "k3jax/optim/schedule.py",
        "optax.linear_schedule(peak / warm, peak, warm - 1)",
        "optax.linear_schedule(0.0, peak, warm)",
        ("tests/test_schedule.py",),
    ),
    Breakage(
        "clip-without-bound",
        "QK-Clip brings every head to tau, also from below",
        "k3jax/optim/qk_clip.py",
        "jnp.where(over_H, max_logit_H, tau)",
        "max_logit_H",
        ("tests/test_qk_clip.py",),
    ),
    Breakage(
        "clip-shared-by-root",
        "QK-Clip scales the query's shared dims by the root of the ratio",
        "k3jax/optim/qk_clip.py",
        "jnp.where(own, root_H1, ratio_H1)",
        "jnp.where(own, root_H1, root_H1)",
        ("tests/test_qk_clip.py",),
    ),
    Breakage(
        "clip-never",
        "a step does not apply QK-Clip",
        "k3jax/train/step.py",
        "if cfg.optim.qk_clip is not None:",
        "if False:",
        ("tests/test_step.py::test_a_step_clips_by_the_largest_logits_that_it_saw",),
    ),
    # ---- steps, data and runs ----
    Breakage(
        "no-z-loss",
        "the z-loss is no part of what is minimised",
        "k3jax/train/step.py",
        "cfg.optim.z_loss * sums.z + ",
        "",
        OBJECTIVE,
    ),
    Breakage(
        "tied-head-without-gradient",
        "a tied embedding takes no gradient from the head",
        "k3jax/model.py",
        'params["embedding"].T if cfg.tie_embeddings',
        'jax.lax.stop_gradient(params["embedding"].T) if cfg.tie_embeddings',
        ("tests/test_step.py::test_a_tied_embedding_takes_the_gradient_of_both_its_ends",),
    ),
    Breakage(
        "rate-of-the-next-step",
        "the logged learning rate is that of the next step",
        "k3jax/train/step.py",
        "(state.step)",
        "(state.step + 1)",
        ("tests/test_step.py::test_the_logged_rate_is_the_one_that_moved_the_parameters",),
    ),
    Breakage(
        "mean-of-means",
        "micro-batches count alike, however many tokens they hold",
        "k3jax/train/step.py",
        "+ sums.penalty) / tokens, (sums, seen)",
        "+ sums.penalty) / (sums.tokens * cfg.optim.accumulate), (sums, seen)",
        ACCUMULATION,
    ),
    Breakage(
        "padding-in-loss",
        "the loss of padding is part of the sum, though not of the count",
        "k3jax/train/loss.py",
        "jnp.sum(x_BT * weights_BT)",
        "jnp.sum(x_BT)",
        ("tests/test_step.py::test_the_first_loss_is_that_of_knowing_nothing",),
    ),
    Breakage(
        "validation-mean-of-means",
        "validation batches count alike, however many tokens they hold",
        "k3jax/evaluate.py",
        "loss + float(sums.loss), tokens + float(sums.tokens)",
        "loss + float(sums.loss) / max(float(sums.tokens), 1), tokens + 1",
        ("tests/test_metrics.py",),
    ),
    Breakage(
        "seed-ignored",
        "every seed draws the same parameters",
        "k3jax/train/state.py",
        "jax.random.key(cfg.run.seed)",
        "jax.random.key(0)",
        ("tests/test_step.py::test_another_seed_is_another_start",),
    ),
    Breakage(
        "unguarded-step",
        "a gradient that is not finite is applied",
        "k3jax/train/step.py",
        "jnp.where(finite, new, old)",
        "new",
        ("tests/test_step.py::test_a_step_that_is_not_finite_leaves_the_state",),
    ),
    Breakage(
        "guard-of-the-loss-alone",
        "a gradient that is not finite is applied if its loss is finite",
        "k3jax/train/step.py",
        "jnp.isfinite(sums.loss) & jnp.isfinite(norm)",
        "jnp.isfinite(sums.loss)",
        ("tests/test_step.py::test_a_step_that_is_not_finite_leaves_the_state",),
    ),
    Breakage(
        "maxima-of-one-micro-batch",
        "the largest logits are those of the last micro-batch",
        "k3jax/report.py",
        "jax.tree.map(jnp.maximum, a.maxima, b.maxima)",
        "b.maxima",
        ("tests/test_metrics.py::test_of_two_micro_batches_the_larger_maximum_stays",),
    ),
    Breakage(
        "reports-mean-of-means",
        "what layers report of micro-batches counts alike, however many tokens they hold",
        "k3jax/report.py",
        "(x * tokens_a + y * tokens_b) / total",
        "(x + y) / 2",
        ("tests/test_metrics.py::test_means_of_micro_batches_weigh_by_their_tokens",),
    ),
    Breakage(
        "counts-of-one-device",
        "statistics of the layers are those of the first device",
        "k3jax/report.py",
        "jnp.sum(x, axis=layers)",
        "jnp.take(x, 0, axis=layers)",
        ("tests/test_step.py::test_eight_devices_equal_one",),
    ),
    Breakage(
        "target-of-another-document",
        "targets are the row's next tokens, also where a document ends",
        "k3jax/data/packing.py",
        '        row["weights"][start:end] = 1\n',
        '        row["weights"][start:end] = 1\n    row["targets"][:-1] = row["tokens"][1:]\n',
        ("tests/test_data_loader.py",),
    ),
    Breakage(
        "documents-not-told-apart",
        "all documents of a row have one segment id",
        "k3jax/data/packing.py",
        'row["segment_ids"][start:end] = segment',
        'row["segment_ids"][start:end] = 1',
        ("tests/test_data_loader.py",),
    ),
    Breakage(
        "data-from-the-start",
        "a resumed run reads its data from the beginning again",
        "k3jax/train/loop.py",
        'stream.set_state(position["stream"])',
        "pass",
        ("tests/test_train.py::test_an_interrupted_run_goes_on_exactly[3]",),
    ),
    Breakage(
        "sample-of-the-token-before",
        "a token is drawn from the logits of the last but one",
        "k3jax/generate.py",
        "at - 1, keepdims",
        "at - 2, keepdims",
        ("tests/test_generate.py::test_the_likeliest_token_is_that_of_the_model_at_every_step",),
    ),
)
