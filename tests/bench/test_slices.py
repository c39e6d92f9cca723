"""Slices and sweeps: what is reduced is what transformers then builds. Run: pytest tests/bench/test_slices.py"""

from itertools import pairwise

import pytest
from small_bench import SCENARIO

from memcore.bench.case import Case, Part, dump_case, load_case
from memcore.bench.slices import Slice, make_slice, room
from memcore.bench.sweeps import DEPTHS, SEGMENT_LAYERS, SweepKind, estimate_s, plan
from memcore.budget import FORMULAS
from memcore.counting import count_config
from memcore.errors import UserError
from memcore.loading import build_model, load_config
from memcore.models import catalogue, load_inventory
from memcore.scenario import parse_scenario

NAMES = [name for name, model in catalogue().items() if model.config is not None]


def slice_of(name: str, device: str = "cpu", dtype: str | None = None) -> Slice:
    return make_slice(parse_scenario({"model": {"name": name}}), FORMULAS, device, dtype)


@pytest.mark.parametrize("name", NAMES)
def test_every_models_slice_is_built_and_is_small_enough(name: str):
    part = slice_of(name)
    counted = load_inventory(count_config({"config": part.config(4, 2048)})["inventory"])
    assert len(counted.layers) == 4
    assert max(block.numel for block in counted.layers) <= room("cpu").layer_params
    shapes = counted.shapes
    assert (shapes.hidden_size, shapes.num_heads, shapes.head_dim) == (
        part.hidden_size,
        part.num_heads,
        part.shapes.head_dim,
    )


def test_llama_8b_on_a_cpu_keeps_its_head_size_and_its_proportions():
    part = slice_of("meta-llama/Llama-3.1-8B")
    config = part.config(2, 1024)
    assert config["model_type"] == "llama"
    assert (config["hidden_size"], config["intermediate_size"]) == (4096 // 8, 14336 // 8)
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (32 // 8, 8 // 8)
    model = build_model(load_config(config))
    assert type(model).__name__ == "LlamaForCausalLM"
    assert part.dtype == "fp32"
    notes = part.reductions()
    assert any("512 instead of 4,096" in note and "4 of 32 heads" in note for note in notes)
    assert any("FP32 instead of BF16" in note for note in notes)


def test_an_accelerator_runs_the_layer_at_its_real_width_and_dtype():
    part = slice_of("meta-llama/Llama-3.1-8B", "cuda")
    assert (part.hidden_size, part.num_heads, part.dtype) == (4096, 32, "bf16")
    assert not any("Width" in note for note in part.reductions())


def test_a_dtype_that_is_asked_for_wins():
    assert slice_of("meta-llama/Llama-3.1-8B", "cpu", "bf16").dtype == "bf16"


def test_dropout_is_off_and_said():
    part = slice_of("openai-community/gpt2")
    config = load_config(part.config(2, 128))
    assert config.attn_pdrop == config.resid_pdrop == config.embd_pdrop == 0.0
    assert any("Dropout" in note for note in part.reductions())


def test_a_bare_count_has_no_layers():
    with pytest.raises(UserError, match="no layers"):
        make_slice(parse_scenario({"model": {"n_params": "7B"}}), FORMULAS, "cpu")


class TestSweeps:
    @pytest.mark.parametrize("kind", list(SweepKind))
    @pytest.mark.parametrize("name", ["meta-llama/Llama-3.1-8B", "google/gemma-2-9b", "openai-community/gpt2-xl"])
    def test_one_click_is_planned_for_under_90_s(self, kind: SweepKind, name: str):
        sweep = plan(kind, slice_of(name))
        assert sum(estimate_s(case) for case in sweep.cases) < 90
        assert len({case.key for case in sweep.cases}) == len(sweep.cases)

    @pytest.mark.parametrize("name", NAMES)
    def test_lengths_double_at_least_four_times(self, name: str):
        sweep = plan(SweepKind.SEQUENCE, slice_of(name))
        for attention in ("plain", "flash"):
            alone = [case for case in sweep.cases if case.part is Part.ATTENTION and case.attention == attention]
            lengths = [case.seq_len for case in alone]
            assert len(lengths) >= 5
            assert all(after == 2 * before for before, after in pairwise(lengths))
            assert {case.head_dim for case in alone} == {slice_of(name).shapes.head_dim}

    def test_plain_comes_first_in_each_slice(self):
        for kind in (SweepKind.SEQUENCE, SweepKind.FRONTIER):
            seen: set[tuple[object, ...]] = set()
            for case in plan(kind, slice_of("meta-llama/Llama-3.1-8B")).cases:
                slice_key = (case.part, case.seq_len, case.num_layers)
                if slice_key not in seen:
                    assert (case.attention, case.checkpointing) == ("plain", "none")
                seen.add(slice_key)

    def test_depths_are_squares_up_to_64(self):
        sweep = plan(SweepKind.DEPTH, slice_of("meta-llama/Llama-3.1-8B"))
        stack = [case for case in sweep.cases if case.part is Part.PROJECTIONS]
        assert [case.num_layers for case in stack if case.checkpointing == "none"] == list(DEPTHS) == [4, 9, 16, 36, 64]
        assert [case.checkpointing for case in stack if case.checkpointing != "none"] == [
            f"segments({k})" for k in (2, 3, 4, 6, 8)
        ]

    def test_segments_have_every_k(self):
        sweep = plan(SweepKind.SEGMENTS, slice_of("meta-llama/Llama-3.1-8B"))
        assert [case.checkpointing for case in sweep.cases] == [
            "none",
            *(f"segments({k})" for k in range(1, SEGMENT_LAYERS + 1)),
        ]

    def test_a_case_survives_json(self):
        for case in plan(SweepKind.DEPTH, slice_of("openai-community/gpt2")).cases:
            again: Case = load_case(dump_case(case))
            assert again == case
            assert again.key == case.key

    def test_equal_scenarios_ask_the_same_cases(self):
        one, two = (plan(SweepKind.FRONTIER, slice_of("Qwen/Qwen3-8B")) for _ in range(2))
        assert [case.key for case in one.cases] == [case.key for case in two.cases]


def test_the_small_scenario_is_not_reduced_in_width():
    scenario = parse_scenario(SCENARIO)
    inventory = load_inventory(count_config({"config": dict(SCENARIO["model"]["config"])})["inventory"])
    part = make_slice(scenario, type(FORMULAS)(inventory=inventory), "cpu")
    assert part.divisor == 1
    assert part.reductions() == ["The layers alone run: no head, no loss, and an embedding of a few words."]
