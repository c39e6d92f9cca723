"""The numbers that the product must reproduce: bytes per parameter, the ZeRO paper's table, other tools, counts.

Run: pytest tests/test_worked_examples.py. GB is 1e9 bytes.
"""

from decimal import Decimal

import pytest

from memcore.budget import Budget, Verdict, predict
from memcore.models import catalogue_inventory
from memcore.recipes import CONVENTIONS, OTHER_TOOLS, ConventionName
from memcore.scenario import parse_scenario
from memcore.states import model_states
from memcore.terms import Category, Phase
from memcore.units import GB, MIB
from memcore.zero import account

PSI = 7_000_000_000

# arXiv 1910.02054, table 1, GB per device with K = 12: (P_os, P_os+g, P_os+g+p) as printed.
ZERO_PAPER = {
    "ZeRO paper 7.5B": {
        1: ("120", "120", "120"),
        4: ("52.5", "41.3", "30"),
        16: ("35.6", "21.6", "7.5"),
        64: ("31.4", "16.6", "1.88"),
        256: ("30.4", "15.4", "0.47"),
        1024: ("30.1", "15.1", "0.12"),
    },
    "ZeRO paper 128B": {
        1: ("2048", "2048", "2048"),
        4: ("896", "704", "512"),
        16: ("608", "368", "128"),
        64: ("536", "284", "32"),
        256: ("518", "263", "8"),
        1024: ("513", "257", "2"),
    },
    "ZeRO paper 1T": {
        1: ("16000", "16000", "16000"),
        4: ("7000", "5500", "4000"),
        16: ("4750", "2875", "1000"),
        64: ("4187", "2218", "250"),
        256: ("4046", "2054", "62.5"),
        1024: ("4011", "2013", "15.6"),
    },
}
PAPER_CELLS = [
    (model, ranks, stage, printed)
    for model, rows in ZERO_PAPER.items()
    for ranks, row in rows.items()
    for stage, printed in enumerate(row, start=1)
]

# GB per GPU for 7e9 parameters, AdamW, 8 data-parallel ranks, by stage; None where the tool has no such stage.
TOOLS_7B_8_RANKS = {
    "ZeRO paper": (112, 38.5, 26.25, 14),
    "DeepSpeed's estimator": (None, None, 29.75, 15.75),
    "DeepSpeed's documentation": (None, None, 42.0, 15.75),
    "Megatron distributed optimizer": (126, 52.5, None, None),
    "llm-analysis": (126, 52.5, 28, 15.75),
    "EleutherAI calc_transformer_mem": (126, 53.5, 29.0, 18.75),
    "PyTorch FSDP2, FP32 shards": (112, None, None, 14),
}

EXACT_COUNTS = {
    "meta-llama/Llama-2-7b-hf": 6_738_415_616,
    "meta-llama/Llama-2-13b-hf": 13_015_864_320,
    "meta-llama/Llama-2-70b-hf": 68_976_648_192,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3.1-70B": 70_553_706_496,
    "meta-llama/Llama-3.1-405B": 405_853_388_800,
    "meta-llama/Llama-3.2-3B": 3_212_749_824,
    "mistralai/Mistral-7B-v0.1": 7_241_732_096,
    "mistralai/Mixtral-8x7B-v0.1": 46_702_792_704,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "openai-community/gpt2-xl": 1_557_611_200,
}


def seven_billion(stage: int, gpus: int = 8, gpu: str = "A100-80GB") -> Budget:
    parallelism = {"engine": "deepspeed", "zero_stage": stage}
    return predict(
        parse_scenario(
            {"model": {"n_params": "7b"}, "hardware": {"gpu": gpu, "gpus": gpus}, "parallelism": parallelism}
        )
    )


def test_one_parameter_costs_16_bytes():
    budget = predict(parse_scenario({"model": {"n_params": 1_000_000}}))
    assert budget.static.weights_bytes == 2 * 1_000_000
    assert budget.static.gradients_bytes == 2 * 1_000_000
    assert budget.static.optimizer_bytes == 12 * 1_000_000
    assert budget.states.total_bytes(Category.OPTIMIZER) == (4 + 4 + 4) * 1_000_000
    assert [state.name for state in budget.states.states] == [
        "weights", "gradients", "master_weights", "momentum", "variance",
    ]  # fmt: skip


def test_7b_needs_112_gb_and_does_not_fit_one_80_gb_card():
    budget = predict(parse_scenario({"model": {"n_params": "7b"}, "hardware": {"gpu": "A100-80GB"}}))
    assert budget.static.total_bytes == 112 * GB
    assert budget.verdict is Verdict.DOES_NOT_FIT


@pytest.mark.parametrize(
    ("stage", "weights", "gradients", "optimizer", "total"),
    [
        (0, 14_000_000_000, 14_000_000_000, 84_000_000_000, 112_000_000_000),
        (1, 14_000_000_000, 14_000_000_000, 10_500_000_000, 38_500_000_000),
        (2, 14_000_000_000, 1_750_000_000, 10_500_000_000, 26_250_000_000),
        (3, 1_750_000_000, 1_750_000_000, 10_500_000_000, 14_000_000_000),
    ],
)
def test_7b_on_8_gpus_by_stage(stage: int, weights: int, gradients: int, optimizer: int, total: int):
    static = seven_billion(stage).static
    assert (static.weights_bytes, static.gradients_bytes, static.optimizer_bytes) == (weights, gradients, optimizer)
    assert static.total_bytes == total


def test_zero1_states_of_7b_fit_40_gb_and_80_gb_cards():
    for gpu in ("A100-40GB", "A100-80GB"):
        budget = seven_billion(1, gpu=gpu)
        assert budget.static.total_bytes < budget.ladder.usable


def test_zero3_peak_is_above_its_14_gb_floor():
    named = {
        "model": {"name": "meta-llama/Llama-2-7b-hf"},
        "hardware": {"gpus": 8},
        "parallelism": {"engine": "deepspeed", "zero_stage": 3},
    }
    budget = predict(parse_scenario(named))
    floor = 2 * 6_738_415_616  # 16 / 8 bytes per parameter
    assert floor <= budget.static.total_bytes <= floor + 16 * 8
    assert budget.peak_bytes > floor + GB
    assert any(term.name == "gathered_parameters" for term in budget.terms)


def test_eight_40_gb_cards_train_7b_tightly_and_the_backward_binds():
    budget = seven_billion(1, gpu="A100-40GB")
    assert budget.verdict is Verdict.UNCERTAIN
    assert budget.binding_phase is Phase.BACKWARD
    assert budget.timeline[budget.peak_index].label == "backward[reduce]"
    assert budget.peak_bytes > 38.5 * GB + 1.0 * GB
    peaks = {phase: budget.totals[index] for phase, index in budget.phase_peaks().items()}
    assert peaks[Phase.OPTIMIZER] < peaks[Phase.BACKWARD]
    # "About 2 GB remain for everything else": 42.4 GB less the context and what the step takes. NCCL has 0.7 of them.
    assert 1.0 * GB < budget.ladder.usable - budget.ladder.device + 688 * MIB < 2.5 * GB


@pytest.mark.parametrize(("model", "ranks", "stage", "printed"), PAPER_CELLS)
def test_zero_paper_table_1(model: str, ranks: int, stage: int, printed: str):
    scenario = parse_scenario({"model": {"name": model}})
    states = model_states(scenario, int(Decimal(model.split()[2][:-1]) * (10**12 if model[-1] == "T" else GB)), None)
    found = Decimal(account(states.states, stage, ranks).total_bytes) / GB
    # The paper rounds some cells and truncates others: one unit of the last printed digit.
    unit = Decimal(10) ** Decimal(printed).as_tuple().exponent
    assert abs(found - Decimal(printed)) <= unit


def test_zero_paper_table_has_54_cells():
    assert len(PAPER_CELLS) == 54


@pytest.mark.parametrize("label", TOOLS_7B_8_RANKS)
def test_other_tools_on_the_same_question(label: str):
    (tool,) = [tool for tool in OTHER_TOOLS if tool.label == label]
    assert tool.source
    assert tool.why
    for stage, gigabytes in enumerate(TOOLS_7B_8_RANKS[label]):
        expected = None if gigabytes is None else pytest.approx(gigabytes * GB, rel=1e-12)
        assert tool.bytes_per_gpu(PSI, stage, 8) == expected


def test_every_other_tool_is_checked():
    assert [tool.label for tool in OTHER_TOOLS] == list(TOOLS_7B_8_RANKS)


@pytest.mark.parametrize(
    ("convention", "bytes_per_parameter"),
    [
        (ConventionName.ZERO_PAPER, 16),
        (ConventionName.DEEPSPEED_FP32_GRAD, 20),
        (ConventionName.DEEPSPEED_ESTIMATOR, 20),
        (ConventionName.MEGATRON, 18),
        (ConventionName.FSDP2_MIXED, 16),
        (ConventionName.AMP_AUTOCAST, 16),
        (ConventionName.PURE_BF16, 8),
        (ConventionName.PURE_FP16, 8),
        (ConventionName.FP32, 16),
    ],
)
def test_bytes_per_parameter_by_convention(convention: ConventionName, bytes_per_parameter: int):
    assert CONVENTIONS[convention].bytes_per_parameter() == bytes_per_parameter


def test_every_convention_is_cited():
    assert all(convention.citation and convention.label for convention in CONVENTIONS.values())


@pytest.mark.parametrize(
    ("convention", "stage", "gigabytes"),
    [
        # 6 + 12/DP, 2 + 18/N, 18/N, and FSDP2's 16/N with N = 8 and 7e9 parameters.
        ("megatron", 1, 52.5),
        ("deepspeed_estimator", 2, 29.75),
        ("deepspeed_estimator", 3, 15.75),
        ("fsdp2_mixed", 3, 14.0),
    ],
)
def test_conventions_agree_with_the_tools_that_they_are_named_after(convention: str, stage: int, gigabytes: float):
    scenario = parse_scenario(
        {
            "model": {"n_params": "7b"},
            "hardware": {"gpus": 8},
            "parallelism": {"engine": "deepspeed", "zero_stage": stage},
            "recipe": {"convention": convention},
        }
    )
    assert predict(scenario).static.total_bytes == gigabytes * GB


@pytest.mark.parametrize("name", EXACT_COUNTS)
def test_exact_parameter_counts(name: str):
    inventory = catalogue_inventory(name)
    assert inventory is not None
    assert inventory.n_params == EXACT_COUNTS[name]
