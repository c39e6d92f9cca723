"""FSDP1 in the trace: over depths and settings, beside its closed form, and against published peaks to the byte.

Run: pytest tests/trace/test_fsdp1.py. Real runs on CPU ranks are in tests/verify/test_matrix.py.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from memcore.budget import Budget, evidence_for, predict
from memcore.jobs import LightLane
from memcore.scenario import Scenario, parse_scenario
from memcore.score.adapter import scenario_of
from memcore.score.published import published_records
from memcore.score.record import parse_run
from memcore.terms import Phase
from memcore.trace.profile import ActivationProfile
from memcore.trace.request import read_request, trace_request
from memcore.trace.tracer import trace
from memcore.verify.matrix import MODEL

pytestmark = pytest.mark.usefixtures("one_torch_thread")
LORA = {"rank": 16, "targets": ["q_proj", "v_proj"], "adapter_dtype": "bf16"}
BF16 = {"convention": "pure_bf16"}
AROUND = {"checkpointing": "full", "reentrant": True}
NO_SHARD_8 = {"engine": "fsdp1", "dp_shard": 1, "dp_replicate": 8}
SCENARIO_8B = {
    "model": {"name": "meta-llama/Llama-3.1-8B"},
    "recipe": {"convention": "fsdp2_mixed"},
    "workload": {"micro_batch": 1, "seq_len": 256},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "checkpoints within units": {"workload": {"checkpointing": "full"}},
    "checkpoints around units": {"workload": AROUND, "engine_config": {"checkpoint_around_units": True}},
    "the other checkpoint around units": {
        "workload": {"checkpointing": "full"}, "engine_config": {"checkpoint_around_units": True},
    },
    "BACKWARD_POST": {"engine_config": {"backward_prefetch": "post"}},
    "SHARD_GRAD_OP": {"engine_config": {"reshard_after_forward": False}},
    "flat parameters": {"engine_config": {"use_orig_params": False}},
    "on the host": {"engine_config": {"cpu_offload": True}},
    "adapters apart": {"recipe": {**BF16, "method": "lora", "lora": LORA}},
    "adapters inside": {
        "recipe": {**BF16, "method": "lora", "lora": LORA}, "engine_config": {"adapters": "inside"},
    },
    "adapters ignored": {
        "recipe": {**BF16, "method": "lora", "lora": LORA}, "engine_config": {"adapters": "ignored"},
    },
    "a packed base": {
        "recipe": {**BF16, "method": "qlora", "lora": LORA}, "workload": AROUND,
        "engine_config": {"checkpoint_around_units": True},
    },
    "forward_prefetch": {"engine_config": {"forward_prefetch": True}},
    "NO_SHARD": {"parallelism": {"dp_shard": 1, "dp_replicate": 4}},
    "NO_SHARD in one dtype": {"parallelism": {"dp_shard": 1, "dp_replicate": 4}, "recipe": BF16},
    "NO_SHARD, SHARD_GRAD_OP asked for": {
        "parallelism": {"dp_shard": 1, "dp_replicate": 4}, "engine_config": {"reshard_after_forward": False},
    },
    "NO_SHARD, adapters": {
        "parallelism": {"dp_shard": 1, "dp_replicate": 4}, "recipe": {**BF16, "method": "lora", "lora": LORA},
    },
    "HYBRID_SHARD": {"parallelism": {"dp_shard": 2, "dp_replicate": 2}},
}  # fmt: skip


def request_of(full_depth: bool = False, **parts: Any) -> dict[str, Any]:
    data = {
        "model": {"config": dict(MODEL)},
        "hardware": {"gpus": 4},
        "parallelism": {"engine": "fsdp1", **parts.get("parallelism", {})},
        "engine_config": parts.get("engine_config", {}),
        "recipe": parts.get("recipe", {"convention": "fsdp2_mixed"}),
        "workload": {"micro_batch": 1, "seq_len": 16, **parts.get("workload", {})},
    }
    request = trace_request(parse_scenario(data))
    assert isinstance(request, dict)
    return {**request, "full_depth": full_depth}


def traced(**parts: Any) -> ActivationProfile:
    return trace(read_request(request_of(**parts)))


@pytest.mark.parametrize("parts", SETTINGS.values(), ids=SETTINGS)
def test_a_few_layers_replay_as_all_of_them(parts: dict[str, Any]):
    few, every = traced(**parts), traced(full_depth=True, **parts)
    assert few.totals == every.totals
    assert few.with_gradients == every.with_gradients
    assert few.traced_layers == 3


def unit_bytes(width: int) -> int:
    """A layer's 3,146,752 parameters: 2 x 512^2 + 2 x 512 x 256 + 3 x 512 x 1536 + 2 x 512."""
    return width * (2 * 512**2 + 2 * 512 * 256 + 3 * 512 * 1536 + 2 * 512)


def test_the_root_stays_and_one_layer_after_the_other_comes():
    gathered, root = traced().of("gathered"), 2 * (2 * 8192 * 512 + 512)
    cast = unit_bytes(2) // 4
    assert set(gathered[1:8]) == {root + unit_bytes(2) + cast}
    # The next one is there while a layer's gradients are computed, with its cast slice at first.
    assert gathered[9:16] == (root + 2 * unit_bytes(2),) * 7


def test_a_checkpoint_around_units_gathers_none_ahead():
    around = traced(**SETTINGS["checkpoints around units"]).of("gathered")
    assert around[9] < traced(**SETTINGS["checkpoints within units"]).of("gathered")[9]


def test_adapters_inside_their_layers_have_gradients_as_long_as_the_layer():
    inside = traced(**SETTINGS["adapters inside"])
    grown = inside.with_gradients[-1] - inside.totals[-1]
    adapters = 2 * (16 * 512 + 16 * 512 + 16 * 512 + 16 * 256)
    assert grown == pytest.approx(8 * (unit_bytes(2) + adapters) / 4, rel=0.001)


def test_the_next_layer_is_gathered_before_the_forward():
    gathered, root = traced(**SETTINGS["forward_prefetch"]).of("gathered"), 2 * (2 * 8192 * 512 + 512)
    # Both whole, with the next one's cast slice at first; the last layer has none after it.
    assert set(gathered[1:7]) == {root + 2 * unit_bytes(2) + unit_bytes(2) // 4}


class TestWithoutSharding:
    def test_what_is_of_the_computations_dtype_is_used_where_it_is(self):
        assert set(traced(**SETTINGS["NO_SHARD in one dtype"]).of("gathered")) == {0}

    def test_else_a_unit_is_cast_and_let_go_of_after_its_forward(self):
        root = 2 * (2 * 8192 * 512 + 512)
        whole = traced(**SETTINGS["NO_SHARD"])
        assert set(whole.of("gathered")[1:8]) == {root + unit_bytes(2)}
        assert whole.totals == traced(**SETTINGS["NO_SHARD, SHARD_GRAD_OP asked for"]).totals

    def test_gradients_are_whole(self):
        whole = traced(**SETTINGS["NO_SHARD in one dtype"])
        grown = whole.with_gradients[-1] - whole.totals[-1]
        assert grown == 2 * (2 * 8192 * 512 + 512) + 8 * unit_bytes(2)

    def test_one_gpu_has_nothing_to_share(self):
        """torch 2.13, distributed/fsdp/_init_utils.py, _init_core_state: NO_SHARD for a world of 1."""
        data = {**SCENARIO_8B, "hardware": {"gpus": 1}, "parallelism": {"engine": "fsdp1"}}
        apart = {**SCENARIO_8B, "hardware": {"gpus": 8}, "parallelism": NO_SHARD_8}
        assert predict(parse_scenario(data)).totals == predict(parse_scenario(apart)).totals


def test_groups_divide_among_their_own_ranks():
    """HYBRID_SHARD on 4 ranks in 2 groups is FULL_SHARD on 2, but for what the groups add up in place."""
    groups = traced(**SETTINGS["HYBRID_SHARD"])
    two = request_of()
    assert groups.totals == trace(read_request({**two, "sharding": {**two["sharding"], "shard": 2}})).totals


# Peaks that fms-acceleration measured on A100s with torch 2.4.1 and published to the byte.
PUBLISHED = {
    "fms-a-Mistral-7B-v0.1-none-full-g2-b2": 36_225_939_968,
    "fms-a-Mistral-7B-v0.1-baseline-peft-bnb-qlora-g2-b2": 9_424_594_432,
    "fms-a-Llama-2-70b-hf-baseline-peft-bnb-qlora-g2-b2": 46_685_287_936,
    "fms-a_liger-Meta-Llama-3-8B-foak-fast-kernels-liger-full-g4-b8": 44_061_352_448,
    "fms-a_liger-Meta-Llama-3-8B-foak-fast-kernels-liger-lora-g2-b16": 61_448_585_728,
}


@pytest.mark.parametrize(("run_id", "measured"), PUBLISHED.items())
def test_a_published_peak(run_id: str, measured: int, light: LightLane):
    scenario = scenario_of(parse_run(published_records()[run_id]))
    assert budget_of(scenario, light).peak_bytes == pytest.approx(measured, rel=0.002)


@pytest.fixture(scope="module")
def light() -> Iterator[LightLane]:
    lane = LightLane()
    yield lane
    lane.close()


def budget_of(scenario: Scenario, light: LightLane) -> Budget:
    return predict(scenario, evidence_for(scenario, light.ask, traced=True))


NEAR = ("plain", "checkpoints around units", "SHARD_GRAD_OP", "flat parameters", "forward_prefetch")


@pytest.mark.parametrize("name", [*NEAR, "NO_SHARD", "NO_SHARD in one dtype", "HYBRID_SHARD"])
def test_the_closed_form_is_near_the_trace(name: str, light: LightLane):
    """On 8 GPUs and a model whose layers are large beside its activations."""
    parts = SETTINGS[name]
    spread = {"NO_SHARD": NO_SHARD_8, "HYBRID_SHARD": {"engine": "fsdp1", "dp_shard": 4, "dp_replicate": 2}}
    data = {
        **SCENARIO_8B,
        "hardware": {"gpus": 8},
        "parallelism": spread.get(name.partition(" in")[0], {"engine": "fsdp1"}),
        "engine_config": parts.get("engine_config", {}),
        "recipe": parts.get("recipe", {"convention": "fsdp2_mixed"}),
        "workload": {"micro_batch": 1, "seq_len": 256, **parts.get("workload", {})},
    }
    scenario = parse_scenario(data)
    traced_budget, formula = budget_of(scenario, light), predict(scenario)
    for phase, index in traced_budget.phase_peaks().items():
        if phase is Phase.INIT:
            continue
        form = formula.totals[formula.phase_peaks()[phase]]
        assert form == pytest.approx(traced_budget.totals[index], rel=0.05), phase
