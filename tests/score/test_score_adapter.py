"""From a measured run to a scenario: no field is left out in silence. Run: pytest tests/score/test_score_adapter.py"""

from collections.abc import Iterator
from typing import Any

import pytest
from made_up_run import KINDS, made_up, put

from memcore.errors import UserError
from memcore.scenario import scenario_data
from memcore.score.adapter import scenario_of
from memcore.score.gaps import beyond_scope, gaps_of
from memcore.score.losses import loss_fields
from memcore.score.record import parse_run

# Fields that say where a run comes from, what was measured, or what the counted config is compared with.
BESIDE = {
    "id", "source", "split", "family", "regime", "confidence", "gold", "assumptions", "model.name", "model.n_params",
    "model.n_params_config", "recipe.lora.trainable_params",
    *(f"software.{name}" for name in ("framework", "date", "torch", "transformers")),
    *(f"measured.{name}" for name in ("bytes", "metric", "steady_bytes", "rank", "precision_bytes", "others")),
    # No tensor's bytes depend on them.
    "engine_config.allgather_bucket_size", "engine_config.reduce_scatter", "engine_config.limit_all_gathers",
}  # fmt: skip
# Another value of each field that a scenario may depend on.
OTHER: dict[str, Any] = {
    "model.auto_class": "AutoModelForSequenceClassification",
    "hardware.gpu": "H100-80GB",
    "hardware.gpus": 4,
    "parallelism.engine": "megatron",
    "parallelism.zero_stage": 1,
    "parallelism.dp": 4,
    "parallelism.tp": 2,
    "parallelism.pp": 2,
    "parallelism.vpp": 2,
    "parallelism.microbatches": 4,
    "parallelism.cp": 2,
    "parallelism.ep": 2,
    "parallelism.reshard_after_forward": 2,
    "parallelism.prefetch": "backward_pre",
    "recipe.method": "other",
    "recipe.param_dtype": "fp16",
    "recipe.norm_dtype": "other",
    "recipe.compute_dtype": "fp8",
    "recipe.grad_dtype": "fp16",
    "recipe.optimizer": "adam",
    "recipe.optimizer_impl": "fused",
    "recipe.optimizer_state_dtype": "fp16",
    "recipe.quantization": "gptq_int4",
    "recipe.quant_group_size": 128,
    "recipe.quantize_lm_head": True,
    "recipe.lora": {"rank": 4},
    "recipe.lora.rank": 8,
    "recipe.lora.targets": ["q_proj"],
    "recipe.lora.dropout": 0.1,
    "recipe.lora.modules_to_save": ["lm_head"],
    "recipe.lora.adapter_dtype": "fp16",
    "recipe.lora.sharded": True,
    "workload.micro_batch": 4,
    "workload.seq_len": 64,
    "workload.grad_accum": 2,
    "workload.attention": "eager",
    "workload.checkpointing": "full",
    "workload.sac_save": ["sdpa"],
    "workload.loss": "fused_ce",
    "workload.loss_chunks": 4,
    "workload.logits_dtype": "bf16",
    "workload.dropout": 0.1,
    "workload.fused_kernels": ["bias_gelu"],
    "workload.offload": "activations",
    "engine_config": {"no_such": 1},
    "engine_config.fsdp_units": "block_embed_head",
    "engine_config.reduce_dtype": "bf16",
    "engine_config.use_orig_params": False,
    "engine_config.forward_prefetch": True,
}
# Autocast has nothing to cast where the weights have the computation's dtype, unless adapters have another; FSDP2
# casts what it gathers.
NOTHING_TO_CAST = ("single", "ddp", "deepspeed")

MIXTURE = {"hidden_size": 64, "num_local_experts": 8, "num_experts_per_tok": 2}


def leaves(data: Any, path: str = "") -> Iterator[str]:
    if isinstance(data, dict) and data and path != "model.config":
        for name, value in data.items():
            yield from leaves(value, f"{path}.{name}" if path else name)
    else:
        yield path


def another(path: str, value: object) -> object:
    if isinstance(value, bool):
        return not value
    return OTHER.get(path, value + 7 if isinstance(value, int) else None)


def outcome(data: dict[str, Any]) -> object:
    """The scenario, or why there is none."""
    try:
        run = parse_run(data)
        return beyond_scope(run) or gaps_of(run) or scenario_data(scenario_of(run))
    except UserError as error:
        return str(error)


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_run_is_a_scenario(kind: str):
    assert isinstance(outcome(made_up(kind)), dict), outcome(made_up(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_another_value_of_any_field_is_another_scenario_or_none(kind: str):
    before = outcome(made_up(kind))
    for path in set(leaves(made_up(kind))) - BESIDE - {"model.config"}:
        if path == "recipe.autocast" and kind in NOTHING_TO_CAST:
            continue
        data = made_up(kind)
        value = made_up(kind)
        for part in path.split("."):
            value = value[part]
        put(data, path, another(path, value))
        assert outcome(data) != before, path


def test_the_config_is_the_scenarios_own():
    data = made_up()
    assert outcome(data)["model"]["config"]["hidden_size"] == 64  # type: ignore[index]


@pytest.mark.parametrize(
    ("kind", "changes", "expected"),
    [
        ("single", {}, {"convention": "pure_bf16"}),
        (
            "single",
            {"recipe__param_dtype": "fp32", "recipe__grad_dtype": "fp32", "recipe__autocast": True},
            {"convention": "amp_autocast", "compute_dtype": "bf16"},
        ),
        ("fsdp2", {}, {"convention": "fsdp2_mixed", "reduce_dtype": "fp32"}),
        ("deepspeed", {"recipe__grad_dtype": "fp32"}, {"convention": "deepspeed_fp32_grad"}),
        ("deepspeed", {}, {"master_dtype": "fp32", "state_dtype": "fp32", "grad_dtype": "bf16"}),
        ("single", {"recipe__optimizer": "paged_adamw_8bit", "recipe__optimizer_impl": None,
                    "recipe__optimizer_state_dtype": "int8"},
         {"optimizer": {"name": "adamw", "bits": 8, "paged": True}}),
    ],
)  # fmt: skip
def test_dtypes_are_a_convention_with_the_runs_own(kind: str, changes: dict[str, Any], expected: dict[str, Any]):
    recipe = scenario_of(parse_run(made_up(kind, **changes))).recipe.model_dump(mode="json", exclude_none=True)
    recipe["optimizer"] = {name: value for name, value in recipe["optimizer"].items() if value is not False}
    assert {name: recipe[name] for name in expected} == expected


def test_autocast_around_fp32_adapters_is_theirs():
    lora = scenario_of(parse_run(made_up("lora", recipe__autocast=True))).recipe.lora
    assert lora is not None
    assert lora.autocast
    plain = scenario_of(parse_run(made_up("lora"))).recipe.lora
    assert plain is not None
    assert not plain.autocast


def test_engine_settings_arrive():
    config = scenario_of(parse_run(made_up("deepspeed"))).zero_config
    assert (config.reduce_bucket_size, config.overlap_comm, config.stage3_max_live_parameters) == (1000, True, 10**6)
    views = scenario_of(parse_run(made_up("ddp", engine_config={"gradient_as_bucket_view": True})))
    assert scenario_data(views)["engine_config"] == {"gradient_as_bucket_view": True}
    offloaded = scenario_of(parse_run(made_up("fsdp2", workload__offload="params+grads+optimizer")))
    assert offloaded.fsdp2_config.cpu_offload
    whole = scenario_of(parse_run(made_up("fsdp2", parallelism__reshard_after_forward=False)))
    assert not whole.fsdp2_config.reshard_after_forward
    units = {"fsdp_units": "block_embed_head", "reshard_exception": "head"}
    config = scenario_of(parse_run(made_up("fsdp2", engine_config=units))).fsdp2_config
    assert (config.fsdp_units, config.reshard_exception) == ("block_embed_head", "head")


@pytest.mark.parametrize(
    ("framework", "attention", "expected"),
    [
        ("torchtune", "flex", "memory_efficient"),
        ("torchtitan", "flash", "memory_efficient"),
        ("torchtitan", "cudnn", "flash"),
        ("hf_trainer", "flex", "flash"),
        ("hf_trainer", "flash", "flash"),
    ],
)
def test_attention_on_keys_that_the_model_repeats(framework: str, attention: str, expected: str):
    run = made_up(software__framework=framework, workload__attention=attention)
    assert scenario_of(parse_run(run)).workload.attention == expected


def test_what_is_compiled_arrives():
    given = {"software__framework": "torchtitan", "workload__compile": True, "workload__loss_compiled": True}
    work = scenario_of(parse_run(made_up(**given))).workload
    assert work.compile
    assert work.loss_compiled


@pytest.mark.parametrize(
    ("method", "loss", "compiled"),
    [("full", "unfused", False), ("full", "chunked_ce", True), ("lora", "unfused", True)],
)
def test_torchtunes_full_fine_tuning_drops_its_compiled_loss(method: str, loss: str, compiled: bool):
    kind = "single" if method == "full" else "lora"
    given = {"workload__loss_compiled": True, "workload__loss": loss, "workload__logits_dtype": "fp32"}
    run = parse_run(made_up(kind, software__framework="torchtune", **given))
    assert loss_fields(run)["loss_compiled"] == compiled


def test_torchtitans_float8_is_torchaos_beside_bf16():
    """abs and max are saved for float8's scales: compiled, they keep nothing else; uncompiled, the whole tensor."""
    given: dict[str, Any] = {
        "software__framework": "torchtitan", "hardware__gpu": "H100-80GB", "recipe__compute_dtype": "fp8",
        "engine_config": {"fp8_recipe": "tensorwise", "fp8_all_gather": False}, "workload__compile": True,
        "workload__checkpointing": "selective_op", "workload__sac_save": ["mm_alternate", "sdpa", "abs", "max"],
    }  # fmt: skip
    recipe = scenario_of(parse_run(made_up(**given))).recipe
    assert (recipe.fp8, recipe.computed_dtype) == ("tensorwise", "bf16")
    for changes, field in (
        ({"workload__compile": False}, "workload.sac_save"),
        ({"software__framework": "hf_trainer"}, "recipe.compute_dtype"),
        ({"engine_config": {"fp8_recipe": "delayed"}}, "engine_config.fp8_recipe"),
    ):
        assert field in [gap.field for gap in gaps_of(parse_run(made_up(**given | changes)))]


def test_torchtitans_save_list_arrives():
    """What never runs without tensor parallelism and FP8 leaves nothing to save."""
    listed = ["mm_alternate", "sdpa", "reduce_scatter", "max"]
    run = made_up(workload__checkpointing="selective_op", workload__sac_save=listed)
    assert scenario_of(parse_run(run)).workload.checkpointing == "save(mm_alternate,attention)"
    run = made_up(workload__checkpointing="selective_op", workload__sac_save=[*listed, "all_to_all"])
    assert [gap.field for gap in gaps_of(parse_run(run))] == ["workload.sac_save"]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"recipe__master_weights": True}, "recipe.master_weights"),
        ({"recipe__grad_dtype": "bf16"}, "recipe.grad_dtype"),
        ({"recipe__lora": None}, "recipe.lora"),
        ({"workload__loss": "fused_linear_ce", "workload__logits_dtype": None, "workload__loss_chunks": 3},
         "workload.loss_chunks"),
        ({"workload__loss": "unfused", "workload__logits_dtype": "fp16"}, "workload.logits_dtype"),
    ],
)  # fmt: skip
def test_what_a_scenario_cannot_express_of_adapters_and_losses(changes: dict[str, Any], field: str):
    assert [gap.field for gap in gaps_of(parse_run(made_up("lora", **changes)))] == [field]


def test_ligers_chunks_are_those_of_its_rule():
    """256 tokens, a vocabulary 8 times as wide as the hidden size: 8 chunks of 32."""
    fused = {"workload__loss": "fused_linear_ce", "workload__logits_dtype": None}
    assert gaps_of(parse_run(made_up(**fused, workload__loss_chunks=8))) == ()
    assert gaps_of(parse_run(made_up(**fused, workload__loss_chunks=None))) == ()


FP32_LOGITS = {"workload__logits_dtype": "fp32"}
IN_16_BIT = {"workload__logits_dtype": "bf16"}


@pytest.mark.parametrize(
    ("software", "changes", "expected"),
    [
        ({"transformers": "4.45.2"}, FP32_LOGITS, ("unfused", "model", True)),
        ({"transformers": "4.48.1"}, FP32_LOGITS, ("unfused", "loss", True)),
        ({"transformers": "4.49.0"}, FP32_LOGITS, ("unfused", "loss", False)),
        ({"transformers": "5.0"}, FP32_LOGITS, ("unfused", "loss", False)),
        ({"date": "2023-12"}, FP32_LOGITS, ("unfused", "model", True)),
        ({"transformers": "4.48.1"}, IN_16_BIT, ("unfused", "none", True)),
        ({"framework": "torchtitan"}, FP32_LOGITS, ("unfused", "loss", False)),
        ({"framework": "torchtune"}, FP32_LOGITS, ("unfused", "model", False)),
        ({"framework": "litgpt"}, IN_16_BIT, ("unfused", "model", False)),
        ({"framework": "litgpt"}, {**IN_16_BIT, "workload__loss": "chunked_ce", "workload__loss_chunks": 16},
         ("chunked_ce", "model", True)),
        ({"framework": "litgpt"}, {**IN_16_BIT, "workload__loss": "chunked_head_and_ce", "workload__loss_chunks": 9},
         ("chunked", "model", False)),
        ({"framework": "torchtune"},
         {**IN_16_BIT, "workload__loss": "chunked_head_and_ce", "workload__loss_chunks": 8},
         ("chunked", "loss", False)),
        ({"transformers": "4.45.2"}, {**FP32_LOGITS, "workload__loss": "fused_ce"}, ("fused_ce", "model", True)),
        ({"framework": "megatron"}, {**FP32_LOGITS, "workload__loss": "vocab_parallel_ce"},
         ("fused_ce", "loss", False)),
        ({"transformers": "4.45.2", "date": "2024-11"},
         {"workload__logits_dtype": None, "workload__loss": "fused_linear_ce"}, ("fused", "loss", True)),
        ({"transformers": "5.0", "date": "2026-01"},
         {"workload__logits_dtype": None, "workload__loss": "fused_linear_ce"}, ("fused", "none", False)),
    ],
)  # fmt: skip
def test_a_loss_is_that_of_the_runs_library(
    software: dict[str, Any], changes: dict[str, Any], expected: tuple[Any, ...]
):
    """As memcore.scenario.losses has them."""
    named = {f"software__{name}": value for name, value in software.items()}
    work = scenario_of(parse_run(made_up(**named, **changes))).workload
    assert (work.loss.value, work.upcast.value, work.shifted_copy) == expected
    assert work.loss_chunks == changes.get("workload__loss_chunks")


def test_where_a_forward_does_not_upcast_autocast_does():
    """transformers 4.48, modeling_gpt_bigcode.py: a shifted copy in 16 bit, then torch's cross entropy."""
    config = {"model_type": "gpt_bigcode", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 512}
    changes = {"model__config": config, "recipe__autocast": True, "software__transformers": "4.48.1"}
    work = scenario_of(parse_run(made_up("lora", **changes))).workload
    assert (work.upcast.value, work.shifted_copy) == ("none", True)


def test_parallelism_beyond_the_scope_is_named():
    run = parse_run(made_up(parallelism__tp=2, parallelism__ep=4, hardware__gpus=2))
    assert beyond_scope(run) == ("tp = 2", "ep = 4")


def test_what_transformers_4_did_otherwise_is_said_of_its_runs():
    """Experts were modules of their own; GPTBigCode's classes went on collecting keys and values."""

    def said(version: str | None, model_type: str) -> tuple[str, bool]:
        run = made_up(software__transformers=version, model__config={**MIXTURE, "model_type": model_type})
        scenario = scenario_of(parse_run(run))
        return scenario.model.experts, scenario.workload.use_cache

    assert said("4.48.1", "mixtral") == ("separate", False)
    assert said("4.48.1", "gpt_bigcode") == ("separate", True)
    assert said("5.24.0", "mixtral") == said("5.24.0", "gpt_bigcode") == ("stacked", False)
    assert said(None, "mixtral") == ("stacked", False)


def test_ddp_holds_the_same_in_micro_steps_that_are_not_synchronised():
    """litgpt's published run of TinyLlama takes one more set of gradients on eight A100 than on one."""
    run = made_up("ddp", engine_config={"no_sync_accumulation": True}, workload__grad_accum=16)
    assert gaps_of(parse_run(run)) == ()
    on_one, on_eight, gradients = 29.84e9, 32.04e9, 2 * 1_100_048_384
    assert on_eight - on_one == pytest.approx(gradients, rel=0.005)


@pytest.mark.parametrize(
    ("software", "code"), [({"framework": "litgpt"}, "litgpt"), ({"framework": "hf_trainer"}, "transformers")]
)
def test_the_model_code_is_that_of_the_framework(software: dict[str, Any], code: str):
    named = {f"software__{name}": value for name, value in software.items()}
    assert scenario_of(parse_run(made_up(**named))).model.code == code


@pytest.mark.parametrize(("date", "kept"), [("2024-06", True), ("2024-07", False)])
def test_runs_before_bitsandbytes_0_43_2_keep_the_inputs_of_4_bit_products(date: str, kept: bool):
    assert scenario_of(parse_run(made_up("qlora", software__date=date))).recipe.keeps_packed_inputs is kept


@pytest.mark.parametrize(("date", "held"), [("2023-10", False), ("2024-04", True)])
def test_litgpts_loop_holds_its_last_loss_since_it_has_data_loaders(date: str, held: bool):
    run = made_up("qlora", software__date=date, software__framework="litgpt", workload__checkpointing="none")
    assert scenario_of(parse_run(run)).workload.last_loss_held is held


@pytest.mark.parametrize(
    ("stage", "resharded", "spread"),
    [(3, True, (2, 1, True)), (3, None, (2, 1, True)), (3, False, (2, 1, False)), (2, None, (2, 1, False)),
     (2, False, (2, 1, False)), (0, None, (1, 2, True))],
)  # fmt: skip
def test_fsdp1s_strategies(stage: int, resharded: bool | None, spread: tuple[int, int, bool]):
    """FULL_SHARD counts as stage 3 and NO_SHARD as 0, says the runs' schema."""
    changes = {"parallelism__zero_stage": stage, "parallelism__reshard_after_forward": resharded}
    scenario = scenario_of(parse_run(made_up("fsdp1", **changes)))
    parallelism = scenario.parallelism
    assert (parallelism.dp_shard, parallelism.dp_replicate, scenario.fsdp1_config.reshard_after_forward) == spread


def test_a_strategy_that_contradicts_itself_is_a_gap():
    run = made_up("fsdp1", parallelism__zero_stage=2, parallelism__reshard_after_forward=True)
    assert [gap.field for gap in gaps_of(parse_run(run))] == ["parallelism.reshard_after_forward"]


@pytest.mark.parametrize(("prefetch", "ahead"), [("backward_pre", False), ("backward_pre+forward", True)])
def test_what_fsdp1_gathers_ahead(prefetch: str, ahead: bool):
    config = scenario_of(parse_run(made_up("fsdp1", parallelism__prefetch=prefetch))).fsdp1_config
    assert (config.backward_prefetch, config.forward_prefetch) == ("pre", ahead)
