"""Reading a ds_config: against DeepSpeed's own config model, the public cases, and whatever else is pasted.

Run: pytest tests/ds_config/test_ds_config.py. The tests that call DeepSpeed are skipped without it; its import
takes a few seconds.
"""

import copy
import json
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memcore.budget import FORMULAS, predict
from memcore.ds_config import ZERO_KEYS, Effect, Reading, read_ds_config
from memcore.ds_config.mending import SWITCHES
from memcore.errors import UserError
from memcore.scenario import Device, Scenario, ZeroConfig, parse_scenario
from memcore.units import GIB

LLAMA, PSI = "meta-llama/Llama-3.1-8B", 8_030_261_248


def scenario_of(**parts: Any) -> Scenario:
    return parse_scenario({"model": {"name": LLAMA}, "hardware": {"gpus": 8, "gpu": "A100-80GB"}, **parts})


SCENARIO = scenario_of()


def read(config: Any, scenario: Scenario = SCENARIO) -> Reading:
    return read_ds_config(config if isinstance(config, str) else json.dumps(config), scenario, FORMULAS)


def zero(stage: int = 3, **keys: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **keys}}


def noted(reading: Reading, *words: str) -> bool:
    """Whether one note has all the words."""
    return any(all(word in note for word in words) for note in reading.notes)


def check_sentence(error: UserError) -> None:
    sentence = str(error)
    assert sentence.endswith(".")
    assert "\n" not in sentence
    assert len(sentence) < 300


@pytest.fixture(scope="module")
def zero_model() -> Iterator[Any]:
    """DeepSpeed's own config model, imported without an accelerator, its deprecation logs aside."""
    patch = pytest.MonkeyPatch()
    patch.setenv("DS_ACCELERATOR", "cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = pytest.importorskip("deepspeed.runtime.zero.config")
    yield module.DeepSpeedZeroConfig
    patch.undo()


# --- the library's own keys -------------------------------------------------------------------------------------------


class TestAgainstTheLibrary:
    """deepspeed 0.19.8 as installed."""

    def test_every_key_is_classed_and_nothing_else(self, zero_model: Any):
        fields = {field.alias or name for name, field in zero_model.model_fields.items()}
        assert set(ZERO_KEYS) == fields

    def test_defaults_are_the_librarys(self, zero_model: Any):
        own = zero_model(stage=3)
        for name, field in ZeroConfig.model_fields.items():
            if name != "stage":
                theirs = getattr(own, name.removeprefix("stage3_"), None)
                expected = field.get_default()
                # Ours is None where DeepSpeed's default depends on the stage.
                assert expected is None or theirs == expected, name

    def test_switches_are_the_librarys(self, zero_model: Any):
        own = {f.alias or n for n, f in zero_model.model_fields.items() if f.annotation is bool or n == "overlap_comm"}
        assert own - {"stage3_gather_fp16_weights_on_model_save"} == SWITCHES

    @pytest.mark.parametrize("stage", [0, 1, 2, 3])
    def test_overlap_comm_is_on_at_stage_3_only(self, zero_model: Any, stage: int):
        own = {key.path: key.value for key in read(zero(stage)).keys}
        assert own["overlap_comm"] == zero_model(stage=stage).overlap_comm == (stage == 3)

    @pytest.mark.parametrize(
        "name",
        [
            "prefetch_bucket_size", "param_persistence_threshold", "model_persistence_threshold", "max_live_parameters",
            "max_reuse_distance", "gather_16bit_weights_on_model_save", "module_granularity_threshold",
            "use_all_reduce_for_fetch_params", "allgather_sequential",
        ],
    )  # fmt: skip
    def test_field_names_are_read_as_deepspeed_reads_them(self, zero_model: Any, name: str):
        value = getattr(zero_model(), name)
        changed = (not value) if isinstance(value, bool) else 12_345
        assert getattr(zero_model(stage=3, **{name: changed}), name) == changed
        reading = read(zero(**{name: changed}))
        assert reading.unknown == ()
        assert reading.corrected["zero_optimization"][f"stage3_{name}"] == changed
        if f"stage3_{name}" in ZeroConfig.model_fields:
            assert getattr(reading.scenario.zero_config, f"stage3_{name}") == changed

    @pytest.mark.parametrize(
        "value",
        [500_000_000, 5e8, "500000000", " 500000000 ", "+500000000", "5e8", 0.5, 15099494.4, 0, -1, None, [1], {}],
    )
    def test_a_size_is_refused_where_deepspeed_refuses_it(self, zero_model: Any, value: Any):
        """Where the library takes it, we say nothing and read the same number; else one note, and the mended file
        is taken."""
        try:
            theirs = zero_model(stage=3, reduce_bucket_size=value).reduce_bucket_size
        except ValueError:
            theirs = None
        reading = read(zero(reduce_bucket_size=value))
        about = [note for note in reading.notes if "reduce_bucket_size" in note]
        assert len(about) == (theirs is None)
        if theirs is not None:
            assert reading.scenario.zero_config.reduce_bucket_size == theirs
        mended = zero_model(**reading.corrected["zero_optimization"])
        assert mended.reduce_bucket_size == reading.scenario.zero_config.reduce_bucket_size

    @pytest.mark.parametrize("value", [True, False, 0, 1, "true", "False", "on", "no", 2, "maybe", [], None, "auto"])
    @pytest.mark.parametrize("name", ["contiguous_gradients", "overlap_comm", "reduce_scatter"])
    def test_a_switch_is_read_as_deepspeed_reads_it(self, zero_model: Any, name: str, value: Any):
        try:
            theirs = getattr(zero_model(stage=2, **{name: value}), name)
        except ValueError:
            theirs = None
        reading = read(zero(2, **{name: value}))
        assert noted(reading, name) == (theirs is None)
        if theirs is not None and name != "reduce_scatter":
            assert bool(getattr(reading.scenario.zero_config, name)) == theirs
        zero_model(**reading.corrected["zero_optimization"])


# --- the public cases ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cases(public_cases: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: case for name, case in public_cases.items() if case["kind"] == "ds_config"}


def test_every_public_case_is_covered(cases: dict[str, dict[str, Any]]):
    assert set(cases) == {
        "ds-auto-z3-offload",
        "ds-legacy-cpu-offload-vs-misplaced",
        "ds-string-and-fraction-sizes",
        "ds-batch-triple-no-hf",
    }


class TestAutoStage3Offload:
    """hiyouga/LLaMA-Factory's ds_z3_offload_config.json. Not checked: its cross-check, 13 GB per card, which does
    not say under which metric."""

    @pytest.fixture
    def case(self, cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
        return cases["ds-auto-z3-offload"]

    def test_sizes_follow_from_the_hidden_size(self, case: dict[str, Any]):
        reading = read(case["input"])
        right = case["right"]["resolve_for_hidden_4096"]
        for name, value in right.items():
            assert getattr(reading.scenario.zero_config, name) == value
            assert reading.corrected["zero_optimization"][name] == value
        # 0.9 x 4096 x 4096 = 15099494.4 cut, not rounded up.
        assert right["stage3_prefetch_bucket_size"] == 15_099_494

    def test_batch_accumulation_and_precision_are_the_recipes(self, case: dict[str, Any]):
        scenario = scenario_of(workload={"micro_batch": 3, "grad_accum": 5}, recipe={"convention": "pure_bf16"})
        reading = read(case["input"], scenario)
        assert reading.scenario.workload == scenario.workload
        assert reading.scenario.recipe == scenario.recipe
        assert noted(reading, "Precision is left to the trainer")

    def test_unknown_sections_do_not_stop_it_and_known_ones_are_kept(self, case: dict[str, Any]):
        reading = read(case["input"])
        assert reading.unknown == ()
        assert {"comms_config", "monitor_config"} <= set(reading.corrected)

    def test_states_leave_the_gpu_for_the_host(self, case: dict[str, Any]):
        budget = predict(read(case["input"]).scenario)
        assert not {"weights", "master_weights", "momentum", "variance"} & {term.name for term in budget.terms}
        # 18 bytes per parameter in all: 134.6 GiB.
        assert budget.host.cpu_bytes == 18 * PSI
        assert budget.host.cpu_bytes / GIB == pytest.approx(134.6, abs=0.05)
        # What is left of the weights: at most 1e9 live elements and what the next module needs, 2 bytes each.
        gathered = sum(term.largest for term in budget.terms if term.name == "gathered_parameters")
        assert 0 < gathered <= 2 * (10**9 + 15_099_494 + 128_256 * 4096)

    def test_saving_costs_the_host_and_not_the_gpu(self, case: dict[str, Any]):
        (key,) = [k for k in read(case["input"]).keys if k.path == "stage3_gather_16bit_weights_on_model_save"]
        assert key.effect is Effect.NO_EFFECT
        assert key.cost_bytes is None
        assert "2 bytes per parameter" in key.why
        assert "rank 0's host memory" in key.why


class TestLegacyOffloadAndAMisplacedSection:
    """deepspeedai/DeepSpeed#1935: two files that look alike."""

    @pytest.fixture
    def files(self, cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
        given: dict[str, Any] = cases["ds-legacy-cpu-offload-vs-misplaced"]["input"]
        return given

    def test_the_legacy_key_offloads_and_is_deprecated(self, files: dict[str, Any], zero_model: Any):
        reading = read(files["A"])
        assert reading.scenario.offload.optimizer is Device.CPU
        assert noted(reading, "cpu_offload is deprecated", "offload_optimizer")
        mended = reading.corrected["zero_optimization"]
        assert "cpu_offload" not in mended
        assert zero_model(**mended).offload_optimizer.device == "cpu"

    def test_the_misplaced_section_does_not(self, files: dict[str, Any], zero_model: Any):
        reading = read(files["B"])
        assert reading.scenario.offload.optimizer is Device.NONE
        assert noted(reading, "offload_optimizer", "outside zero_optimization")
        assert reading.unknown == ("offload_optimizer",)
        assert "offload_optimizer" not in reading.corrected
        assert zero_model(**reading.corrected["zero_optimization"]).offload_optimizer is None

    def test_they_differ_by_the_optimizers_slice_and_the_gradients_of_the_step(self, files: dict[str, Any]):
        on_host, on_gpu = (predict(read(files[name]).scenario) for name in ("A", "B"))
        states = ("master_weights", "momentum", "variance")
        kept = sum(term.largest for term in on_gpu.terms if term.name in states)
        assert kept == 12 * PSI // 8
        assert not any(term.name in states for term in on_host.terms)
        # The FP32 gradient of the step: 4 Psi / N beside 2 Psi / N of its flattening.
        copies = [term.largest for term in on_gpu.terms if term.name == "step_gradient_copies"]
        assert copies == [6 * PSI // 8]

    def test_a_related_key_that_never_was(self, zero_model: Any):
        with pytest.raises(ValueError, match="cpu_offload_params"):
            zero_model(stage=3, cpu_offload_params=True)
        reading = read(zero(cpu_offload_params=True))
        assert reading.unknown == ("zero_optimization.cpu_offload_params",)
        assert noted(reading, "cpu_offload_params is not a key of DeepSpeed")
        assert reading.scenario.offload.parameters is Device.NONE

    @pytest.mark.parametrize("given", [True, False])
    def test_all_deprecated_keys_are_rewritten(self, zero_model: Any, given: bool):
        old = {
            "cpu_offload": given,
            "cpu_offload_param": given,
            "cpu_offload_use_pin_memory": False,
            "stage3_gather_fp16_weights_on_model_save": given,
        }
        reading = read(zero(**old))
        assert sum("is deprecated" in note for note in reading.notes) == 4
        mended = zero_model(**reading.corrected["zero_optimization"])
        assert not old.keys() & reading.corrected["zero_optimization"].keys()
        assert mended.gather_16bit_weights_on_model_save == given
        assert (mended.offload_optimizer is not None) == (mended.offload_param is not None) == given
        if given:
            assert mended.offload_optimizer.pin_memory is mended.offload_param.pin_memory is False
        devices = (reading.scenario.offload.optimizer, reading.scenario.offload.parameters)
        assert devices == ((Device.CPU,) * 2 if given else (Device.NONE,) * 2)

    def test_old_and_new_together_are_taken_once_mended(self, zero_model: Any):
        both = {"cpu_offload": True, "offload_optimizer": {"device": "nvme", "nvme_path": "/tmp/x"}}
        with pytest.raises(AssertionError, match="together"):
            zero_model(stage=3, **both)
        reading = read(zero(**both))
        assert zero_model(**reading.corrected["zero_optimization"]).offload_optimizer.device == "nvme"
        assert reading.scenario.offload.optimizer is Device.NVME


class TestSpellingsOfASize:
    """snowflakedb/ArcticTraining#165 and deepspeedai/DeepSpeed#6525."""

    @pytest.mark.parametrize(
        ("name", "key", "value", "refused"),
        [
            ("A", "reduce_bucket_size", 500_000_000, True),
            ("B", "stage3_prefetch_bucket_size", 15_099_494, True),
            ("C", "reduce_bucket_size", 500_000_000, False),
            ("D", "reduce_bucket_size", 500_000_000, False),
        ],
    )
    def test_each(
        self, cases: dict[str, dict[str, Any]], zero_model: Any, name: str, key: str, value: int, refused: bool
    ):  # fmt: skip
        given = cases["ds-string-and-fraction-sizes"]["input"][name]
        reading = read(given)
        assert getattr(reading.scenario.zero_config, key) == value
        assert noted(reading, key, "which DeepSpeed refuses", str(value)) == refused
        assert reading.corrected["zero_optimization"][key] == value
        zero_model(**reading.corrected["zero_optimization"])
        if refused:
            with pytest.raises(ValueError, match="valid integer"):
                zero_model(**given["zero_optimization"])
        else:
            zero_model(**given["zero_optimization"])

    @pytest.mark.parametrize(("recipe", "gib"), [({}, 0.93), ({"convention": "fp32"}, 1.86)])
    def test_sizes_are_elements(self, recipe: dict[str, Any], gib: float):
        budget = predict(read(zero(reduce_bucket_size="500000000"), scenario_of(recipe=recipe)).scenario)
        (bucket,) = [term for term in budget.terms if term.name == "reduce_bucket"]
        assert bucket.largest / GIB == pytest.approx(gib, abs=0.01)


class TestBatchTriple:
    """deepspeedai/DeepSpeed#3566. Not covered: that the load phase may exceed the training's, which a ds_config
    does not show."""

    @pytest.mark.parametrize("gpus", [1, 2, 8, 15, 16, 32])
    def test_only_sixteen_gpus_agree(self, cases: dict[str, dict[str, Any]], gpus: int):
        case = cases["ds-batch-triple-no-hf"]
        reading = read(case["input"], scenario_of(hardware={"gpus": gpus}))
        assert noted(reading, "train_batch_size is 16", "The file implies 16 GPUs") == (gpus != 16)
        assert case["right"]["world_size_implied"] == 16

    def test_auto_precision_is_asked_about_and_not_assumed(self, cases: dict[str, dict[str, Any]]):
        reading = read(cases["ds-batch-triple-no-hf"]["input"], scenario_of(recipe={"convention": "megatron"}))
        assert noted(reading, "DeepSpeed alone reads it as off and trains in FP32")
        assert reading.scenario.recipe.convention == "megatron"

    def test_buckets_and_live_parameters_are_deepspeeds_defaults(self, cases: dict[str, dict[str, Any]]):
        config = read(cases["ds-batch-triple-no-hf"]["input"]).scenario.zero_config
        assert config.reduce_bucket_size == 500_000_000
        assert config.stage3_max_live_parameters == 1_000_000_000

    @pytest.mark.parametrize(
        ("given", "micro", "accumulation"),
        [
            ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2}, 2, 4),
            ({"train_batch_size": 64, "gradient_accumulation_steps": 2}, 4, 2),
            ({"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 5}, 3, 5),
            ({"train_micro_batch_size_per_gpu": "2", "gradient_accumulation_steps": 4.0}, 2, 4),
            ({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}, 7, 9),
            ({}, 7, 9),
        ],
    )
    def test_the_third_follows_from_two(self, given: dict[str, Any], micro: int, accumulation: int):
        scenario = scenario_of(workload={"micro_batch": 7, "grad_accum": 9})
        workload = read({**given, **zero()}, scenario).scenario.workload
        assert (workload.micro_batch, workload.grad_accum) == (micro, accumulation)

    @pytest.mark.parametrize("value", [0, -1, 1.5, "many", [], {}, True, 10**30])
    @pytest.mark.parametrize(
        "name", ["train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"]
    )
    def test_what_is_no_batch_is_left_as_it_was(self, name: str, value: Any):
        reading = read({name: value, **zero()})
        assert noted(reading, name, "allowed is a whole number above 0")
        assert reading.scenario.workload == SCENARIO.workload


# --- "auto" -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [LLAMA, "openai-community/gpt2", "Qwen/Qwen3-0.6B", "ibm/PowerLM-3b"])
def test_auto_sizes_are_hugging_faces(model: str):
    """transformers 5.24, integrations/deepspeed.py, trainer_config_finalize: h h, int(0.9 h h), 10 h."""
    hidden = {LLAMA: 4096, "openai-community/gpt2": 768, "Qwen/Qwen3-0.6B": 1024, "ibm/PowerLM-3b": 2304}[model]
    names = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
    config = read(zero(**dict.fromkeys(names, "auto")), scenario_of(model={"name": model})).scenario.zero_config
    assert [getattr(config, name) for name in names] == [hidden * hidden, int(0.9 * hidden * hidden), 10 * hidden]


def test_auto_without_a_hidden_size_is_said():
    bare = scenario_of(model={"n_params": 10**9})
    reading = read(zero(reduce_bucket_size="auto"), bare)
    assert noted(reading, "reduce_bucket_size", "from the hidden size")
    assert reading.scenario.zero_config.reduce_bucket_size == 500_000_000
    assert "reduce_bucket_size" not in reading.corrected["zero_optimization"]


@pytest.mark.parametrize("name", [name for name in ZERO_KEYS if name != "stage"])
def test_auto_anywhere_is_taken_as_deepspeed_takes_it(zero_model: Any, name: str):
    reading = read(zero(**{name: "auto"}))
    zero_model(**reading.corrected["zero_optimization"])
    assert reading.unknown == ()


@pytest.mark.parametrize("name", ["offload_optimizer", "offload_param"])
def test_an_auto_device_is_no_device(zero_model: Any, name: str):
    reading = read(zero(**{name: {"device": "auto"}}))
    assert noted(reading, f"{name}.device", "allowed are none, cpu and nvme")
    zero_model(**reading.corrected["zero_optimization"])


# --- precision and offload ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "stage", "bytes_per_parameter"),
    [
        ({"bf16": {"enabled": True}}, 2, 16),
        ({"fp16": {"enabled": True}}, 2, 16),
        ({"fp16": {"enabled": False}}, 2, 16),
        ({"bf16": {"enabled": False}}, 0, 16),
        ({"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}, 1, 20),
        ({"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}}, 1, 16),
    ],
)
def test_precision(file: dict[str, Any], stage: int, bytes_per_parameter: int):
    """2 + 2 + 12, or 4 + 4 + 8 where neither is on; 4 more for FP32 accumulation (bf16_optimizer.py)."""
    budget = predict(read({**file, **zero(stage)}).scenario)
    assert sum(state.total_bytes for state in budget.states.states) == bytes_per_parameter * PSI


def test_precision_that_is_off_is_fp32_and_said():
    reading = read({"bf16": {"enabled": False}, **zero(2)})
    assert noted(reading, "DeepSpeed trains in FP32")
    budget = predict(reading.scenario)
    assert {state.element_bytes for state in budget.states.states} == {4}


@pytest.mark.parametrize(
    ("stage", "section", "device", "kept"),
    [
        (2, "offload_optimizer", "cpu", "cpu"),
        (3, "offload_optimizer", "nvme", "nvme"),
        (3, "offload_param", "cpu", "cpu"),
        # DeepSpeed reads them at the stages that divide what they move.
        (0, "offload_optimizer", "cpu", "none"),
        (2, "offload_optimizer", "nvme", "none"),
        (2, "offload_param", "cpu", "none"),
        (3, "offload_param", "none", "none"),
    ],
)
def test_offload_by_stage(stage: int, section: str, device: str, kept: str):
    reading = read(zero(stage, **{section: {"device": device}}))
    part = "optimizer" if section == "offload_optimizer" else "parameters"
    assert getattr(reading.scenario.offload, part) == kept
    assert noted(reading, "needs ZeRO stage") == (device != kept)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_part_of_the_optimizer_can_be_offloaded_at_stage_3_only(zero_model: Any, stage: int):
    """deepspeed 0.19.8, offload_ratio_check. The part itself is not predicted: all of it is taken to be moved."""
    given = {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}
    if stage != 3:
        with pytest.raises((AssertionError, ValueError), match="Partial offloading"):
            zero_model(stage=stage, **given)
    reading = read(zero(stage, **given))
    assert noted(reading, "offload_optimizer.ratio", "write 1.0") == (stage != 3)
    assert zero_model(**reading.corrected["zero_optimization"]).offload_optimizer.ratio == (0.5 if stage == 3 else 1.0)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_norm_can_be_left_out_at_stages_1_and_2_only(zero_model: Any, stage: int):
    reading = read(zero(stage, compute_grad_norm=False))
    assert noted(reading, "compute_grad_norm", "write True") == (stage not in (1, 2))
    zero_model(**reading.corrected["zero_optimization"])


# --- what is not a key --------------------------------------------------------------------------------------------


def test_unknown_keys_are_listed_and_taken_out(zero_model: Any):
    long = "x" * 100
    reading = read(
        {"nonsense": 1, "stage": 3, long: 2, "gradient_clipping": 1.0, **zero(contiguous_grads=True, **{long: 3})}
    )
    assert reading.unknown == (
        "nonsense", "stage", "x" * 60, "zero_optimization.contiguous_grads", "zero_optimization." + "x" * 60,
    )  # fmt: skip
    assert set(reading.corrected) == {"gradient_clipping", "zero_optimization"}
    assert reading.corrected["zero_optimization"] == {"stage": 3}
    assert noted(reading, "contiguous_grads is not a key of DeepSpeed")
    assert noted(reading, "stage lies outside zero_optimization")
    with pytest.raises(ValueError, match="contiguous_grads"):
        zero_model(stage=3, contiguous_grads=True)


@pytest.mark.parametrize("key", ["stage3_max_live_parameters", "offload_param", "stage3_prefetch_bucket_size"])
def test_a_misplaced_key_is_named_and_has_no_effect(key: str):
    reading = read({key: 1, **zero()})
    assert noted(reading, f"{key} lies outside zero_optimization")
    assert reading.scenario == read(zero()).scenario


def test_the_file_given_is_not_changed():
    given = {"nonsense": 1, **zero(reduce_bucket_size="5e8", cpu_offload=True)}
    before = copy.deepcopy(given)
    read_ds_config(given, SCENARIO, FORMULAS)
    assert given == before


def test_a_mended_file_needs_no_mending():
    given = {"nonsense": 1, **zero(2, reduce_bucket_size="5e8", cpu_offload=True, reduce_scatter="maybe", what=1)}
    reading = read(given)
    again = read(dict(reading.corrected))
    assert again.scenario == reading.scenario
    assert again.corrected == reading.corrected
    assert again.notes == ("The file names no precision; the recipe's convention is kept.",)


def test_an_empty_file_is_deepspeeds_stage_0():
    reading = read({})
    assert reading.scenario.parallelism.stage == 0
    assert reading.unknown == ()


# --- what each key costs ------------------------------------------------------------------------------------------


def test_costs_are_the_budgets_own():
    reading = read(zero(2, overlap_comm=True, reduce_bucket_size=10_000_000))
    keys = {key.path: key for key in reading.keys}
    assert keys["reduce_bucket_size"].cost_bytes == 2 * 2 * 10_000_000
    assert keys["overlap_comm"].cost_bytes == 2 * 10_000_000
    assert keys["stage"].cost_bytes == predict(reading.scenario).static.total_bytes
    assert keys["stage3_max_live_parameters"].effect is Effect.NO_EFFECT
    assert [key.path for key in reading.costliest(2)] == ["reduce_bucket_size", "overlap_comm"]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_key_can_be_explained_at_every_stage(stage: int):
    given = {name: "auto" for name in ZERO_KEYS if name != "stage"}
    keys = read(zero(stage, **given)).keys
    assert {key.path for key in keys} == set(ZERO_KEYS)
    for key in keys:
        assert key.why.endswith(".")
        assert key.cost_bytes is None or key.cost_bytes >= 0


# --- what is not a ds_config at all --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "",
        "   ",
        "not json",
        "{",
        "[]",
        "[1, 2]",
        "7",
        "null",
        '"text"',
        '{"zero_optimization": NaN}',
        '{"zero_optimization": {"reduce_bucket_size": Infinity}}',
        '{"zero_optimization": {"reduce_bucket_size": 1e999}}',
        '{"zero_optimization": []}',
        '{"zero_optimization": 3}',
        '{"zero_optimization": null}',
        '{"zero_optimization": {"stage": 7}}',
        '{"zero_optimization": {"stage": -1}}',
        '{"zero_optimization": {"stage": "auto"}}',
        '{"zero_optimization": {"stage": null}}',
        '{"zero_optimization": {"stage": [3]}}',
        '{"zero_optimization": {"stage": "three"}}',
        '{"a": ' * 5000 + "1" + "}" * 5000,
        '{"zero_optimization": {"offload_param": ' + "[" * 100_000,
        '{"x": "' + "y" * 2**20 + '"}',
        "import torch\nimport deepspeed\nmodel, _, _, _ = deepspeed.initialize(model=net)\n",
        "#!/usr/bin/env python\nimport torch\nds_config = {'zero_optimization': {'stage': 3}}\n",
        "def main():\n    pass\n",
        "deepspeed:\n  zero_optimization:\n    stage: 3\n",
        "\x00\xff",
    ],
    ids=lambda text: text[:30],
)
def test_what_is_no_ds_config_gets_one_sentence(text: str):
    for file in (text, text.encode("utf-8", "surrogateescape")):
        with pytest.raises(UserError) as caught:
            read_ds_config(file, SCENARIO, FORMULAS)
        check_sentence(caught.value)


def test_bytes_that_are_no_text_get_one_sentence():
    with pytest.raises(UserError):
        read_ds_config(b"\xff\xfe\x00{", SCENARIO, FORMULAS)


def test_a_script_is_told_from_a_broken_file():
    with pytest.raises(UserError, match="a program, not a ds_config"):
        read("import torch\n" + json.dumps(zero()))


@pytest.mark.parametrize("depth", [10, 100, 300, 600, 900, 990, 2000])
@pytest.mark.parametrize("key", ["monitor_config", "zero_optimization", "nonsense"])
def test_nesting_is_read_or_refused_in_a_sentence(key: str, depth: int):
    nested = '{"a":' * depth + "1" + "}" * depth
    text = f'{{"{key}": {nested}}}' if key != "zero_optimization" else f'{{"{key}": {{"offload_param": {nested}}}}}'
    try:
        reading = read(text)
    except UserError as error:
        check_sentence(error)
    else:
        assert reading.scenario.parallelism.stage == 0


# --- junk for every key -------------------------------------------------------------------------------------------

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, 1, -1, 7, 0.5, 1e9, 15099494.4, 10**6, 10**12, 10**16, 2**63, 10**40, -0.0, 1e300]),
    st.integers(-(10**20), 10**20),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from(
        ["auto", "5e8", "500000000", "true", "off", "", " ", "nan", "inf", "1_000", "cpu", "nvme", "none", "٣"]
    ),
    st.text(max_size=20),
)
JUNK = st.one_of(
    SCALARS,
    st.lists(SCALARS, max_size=3),
    st.dictionaries(
        st.sampled_from(
            ["device", "pin_memory", "ratio", "buffer_count", "nvme_path", "classes", "names", "topk_ratio",
             "enabled", "overlap_step", "nonsense"]
        ),
        SCALARS | st.lists(SCALARS, max_size=2),
        max_size=4,
    ),
)  # fmt: skip
TOP = [
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "fp16", "bf16", "optimizer",
    "data_types", "gradient_clipping", "nonsense", "stage3_max_live_parameters",
]  # fmt: skip


@settings(max_examples=400)
@given(
    stage=st.sampled_from([0, 1, 2, 3]),
    inner=st.dictionaries(st.sampled_from([*ZERO_KEYS, "nonsense"]), JUNK, max_size=4),
    outer=st.dictionaries(st.sampled_from(TOP), JUNK, max_size=3),
)
def test_junk_is_read_with_notes_or_refused_in_a_sentence(stage: int, inner: dict[str, Any], outer: dict[str, Any]):
    """Whatever stands behind whichever key: a reading or a UserError, never another exception."""
    try:
        reading = read({**outer, "zero_optimization": {"stage": stage, **inner}})
    except UserError as error:
        check_sentence(error)
        return
    assert reading.scenario.parallelism.engine == "deepspeed"
    for note in reading.notes:
        assert len(note) < 400
    assert json.loads(json.dumps(reading.corrected)) == reading.corrected
    assert "nonsense" not in reading.corrected
    assert "nonsense" not in reading.corrected["zero_optimization"]


@pytest.mark.parametrize("name", [name for name in ZERO_KEYS if name != "stage"])
def test_whatever_is_accepted_is_mended_to_what_deepspeed_accepts(zero_model: Any, name: str):
    """For each key: any junk is mended so that the real DeepSpeedZeroConfig takes the file."""

    @settings(max_examples=25)
    @given(value=JUNK, stage=st.sampled_from([1, 2, 3]))
    def check(value: Any, stage: int) -> None:
        try:
            reading = read(zero(stage, **{name: value}))
        except UserError:
            return
        zero_model(**reading.corrected["zero_optimization"])

    check()
