"""ZeRO's theory: shares, offloading and communication volume against hand arithmetic and the paper.

Run: pytest tests/test_zero.py. Psi is 7e9 parameters unless a test says otherwise.
"""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memcore.budget import Budget, predict
from memcore.hardware import accelerator
from memcore.scenario import parse_scenario
from memcore.states import GRADIENT_STAGE, OPTIMIZER_STAGE, WEIGHT_STAGE, State, model_states
from memcore.terms import Category, Formula
from memcore.units import GB
from memcore.zero import MAX_SEARCHED_RANKS, account, communication, hpz_secondary_bytes, share, smallest_ranks

PSI = 7_000_000_000


def state(elements: int, total_bytes: int, divided_from: int, **more: int) -> State:
    return State(
        name="state",
        category=Category.OPTIMIZER,
        elements=elements,
        total_bytes=total_bytes,
        divided_from=divided_from,
        formula=Formula(symbols="", numbers=""),
        source="",
        **more,
    )


def budget(engine: str = "deepspeed", gpus: int = 8, **parts: Any) -> Budget:
    parallelism = {"engine": engine, **parts.pop("parallelism", {})}
    hardware = {"gpu": "H100-80GB", "gpus": gpus, **parts.pop("hardware", {})}
    return predict(
        parse_scenario({"model": {"n_params": PSI}, "hardware": hardware, "parallelism": parallelism, **parts})
    )


def test_a_share_is_rounded_up_to_whole_values():
    assert share(state(10, 40, OPTIMIZER_STAGE), 1, 4) == 3 * 4
    assert share(state(10, 40, OPTIMIZER_STAGE), 1, 16) == 4
    assert share(state(10, 40, OPTIMIZER_STAGE), 1, 1) == 40


def test_a_share_without_a_whole_number_of_bytes_per_value_is_rounded_up_to_bytes():
    assert share(state(1000, 1016, OPTIMIZER_STAGE), 1, 3) == math.ceil(1016 / 3)


@pytest.mark.parametrize("divided_from", [OPTIMIZER_STAGE, GRADIENT_STAGE, WEIGHT_STAGE])
def test_a_state_is_whole_below_its_stage(divided_from: int):
    shares = [share(state(100, 400, divided_from), stage, 4) for stage in range(4)]
    assert shares == [400] * divided_from + [100] * (4 - divided_from)


def test_a_fleeting_state_takes_nothing():
    assert share(state(100, 400, GRADIENT_STAGE, fleeting_from=2), 1, 4) == 400
    assert share(state(100, 400, GRADIENT_STAGE, fleeting_from=2), 2, 4) == 0


@given(
    elements=st.integers(1, 10**15),
    width=st.sampled_from([1, 2, 4]),
    ranks=st.integers(1, 10**6),
    stage=st.integers(0, 3),
)
def test_the_ranks_shares_hold_the_whole_state_and_little_more(elements: int, width: int, ranks: int, stage: int):
    each = share(state(elements, elements * width, OPTIMIZER_STAGE), stage, ranks)
    divided = ranks if stage >= 1 else 1
    assert elements * width <= each * divided < elements * width + divided * width


def test_one_rank_makes_all_stages_equal():
    totals = {budget(gpus=1, parallelism={"zero_stage": stage}).static.total_bytes for stage in range(4)}
    assert totals == {16 * PSI}


def test_hsdp_divides_by_the_shard_group_alone():
    replicated = budget("fsdp2", gpus=16, parallelism={"dp_shard": 4, "dp_replicate": 4})
    assert replicated.static.total_bytes == 16 * PSI // 4
    assert budget("fsdp2", gpus=16).static.total_bytes == PSI


def test_ddp_divides_nothing():
    assert budget("ddp", gpus=64).static.total_bytes == 16 * PSI


def test_hpz_adds_a_16_bit_copy_divided_within_the_group():
    config = {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}}
    with_hpz = budget(gpus=64, engine_config=config)
    (term,) = [term for term in with_hpz.terms if term.name == "secondary_weights"]
    assert term.largest == 2 * PSI // 8
    assert with_hpz.static == budget(gpus=64, parallelism={"zero_stage": 3}).static
    assert hpz_secondary_bytes(10, 2, 4) == 6
    assert hpz_secondary_bytes(10, 2, 1) == 0


@pytest.mark.parametrize(
    ("stage", "offload", "cpu", "nvme"),
    [
        # The estimator's 18 bytes per parameter over all ranks before its buffer factor, 16 for the optimizer alone.
        (3, {"optimizer": "cpu", "parameters": "cpu"}, 18, 0),
        (3, {"optimizer": "cpu"}, 16, 0),
        (2, {"optimizer": "cpu"}, 16, 0),
        (1, {"optimizer": "cpu"}, 16, 0),
        (3, {"parameters": "cpu"}, 2, 0),
        (3, {"optimizer": "nvme", "parameters": "nvme"}, 4, 14),
        (3, {"optimizer": "nvme", "parameters": "cpu"}, 6, 12),
    ],
)
def test_host_memory_of_a_node_with_all_ranks(stage: int, offload: dict[str, str], cpu: int, nvme: int):
    host = budget(parallelism={"zero_stage": stage}, offload=offload).host
    assert (host.cpu_bytes, host.nvme_bytes, host.unified_bytes) == (cpu * PSI, nvme * PSI, 0)


def test_host_memory_is_per_node():
    offload = {"optimizer": "cpu", "parameters": "cpu"}
    host = budget(gpus=32, parallelism={"zero_stage": 3}, offload=offload).host
    assert host.cpu_bytes == 18 * PSI * 8 // 32


def test_host_memory_of_the_public_offload_case():
    # shared/public_cases.json, ds-auto-z3-offload: 134.6 GiB for 8.03e9 parameters on eight ranks.
    scenario = {
        "model": {"name": "meta-llama/Llama-3.1-8B"},
        "hardware": {"gpus": 8},
        "parallelism": {"engine": "deepspeed", "zero_stage": 3},
        "offload": {"optimizer": "cpu", "parameters": "cpu"},
    }
    assert predict(parse_scenario(scenario)).host.cpu_bytes / 2**30 == pytest.approx(134.6, abs=0.05)


def test_offloaded_states_leave_the_gpu():
    offload = {"optimizer": "cpu", "parameters": "cpu"}
    left = budget(parallelism={"zero_stage": 3}, offload=offload)
    assert {term.name for term in left.terms} == {"reduce_bucket", "reduce_flatten", "cublas_workspace"}


def test_paged_states_are_in_unified_memory():
    recipe = {"optimizer": {"name": "adamw", "paged": True}}
    paged = budget("single", gpus=1, recipe=recipe)
    assert paged.host.unified_bytes == 8 * PSI
    at_idle = sum(term.at(len(paged.timeline) - 1) for term in paged.terms if term.category is Category.OPTIMIZER)
    assert at_idle == 4 * PSI  # the master copy


@pytest.mark.parametrize(
    ("stage", "capacity", "ranks"),
    [
        # 4 Psi + 12 Psi / N <= 40 GB: N >= 84 / 12 = 7; 2 Psi + 14 Psi / N: 98 / 26; 16 Psi / N: 112 / 40.
        (1, 40 * GB, 7),
        (2, 40 * GB, 4),
        (3, 40 * GB, 3),
        (0, 112 * GB, 1),
        (0, 112 * GB - 1, None),
        (1, 28 * GB, None),
        (3, 1, None),
    ],
)
def test_smallest_number_of_ranks(stage: int, capacity: int, ranks: int | None):
    states = model_states(parse_scenario({"model": {"n_params": PSI}}), PSI, None).states
    assert smallest_ranks(states, stage, capacity) == ranks


@given(stage=st.integers(1, 3), capacity=st.integers(10**9, 200 * 10**9), n_params=st.integers(10**6, 10**12))
def test_smallest_number_of_ranks_is_enough_and_one_less_is_not(stage: int, capacity: int, n_params: int):
    states = model_states(parse_scenario({"model": {"n_params": n_params}}), n_params, None).states
    ranks = smallest_ranks(states, stage, capacity)
    if ranks is None:
        assert account(states, stage, MAX_SEARCHED_RANKS).total_bytes > capacity
    else:
        assert account(states, stage, ranks).total_bytes <= capacity
        assert ranks == 1 or account(states, stage, ranks - 1).total_bytes > capacity


@pytest.mark.parametrize(("stage", "volume"), [(0, 2), (1, 2), (2, 2), (3, 3)])
def test_communication_volume_of_the_paper(stage: int, volume: int):
    # arXiv 1910.02054, section 7: 2 Psi for DDP and stages 1 and 2, 3 Psi for stage 3.
    moved = budget(parallelism={"zero_stage": stage}).communication
    assert moved.volume_in_parameters(PSI) == volume
    # A ring of 8 sends 7/8 of each value; all are 16 bit.
    assert moved.bytes_per_gpu == volume * PSI * 2 * 7 // 8


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_gpu_moves_nothing_at_any_stage(stage: int):
    moved = budget(gpus=1, parallelism={"zero_stage": stage}).communication
    assert (moved.volume_in_parameters(PSI), moved.bytes_per_gpu) == (0, 0)


def test_ddp_and_fsdp2_move_2_and_3_psi():
    assert budget("ddp").communication.volume_in_parameters(PSI) == 2
    assert budget("fsdp2").communication.volume_in_parameters(PSI) == 3


@pytest.mark.parametrize(("stage", "volume"), [(0, 2), (1, 2), (2, 4 + 1), (3, 12)])
def test_communication_with_four_micro_steps(stage: int, volume: int):
    # Stages 2 and 3 reduce in each micro-step; stage 3 gathers twice in each.
    moved = budget(parallelism={"zero_stage": stage}, workload={"grad_accum": 4}).communication
    assert moved.volume_in_parameters(PSI) == volume


def test_fp32_reduction_moves_twice_the_bytes():
    moved = budget("fsdp2", recipe={"convention": "fsdp2_mixed"}).communication
    # Gradients 4 bytes, two gathers of BF16 weights.
    assert moved.bytes_per_gpu == (4 + 2 * 2) * PSI * 7 // 8


def test_hsdp_adds_an_all_reduce_of_the_slices():
    moved = budget("fsdp2", gpus=16, parallelism={"dp_shard": 8, "dp_replicate": 2}).communication
    within = 3 * PSI * 2 * 7 // 8
    across = 2 * (PSI // 8) * 2 // 2
    assert moved.bytes_per_gpu == within + across
    # Groups of 8 lie within a node of 8 (450 GB/s); only their all-reduce crosses the network (50 GB/s).
    assert [collective.spans_nodes for collective in moved.collectives] == [False, False, True]
    assert moved.seconds == pytest.approx(within / 450e9 + across / 50e9)
    assert moved.link_name == "network"


def test_one_gpu_moves_nothing():
    assert budget("single", gpus=1).communication.bytes_per_gpu == 0


def test_links_within_and_across_nodes():
    within = budget(gpus=8, parallelism={"zero_stage": 1}).communication
    assert within.link_name == accelerator("H100-80GB").link.name == "NVLink 4"
    assert within.link_bytes_per_s == 450 * GB  # 900 GB/s both directions
    assert within.seconds == pytest.approx(2 * PSI * 2 * 7 / 8 / 450e9)
    across = budget(gpus=16, parallelism={"zero_stage": 1}).communication
    assert across.link_name == "network"
    assert across.link_bytes_per_s == 50 * GB  # 400 Gbit/s
    small_nodes = budget(gpus=8, hardware={"gpus_per_node": 4}, parallelism={"zero_stage": 1}).communication
    assert small_nodes.link_name == "network"


def test_a_stage_can_be_asked_for_that_is_not_the_scenarios():
    scenario = parse_scenario({"model": {"n_params": PSI}, "hardware": {"gpus": 8}, "parallelism": {"zero_stage": 1}})
    states = model_states(scenario, PSI, None)
    moved = communication(scenario, states, accelerator("H100-80GB"), stage=3)
    assert moved.volume_in_parameters(PSI) == 3
