"""What stands between floor and peak: adds up, agrees with DeepSpeed's own functions, and answers what-ifs.

Run: pytest tests/test_buffers.py. DeepSpeed is imported by the tests that call it alone; they are skipped without
it.
"""

import warnings
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memcore.budget import Budget, predict
from memcore.buffers import (
    PCIE4_BYTES_PER_S,
    above_floor,
    compute_seconds,
    estimator_bytes,
    gathered_bytes,
    knob_effects,
    link_times,
    two_against_three,
    with_zero,
)
from memcore.errors import UserError
from memcore.hardware import accelerator
from memcore.models import catalogue
from memcore.scenario import parse_scenario
from memcore.terms import Category, Phase

LLAMA, LLAMA_PSI = "meta-llama/Llama-3.1-8B", 8_030_261_248
STATES = (Category.WEIGHTS, Category.GRADIENTS, Category.OPTIMIZER)


def deepspeed(
    stage: int, model: Any = LLAMA, gpus: int = 8, zero: dict[str, Any] | None = None, **parts: Any
) -> Budget:
    scenario = {
        "model": {"name": model} if isinstance(model, str) else {"n_params": model},
        "hardware": {"gpus": gpus},
        "parallelism": {"engine": "deepspeed", "zero_stage": stage},
        "engine_config": {"zero_optimization": zero or {}},
        **parts,
    }
    return predict(parse_scenario(scenario))


@pytest.fixture(scope="module")
def estimators() -> Any:
    """DeepSpeed's own estimators and its count of the largest module, without an accelerator."""
    patch = pytest.MonkeyPatch()
    patch.setenv("DS_ACCELERATOR", "cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stage3 = pytest.importorskip("deepspeed.runtime.zero.stage3")
        stage2 = pytest.importorskip("deepspeed.runtime.zero.stage_1_and_2")
    yield (
        stage2.estimate_zero2_model_states_mem_needs,
        stage3.estimate_zero3_model_states_mem_needs,
        stage3.model_to_params,
    )
    patch.undo()


# --- floor and what is above it ---------------------------------------------------------------------------------


@settings(max_examples=40)
@given(
    engine=st.sampled_from(["single", "ddp", "fsdp2", *(f"deepspeed{stage}" for stage in range(4))]),
    model=st.sampled_from([{"name": LLAMA}, {"name": "openai-community/gpt2"}, {"n_params": 10**9}]),
    gpus=st.sampled_from([1, 2, 8, 64]),
    accumulation=st.sampled_from([1, 4]),
    convention=st.sampled_from(["zero_paper", "deepspeed_fp32_grad", "fsdp2_mixed", "pure_bf16"]),
    overlap=st.booleans(),
)
def test_the_stack_adds_up_with_the_engines_terms(
    engine: str, model: dict[str, Any], gpus: int, accumulation: int, convention: str, overlap: bool
):  # fmt: skip
    """At each phase's peak: floor and what is above it are all of the engine's terms, none lost, none twice."""
    parallelism: dict[str, Any] = {"engine": engine.rstrip("0123")}
    data: dict[str, Any] = {
        "model": model,
        "hardware": {"gpus": 1 if engine == "single" else gpus},
        "parallelism": parallelism,
        "recipe": {"convention": convention},
        "workload": {"grad_accum": accumulation},
    }
    if engine.startswith("deepspeed"):
        parallelism["zero_stage"] = int(engine[-1])
        data["engine_config"] = {"zero_optimization": {"overlap_comm": overlap}}
    try:
        budget = predict(parse_scenario(data))
    except UserError:
        return
    peaks = budget.phase_peaks()
    rows = above_floor(budget)
    assert [row.phase for row in rows] == list(peaks)
    for row in rows:
        index = peaks[row.phase]
        engine_terms = [t for t in budget.terms if t.category in (*STATES, Category.COMMUNICATION)]
        assert row.floor + sum(share for _term, share in row.terms) == sum(t.at(index) for t in engine_terms)
        # A slice is padded, and keeps the tensors that it touches whole.
        whole = 4 * budget.inventory.largest_tensor[1].numel if budget.inventory else 0
        assert row.floor <= budget.static.total_bytes + whole + 2 * 16 * len(budget.states.states)
        assert all(share > 0 for _term, share in row.terms)


def test_zero_1_is_reached_at_the_end_of_the_backward():
    """worked_examples.md: 38.5 GB of states and a 1.0 GB bucket, for 7e9 parameters on eight GPUs.

    At the peak the gradients of the first bucket have moved into it: 37.5 + 1.0. The worked example leaves out
    what the engine then adds: this rank's slice of reduced gradients, 14 / 8 GB.
    """
    rows = {row.phase: row for row in above_floor(deepspeed(1, model=7_000_000_000))}
    above = {term.name: share / 1e9 for term, share in rows[Phase.BACKWARD].terms}
    assert rows[Phase.BACKWARD].floor / 1e9 + above["reduce_bucket"] == pytest.approx(38.5, abs=0.01)
    assert above == {"reduce_bucket": 1.0, "gradient_slice": 1.75}


def test_zero_3_stands_above_its_floor_by_what_is_gathered():
    budget = deepspeed(3)
    rows = {row.phase: row for row in above_floor(budget)}
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        names = {term.name for term, _share in rows[phase].terms}
        assert {"gathered_parameters", "persistent_parameters", "reduce_bucket"} <= names
    assert "gathered_parameters" not in {term.name for term, _share in rows[Phase.OPTIMIZER].terms}


# --- ZeRO-2 against ZeRO-3 ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_against_three_explains_the_whole_difference(stage: int):
    found = two_against_three(deepspeed(stage))
    assert found is not None
    two, three, rows = found
    assert (two.scenario.parallelism.stage, three.scenario.parallelism.stage) == (2, 3)
    assert sum(row.at_two - row.at_three for row in rows) == two.peak_bytes - three.peak_bytes
    differences = [row.at_two - row.at_three for row in rows]
    assert differences == sorted(differences)
    assert 0 not in differences
    weights = next(row for row in rows if row.name == "weights")
    assert (weights.at_two, weights.at_three) == (2 * LLAMA_PSI, -(-2 * LLAMA_PSI // 8))


def test_two_against_three_without_hpz_below_three():
    found = two_against_three(deepspeed(3, zero={"zero_hpz_partition_size": 4}))
    assert found is not None
    assert found[1].scenario.zero_config.zero_hpz_partition_size == 4


@pytest.mark.parametrize(
    ("parallelism", "parts"),
    [
        ({"engine": "fsdp2"}, {}),
        ({"engine": "ddp"}, {}),
        # Parameters on the host have no form at ZeRO-2.
        ({"engine": "deepspeed", "zero_stage": 3}, {"offload": {"parameters": "cpu"}}),
    ],
)
def test_where_one_has_no_form_there_is_no_comparison(parallelism: dict[str, Any], parts: dict[str, Any]):
    data = {"model": {"name": LLAMA}, "hardware": {"gpus": 8}, "parallelism": parallelism, **parts}
    assert two_against_three(predict(parse_scenario(data))) is None


# --- DeepSpeed's own estimator --------------------------------------------------------------------------------------


@pytest.mark.parametrize("gpus", [1, 2, 8, 24, 64])
@pytest.mark.parametrize("psi", [7_000_000_000, LLAMA_PSI, 124_439_808, 1])
def test_estimator_of_a_bare_count_is_deepspeeds(estimators: Any, psi: int, gpus: int):
    two, three, _count = estimators
    nodes = gpus // 8 if gpus > 8 else 1
    ours = estimator_bytes(deepspeed(2, model=psi, gpus=gpus))
    # DeepSpeed divides in floating point, exact to a few bytes at these sizes.
    assert ours[2] == pytest.approx(two(psi, gpus // nodes, nodes, cpu_offload=False)[1], abs=4)
    assert ours[3] == pytest.approx(three(psi, 0, gpus // nodes, nodes, cpu_offload=False)[1], abs=4)


@pytest.mark.parametrize(
    "name",
    [
        LLAMA,
        "openai-community/gpt2",
        "EleutherAI/gpt-j-6b",  # a head with a bias
        "mistralai/Mixtral-8x7B-v0.1",  # one module owns all experts
        "Qwen/Qwen3-30B-A3B",
        "deepseek-ai/DeepSeek-V2-Lite",
    ],
)
def test_estimator_of_a_model_is_deepspeeds(estimators: Any, name: str):
    """The largest layer as DeepSpeed counts it, on the real model class on the meta device."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    two, three, count = estimators
    config = catalogue()[name].config
    assert config is not None
    fields = {key: value for key, value in config.items() if key != "model_type"}
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **fields))
    largest = max(sum(p.numel() for p in m.parameters(recurse=False)) for m in model.modules())
    psi = sum(p.numel() for p in model.parameters())
    assert count.__name__ == "model_to_params"  # which counts largest layers so, but cannot tell meta tensors apart
    ours = estimator_bytes(deepspeed(3, model=name))
    assert ours[2] == pytest.approx(two(psi, 8, 1, cpu_offload=False)[1], abs=4)
    assert ours[3] == pytest.approx(three(psi, largest, 8, 1, cpu_offload=False)[1], abs=4)


# --- the prefetcher's settings ----------------------------------------------------------------------------------------

SMALL = {
    "stage3_prefetch_bucket_size": 0,
    "stage3_max_live_parameters": 3_000_000,
    "stage3_max_reuse_distance": 3_000_000,
}


def test_lowering_one_alone_saves_nothing_and_all_of_them_save_most():
    """engine_facts.md: the gathered set is small only if reuse is small AND (prefetch is 0 or max_live is small).
    GPT-2's 124e6 parameters lie within all defaults, so that the whole model is gathered."""
    budget = deepspeed(3, model="openai-community/gpt2")
    effects = knob_effects(budget, SMALL)
    assert [dict(effect.changes) for effect in effects] == [*({name: SMALL[name]} for name in SMALL), SMALL]
    *single, together = effects
    whole = 2 * 124_439_808
    for effect in single:
        assert effect.before == effect.after, effect.changes
    assert together.before > 0.9 * whole
    # The table alone, which is also the head, is 38.6e6 of the 124e6: it is what is left.
    assert together.after - 2 * 500_000_000 < 0.5 * whole


@pytest.mark.parametrize(
    ("pair", "small"),
    [
        (("stage3_max_reuse_distance", "stage3_prefetch_bucket_size"), True),
        (("stage3_max_reuse_distance", "stage3_max_live_parameters"), True),
        (("stage3_max_live_parameters", "stage3_prefetch_bucket_size"), False),
    ],
)
def test_pairs_of_settings(pair: tuple[str, str], small: bool):
    """The same rule pair by pair."""
    effect = knob_effects(deepspeed(3, model="openai-community/gpt2"), {name: SMALL[name] for name in pair})[-1]
    saved = effect.before - effect.after
    assert (saved > 10**8) == small
    assert (saved == 0) != small


@settings(max_examples=15)
@given(
    prefetch=st.integers(0, 10**10), live=st.integers(0, 10**10), reuse=st.integers(0, 10**10), gpus=st.integers(2, 64)
)
def test_no_setting_gathers_more_than_the_model(prefetch: int, live: int, reuse: int, gpus: int):
    zero = {
        "stage3_prefetch_bucket_size": prefetch,
        "stage3_max_live_parameters": live,
        "stage3_max_reuse_distance": reuse,
        "reduce_bucket_size": 1,
    }
    found = gathered_bytes(deepspeed(3, model="openai-community/gpt2", gpus=gpus, zero=zero)) - 2
    assert 2 * 768 * 50_257 <= found <= 2 * 124_439_808


def test_other_settings_stay_when_one_is_changed():
    budget = deepspeed(3, zero={"reduce_bucket_size": 7, "overlap_comm": True})
    zero = with_zero(budget, {"sub_group_size": 9}).scenario.zero_config
    assert (zero.reduce_bucket_size, zero.overlap_comm, zero.sub_group_size) == (7, True, 9)


# --- links ---------------------------------------------------------------------------------------------------------


def test_link_times_by_hand():
    """ZeRO-3 moves 3 Psi parameters of 2 bytes; H100: 450 GB/s of NVLink one way, 989.4 Tflop/s (datasheet)."""
    budget = deepspeed(3, hardware={"gpu": "H100-80GB", "gpus": 8}, workload={"seq_len": 4096})
    card = accelerator("H100-80GB")
    times = {time.link: time for time in link_times(budget)}
    moved = budget.communication.bytes_per_gpu
    assert moved == pytest.approx(3 * 2 * LLAMA_PSI, rel=0.13)  # N - 1 of N parts
    assert set(times) == {card.link.name, "PCIe 4.0 x16", "network, 400 Gbit/s"}
    assert times[card.link.name].seconds == moved / card.link.bytes_per_s
    assert times["PCIe 4.0 x16"].seconds == moved / 31.5e9
    assert times["network, 400 Gbit/s"].seconds == moved / 50e9
    compute = 6 * LLAMA_PSI * 4096 / (card.peak_dense_bf16_flops_per_s or 0)
    for time in times.values():
        assert time.compute_seconds == pytest.approx(compute)
        assert time.can_hide == (time.seconds <= compute)
    # PCI Express 4.0: 16 GT/s, 16 lanes, 128b/130b, 8 bits a byte.
    assert pytest.approx(16e9 * 16 * 128 / 130 / 8, rel=1e-3) == PCIE4_BYTES_PER_S


# A layer of Llama-3.1-8B: queries, keys, values, output; gate, up, down; two norms.
Q, K, V, OUT = 4096 * 4096, 4096 * 1024, 4096 * 1024, 4096 * 4096
GATE = UP = DOWN = 4096 * 14_336
NORMS = 2 * 4096
LAYER = Q + K + V + OUT + GATE + UP + DOWN + NORMS


@pytest.mark.parametrize(
    ("method", "kind", "again"),
    [
        ("full", "none", 0),
        ("lora", "none", 0),
        ("full", "full", 32 * LAYER),
        ("lora", "full", 32 * LAYER),
        # Whole groups are run again too; of these two every third layer, and the first five.
        ("full", "segments(5)", 32 * LAYER),
        ("full", "every_nth(3)", 11 * LAYER),
        ("full", "first(5)", 5 * LAYER),
        # Scores are not a product with weights.
        ("full", "attention", 0),
        ("full", "save(attention)", 32 * LAYER),
        ("full", "save(mm)", 32 * NORMS),
        # The first, third, fifth and seventh product keep their results.
        ("full", "save(attention,mm_alternate)", 32 * (K + OUT + UP + NORMS)),
    ],
)
def test_flops_per_token(method: str, kind: str, again: int):
    """arXiv 2001.08361, section 2.1: 2 in the forward, 4 in the backward, 2 of them for a frozen base; and 2 for what
    is run again, which the embedding and the head are not."""
    budget = deepspeed(2, recipe={"method": method}, workload={"checkpointing": kind})
    rate = budget.device.peak_dense_bf16_flops_per_s
    assert rate is not None
    flops = (6 if method == "full" else 4) * LLAMA_PSI + 2 * again
    assert compute_seconds(budget, budget.device) == pytest.approx(flops * 4096 / rate, rel=1e-12)


def test_experts_that_are_saved_are_not_run_again():
    """Mixtral keeps its experts stacked, whose products are grouped: 8 of 3 x 4096 x 14,336, of which 2 are used."""
    kept, again = (
        deepspeed(2, model="mistralai/Mixtral-8x7B-v0.1", workload={"checkpointing": kind})
        for kind in ("save(grouped_mm)", "full")
    )
    rate = again.device.peak_dense_bf16_flops_per_s
    times = [compute_seconds(each, each.device) for each in (kept, again)]
    assert rate is not None
    assert None not in times
    saved = (times[1] or 0) - (times[0] or 0)
    assert saved == pytest.approx(2 * 32 * 2 * 3 * 4096 * 14_336 * 4096 / rate, rel=1e-9)


def test_experts_compute_with_those_that_are_chosen():
    budget = deepspeed(2, model="mistralai/Mixtral-8x7B-v0.1")
    rate = budget.device.peak_dense_bf16_flops_per_s
    assert rate is not None
    # Mixtral's paper: 12.9e9 active of 46.7e9.
    assert compute_seconds(budget, budget.device) == pytest.approx(6 * 12.9e9 * 4096 / rate, rel=0.01)


def test_an_unknown_rate_is_said_and_not_guessed():
    budget = deepspeed(3)
    unknown = replace(budget, device=replace(budget.device, peak_dense_bf16_flops_per_s=None))
    assert {time.compute_seconds for time in link_times(unknown)} == {None}
    assert {time.can_hide for time in link_times(unknown)} == {None}
    assert [time.seconds for time in link_times(unknown)] == [time.seconds for time in link_times(budget)]


# --- bucket sizes changed in a published report (measured/runs.json, "deltas") ----------------------------------------


@pytest.fixture(scope="module")
def deltas(measured_runs: dict[str, Any]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = measured_runs["deltas"]
    return found


def reduce_bucket(settings: dict[str, Any], stage: int) -> int:
    """The engine's buckets for the record's settings, the model aside: FP16 gradients are stated as assumed.

    reduce_scatter is not a setting that we read: it takes no memory in a step.
    """
    zero = {key: value for key, value in settings.items() if key != "reduce_scatter"}
    budget = deepspeed(stage, model=1_844_440_680, zero=zero)  # ViT-G/14; the bucket does not depend on it
    return sum(term.largest for term in budget.terms if term.name == "reduce_bucket")


@pytest.mark.parametrize(
    "name", ["ds1302-reduce-scatter-off", "ds1302-overlap-off", "ds1302-bucket-1e8", "ds1302-bucket-1e7",
             "ds1302-contiguous-off"],
)  # fmt: skip
def test_published_differences_of_settings(deltas: dict[str, dict[str, Any]], name: str):
    """deepspeedai/DeepSpeed#1302: ZeRO-2, GPU count and batch not stated, so that only the difference of the
    buckets can be predicted: within 4 MiB."""
    delta = deltas[name]
    found = reduce_bucket(delta["variant"], delta["zero_stage"]) - reduce_bucket(delta["baseline"], delta["zero_stage"])
    assert found == pytest.approx(delta["delta_bytes"], abs=4 * 2**20)


def test_every_published_difference_is_covered(deltas: dict[str, dict[str, Any]]):
    assert len(deltas) == 5
