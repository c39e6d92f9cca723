"""The activation explorer's curves: how they grow, where they cross, and that they are the closed forms' own.

Run: pytest tests/test_explore.py.
"""

from itertools import pairwise
from math import log2
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memcore.activations import model_activations
from memcore.budget import Budget, predict
from memcore.explore import (
    SEQUENCES,
    activations_at_most,
    depth_curves,
    layer_of,
    layer_rows,
    loss_rows,
    peak_activations,
    segments,
    sequence_curves,
    takeover,
    typical_layer,
    with_workload,
    without_autocast,
)
from memcore.scenario import parse_scenario
from memcore.terms import Phase
from memcore.units import MIB

LLAMA = "meta-llama/Llama-3.1-8B"
BARE = {"model": {"n_params": 7_000_000_000}}


def budget_of(model: str = LLAMA, **workload: Any) -> Budget:
    recipe = {"convention": "pure_bf16"}
    return predict(
        parse_scenario({"model": {"name": model}, "recipe": recipe, "workload": {"seq_len": 8192, **workload}})
    )


def exponents(points: tuple[tuple[int, int], ...]) -> list[float]:
    """The slope of each doubling on log-log axes."""
    return [log2(later[1] / earlier[1]) / log2(later[0] / earlier[0]) for earlier, later in pairwise(points)]


class TestOverTheSequence:
    """worked_examples.md, question 5: plain attention is O(N^2), flash O(N)."""

    @pytest.mark.parametrize("model", [LLAMA, "openai-community/gpt2", "google/gemma-2-9b", "openai/gpt-oss-20b"])
    def test_exponents(self, model: str):
        curves = {(c.attention, c.checkpointing): exponents(c.points) for c in sequence_curves(budget_of(model))}
        assert len(curves) == 6
        for kind in ("none", "full"):
            for attention in ("flash", "memory_efficient"):
                assert curves[attention, kind] == pytest.approx([1.0] * 8, abs=1e-3)
            plain = curves["eager", kind]
            assert plain == sorted(plain)  # ever nearer to 2
            # With all layers recomputed the kept inputs, linear, weigh more beside one layer's scores.
            assert plain[-1] == pytest.approx(2.0, abs=0.1)
            assert plain[0] < 1.9

    def test_points_are_the_answers_own(self):
        budget = budget_of()
        for curve in sequence_curves(budget):
            assert [length for length, _size in curve.points] == list(SEQUENCES)
            length, size = curve.points[4]
            assert length == 8192
            assert size == activations_at_most(budget, attention=curve.attention, checkpointing=curve.checkpointing)

    def test_the_peak_is_that_of_the_terms(self):
        """The most of the activations at any moment of the backward, the loss left out."""
        for workload in ({}, {"attention": "eager"}, {"checkpointing": "full"}, {"checkpointing": "segments(3)"}):
            budget = budget_of(**workload)
            found = model_activations(budget.scenario, budget.states, budget.inventory)
            assert found is not None
            sums = [
                sum(term.at(index) for term in budget.terms if term.category.value == "activations")
                for index, moment in enumerate(budget.timeline)
                if moment.phase is Phase.BACKWARD
            ]
            assert peak_activations(found) == max(sums)

    def test_the_scenarios_own_batch_and_method_are_kept(self):
        one, two = (sequence_curves(budget_of(micro_batch=batch)) for batch in (1, 2))
        for single, double in zip(one, two, strict=True):
            assert [2 * size for _length, size in single.points] == pytest.approx([s for _length, s in double.points])


class TestTakeover:
    """The length at which a layer's scores take as much as all the rest of it."""

    @pytest.mark.parametrize("model", [LLAMA, "openai-community/gpt2", "google/gemma-2-9b"])
    def test_scores_cross_the_rest_there(self, model: str):
        form = layer_of(budget_of(model), "eager")
        assert form is not None
        length = takeover(form)
        assert length is not None
        for tokens, more in ((length - 1, False), (length + 1, True)):
            rest = form.total(tokens, tokens) - form.scores(tokens, tokens)
            assert (form.scores(tokens, tokens) > rest) == more

    def test_llama_by_hand(self):
        # 1664 MiB and 1/16 of statistics at 8192 tokens (1665 less the log-sum-exps), over 32 heads x 6 bytes.
        form = layer_of(budget_of(), "eager")
        assert form is not None
        assert takeover(form) == round((1664 + 1 / 16) * MIB / 8192 / (32 * 6))

    def test_flash_never_crosses(self):
        form = layer_of(budget_of(), "flash")
        assert form is not None
        assert takeover(form) is None


class TestOverTheDepth:
    """O(L) for none and full, O(sqrt(L)) for the best segments."""

    @pytest.mark.parametrize("attention", ["flash", "eager"])
    def test_none_and_full_are_linear_and_segments_are_not(self, attention: str):
        curves = {curve.checkpointing: curve.points for curve in depth_curves(budget_of(attention=attention))}
        none, full, best = (dict(curves[kind]) for kind in ("none", "full", "segments"))
        assert list(none) == [2**power for power in range(9)]
        for depth in (64, 128):
            assert none[2 * depth] == 2 * none[depth]
        assert full[256] - full[128] == 2 * (full[128] - full[64])
        # Best segments are never above one layer each, and grow with the root of the depth in the end.
        assert all(best[depth] <= full[depth] for depth in full)
        assert best[256] <= full[256]
        if attention == "flash":  # where one layer does not outweigh all inputs
            assert log2(best[256] / best[64]) / 2 < 0.7 < log2(full[256] / full[64]) / 2 + 0.1

    def test_llama_at_32_layers_by_hand(self):
        # memory_efficient: a = 1665.0625 MiB, c = 64 MiB; one layer each is best below 52 layers.
        curves = {c.checkpointing: dict(c.points) for c in depth_curves(budget_of(attention="memory_efficient"))}
        layer = (1665 + 1 / 16) * MIB
        assert curves["none"][32] == 32 * layer
        assert curves["full"][32] == curves["segments"][32] == 32 * 64 * MIB + layer


class TestSegments:
    def test_the_users_layer_and_the_textbook_s(self):
        found = segments(budget_of(attention="memory_efficient"))
        assert found is not None
        assert found.num_layers == 32
        assert found.input_bytes == 64 * MIB
        assert found.layer_bytes == (1665 + 1 / 16) * MIB
        assert found.law.best == 1
        # A layer that keeps only its input: sqrt(32) = 5.7 a segment (4 to 8 tie, 12 inputs each).
        assert found.textbook_layer.textbook == 6
        assert found.textbook_layer.peaks[6 - 1] == min(found.textbook_layer.peaks) == 12 * 64 * MIB

    @pytest.mark.parametrize("model", [LLAMA, "meta-llama/Llama-3.1-405B", "openai-community/gpt2-xl"])
    def test_the_law_is_the_terms_without_what_is_there_for_a_moment(self, model: str):
        """For each k: kept inputs and one group made again are the law's c ceil(L / k) + a k where k divides L."""
        budget = budget_of(model, seq_len=1024)
        found = segments(budget)
        assert found is not None
        for k in (k for k in range(1, 10) if found.num_layers % k == 0):
            scenario = with_workload(budget.scenario, checkpointing=f"segments({k})")
            activations = model_activations(scenario, budget.states, budget.inventory)
            assert activations is not None
            kept = sum(sum(activations.kept_by(index)) for index in range(found.num_layers))
            again = max(sum(activations.recomputed_at(index)) for index in range(found.num_layers))
            assert kept + again == found.law.peaks[k - 1]

    def test_405b_takes_two_layers_a_segment(self):
        found = segments(budget_of("meta-llama/Llama-3.1-405B", attention="memory_efficient"))
        assert found is not None
        assert found.num_layers == 126
        assert found.law.best == 2


class TestRows:
    @pytest.mark.parametrize("attention", ["flash", "memory_efficient", "eager"])
    @pytest.mark.parametrize("model", [LLAMA, "mistralai/Mixtral-8x7B-v0.1", "deepseek-ai/DeepSeek-V3"])
    def test_a_layers_rows_add_up_and_are_sorted(self, model: str, attention: str):
        budget = budget_of(model, attention=attention)
        rows, form = layer_rows(budget), layer_of(budget, attention)
        assert form is not None
        assert sum(row.num_bytes for row in rows) == form.total(8192, 8192)
        assert [row.num_bytes for row in rows] == sorted((row.num_bytes for row in rows), reverse=True)
        assert all(row.num_bytes == pytest.approx(row.per_token * 8192) for row in rows)

    def test_llamas_rows_are_the_notes(self):
        # tracing_facts.md, fact 9: 4 x 224 MiB in the MLP, 2 x 128 of FP32 in the norms, 8 x 64 of the hidden size
        # (here 2 in the norms, 4 in the attention, 2 read by projections), 1 of log-sum-exps; 1/16 of statistics.
        rows = {row.name: row.num_bytes / MIB for row in layer_rows(budget_of(attention="memory_efficient"))}
        norms = 2 * 128 + 2 * 64 + 1 / 16
        assert rows == {"mlp": 896, "norms": norms, "attention": 256, "linear_inputs": 128, "log_sum_exp": 1}

    def test_the_most_common_layer_stands_for_a_model_of_several_kinds(self):
        # DeepSeek-V3: 3 dense layers, 58 with experts.
        budget = budget_of("deepseek-ai/DeepSeek-V3")
        found = model_activations(budget.scenario, budget.states, budget.inventory)
        assert found is not None
        assert found.forms.count(typical_layer(found)) == 58

    def test_losses(self):
        rows = dict(loss_rows(budget_of()))
        assert list(rows) == ["unfused", "chunked_ce", "chunked", "fused_ce", "fused"]
        assert rows["unfused"] == 12 * 8192 * 128_256
        assert rows["unfused"] > rows["chunked"] > rows["fused"]


def test_without_shapes_there_is_nothing_to_draw():
    budget = predict(parse_scenario(BARE))
    assert sequence_curves(budget) == depth_curves(budget) == layer_rows(budget) == loss_rows(budget) == []
    assert segments(budget) is None
    assert layer_of(budget, "eager") is None
    assert activations_at_most(budget) == 0


@settings(max_examples=20)
@given(
    model=st.sampled_from([LLAMA, "openai-community/gpt2", "mistralai/Mixtral-8x7B-v0.1"]),
    batch=st.integers(1, 16),
    seq_len=st.integers(1, 16_384),
    checkpointing=st.sampled_from(["none", "full", "segments(2)", "attention"]),
)
def test_any_workload_is_drawn(model: str, batch: int, seq_len: int, checkpointing: str):
    """Layers in closed form do not depend on the scenario's own checkpointing."""
    budget = budget_of(model, micro_batch=batch, seq_len=seq_len, checkpointing=checkpointing)
    plain = budget_of(model, micro_batch=batch, seq_len=seq_len)
    assert layer_rows(budget) == layer_rows(plain)
    assert segments(budget) == segments(plain)
    assert depth_curves(budget) == depth_curves(plain)


def test_under_autocast_the_curves_are_those_of_the_same_layers_without_it():
    parts = {"recipe": {"convention": "amp_autocast"}, "workload": {"seq_len": 8192}}
    autocast = predict(parse_scenario({"model": {"name": LLAMA}, **parts}))
    assert autocast.states.precision.label == "AMP autocast"
    assert segments(autocast) is None
    assert segments(without_autocast(autocast)) == segments(budget_of())
    assert without_autocast(budget_of()) == budget_of()
