"""What a Scenario takes and refuses: defaults, each refusal's sentence, hostile input, round trips.

Run: pytest tests/test_scenario.py.
"""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memcore.configs import MAX_LINK_TEXT, check_config, normalise_config
from memcore.engine_options import EngineName
from memcore.errors import UserError
from memcore.models import catalogue
from memcore.scenario import Device, Method, Scenario, parse_scenario, scenario_data

BARE = {"n_params": "7b"}
LLAMA = {"name": "meta-llama/Llama-3.1-8B"}


def scenario(**parts: Any) -> Scenario:
    return parse_scenario({"model": BARE, **parts})


def refusal(data: object) -> UserError:
    with pytest.raises(UserError) as caught:
        parse_scenario(data)
    text = str(caught.value)
    assert text.endswith("."), "a refusal is a whole sentence"
    assert "\n" not in text
    assert len(text) < 400, "a refusal never repeats long input"
    return caught.value


class TestDefaults:
    def test_a_bare_count_is_one_gpu_with_bf16_adamw(self):
        found = scenario()
        assert found.model.n_params == 7_000_000_000
        assert found.parallelism.engine is EngineName.SINGLE
        assert (found.hardware.gpus, found.hardware.gpus_per_node) == (1, 1)
        assert found.recipe.method is Method.FULL
        assert (found.recipe.convention, found.recipe.optimizer.name) == ("zero_paper", "adamw")
        assert found.offload.optimizer is Device.NONE
        assert (found.workload.micro_batch, found.workload.seq_len) == (1, 4096)

    def test_several_gpus_are_ddp(self):
        found = scenario(hardware={"gpus": 8}).parallelism
        assert (found.engine, found.dp_replicate, found.dp_shard) == (EngineName.DDP, 8, 1)

    def test_a_zero_stage_means_deepspeed_over_all_gpus(self):
        found = scenario(hardware={"gpus": 8}, parallelism={"zero_stage": 2}).parallelism
        assert (found.engine, found.dp_shard, found.stage) == (EngineName.DEEPSPEED, 8, 2)

    def test_an_engine_config_means_deepspeed_at_its_stage(self):
        found = scenario(engine_config={"zero_optimization": {"stage": 3}}).parallelism
        assert (found.engine, found.zero_stage) == (EngineName.DEEPSPEED, 3)

    def test_fsdp2_divides_everything(self):
        found = scenario(hardware={"gpus": 16}, parallelism={"engine": "fsdp2", "dp_replicate": 2}).parallelism
        assert (found.dp_shard, found.dp_replicate, found.stage, found.dp) == (8, 2, 3, 16)

    def test_nodes_have_at_most_eight_gpus(self):
        assert scenario(hardware={"gpus": 4}).hardware.gpus_per_node == 4
        assert scenario(hardware={"gpus": 64}).hardware.gpus_per_node == 8

    @pytest.mark.parametrize("eight", [8, 8.0, "8"])
    def test_whole_numbers_may_come_as_text_or_floats(self, eight: object):
        for parts in ({"hardware": {"gpus": eight}}, {"hardware": {"gpus": 8}, "parallelism": {"dp": eight}}):
            found = scenario(**parts)
            assert (found.hardware.gpus, found.parallelism.dp_replicate) == (8, 8)

    def test_none_is_the_same_as_not_given(self):
        nothing = {"engine": None, "zero_stage": None, "dp": None, "dp_shard": None, "dp_replicate": None}
        assert scenario(hardware={"gpus": 8}, parallelism=nothing) == scenario(hardware={"gpus": 8})

    def test_an_optimizer_may_be_its_name(self):
        assert scenario(recipe={"optimizer": "lion"}) == scenario(recipe={"optimizer": {"name": "lion"}})

    def test_ds_config_floats_are_whole_numbers(self):
        found = scenario(engine_config={"zero_optimization": {"reduce_bucket_size": 5e8, "sub_group_size": 1e9}})
        assert found.zero_config.reduce_bucket_size == 500_000_000

    def test_json_text_and_bytes(self):
        text = '{"model": {"n_params": 7000000000}}'
        assert parse_scenario(text) == parse_scenario(text.encode()) == scenario()


@pytest.mark.parametrize(
    ("count", "number"),
    [
        ("7b", 7 * 10**9),
        ("7B", 7 * 10**9),
        ("7e9", 7 * 10**9),
        ("6,738,415,616", 6_738_415_616),
        ("6_738_415_616", 6_738_415_616),
        ("1.5 T", 1_500_000_000_000),
        ("350m", 350_000_000),
        (" 124 M ", 124_000_000),
        ("0.5b", 500_000_000),
        ("1e15", 10**15),
        ("999999999999999", 999_999_999_999_999),
        (7e9, 7 * 10**9),
        (10**15, 10**15),
    ],
)
def test_parameter_counts(count: object, number: int):
    assert parse_scenario({"model": {"n_params": count}}).model.n_params == number


@pytest.mark.parametrize(
    ("count", "sentence"),
    [
        ("-3", "'-3' is not a parameter count: write a whole number above 0"),
        ("abc", "'abc' is not a parameter count"),
        ("", "'' is not a parameter count"),
        ("nan", "'nan' is not a parameter count"),
        ("inf", "'inf' is not a parameter count"),
        ("0", "'0' is not a parameter count"),
        ("0.4", "'0.4' is not a parameter count"),
        ("b", "'b' is not a parameter count"),
        ("7bb", "'7bb' is not a parameter count"),
        ("0x10", "'0x10' is not a parameter count"),
        ("1e-3", "'1e-3' is not a parameter count"),
        ("１２", "'１２' is not a parameter count"),  # full-width digits
        ("x" * 100_000, "is not a parameter count"),
        ("1e400", "'1e400' is more than 1000 T, the largest"),
        ("1e16", "'1e16' is more than 1000 T"),
        ("9" * 4000, "is more than 1000 T"),
        ("9" * 5000, "is more than 1000 T"),
        (True, "model.n_params is True; allowed is a whole number."),
        (False, "model.n_params is False; allowed is a whole number."),
        (0, "model.n_params is 0; allowed is a whole number of 1 or more."),
        (-3, "model.n_params is -3; allowed is a whole number of 1 or more."),
        (1.5, "model.n_params is 1.5; allowed is a whole number."),
        (10**15 + 1, "allowed is at most 1,000,000,000,000,000."),
        (float("nan"), "model.n_params is nan; allowed is a whole number."),
        (float("inf"), "model.n_params is inf; allowed is a whole number."),
        ([], "model.n_params is []; allowed is a whole number."),
        ({}, "model.n_params is an object; allowed is a whole number."),
        (None, "model needs exactly one of name, n_params and config; it has none of them."),
    ],
)
def test_bad_parameter_counts(count: object, sentence: str):
    error = refusal({"model": {"n_params": count}})
    assert sentence in str(error)
    assert error.field == ("model" if count is None else "model.n_params")


EIGHT = {"hardware": {"gpus": 8}}
REFUSALS = [
    # hardware
    ({"hardware": {"gpus": 0}}, "hardware.gpus", "hardware.gpus is 0; allowed is a whole number of 1 or more."),
    ({"hardware": {"gpus": -8}}, "hardware.gpus", "hardware.gpus is -8; allowed is a whole number of 1 or more."),
    ({"hardware": {"gpus": None}}, "hardware.gpus", "hardware.gpus is None; allowed is a whole number."),
    ({"hardware": {"gpus": True}}, "hardware.gpus", "hardware.gpus is True; allowed is a whole number."),
    ({"hardware": {"gpus": 2.5}}, "hardware.gpus", "hardware.gpus is 2.5; allowed is a whole number."),
    ({"hardware": {"gpus": "eight"}}, "hardware.gpus", "hardware.gpus is 'eight'; allowed is a whole number."),
    ({"hardware": {"gpus": 10**30}}, "hardware.gpus", "allowed is at most 1,000,000."),
    (
        {"hardware": {"gpus": 8, "gpus_per_node": 3}},
        "hardware.gpus_per_node",
        "hardware.gpus_per_node is 3, which does not divide hardware.gpus = 8 into whole nodes.",
    ),
    (
        {"hardware": {"gpu": "H100"}},
        "hardware.gpu",
        "hardware.gpu is 'H100', which is not in the catalogue; the nearest are H100-96GB, H100-80GB, H100-NVL-94GB.",
    ),
    ({"hardware": {"gpu": 5}}, "hardware.gpu", "hardware.gpu is 5; allowed is a text"),
    ({"hardware": []}, "hardware", "hardware is []; allowed is an object with its fields."),
    # model
    ({"model": {}}, "model", "model needs exactly one of name, n_params and config; it has none of them."),
    ({"model": {**LLAMA, **BARE}}, "model", "it has name, n_params."),
    ({"model": None}, "model", "model is None; allowed is an object with its fields."),
    (
        {"model": {"name": "Llama-3.1-8B"}},
        "model.name",
        "model.name is 'Llama-3.1-8B', which is not in the catalogue; the nearest are meta-llama/Llama-3.1-8B",
    ),
    ({"model": {"name": "x" * 10**5}}, "model.name", "allowed is a text of up to 120 characters."),
    # parallelism
    *(
        ({"parallelism": {name: 2}}, f"parallelism.{name}", f"parallelism.{name} is 2; only 1 is predicted so far.")
        for name in ("tp", "pp", "vpp", "cp", "ep")
    ),
    ({"parallelism": {"tp": 0}}, "parallelism.tp", "parallelism.tp is 0; allowed is a whole number of 1 or more."),
    (
        {**EIGHT, "parallelism": {"engine": "fsdp2", "zero_stage": 3}},
        "parallelism.zero_stage",
        "parallelism.zero_stage is 3, but fsdp2 has no ZeRO stages: leave it out, or choose deepspeed.",
    ),
    ({"parallelism": {"zero_stage": 4}}, "parallelism.zero_stage", "zero_stage is 4; allowed is at most 3."),
    (
        {"parallelism": {"engine": "horovod"}},
        "parallelism.engine",
        "allowed is single, ddp, fsdp1, fsdp2, deepspeed or llm_c.",
    ),
    ({"parallelism": {"engine": ["ddp"]}}, "parallelism.engine", "allowed is single, ddp, fsdp1, fsdp2"),
    (
        {**EIGHT, "parallelism": {"engine": "single"}},
        "parallelism.engine",
        "parallelism.engine is single, but hardware.gpus is 8: choose ddp, fsdp1, fsdp2 or deepspeed.",
    ),
    (
        {**EIGHT, "parallelism": {"engine": "fsdp2", "dp": 4}},
        "parallelism.dp",
        "dp_shard x dp_replicate = 4 x 1 = 4, but hardware.gpus is 8.",
    ),
    (
        {**EIGHT, "parallelism": {"engine": "fsdp2", "dp": 8, "dp_shard": 2, "dp_replicate": 2}},
        "parallelism.dp",
        "parallelism.dp is 8, but dp_shard x dp_replicate = 2 x 2 = 4.",
    ),
    (
        {**EIGHT, "parallelism": {"engine": "fsdp2", "dp_replicate": 3}},
        "parallelism.dp",
        "dp_shard x dp_replicate = 2 x 3 = 6, but hardware.gpus is 8.",
    ),
    (
        {**EIGHT, "parallelism": {"engine": "ddp", "dp_shard": 8}},
        "parallelism.dp_shard",
        "parallelism.dp_shard is 8, which does nothing for ddp: only 1 is allowed.",
    ),
    (
        {**EIGHT, "parallelism": {"engine": "deepspeed", "dp_replicate": 2}},
        "parallelism.dp_replicate",
        "parallelism.dp_replicate is 2, which does nothing for deepspeed: only 1 is allowed.",
    ),
    ({"parallelism": {"dp": "x"}}, "parallelism.dp", "parallelism.dp is 'x'; allowed is a whole number of 1 or more."),
    ({"parallelism": {"dp": 0}}, "parallelism.dp", "parallelism.dp is 0; allowed is a whole number of 1 or more."),
    ({"parallelism": {"dp": True}}, "parallelism.dp", "parallelism.dp is True"),
    ({"parallelism": {"dp_shard": 0}}, "parallelism.dp_shard", "allowed is a whole number of 1 or more."),
    ({"parallelism": []}, "parallelism", "parallelism is []; allowed is an object with its fields."),
    # engine_config
    (
        {"engine_config": {}, "parallelism": {"engine": "single"}},
        "engine_config",
        "engine_config does nothing for single: leave it out.",
    ),
    (
        {**EIGHT, "engine_config": {"zero_optimization": {}}, "parallelism": {"engine": "ddp"}},
        "engine_config.zero_optimization",
        "engine_config.zero_optimization is not a setting of ddp that is read here.",
    ),
    (
        {"engine_config": {"zero_optimization": {"stage": 2}}, "parallelism": {"zero_stage": 3}},
        "engine_config.zero_optimization.stage",
        "is 2, but parallelism.zero_stage is 3: they must be the same.",
    ),
    (
        {**EIGHT, "engine_config": {"zero_optimization": {"stage": 2, "zero_hpz_partition_size": 2}}},
        "engine_config.zero_optimization.zero_hpz_partition_size",
        "is 2, which does nothing below ZeRO stage 3.",
    ),
    (
        {**EIGHT, "engine_config": {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 3}}},
        "engine_config.zero_optimization.zero_hpz_partition_size",
        "is 3, which does not divide the 8 data-parallel ranks.",
    ),
    (
        {"engine_config": {"zero_optimization": {"reduce_bucket_size": "auto"}}},
        "engine_config.zero_optimization.reduce_bucket_size",
        "is 'auto'; allowed is a whole number.",
    ),
    ({"engine_config": "x"}, "engine_config", "engine_config is 'x'; allowed is an object with its fields."),
    # recipe
    (
        {"recipe": {"lora": {}}},
        "recipe.lora",
        "recipe.lora does nothing when recipe.method is full: choose lora or qlora.",
    ),
    (
        {"recipe": {"method": "qlora"}},
        "recipe.method",
        "recipe.method is qlora, which needs the model's shapes: give a catalogue name or a config.json.",
    ),
    (
        {"model": {"name": "ZeRO paper 7B"}, "recipe": {"method": "lora"}},
        "recipe.method",
        "recipe.method is lora, which needs the model's shapes",
    ),
    (
        {"model": LLAMA, "recipe": {"method": "lora", "quantization": "nf4"}},
        "recipe.quantization",
        "recipe.quantization is nf4, which does nothing when recipe.method is lora: choose qlora.",
    ),
    (
        {"model": {"n_params": "7b", "experts": "separate"}},
        "model.experts",
        "model.experts is separate, which does nothing for a parameter count.",
    ),
    (
        {"model": LLAMA, "recipe": {"method": "lora", "quant_group_size": 128}},
        "recipe.quant_group_size",
        "recipe.quant_group_size is set, which does nothing when recipe.method is lora: choose qlora.",
    ),
    (
        {"model": LLAMA, "recipe": {"quantize_lm_head": True}},
        "recipe.quantize_lm_head",
        "recipe.quantize_lm_head is set, which does nothing when recipe.method is full: choose qlora.",
    ),
    (
        {"model": LLAMA, "recipe": {"method": "qlora", "quantization": "nf4", "quant_group_size": 128}},
        "recipe.quant_group_size",
        "recipe.quant_group_size is 128; NF4 is predicted with 64 values to a scale alone.",
    ),
    (
        {"model": LLAMA, "recipe": {"method": "qlora", "quantization": "gptq_int4", "quantize_lm_head": True}},
        "recipe.quantize_lm_head",
        "recipe.quantize_lm_head is set, but AutoGPTQ packs the layers' weights alone.",
    ),
    (
        {"model": LLAMA, "recipe": {"method": "qlora", "quantize_lm_head": True}, "workload": {"loss": "fused"}},
        "recipe.quantize_lm_head",
        "recipe.quantize_lm_head is set, but the fused loss reads the head's own weight, which is not there",
    ),
    (
        {
            "model": LLAMA,
            "hardware": {"gpus": 8},
            "parallelism": {"engine": "fsdp2"},
            "recipe": {"method": "qlora", "quantization": "gptq_int4"},
        },
        "recipe.quantization",
        "recipe.quantization is gptq_int4, whose weights are buffers: fsdp2 does not divide those.",
    ),
    (
        {"model": LLAMA, "recipe": {"method": "lora", "lora": {"autocast": True, "adapter_dtype": "bf16"}}},
        "recipe.lora.autocast",
        "recipe.lora.autocast is set, which does nothing but for FP32 adapters on 16-bit weights.",
    ),
    (
        {"model": LLAMA, "recipe": {"method": "lora", "convention": "amp_autocast", "lora": {"autocast": True}}},
        "recipe.lora.autocast",
        "recipe.lora.autocast is set, which does nothing but for FP32 adapters on 16-bit weights.",
    ),
    (
        {
            "model": LLAMA,
            "hardware": {"gpus": 8},
            "parallelism": {"engine": "fsdp2"},
            "recipe": {"method": "lora", "lora": {"autocast": True}},
        },
        "recipe.lora.autocast",
        "recipe.lora.autocast is set, which is not predicted for fsdp2 yet.",
    ),
    (
        {"model": LLAMA, "recipe": {"method": "lora", "lora": {"targets": []}}},
        "recipe.lora.targets",
        'recipe.lora.targets is empty: name at least one module, or "all-linear".',
    ),
    (
        {"model": LLAMA, "recipe": {"method": "lora", "lora": {"targets": "q_proj"}}},
        "recipe.lora.targets",
        "recipe.lora.targets is 'q_proj'; allowed is a list.",
    ),
    ({"recipe": {"optimizer": "lamb"}}, "recipe.optimizer.name", "allowed is adamw, adam, adafactor, lion"),
    (
        {"recipe": {"optimizer": "muon"}},
        "recipe.optimizer.name",
        "is muon, whose states depend on the model's shapes: give a catalogue name or a config.json.",
    ),
    ({"recipe": {"optimizer": {"name": "adamw", "bits": 4}}}, "recipe.optimizer.bits", "is 4; allowed is 8 or 32."),
    (
        {"model": LLAMA, "recipe": {"optimizer": {"name": "muon", "bits": 8}}},
        "recipe.optimizer.bits",
        "recipe.optimizer.bits is 8, but muon has no 8-bit form.",
    ),
    (
        {"model": LLAMA, "recipe": {"optimizer": {"name": "muon", "paged": True}}},
        "recipe.optimizer.paged",
        "recipe.optimizer.paged is set, but muon has no paged form.",
    ),
    (
        {"recipe": {"optimizer": {"bits": 8, "implementation": "fused"}}},
        "recipe.optimizer.implementation",
        "is fused, which does nothing for this optimizer: it is not one of torch's.",
    ),
    (
        {"recipe": {"optimizer": {"name": "adamw", "momentum": True}}},
        "recipe.optimizer.momentum",
        "recipe.optimizer.momentum does nothing for adamw: it is SGD's.",
    ),
    (
        {"model": LLAMA, **EIGHT, "parallelism": {"engine": "fsdp2"}, "recipe": {"optimizer": "adafactor"}},
        "recipe.optimizer.name",
        "is adafactor, which is not predicted for FSDP's divided tensors yet.",
    ),
    (
        {"recipe": {"convention": "deepspeed_fp32_grad"}},
        "recipe.convention",
        "which has no form below ZeRO stage 1; the stage is 0.",
    ),
    ({"recipe": {"convention": "folklore"}}, "recipe.convention", "recipe.convention is 'folklore'; allowed is zero_"),
    ({"recipe": {"param_dtype": "fp64"}}, "recipe.param_dtype", "allowed is fp32, bf16 or fp16."),
    # offload
    (
        {"offload": {"optimizer": "cpu"}},
        "offload.optimizer",
        "offload.optimizer is cpu, which single does not do here: choose deepspeed.",
    ),
    (
        {"parallelism": {"zero_stage": 0}, "offload": {"optimizer": "cpu"}},
        "offload.optimizer",
        "offload.optimizer is cpu, which needs ZeRO stage 1 or above; the stage is 0.",
    ),
    (
        {"parallelism": {"zero_stage": 2}, "offload": {"parameters": "cpu"}},
        "offload.parameters",
        "offload.parameters is cpu, which needs ZeRO stage 3 or above; the stage is 2.",
    ),
    (
        {"parallelism": {"zero_stage": 2}, "offload": {"optimizer": "nvme"}},
        "offload.optimizer",
        "offload.optimizer is nvme, which needs ZeRO stage 3 or above; the stage is 2.",
    ),
    (
        {"parallelism": {"zero_stage": 2}, "offload": {"optimizer": "cpu"}, "recipe": {"optimizer": {"bits": 8}}},
        "offload.optimizer",
        "DeepSpeed's CPU optimizer keeps 32-bit states: set recipe.optimizer.bits to 32.",
    ),
    (
        {
            "hardware": {"gpus": 8},
            "parallelism": {"engine": "fsdp2"},
            "engine_config": {"cpu_offload": True},
            "recipe": {"optimizer": {"bits": 8}},
        },
        "engine_config.cpu_offload",
        "engine_config.cpu_offload is set, but adamw of 8 bits, or paged, runs on a GPU alone.",
    ),
    (
        {
            "hardware": {"gpus": 8},
            "parallelism": {"engine": "fsdp2"},
            "engine_config": {"reshard_after_forward": False, "reshard_exception": "last_block"},
        },
        "engine_config.reshard_exception",
        "is last_block, which does nothing without reshard_after_forward: nothing is resharded.",
    ),
    (
        {
            "hardware": {"gpus": 8},
            "parallelism": {"engine": "fsdp2"},
            "engine_config": {"reshard_exception": "last_block+head"},
        },
        "engine_config.reshard_exception",
        "the head is the root's: set engine_config.fsdp_units to block_embed_head.",
    ),
    ({"offload": {"activations": "nvme"}}, "offload.activations", "is 'nvme'; allowed is none or cpu."),
    # workload
    (
        {"model": {"name": "openai-community/gpt2"}, "workload": {"compile": True, "checkpointing": "attention"}},
        "workload.compile",
        "torch compiles no reentrant checkpoint, and none of the attention alone.",
    ),
    (
        {
            "model": {"name": "openai-community/gpt2"},
            "workload": {"compile": True},
            "parallelism": {"zero_stage": 3},
        },
        "workload.compile",
        "is set, which is not predicted for deepspeed yet.",
    ),
    (
        {"workload": {"checkpointing": "save(attention,mm,mm_alternate)"}},
        "workload.checkpointing",
        "of which mm saves every matrix product: leave mm or mm_alternate out.",
    ),
    (
        {"workload": {"checkpointing": "segments(0)"}},
        "workload.checkpointing",
        "is 'segments(0)'; allowed are none, full, attention, segments(k), every_nth(n) and first(n)",
    ),
    ({"workload": {"seq_len": 0}}, "workload.seq_len", "is 0; allowed is a whole number of 1 or more."),
    ({"workload": {"micro_batch": 10**9}}, "workload.micro_batch", "allowed is at most 100,000,000."),
    ({"workload": {"attention": "magic"}}, "workload.attention", "allowed is flash, eager or memory_efficient."),
    # fields that do not exist
    ({"wokload": {}}, "wokload", "wokload is not a field of a scenario."),
    ({"workload": {"batch": 1}}, "workload.batch", "workload.batch is not a field of a scenario."),
]


@pytest.mark.parametrize(("parts", "field", "sentence"), REFUSALS)
def test_refusals(parts: dict[str, Any], field: str, sentence: str):
    error = refusal({"model": BARE, **parts})
    assert sentence in str(error)
    assert error.field == field


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ("", "This is not JSON (Expecting value, line 1)."),
        ("seven billion", "This is not JSON (Expecting value, line 1)."),
        (b"\xff\xfe\x00", "This is not JSON"),
        ('{"model": {"n_params": NaN}}', "This is not JSON"),
        ('{"model": {"n_params": -Infinity}}', "This is not JSON"),
        ('{"model": {"n_params": 1e999}}', "This is not JSON."),
        ('{"model": {"n_params": ' + "9" * 5000 + "}}", ""),
        ("[" * 100_000, "This is not JSON"),
        ('{"a":' * 50_000, "This is not JSON"),
        ("x" * 10_000_000, "The text is 10,000,000 characters long; up to 400,000 are read."),
        ("[1]", "A scenario is a JSON object with a model; this is a list."),
        ("null", "this is null."),
        ("3", "this is a number."),
        ("true", "this is true or false."),
        ('"x"', "this is text."),
        (None, "this is null."),
        (5, "this is a number."),
        ([], "this is a list."),
        ({}, "model is missing."),
        ("\ud800", "This is not JSON"),
    ],
    ids=str,
)
def test_input_that_is_no_scenario(data: object, sentence: str):
    assert sentence in str(refusal(data))


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _level in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({}, "model.config.model_type is missing; it must be the text that transformers knows the model by."),
        ({"model_type": 5}, "model.config.model_type is 5"),
        ({"model_type": "a b"}, "model.config.model_type is 'a b'"),
        ({"model_type": "x" * 10_000}, "it must be the text that transformers knows"),
        ({"auto_map": {"AutoConfig": "x.Y"}}, "The config asks for remote code (auto_map), which is never run."),
        ({"model_type": "llama", "num_hidden_layers": 1e30}, "num_hidden_layers is 1e+30; allowed is a whole number"),
        ({"model_type": "llama", "num_hidden_layers": 10**30}, "from 1 to 4,096."),
        ({"model_type": "llama", "num_hidden_layers": -1}, "num_hidden_layers is -1"),
        ({"model_type": "llama", "num_hidden_layers": "32"}, "num_hidden_layers is '32'"),
        ({"model_type": "llama", "num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"model_type": "llama", "hidden_size": float("inf")}, "hidden_size is inf"),
        (
            {"model_type": "llama", "hidden_size": 0},
            "hidden_size is 0; allowed is a whole number from 1 to 100,000,000",
        ),
        ({"model_type": "llama", "intermediate_size": [8, 10**30]}, "from 1 to 100,000,000."),
        ({"model_type": "llama", "num_local_experts": 10**9}, "from 0 to 16,384."),
        ({"model_type": "gemma3", "text_config": {"num_hidden_layers": 10**9}}, "model.config.text_config.num_hidden"),
        ({"model_type": "llama", "x": nested(20)}, "is nested too deeply or has too many entries"),
        ({"model_type": "llama", "x": nested(100_000)}, "is nested too deeply"),
        ({"model_type": "llama", "hidden_size": nested(100_000)}, "is nested too deeply"),
        ({"model_type": "llama", **{f"key{i}": i for i in range(5000)}}, "has too many entries to be a model's config"),
        ({"model_type": "llama", "x": [0] * 10_000}, "has too many entries"),
        (
            {"model_type": "llama", "rope_theta": float("nan")},
            "rope_theta is nan, which is not a number that JSON has.",
        ),
        ([], "model.config is []; allowed is an object with its fields."),
        ("config.json", "model.config is 'config.json'; allowed is an object with its fields."),
    ],
    ids=lambda value: repr(value)[:60] if isinstance(value, str) else "",
)
def test_absurd_configs(config: object, sentence: str):
    error = refusal({"model": {"config": config}})
    assert sentence in str(error)
    assert error.field.startswith("model.config")


def test_ten_megabytes_of_config():
    text = json.dumps({"model": {"config": {"model_type": "llama", "padding": "x" * 10_000_000}}})
    assert "up to 400,000 are read" in str(refusal(text))
    # Decoded by the caller already: the long text is dropped, and does not come back.
    found = parse_scenario(json.loads(text))
    assert found.model.config == {"model_type": "llama"}


def test_a_config_keeps_shapes_and_drops_free_text():
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "_name_or_path": "/home/someone/secret",
        "auto_map": {"AutoModel": "remote.Code"},
        "comment": "free text with spaces",
        "torch_dtype": "bfloat16",
        "id2label": {"0": "A"},
        "hidden_act": "silu",
        "long": "x" * (MAX_LINK_TEXT + 1),
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
        "layer_types": ["full_attention", "sliding_attention"],
    }
    kept = {
        "model_type": "llama",
        "hidden_size": 64,
        "hidden_act": "silu",
        "quantization_config": {"quant_method": "mxfp4"},
        "layer_types": ["full_attention", "sliding_attention"],
        "auto_map": True,  # that it asks for code, not which
        "num_labels": 1,  # how many labels, not which
    }
    assert normalise_config(config) == kept
    assert normalise_config(kept) == kept


def test_every_catalogue_config_is_accepted_and_normalising_it_twice_changes_nothing():
    for model in catalogue().values():
        if model.config is not None:
            check_config(model.config)
            once = normalise_config(model.config)
            assert normalise_config(once) == once


@pytest.mark.parametrize(
    ("workload", "field"),
    [
        ({"loss": "unfused", "loss_chunks": 4}, "workload.loss_chunks"),
        ({"loss": "fused", "logits_upcast": "model"}, "workload.logits_upcast"),
        ({"loss": "chunked", "shifted_copy": True}, "workload.shifted_copy"),
        ({"loss": "vocab_parallel_ce"}, "workload.loss"),
    ],
)
def test_what_does_nothing_for_the_loss_is_refused(workload: dict[str, Any], field: str):
    with pytest.raises(UserError) as caught:
        parse_scenario({"model": {"n_params": "7b"}, "workload": workload})
    assert caught.value.field == field


@pytest.mark.parametrize(
    "changes",
    [
        {"recipe": {"method": "lora", "lora": {"autocast": True}, "fp32_norms": True}},
        {"recipe": {"method": "qlora", "fp32_norms": True}},
        {"recipe": {"method": "qlora", "lora": {"autocast": True}, "fp32_norms": True},
         "workload": {"fused_kernels": ["rmsnorm"]}},
    ],
)  # fmt: skip
def test_fp32_norms_are_refused_where_nothing_takes_their_results(changes: dict[str, Any]):
    with pytest.raises(UserError) as caught:
        parse_scenario({"model": {"name": "mistralai/Mistral-7B-v0.3"}, **changes})
    assert caught.value.field == "recipe.fp32_norms"


@pytest.mark.parametrize(
    "changes",
    [
        {"recipe": {"method": "lora", "lora": {"modules_to_save": ["lm_head"]}}},  # FP32 adapters
        {"recipe": {"method": "qlora", "lora": {"modules_to_save": ["lm_head"], "adapter_dtype": "bf16"}}},
        {"recipe": {"method": "lora", "lora": {"modules_to_save": ["lm_head"], "adapter_dtype": "bf16"}},
         "parallelism": {"engine": "fsdp2"}, "hardware": {"gpus": 2}},
    ],
)  # fmt: skip
def test_trained_copies_are_refused_where_they_are_not_predicted(changes: dict[str, Any]):
    with pytest.raises(UserError) as caught:
        parse_scenario({"model": {"name": "meta-llama/Llama-3.1-8B"}, **changes})
    assert caught.value.field == "recipe.lora.modules_to_save"


FSDP2 = {"hardware": {"gpus": 8}, "parallelism": {"engine": "fsdp2"}}
GATHERS = {"engine_config": {"enable_fsdp_float8_all_gather": True}}


@pytest.mark.parametrize(
    ("changes", "field", "words"),
    [
        ({"model": BARE}, "recipe.fp8", "does nothing for a parameter count"),
        ({"recipe": {"fp8": "rowwise", "method": "lora"}}, "recipe.fp8", "full training"),
        ({"recipe": {"fp8": "rowwise", "convention": "pure_fp16"}}, "recipe.fp8", "in BF16"),
        ({"recipe": {"fp8": "rowwise", "convention": "amp_autocast"}}, "recipe.fp8", "without autocast"),
        ({"hardware": {"gpus": 8}, "parallelism": {"zero_stage": 3}}, "recipe.fp8", "a single GPU, DDP, and FSDP2"),
        ({**FSDP2, "engine_config": {"cpu_offload": True}}, "recipe.fp8", "without offloading"),
        ({"hardware": {"gpu": "A100-80GB"}}, "recipe.fp8", "not known to multiply in float8"),
        ({"workload": {"seq_len": 4097}}, "recipe.fp8", "multiples of 16 tokens; there are 4097"),
        ({"recipe": {"fp8": "delayed"}}, "recipe.fp8", "'delayed'; allowed are torchao's tensorwise"),
        ({"recipe": {"fp8": {"margin": 0}}}, "recipe.fp8", "Transformer Engine's recipes are not predicted"),
        ({**FSDP2, **GATHERS}, "engine_config.enable_fsdp_float8_all_gather", "it is rowwise"),
        ({**FSDP2, **GATHERS, "recipe": {}}, "engine_config.enable_fsdp_float8_all_gather", "tensorwise alone"),
        ({**GATHERS, "parallelism": {"engine": "fsdp2"}, "recipe": {"fp8": "tensorwise"}},
         "engine_config.enable_fsdp_float8_all_gather", "among several ranks"),
    ],
)  # fmt: skip
def test_float8_is_refused_where_it_is_not_predicted(changes: dict[str, Any], field: str, words: str):
    found = refusal({"model": LLAMA, "recipe": {"fp8": "rowwise"}, **changes})
    assert found.field == field
    assert words in str(found)


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["7b", "auto", "ddp", "cpu", "llama", 8, 0, -1, 1e308]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)
FIELDS = {
    "model": ("name", "n_params", "config"),
    "hardware": ("gpu", "gpus", "gpus_per_node"),
    "parallelism": (
        "engine", "zero_stage", "dp", "dp_shard", "dp_replicate", "tp", "pp", "vpp", "cp", "ep",
    ),
    "engine_config": ("zero_optimization",),
    "recipe": (
        "method", "convention", "param_dtype", "compute_dtype", "grad_dtype", "reduce_dtype", "master_dtype",
        "state_dtype", "optimizer", "quantization", "lora", "fp8",
    ),
    "offload": ("optimizer", "parameters", "activations"),
    "workload": ("micro_batch", "seq_len", "grad_accum", "attention", "checkpointing", "loss", "loss_chunks",
                 "logits_upcast", "shifted_copy", "logits_retained"),
}  # fmt: skip
DTYPES = st.sampled_from([None, "fp32", "bf16", "fp16"])


@st.composite
def valid_data(draw: st.DrawFn) -> dict[str, Any]:
    """The data of a valid scenario."""
    gpus = draw(st.sampled_from([1, 2, 3, 4, 8, 16, 64, 1024]))
    engine = draw(st.sampled_from(["single"] if gpus == 1 else ["ddp", "fsdp2", "deepspeed"]))
    data: dict[str, Any] = {
        "model": draw(st.sampled_from([BARE, LLAMA, {"n_params": 123}, {"config": {"model_type": "llama"}}])),
        "hardware": {"gpu": draw(st.sampled_from(["H100-80GB", "A100-40GB", "T4-16GB"])), "gpus": gpus},
        "parallelism": {"engine": engine},
        "recipe": {
            "convention": draw(st.sampled_from(["zero_paper", "megatron", "fsdp2_mixed", "pure_bf16", "fp32"])),
            "grad_dtype": draw(DTYPES),
            "master_dtype": draw(st.sampled_from([None, "none", "fp32"])),
            "optimizer": draw(
                st.sampled_from(["adamw", "lion", {"name": "sgd", "momentum": True}, {"bits": 8}, {"paged": True}])
            ),
        },
        "workload": {
            "micro_batch": draw(st.integers(1, 64)),
            "seq_len": draw(st.integers(1, 10**6)),
            "grad_accum": draw(st.integers(1, 8)),
            "attention": draw(st.sampled_from(["flash", "eager"])),
            "checkpointing": draw(st.sampled_from(["none", "full", "segments(2)", "first(9)"])),
        },
    }
    if engine == "deepspeed":
        stage = draw(st.integers(0, 3))
        data["parallelism"]["zero_stage"] = stage
        data["engine_config"] = draw(
            st.sampled_from([None, {}, {"zero_optimization": {"reduce_bucket_size": 123, "overlap_comm": True}}])
        )
        if stage == 3 and data["recipe"]["optimizer"] != {"bits": 8}:
            data["offload"] = draw(st.sampled_from([{}, {"optimizer": "cpu"}, {"parameters": "nvme"}]))
    if engine == "fsdp2" and gpus % 2 == 0:
        data["parallelism"]["dp_replicate"] = draw(st.sampled_from([1, 2]))
    if "n_params" not in data["model"]:
        method = draw(st.sampled_from(["full", "lora", "qlora"]))
        data["recipe"]["method"] = method
        if method != "full":
            data["recipe"]["lora"] = {"rank": draw(st.integers(1, 256)), "targets": ["q_proj", "v_proj"]}
        elif engine in ("single", "ddp") and data["hardware"]["gpu"] == "H100-80GB":
            data["recipe"] |= {"convention": "pure_bf16", "fp8": draw(st.sampled_from([None, "rowwise"]))}
            data["workload"]["micro_batch"] *= 16
    return data


@given(valid_data())
def test_round_trip_through_json(data: dict[str, Any]):
    found = parse_scenario(data)
    text = json.dumps(scenario_data(found), allow_nan=False)
    assert parse_scenario(text) == found
    assert scenario_data(parse_scenario(text)) == scenario_data(found)


def accept_or_refuse(data: object) -> None:
    """A Scenario or a UserError with a sentence, and nothing else."""
    try:
        found = parse_scenario(data)
    except UserError as error:
        sentence = str(error)
    else:
        # What is accepted can be written down and read back.
        assert parse_scenario(json.dumps(scenario_data(found), allow_nan=False)) == found
        return
    assert sentence.endswith(".")


@given(JSON_VALUES)
def test_junk_is_refused(data: object):
    accept_or_refuse(data)


@given(st.text(max_size=200) | st.binary(max_size=200))
def test_junk_text_is_refused(text: str | bytes):
    accept_or_refuse(text)


@given(st.fixed_dictionaries({}, optional=dict.fromkeys(FIELDS, JSON_VALUES)))
def test_junk_parts_are_refused(data: dict[str, Any]):
    accept_or_refuse(data)


@given(data=valid_data(), junk=JSON_VALUES, place=st.sampled_from([(p, f) for p, fs in FIELDS.items() for f in fs]))
def test_one_field_of_junk_is_refused_or_taken(data: dict[str, Any], junk: object, place: tuple[str, str]):
    part, field = place
    accept_or_refuse({**data, part: {**(data.get(part) or {}), field: junk}})
    accept_or_refuse({**data, part: junk})


@given(junk=JSON_VALUES, field=st.sampled_from(["hidden_size", "num_hidden_layers", "text_config", "anything"]))
def test_junk_in_a_config(junk: object, field: str):
    accept_or_refuse({"model": {"config": {"model_type": "llama", field: junk}}})


@given(
    key=st.sampled_from(["name", "bits", "paged", "implementation", "momentum", "rank", "targets", "adapter_dtype"]),
    junk=JSON_VALUES,
)
def test_junk_in_the_optimizer_and_the_adapters(key: str, junk: object):
    part = "lora" if key in ("rank", "targets", "adapter_dtype") else "optimizer"
    accept_or_refuse({"model": LLAMA, "recipe": {"method": "lora", part: {key: junk}}})
