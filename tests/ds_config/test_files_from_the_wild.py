"""Files as repositories and documentation have them, each held against DeepSpeed's own reader.

Run: pytest tests/ds_config/test_files_from_the_wild.py. The files are written anew, their form is that of axolotl's,
LLaMA-Factory's, DeepSpeedExamples' and accelerate's. The tests that call DeepSpeed are skipped without it.
"""

import json
import logging
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch

from memcore.budget import FORMULAS, predict
from memcore.ds_config import Reading, read_ds_config
from memcore.ds_config.keys import REMOVED, REMOVED_FROM_ZERO, SECTION_KEYS
from memcore.errors import UserError
from memcore.optimizers import OptimizerName
from memcore.scenario import Device, Scenario, parse_scenario

LLAMA, PSI = "meta-llama/Llama-3.1-8B", 8_030_261_248
MICRO, STEPS, GPUS = 7, 9, 8


def scenario_of(**parts: Any) -> Scenario:
    usual = {
        "model": {"name": LLAMA},
        "hardware": {"gpus": GPUS, "gpu": "A100-80GB"},
        "workload": {"micro_batch": MICRO, "grad_accum": STEPS},
    }
    return parse_scenario({**usual, **parts})


SCENARIO = scenario_of()


def read(config: str | Mapping[str, Any], scenario: Scenario = SCENARIO) -> Reading:
    return read_ds_config(config if isinstance(config, str) else json.dumps(config), scenario, FORMULAS)


def noted(reading: Reading, *words: str) -> bool:
    return any(all(word in note for word in words) for note in reading.notes)


def zero(stage: int = 2, **outer: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage}, **outer}


@pytest.fixture(scope="module")
def theirs() -> Iterator[Callable[[Mapping[str, Any]], Any]]:
    """DeepSpeed's own reading of a file on eight ranks, with a micro-batch where the file has no batch at all."""
    patch = pytest.MonkeyPatch()
    patch.setenv("DS_ACCELERATOR", "cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = pytest.importorskip("deepspeed.runtime.config")
    patch.setattr(module.dist, "get_rank", lambda *_: 0)
    patch.setattr(module.dist, "get_world_size", lambda *_: GPUS)
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)

    def config(raw: Mapping[str, Any]) -> Any:
        batch = {} if {"train_batch_size", "train_micro_batch_size_per_gpu"} & raw.keys() else {
            "train_micro_batch_size_per_gpu": MICRO
        }  # fmt: skip
        return module.DeepSpeedConfig({**json.loads(json.dumps(raw)), **batch})

    yield config
    logging.disable(before)
    patch.undo()


# --- how the text is written ------------------------------------------------------------------------------------------

PLAIN = {"train_micro_batch_size_per_gpu": 3, "bf16": {"enabled": True}, **zero(3)}


NEARLY_JSON = {
    "comments": """{ // one
        "train_micro_batch_size_per_gpu": 3, # two
        /* three
        lines */ "bf16": {"enabled": true}, "zero_optimization": {"stage": 3}}""",
    "commas": """{"train_micro_batch_size_per_gpu": 3, "bf16": {"enabled": true,},
        "zero_optimization": {"stage": 3},
        }""",
    "program": """ds_config = {'train_micro_batch_size_per_gpu': 3, 'bf16': {'enabled': True},
        'zero_optimization': {'stage': 3}}""",
    "markdown": """```json
{"train_micro_batch_size_per_gpu": 3, "bf16": {"enabled": true}, "zero_optimization": {"stage": 3}}
```
""",
    "bare keys": "{train_micro_batch_size_per_gpu: 3, bf16: {enabled: true}, zero_optimization: {stage: 3}}",
    "byte order mark": "\ufeff" + json.dumps(PLAIN),
}


@pytest.mark.parametrize("text", NEARLY_JSON.values(), ids=NEARLY_JSON)
def test_a_file_that_is_nearly_json_is_read(text: str):
    reading = read(text)
    assert reading.scenario == read(PLAIN).scenario
    assert reading.scenario.workload.micro_batch == 3
    assert noted(reading, "not strict JSON", "Hugging Face") == (not text.startswith("\ufeff"))
    assert json.loads(json.dumps(reading.corrected)) == read(PLAIN).corrected


def test_what_looks_like_a_comment_in_a_text_is_none():
    url = "http://host/#part"
    reading = read(f'{{"wandb": {{"host": "{url}"}}, "zero_optimization": {{"stage": 1}},}}')
    assert reading.corrected["wandb"] == {"host": url}


@pytest.mark.parametrize("filler", ["a " * 90_000, "'x'," * 45_000, "/*" * 90_000, "{a:" * 60_000, "#\n" * 90_000])
def test_long_texts_are_refused_at_once(filler: str):
    start = time.monotonic()
    with pytest.raises(UserError):
        read("{" + filler)
    assert time.monotonic() - start < 3


@pytest.mark.parametrize("stage", ["${stage}", "STAGE", "<stage>", "2 ** 1", "1 2"])
def test_a_placeholder_is_not_guessed(stage: str):
    with pytest.raises(UserError, match="This is not JSON"):
        read(f'{{"zero_optimization": {{"stage": {stage}}}}}')


def test_a_key_that_is_there_twice_is_said():
    """runtime/config_utils.py, dict_raise_error_on_duplicate_keys, stops there."""
    reading = read('{"zero_optimization": {"stage": 2, "stage": 3}}')
    assert noted(reading, "stage is there more than once")
    assert reading.scenario.parallelism.stage == 3


# --- accelerate's YAML ------------------------------------------------------------------------------------------------

YAML = """\
compute_environment: LOCAL_MACHINE
# written by accelerate config
deepspeed_config:
  gradient_accumulation_steps: 4
  gradient_clipping: 1.0
  offload_optimizer_device: {device}
  offload_param_device: none
  zero3_init_flag: true
  zero_stage: {stage}
distributed_type: DEEPSPEED
downcast_bf16: 'no'
mixed_precision: {precision}   # or fp16
num_processes: 8
tpu_env: []
"""


@pytest.mark.parametrize(
    ("stage", "device", "precision", "bytes_each"),
    [(3, "cpu", "bf16", 16), (2, "none", "fp16", 16), (1, "cpu", "no", 16)],
)
def test_accelerates_yaml_is_the_ds_config_that_it_makes(stage: int, device: str, precision: str, bytes_each: int):
    """Held against accelerate's own plugin."""
    accelerate = pytest.importorskip("accelerate.utils.dataclasses")
    patch = pytest.MonkeyPatch()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plugin = accelerate.DeepSpeedPlugin(
            zero_stage=stage,
            gradient_accumulation_steps=4,
            offload_optimizer_device=device,
            offload_param_device="none",
        )
        plugin.set_mixed_precision(precision)
    patch.undo()
    made = plugin.deepspeed_config
    reading = read(YAML.format(stage=stage, device=device, precision=precision))
    assert noted(reading, "accelerate's YAML")
    scenario = reading.scenario
    assert scenario.parallelism.stage == made["zero_optimization"]["stage"] == stage
    assert scenario.offload.optimizer == made["zero_optimization"]["offload_optimizer"]["device"] == device
    assert scenario.workload.grad_accum == made["gradient_accumulation_steps"] == 4
    for half in ("fp16", "bf16"):
        assert reading.corrected[half]["enabled"] == made[half]["enabled"]
    states = predict(scenario).states.states
    assert sum(state.total_bytes for state in states) == bytes_each * PSI
    assert {state.element_bytes for state in states} == ({4} if precision == "no" else {2, 4})


def test_an_uploaded_yaml_may_begin_with_a_byte_order_mark():
    text = YAML.format(stage=3, device="none", precision="bf16")
    reading = read_ds_config(b"\xef\xbb\xbf" + text.encode(), SCENARIO, FORMULAS)
    assert reading.scenario.parallelism.stage == 3


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "base_model: x\ndatasets:\n  - path: y\n    type: z\ndeepspeed: configs/zero3.json\n",
            "only names a ds_config",
        ),
        ("deepspeed_config:\n  deepspeed_config_file: z.json\n  zero3_init_flag: false\n", "only names a ds_config"),
        ("distributed_type: FSDP\nfsdp_config:\n  fsdp_offload_params: false\n", "no deepspeed_config section"),
    ],
)
def test_another_yaml_is_told_apart(text: str, sentence: str):
    with pytest.raises(UserError, match=sentence):
        read(text)


# --- forms of older versions ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("given", "stage"), [(True, 1), (False, 0)])
def test_a_bare_switch_is_the_form_of_the_first_versions(theirs: Callable[..., Any], given: bool, stage: int):
    reading = read({"zero_optimization": given, "fp16": {"enabled": True}})
    assert reading.scenario.parallelism.stage == theirs({"zero_optimization": given}).zero_optimization_stage == stage
    assert noted(reading, "an old form")
    assert theirs(reading.corrected).zero_optimization_stage == stage


def test_bfloat16_is_the_old_name_of_bf16(theirs: Callable[..., Any]):
    file = zero(2, bfloat16={"enabled": True})
    assert theirs(file).bfloat16_config.enabled
    reading = read(file, scenario_of(recipe={"convention": "fp32"}))
    assert reading.unknown == ()
    assert sum(state.total_bytes for state in predict(reading.scenario).states.states) == 16 * PSI
    assert {state.element_bytes for state in predict(reading.scenario).states.states} == {2, 4}


def test_what_was_removed_is_the_librarys_own_list():
    module = pytest.importorskip("deepspeed.runtime.config")
    assert module._REMOVED_TOP_LEVEL_CONFIG_KEYS.keys() == REMOVED
    assert module._REMOVED_ZERO_CONFIG_KEYS.keys() == REMOVED_FROM_ZERO


@pytest.mark.parametrize("key", ["amp", "elasticity", "compression_training", "zero_optimization.mics_shard_size"])
def test_a_feature_that_was_removed_is_said_and_taken_out(theirs: Callable[..., Any], key: str):
    outer, _dot, inner = key.partition(".")
    file = {**zero(3), outer: {"stage": 3, inner: 8} if inner else {"enabled": True}}
    with pytest.raises(Exception, match="removed"):
        theirs(file)
    reading = read(file)
    assert noted(reading, key, "taken out of DeepSpeed")
    assert reading.unknown == ()
    assert theirs(reading.corrected).zero_optimization_stage == 3


def test_keys_of_other_sections_are_the_librarys_own():
    precision = pytest.importorskip("deepspeed.runtime.precision_config")
    module = pytest.importorskip("deepspeed.runtime.config")
    own = {
        "bf16": precision.DeepSpeedBF16Config,
        "fp16": precision.DeepSpeedFP16Config,
        "compile": module.CompileConfig,
    }
    assert {name: set(model.model_fields) for name, model in own.items()} == SECTION_KEYS


def test_a_key_that_such_a_section_refuses_is_said_and_taken_out(theirs: Callable[..., Any]):
    file = zero(1, compile={"disable": False, "backend": "inductor"}, bf16={"enabled": True, "loss_scale": 0})
    with pytest.raises(ValueError, match="not permitted"):
        theirs(file)
    reading = read(file)
    for key in ("compile.disable", "compile.backend", "bf16.loss_scale"):
        assert noted(reading, key, "is not a key of DeepSpeed")
    assert theirs(reading.corrected).bfloat16_config.enabled


@pytest.mark.parametrize("key", ["cpu_offload", "overlap_comm", "reduce_bucket_size", "zero_hpz_partition_size"])
def test_every_key_of_the_section_is_missed_outside_it(key: str):
    reading = read(zero(2, **{key: True}))
    assert noted(reading, f"{key} lies outside zero_optimization")
    assert reading.scenario.offload.optimizer is Device.NONE


def test_a_sub_group_of_zero_is_one_parameter(theirs: Callable[..., Any]):
    """axolotl's zero3 files. stage3.py, _create_fp16_sub_groups closes a group once it holds sub_group_size elements:
    the largest is then one parameter's share, the embedding's."""
    file = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3, "sub_group_size": 0}}
    assert theirs(file).zero_config.sub_group_size == 0
    reading = read(file)
    assert not noted(reading, "sub_group_size")
    (copies,) = [term for term in reading.budget.terms if term.name == "step_gradient_copies"]
    assert copies.largest == (2 + 4) * 128_256 * 4096 // GPUS


# --- precision --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["true", "True", 1, "on"])
def test_a_switch_in_any_spelling_turns_precision_on(theirs: Callable[..., Any], given: Any):
    file = zero(2, bf16={"enabled": given})
    assert theirs(file).bfloat16_config.enabled
    assert {state.element_bytes for state in predict(read(file).scenario).states.states} == {2, 4}


def test_both_at_once_are_refused(theirs: Callable[..., Any]):
    file = zero(2, bf16={"enabled": True}, fp16={"enabled": True})
    with pytest.raises(AssertionError, match="simultaneously"):
        theirs(file)
    reading = read(file)
    assert noted(reading, "bf16 and fp16 are both enabled")
    assert theirs(reading.corrected).bfloat16_config.enabled


def test_a_section_that_is_no_object_is_refused(theirs: Callable[..., Any]):
    with pytest.raises(TypeError):
        theirs(zero(2, bf16=True))
    reading = read(zero(2, bf16=True))
    assert noted(reading, "bf16 is True", '{"enabled": true}')
    assert theirs(reading.corrected).bfloat16_config.enabled


@pytest.mark.parametrize("before", ["fp32", "pure_bf16", "zero_paper", "deepspeed_fp32_grad"])
@pytest.mark.parametrize("half", ["bf16", "fp16"])
def test_the_file_decides_the_dtypes_whatever_the_recipe_said(before: str, half: str):
    """2 + 2 + 12 bytes: 16-bit weights and gradients, FP32 master copy and two states (engine.py, get_data_types)."""
    scenario = scenario_of(
        recipe={"convention": before}, parallelism={"engine": "deepspeed", "zero_stage": 2}
    )  # fmt: skip
    states = predict(read(zero(2, **{half: {"enabled": True}}), scenario).scenario).states
    assert sorted(state.element_bytes for state in states.states) == [2, 2, 4, 4, 4]
    assert states.precision.convention.param_dtype == half


def test_an_open_half_beside_an_enabled_one_leaves_nothing_open():
    reading = read(zero(2, fp16={"enabled": "auto"}, bf16={"enabled": True}))
    assert not noted(reading, "left to the trainer")


def test_autocast_keeps_the_weights_in_fp32():
    """runtime/torch_autocast.py: the model keeps its dtype, its operations run in the other."""
    scenario = read(zero(2, torch_autocast={"enabled": True, "dtype": "float16"})).scenario
    assert {state.element_bytes for state in predict(scenario).states.states} == {4}
    assert scenario.recipe.computed_dtype == "fp16"


def test_master_weights_and_states_in_bf16():
    """DeepSpeedExamples, training/bf16_master_weight: master copy, its gradient and both states take 2 bytes each
    instead of 4; the figures there, allocated, differ by 6 bytes for each of 6.86e9 parameters on 4 GPUs: 9.57 GiB."""
    keys = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    usual, low = (
        predict(read({"bf16": section, "zero_optimization": {"stage": 3}}).scenario)
        for section in ({"enabled": True}, keys)
    )
    per_parameter = [sum(s.total_bytes for s in budget.states.states) / PSI for budget in (usual, low)]
    assert per_parameter == [16, 10]
    assert (per_parameter[0] - per_parameter[1]) * 6.86e9 / 4 / 2**30 == pytest.approx(25.74 - 16.17, abs=0.02)
    copies = [next(t for t in budget.terms if t.name == "step_gradient_copies").largest for budget in (usual, low)]
    # Flattened in 16 bits and cast to FP32, against flattened only.
    assert copies[0] == 3 * copies[1]


def test_half_of_it_is_not_predicted_and_said():
    reading = read(zero(2, bf16={"enabled": True, "bf16_master_weights_and_grads": True}))
    assert noted(reading, "bf16_master_weights_and_grads", "not predicted")


# --- optimizer --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "name", "moments"),
    [
        ({"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}}, OptimizerName.ADAMW, 2),
        ({"type": "adam"}, OptimizerName.ADAM, 2),
        ({"type": "Lion", "params": {"lr": 1e-4}}, OptimizerName.LION, 1),
        ({"type": "SGD", "params": {"lr": 0.1}}, OptimizerName.SGD, 0),
        ({"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}, OptimizerName.SGD, 1),
    ],
)
def test_the_files_optimizer_is_the_scenarios(section: dict[str, Any], name: OptimizerName, moments: int):
    reading = read(zero(2, bf16={"enabled": True}, optimizer=section))
    assert reading.scenario.recipe.optimizer.name is name
    states = predict(reading.scenario).states.states
    assert sum(state.total_bytes for state in states) == (2 + 2 + 4 + 4 * moments) * PSI


def test_torchs_own_adam_runs_for_each_tensor_at_once():
    """engine.py, get_optimizer_configuration: torch_adam takes torch.optim.AdamW, whose default is foreach."""
    fused, own = (
        read(zero(2, optimizer={"type": "AdamW", "params": {"torch_adam": own}})).scenario for own in (False, True)
    )
    assert (fused.recipe.optimizer.implementation, own.recipe.optimizer.implementation) == (None, "foreach")
    assert "foreach_temporary" in {term.name for term in predict(own).terms}
    assert "foreach_temporary" not in {term.name for term in predict(fused).terms}


@pytest.mark.parametrize("kind", ["Lamb", "adagrad", "RMSprop", "OneBitAdam", "FusedAdam", "sgd", "", 3, ["AdamW"]])
def test_an_optimizer_that_is_not_known_is_said(kind: Any):
    """engine.py, _configure_basic_optimizer: its own in any case, else torch.optim's of that very name."""
    scenario = scenario_of(recipe={"optimizer": "lion"})
    reading = read(zero(2, optimizer={"type": kind}), scenario)
    exists = str(kind).lower() in ("lamb", "adagrad") or hasattr(torch.optim, str(kind) or "?")
    assert noted(reading, "optimizer.type is", "not predicted" if exists else "does not know")
    assert reading.scenario.recipe.optimizer.name is OptimizerName.LION


# --- batch ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [
        {"train_batch_size": 64},
        {"train_micro_batch_size_per_gpu": 4},
        {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2},
        {"train_batch_size": 64, "gradient_accumulation_steps": 2},
        {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2},
        {"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 5},
    ],
)
def test_what_is_not_given_follows_as_in_deepspeed(theirs: Callable[..., Any], given: dict[str, int]):
    own = theirs({**given, **zero()})
    reading = read({**given, **zero()})
    expected = (own.train_micro_batch_size_per_gpu, own.gradient_accumulation_steps)
    assert (reading.scenario.workload.micro_batch, reading.scenario.workload.grad_accum) == expected
    assert not noted(reading, "train_batch_size")


@pytest.mark.parametrize(
    ("given", "implied"),
    [
        ({"train_batch_size": 4}, "implies 4 GPUs"),
        ({"train_batch_size": 20}, "implies 10 GPUs"),
        ({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 32}, "implies 1 GPUs"),
        ({"train_batch_size": 16, "train_micro_batch_size_per_gpu": 3}, ""),
    ],
)
def test_a_batch_that_eight_gpus_do_not_make_is_said(theirs: Callable[..., Any], given: dict[str, int], implied: str):
    with pytest.raises(AssertionError):
        theirs({**given, **zero()})
    reading = read({**given, **zero()})
    assert noted(reading, "DeepSpeed stops there", implied)
    assert noted(reading, "implies") == bool(implied)


def test_hugging_faces_open_numbers_stay_the_scenarios():
    given = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
    workload = read({**given, **zero()}).scenario.workload
    assert (workload.micro_batch, workload.grad_accum) == (MICRO, STEPS)


# --- what else decides memory -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outer", "key"),
    [
        ({"tensor_parallel": {"autotp_size": 4}}, "tensor_parallel.autotp_size is 4"),
        ({"sequence_parallel_size": 2}, "sequence_parallel_size is 2"),
        ({"expert_parallel": {"enabled": True, "autoep_size": 2}}, "expert_parallel.autoep_size is 2"),
        ({"hybrid_engine": {"enabled": True}}, "hybrid_engine.enabled is True"),
        ({"compile": {"deepcompile": True}}, "compile.deepcompile is True"),
        ({"bf16": {"enabled": True}, "communication_data_type": "fp32"}, "communication_data_type is 'fp32'"),
        ({"fp16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}, "data_types.grad_accum_dtype"),
    ],
)
def test_a_setting_that_is_not_predicted_is_said(outer: dict[str, Any], key: str):
    assert noted(read(zero(2, **outer)), key, "not predicted")
    assert not noted(read(zero(2)), "not predicted")


def test_ranks_that_share_a_sequence_do_not_multiply_the_batch(theirs: Callable[..., Any]):
    file = zero(3, train_batch_size=8, sequence_parallel_size=2)
    assert theirs(file).train_micro_batch_size_per_gpu == read(file).scenario.workload.micro_batch == 2


def test_the_section_of_checkpointing_turns_none_on():
    """runtime/activation_checkpointing/checkpointing.py only configures a function that the model must call."""
    section = {"partition_activations": True, "cpu_checkpointing": True, "number_checkpoints": 4}
    reading = read(zero(2, activation_checkpointing=section))
    assert noted(reading, "activation_checkpointing", "the workload's checkpointing is kept")
    assert reading.scenario.workload.checkpointing == "none"
    assert not noted(read(zero(2, activation_checkpointing=dict.fromkeys(section, False))), "activation_checkpointing")


def test_accumulation_in_another_dtype_has_no_form_at_stage_0():
    """engine.py, _do_optimizer_sanity_check: "unsupported mix"."""
    reading = read(zero(0, bf16={"enabled": True}, data_types={"grad_accum_dtype": "fp32"}))
    assert noted(reading, "grad_accum_dtype", "refuses at stage 0")
    assert not noted(read(zero(1, bf16={"enabled": True}, data_types={"grad_accum_dtype": "fp32"})), "stage 0")


def test_a_first_stage_of_before_2022_is_refused():
    reading = read({"zero_optimization": {"stage": 1, "legacy_stage1": True}})
    assert noted(reading, "legacy_stage1 is True, which DeepSpeed refuses")
    assert reading.corrected["zero_optimization"]["legacy_stage1"] is False


def test_a_trainers_file_that_holds_a_ds_config():
    reading = read({"deepspeed": {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}, "lr": 1e-4})
    assert reading.scenario.parallelism.stage == 3
    assert noted(reading, "Read is what stands under deepspeed")
    assert reading.unknown == ()


def test_a_part_of_the_optimizer_on_the_host_is_said():
    part = {"device": "cpu", "pin_memory": True, "ratio": 0.3}
    reading = read({"zero_optimization": {"stage": 3, "offload_optimizer": part}})
    assert noted(reading, "offload_optimizer.ratio is 0.3", "all of it is taken to be moved")
