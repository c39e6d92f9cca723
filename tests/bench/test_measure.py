"""Measuring on the CPU, against the trace, hand arithmetic and other ways to read the allocator.

Run: pytest tests/bench/test_measure.py
"""

from typing import Any

import pytest
import torch
from allocator import allocator_peak
from small_bench import CONFIG, attention_case, layers_case, projections_case
from small_models import CONFIGS
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from memcore.bench.case import Case, dump_case
from memcore.bench.measurement import Figures, load_figures
from memcore.bench.worker import measure
from memcore.bench.worker.attention import UnavailableError, kernel_that_ran
from memcore.bench.worker.device import device_task, find_device
from memcore.bench.worker.measure import measure_task

pytestmark = [
    pytest.mark.skipif(find_device() != "cpu", reason="an accelerator is measured here, not the CPU"),
    pytest.mark.usefixtures("one_torch_thread"),
]
FLASH_CPU = "aten::_scaled_dot_product_flash_attention_for_cpu"


def answer(case: Case) -> dict[str, Any]:
    return measure_task({"case": dump_case(case)})


def figures(case: Case) -> Figures:
    found = answer(case)
    assert found["status"] == "done", found
    return load_figures(found["figures"])


class TestAttentionAlone:
    def test_the_peak_is_what_the_profiler_saw_of_the_same_step(self):
        case = attention_case(seq_len=512)
        query, key, value = (
            torch.randn(1, heads, 512, 32, requires_grad=True)
            for heads in (case.num_heads, case.num_kv_heads, case.num_kv_heads)
        )
        gradient = torch.randn(1, case.num_heads, 512, 32)

        def step() -> None:
            with sdpa_kernel(SDPBackend.MATH):
                result = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
                torch.autograd.backward(result, gradient)

        def reset() -> None:
            query.grad = key.grad = value.grad = None

        assert figures(case).peak_bytes == pytest.approx(allocator_peak(step, reset), abs=256)

    def test_plain_keeps_two_score_matrices_and_flash_none(self):
        plain, flash = (figures(attention_case(seq_len=1024, attention=name)) for name in ("plain", "flash"))
        scores = 4 * 4 * 1024 * 1024  # FP32, 4 heads
        assert plain.kept_bytes > scores
        assert plain.peak_bytes > 2 * scores
        # Kept is the output and an FP32 log-sum-exp.
        assert flash.kept_bytes == pytest.approx(4 * 4 * 1024 * 32 + 4 * 4 * 1024, abs=64)
        assert flash.peak_bytes < scores

    def test_the_kernel_that_ran_is_named(self):
        assert figures(attention_case(attention="flash")).kernel == FLASH_CPU
        assert figures(attention_case(attention="plain")).kernel == "aten::_scaled_dot_product_attention_math"

    def test_a_kernel_that_is_not_there_says_so(self):
        found = answer(attention_case(attention="memory_efficient"))
        assert found["status"] == "unavailable"
        assert found["figures"] is None
        assert found["reason"].startswith("Not available here")

    def test_another_kernel_than_the_one_asked_for_is_not_taken_for_it(self):
        with pytest.raises(UnavailableError):
            kernel_that_ran("flash", {"aten::_scaled_dot_product_attention_math", "aten::softmax"})
        with pytest.raises(UnavailableError):
            kernel_that_ran("plain", {FLASH_CPU, "aten::softmax"})

    def test_flash_computes_what_plain_does(self):
        figures(attention_case())
        flash = figures(attention_case(attention="flash"))
        assert flash.loss_difference is not None
        assert flash.gradient_difference is not None
        assert flash.loss_difference < 1e-6
        assert flash.gradient_difference < 1e-5


class TestLayers:
    @pytest.mark.parametrize("attention", ["plain", "flash"])
    @pytest.mark.parametrize(
        "checkpointing", ["none", "full", "segments(2)", "segments(3)", "attention", "save(attention,mm)"]
    )
    def test_a_measured_peak_is_the_traced_one(self, attention: str, checkpointing: str):
        found = figures(layers_case(attention=attention, checkpointing=checkpointing, seq_len=192))
        assert found.traced_bytes is not None
        assert found.traced_with_gradients_bytes is not None
        assert found.peak_bytes == pytest.approx(found.traced_bytes, abs=1024)
        assert found.with_gradients_bytes == pytest.approx(found.traced_with_gradients_bytes, abs=1024)

    @pytest.mark.parametrize("checkpointing", ["none", "full"])
    def test_where_a_weights_gradient_is_larger_than_activations_too(self, checkpointing: str):
        found = figures(layers_case(attention="flash", checkpointing=checkpointing, seq_len=32))
        assert found.traced_bytes is not None
        assert found.peak_bytes == pytest.approx(found.traced_bytes, abs=1024)

    @pytest.mark.parametrize("dtype", ["bf16", "fp16"])
    def test_in_16_bit_within_1_percent_or_1_mib(self, dtype: str):
        for checkpointing in ("none", "full"):
            case = layers_case(attention="flash", checkpointing=checkpointing)
            found = figures(Case(**{**dump_case(case), "part": case.part, "dtype": dtype}))
            assert found.traced_bytes is not None
            assert abs(found.peak_bytes - found.traced_bytes) <= max(found.peak_bytes / 100, 2**20)

    @pytest.mark.parametrize("name", ["gpt2", "qwen3", "gemma3_text", "mixtral"])
    def test_other_architectures_within_1_percent_or_1_mib(self, name: str):
        config = {**CONFIGS[name], "pad_token_id": 0}
        found = figures(layers_case(attention="plain", config=config, num_layers=4))
        assert found.traced_bytes is not None
        assert abs(found.peak_bytes - found.traced_bytes) <= max(found.peak_bytes / 100, 2**20)

    @pytest.mark.parametrize("checkpointing", ["full", "segments(2)", "attention", "save(attention,mm)"])
    def test_checkpointing_changes_memory_and_not_results(self, checkpointing: str):
        plain = figures(layers_case())
        again = figures(layers_case(checkpointing=checkpointing))
        assert again.loss_difference == 0.0
        assert again.gradient_difference == 0.0
        assert again.kept_bytes < plain.kept_bytes
        assert plain.recompute is None
        assert again.recompute is not None
        assert 0 < again.recompute.median < again.backward.median

    def test_full_checkpointing_runs_about_a_forward_again(self):
        found = figures(layers_case(checkpointing="full", seq_len=512))
        assert found.recompute is not None
        assert 0.4 * found.forward.least < found.recompute.median < 1.6 * found.forward.most

    def test_times_are_repeated_and_spread(self):
        found = figures(layers_case())
        assert found.forward.repeats >= 3
        assert found.forward.least <= found.forward.median <= found.forward.most

    def test_gradients_are_the_difference_between_the_two_peaks_without_activations(self):
        # One token: activations are nothing beside the weights' gradients, one FP32 value for each parameter.
        found = figures(layers_case(seq_len=1, attention="flash"))
        hidden, inner, kv = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["hidden_size"] // 2
        layer = 2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * inner + 2 * hidden
        params = 4 * layer + hidden + CONFIG["vocab_size"] * hidden
        assert found.with_gradients_bytes == pytest.approx(4 * params, rel=0.02)
        assert found.peak_bytes < found.with_gradients_bytes / 2


class TestProjections:
    def test_a_stack_keeps_one_input_for_each_layer(self):
        case = projections_case(num_layers=9)
        one = 4 * 1024 * 64
        found = figures(case)
        assert found.kept_bytes == 9 * one
        # At its fullest also the gradient of one input, and for a moment one weight's.
        assert found.peak_bytes == 10 * one + 4 * 64 * 64

    def test_sqrt_segments_keep_segments_and_one_segment(self):
        found = figures(projections_case(num_layers=9, checkpointing="segments(3)"))
        one = 4 * 1024 * 64
        assert found.kept_bytes == 3 * one
        assert found.peak_bytes == pytest.approx(6 * one, abs=4 * 64 * 64)
        assert found.gradient_difference == 0.0


def test_a_variant_after_the_plain_one_does_not_run_it_again(monkeypatch: pytest.MonkeyPatch):
    config = {**CONFIG, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    figures(layers_case(config=config))

    def fail(_subject: object) -> None:
        raise AssertionError("the plain variant runs again")

    case = layers_case(config=config, attention="flash")
    monkeypatch.setattr(measure, "_answer", fail)
    assert measure._plain_answer(case) is not None


def test_the_device_names_itself():
    found = device_task({})
    assert found["kind"] == "cpu"
    assert found["name"]
    assert found["total_bytes"] > 2**30
    assert found["torch"] == torch.__version__
