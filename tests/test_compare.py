"""The scenario beside its alternatives, against hand arithmetic and published tables.

Run: pytest tests/test_compare.py. GB is 1e9 bytes. Figures are those of shared/reference/worked_examples.md.
"""

import math
from typing import Any

import pytest
from generated_scenarios import scenarios
from hypothesis import given, settings

from memcore.budget import Budget, predict
from memcore.buffers import above_floor, estimator_bytes
from memcore.compare import (
    CURVE_RANKS,
    PAPER_RANKS,
    card_rows,
    convention_rows,
    paper_table,
    parameter_costs,
    stage_rows,
    tool_rows,
    world_size_curve,
)
from memcore.errors import UserError
from memcore.hardware import accelerators
from memcore.recipes import CONVENTIONS, DEEPSPEED_ESTIMATOR, ConventionName
from memcore.scenario import Scenario, parse_scenario
from memcore.units import GB
from memcore.zero import account

PSI = 7_000_000_000
FLOORS_7B_8_RANKS = [112.0, 38.5, 26.25, 14.0]


def seven_b(**parts: Any) -> Budget:
    data = {"model": {"n_params": PSI}, "hardware": {"gpu": "A100-80GB", "gpus": 8}, **parts}
    return predict(parse_scenario({"parallelism": {"zero_stage": 2}, **data}))


class TestStages:
    def test_floors_are_the_papers(self):
        assert [row.floor.total_bytes / GB for row in stage_rows(seven_b())] == FLOORS_7B_8_RANKS

    def test_floors_do_not_depend_on_the_chosen_stage_or_engine(self):
        for parallelism in ({"zero_stage": 0}, {"zero_stage": 3}, {"engine": "ddp"}, {"engine": "fsdp2"}):
            rows = stage_rows(seven_b(parallelism=parallelism))
            assert [row.floor.total_bytes / GB for row in rows] == FLOORS_7B_8_RANKS

    def test_peaks_are_those_of_the_same_scenario_at_each_stage(self):
        for row in stage_rows(seven_b()):
            assert row.peak_bytes == seven_b(parallelism={"zero_stage": row.stage}).peak_bytes
            assert row.peak_bytes > row.floor.total_bytes

    @pytest.mark.parametrize("engine", ["fsdp1", "fsdp2"])
    def test_with_replicas_a_shard_group_divides_and_not_all_ranks(self, engine: str):
        """8,030,261,248 parameters of 16 bytes among the four ranks of a group, twice: 32.12 GB each."""
        budget = seven_b(
            model={"name": "meta-llama/Llama-3.1-8B"},
            parallelism={"engine": engine, "dp_shard": 4, "dp_replicate": 2},
            recipe={"convention": "fsdp2_mixed"},
        )
        row = stage_rows(budget)[3]
        assert row.floor == budget.static
        assert row.floor.total_bytes == 16 * 8_030_261_248 // 4
        assert max(each.floor for each in above_floor(budget)) <= row.floor.total_bytes

    def test_an_engine_without_stages_has_one_peak(self):
        budget = seven_b(parallelism={"engine": "fsdp2"})
        assert [row.peak_bytes for row in stage_rows(budget)] == [None, None, None, budget.peak_bytes]

    def test_a_stage_that_the_rest_of_the_scenario_has_no_form_at_has_no_peak(self):
        budget = seven_b(parallelism={"zero_stage": 3}, offload={"parameters": "cpu"})
        assert [row.peak_bytes is None for row in stage_rows(budget)] == [True, True, True, False]

    def test_what_is_moved(self):
        moved = [row.communication.volume_in_parameters(PSI) for row in stage_rows(seven_b())]
        assert [round(each, 9) for each in moved] == [2, 2, 2, 3]

    def test_the_fewest_gpus_hold_the_floor_and_one_less_does_not(self):
        budget = seven_b()
        for row in stage_rows(budget)[1:]:
            assert row.smallest is not None
            usable, states = budget.device.usable_bytes, budget.states.states
            assert account(states, row.stage, row.smallest).total_bytes <= usable
            assert row.smallest == 1 or account(states, row.stage, row.smallest - 1).total_bytes > usable

    def test_no_number_of_gpus_holds_what_is_not_divided(self):
        assert stage_rows(seven_b())[0].smallest is None


def test_curves_fall_with_the_ranks_and_meet_at_one():
    states = seven_b().states
    curves = [world_size_curve(states, stage) for stage in range(4)]
    assert {curve[0] for curve in curves} == {(1, 16 * PSI)}
    for curve in curves:
        totals = [total for _ranks, total in curve]
        assert [ranks for ranks, _total in curve] == list(CURVE_RANKS)
        assert totals == sorted(totals, reverse=True)


class TestCards:
    def test_every_card_is_there(self):
        assert [row.device for row in card_rows(seven_b())] == list(accelerators().values())

    def test_the_largest_model_just_fits(self):
        for row in card_rows(seven_b()):
            assert row.largest_model * 16 <= row.device.usable_bytes < (row.largest_model + 1) * 16

    def test_the_share_is_of_the_usable_memory(self):
        for row in card_rows(seven_b()):
            assert row.share == pytest.approx(112e9 / row.device.usable_bytes)

    def test_the_fewest_gpus_divide_all_states(self):
        for row in card_rows(seven_b()):
            assert row.smallest_gpus is not None
            assert math.ceil(16 * PSI / row.device.usable_bytes) <= row.smallest_gpus
            assert row.smallest_gpus * row.device.usable_bytes >= 16 * PSI


def test_one_parameter_costs_sixteen_bytes_in_five_states():
    costs = {cost.name: cost.bytes_per_parameter for cost in parameter_costs(seven_b().states)}
    assert costs == {"weights": 2, "gradients": 2, "master_weights": 4, "momentum": 4, "variance": 4}


def test_adapters_cost_little_per_parameter_of_the_base():
    recipe = {"method": "qlora", "lora": {"rank": 8}, "quantization": "nf4"}
    costs = parameter_costs(seven_b(model={"name": "meta-llama/Llama-3.1-8B"}, recipe=recipe).states)
    assert sum(cost.bytes_per_parameter for cost in costs) < 1.5


class TestConventions:
    def test_every_convention_is_there_with_its_bytes(self):
        rows = convention_rows(seven_b())
        assert [row.name for row in rows] == list(ConventionName)
        for row in rows:
            assert row.bytes_per_parameter == CONVENTIONS[row.name].bytes_per_parameter()

    def test_the_scenarios_own_convention_gives_its_own_floor(self):
        budget = seven_b()
        (own,) = [row for row in convention_rows(budget) if row.name is ConventionName.ZERO_PAPER]
        assert own.floor == budget.static

    def test_a_convention_without_a_form_at_the_stage_has_no_floor(self):
        budget = seven_b(parallelism={"zero_stage": 0})
        without = {row.name for row in convention_rows(budget) if row.floor is None}
        assert without == {ConventionName.DEEPSPEED_FP32_GRAD, ConventionName.DEEPSPEED_ESTIMATOR}

    @pytest.mark.parametrize(
        ("parallelism", "those"),
        [
            ({"zero_stage": 2}, {"zero_paper", "deepspeed_fp32_grad", "amp_autocast", "fp32"}),
            ({"engine": "fsdp2"}, {"fsdp2_mixed", "amp_autocast", "pure_bf16", "pure_fp16", "fp32"}),
            ({"engine": "ddp"}, {"amp_autocast", "pure_bf16", "pure_fp16", "fp32"}),
        ],
    )
    def test_a_run_has_the_conventions_of_its_engine_alone(self, parallelism: dict[str, Any], those: set[str]):
        """FSDP2's FP32 shards are not kept at ZeRO-2, and DeepSpeed's master copies not by FSDP2."""
        llama, own = {"name": "meta-llama/Llama-3.1-8B"}, {"convention": "engine"}
        budget = seven_b(model=llama, parallelism=parallelism, recipe=own)
        assert {row.name.value for row in convention_rows(budget) if row.floor is not None} == those
        # What is in force is shown all the same.
        named = seven_b(model=llama, parallelism=parallelism, recipe={"convention": "megatron"})
        (row,) = [row for row in convention_rows(named) if row.name is ConventionName.MEGATRON]
        assert row.floor == named.static

    def test_the_row_in_force_costs_what_the_scenario_does(self):
        """AdamW in 8 bits: 2 + 2 + 4 + 2 (1 + 4 / 256) bytes, and not the 16 of the paper's AdamW."""
        budget = seven_b(recipe={"optimizer": {"name": "adamw", "bits": 8}}, model={"name": "openai-community/gpt2"})
        (own,) = [row for row in convention_rows(budget) if row.name is ConventionName.ZERO_PAPER]
        assert own.bytes_per_parameter == account(budget.states.states, 0, 1).total_bytes / budget.states.n_params
        assert own.bytes_per_parameter == pytest.approx(10.03, abs=0.05)

    def test_adapters_have_dtypes_of_their_own(self):
        """peft's FP32 adapters: 4 + 4 + 8 bytes in every convention, also where the base is all BF16."""
        recipe = {"method": "qlora", "quantization": "nf4"}
        budget = seven_b(model={"name": "meta-llama/Llama-3.1-8B"}, recipe=recipe, parallelism={"engine": "ddp"})
        rows = [row for row in convention_rows(budget) if row.floor is not None]
        assert {(row.bytes_per_parameter, row.trained_as.param_dtype.value) for row in rows} == {(16, "fp32")}

    def test_explicit_dtypes_do_not_leak_into_other_conventions(self):
        plain, custom = seven_b(), seven_b(recipe={"grad_dtype": "fp32"})
        floors = [[row.floor for row in convention_rows(each)] for each in (plain, custom)]
        assert floors[0] == floors[1]


@pytest.mark.parametrize(
    ("label", "by_stage"),
    [
        ("ZeRO paper", (112, 38.5, 26.25, 14)),
        ("DeepSpeed's estimator", (None, None, 29.75, 15.75)),
        ("DeepSpeed's documentation", (None, None, 42, 15.75)),
        ("Megatron distributed optimizer", (126, 52.5, None, None)),
        ("llm-analysis", (126, 52.5, 28, 15.75)),
        ("EleutherAI calc_transformer_mem", (126, 53.5, 29, 18.75)),
        ("PyTorch FSDP2, FP32 shards", (112, None, None, 14)),
    ],
)
def test_other_tools_answers_for_seven_b_on_eight_gpus(label: str, by_stage: tuple[float | None, ...]):
    (row,) = [row for row in tool_rows(seven_b()) if row.tool.label == label]
    assert tuple(None if total is None else total / GB for total in row.bytes_by_stage) == pytest.approx(by_stage)


def test_deepspeeds_estimator_is_the_same_in_the_table_and_on_the_buffers_page():
    """stage3.py, estimate_zero3_model_states_mem_needs: 18 Psi / 8 and 4 bytes for each value of Llama-3.1-8B's
    largest module, its table of 128,256 x 4,096; stage_1_and_2.py: 2 Psi + 18 Psi / 8."""
    budget = seven_b(model={"name": "meta-llama/Llama-3.1-8B"})
    (row,) = [row for row in tool_rows(budget) if row.tool is DEEPSPEED_ESTIMATOR]
    psi = 8_030_261_248
    assert row.bytes_by_stage == (None, None, 2 * psi + 18 * psi // 8, 18 * psi // 8 + 4 * 128_256 * 4_096)
    assert estimator_bytes(budget) == {stage: row.bytes_by_stage[stage] for stage in (2, 3)}


@pytest.mark.parametrize(
    ("model", "ranks", "printed"),
    [
        ("ZeRO paper 7.5B", 64, (31.4, 16.6, 1.88)),
        ("ZeRO paper 128B", 256, (518, 263, 8)),
        ("ZeRO paper 1T", 1024, (4011, 2013, 15.6)),
    ],
)
def test_the_papers_table(model: str, ranks: int, printed: tuple[float, ...]):
    cells = {(name, number): totals for name, number, totals in paper_table()}
    assert len(cells) == 3 * len(PAPER_RANKS)
    assert [total / GB for total in cells[model, ranks]] == pytest.approx(printed, rel=0.005)


@settings(max_examples=25)
@given(scenario=scenarios(configs=False))
def test_any_scenario_can_be_compared(scenario: Scenario):
    try:
        budget = predict(scenario)
    except UserError:
        return  # made-up LoRA targets
    assert [row.stage for row in stage_rows(budget)] == [0, 1, 2, 3]
    assert len(card_rows(budget)) == len(accelerators())
    assert len(convention_rows(budget)) == len(CONVENTIONS)
    assert all(cost.bytes_per_parameter >= 0 for cost in parameter_costs(budget.states))
