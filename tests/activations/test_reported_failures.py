"""The four out-of-memory reports of shared/public_cases.json: what the product reproduces of each, and what not.

Run: pytest tests/activations/test_reported_failures.py (skipped without the shared folder).

- LLaMA-7B, ZeRO-2, 8x V100 32 GB. Reproduced: the phase, every term, what was asked for, that ZeRO-3 fits. Not
  reproduced: the verdict, which is "uncertain" since the error band reaches below the card; the prediction is above.
- StarCoder at 8k, FSDP, 80x A100 80 GB. Reproduced: the 12 GiB that were asked for, allocated and asked together
  within 3%, that flash attention fits on 16. Not reproduced: the verdict, "fits": 12 GiB of fragmentation decided.
- Megatron GPT-2 2.6B. Nothing is reproduced: tensor parallelism is refused, and fragmentation is not predicted.
- Llama-2-7B, FSDP, 8x V100 16 GB. Reproduced: the phase, both terms, their sum, what was asked for, that 16-bit
  states would have fit. Not reproduced: the verdict, "uncertain" for the same reason as the first.
"""

from typing import Any

import pytest

from memcore.activations import model_activations
from memcore.budget import Budget, Evidence, Verdict, predict
from memcore.counting import count_config
from memcore.errors import UserError
from memcore.hardware import accelerator
from memcore.models import load_inventory
from memcore.scenario import parse_scenario
from memcore.terms import Phase
from memcore.units import GIB

LLAMA_2 = "meta-llama/Llama-2-7b-hf"
STARCODER = {
    "model_type": "gpt_bigcode",
    "n_embd": 6144,
    "n_head": 48,
    "n_layer": 40,
    "n_positions": 8192,
    "n_inner": 24576,
    "vocab_size": 49152,
    "multi_query": True,
    "activation_function": "gelu_pytorch_tanh",
}


@pytest.fixture(scope="module")
def reports(public_cases: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: case for name, case in public_cases.items() if case["kind"] == "report"}


def gib(budget: Budget) -> dict[str, float]:
    return {term.name: share / GIB for term, share in budget.at_peak()}


def test_every_report_is_covered(reports: dict[str, dict[str, Any]]):
    assert set(reports) == {
        "rep-llama7b-z2-v100-step",
        "rep-starcoder-8k-softmax",
        "rep-megatron-gpt2-26b-frag",
        "rep-llama2-7b-fsdp-v100-16",
    }


class TestLlama7BOnV100:
    """hiyouga/LlamaFactory#1221: fails in AdamW's denominator, one tensor after the other."""

    def budget(self, stage: int) -> Budget:
        half = dict.fromkeys(("param_dtype", "compute_dtype", "grad_dtype", "reduce_dtype"), "fp16")
        return predict(
            parse_scenario(
                {
                    "model": {"name": LLAMA_2},
                    "hardware": {"gpu": "V100-32GB", "gpus": 8},
                    "parallelism": {"engine": "deepspeed", "zero_stage": stage},
                    "recipe": {**half, "optimizer": {"name": "adamw", "implementation": "for_loop"}},
                    # The length is not stated; the step does not depend on it.
                    "workload": {"seq_len": 1024, "checkpointing": "full"},
                }
            )
        )

    def test_the_ledger(self, reports: dict[str, dict[str, Any]]):
        right = reports["rep-llama7b-z2-v100-step"]["right"]
        budget, ledger = self.budget(2), right["ledger_gib"]
        assert budget.binding_phase is Phase.OPTIMIZER
        found = gib(budget)
        for ours, theirs in (
            ("weights", "fp16_weights"),
            ("master_weights", "fp32_master"),
            ("momentum", "exp_avg"),
            ("variance", "exp_avg_sq"),
            ("step_gradient_copies", "fp32_grad"),
        ):
            assert found[ours] == pytest.approx(ledger[theirs], abs=0.01)
        # The root was there, its quotient was asked for: 4 Psi / 8 each.
        assert found["for_loop_temporary"] == pytest.approx(ledger["sqrt_temp"] + ledger["next_temp"], abs=0.01)
        held = budget.peak_bytes / GIB - ledger["next_temp"]
        assert held == pytest.approx(right["observed_gib"], abs=0.05)

    def test_zero_2_does_not_go_in_and_zero_3_fits(self, reports: dict[str, dict[str, Any]]):
        capacity = reports["rep-llama7b-z2-v100-step"]["input"]["capacity_gib"]
        assert accelerator("V100-32GB").usable_bytes / GIB == pytest.approx(capacity, abs=0.05)
        two = self.budget(2)
        assert two.ladder.device > two.ladder.usable
        # Not reproduced: "does not fit". The error band around the peak reaches below the card.
        assert two.verdict is Verdict.UNCERTAIN
        assert self.budget(3).verdict is Verdict.FITS
        static = two.static.total_bytes / GIB
        assert static == pytest.approx(2 * 6.738415616e9 / GIB + 14 / 8 * 6.738415616e9 / GIB, abs=0.01)
        assert static < capacity - 6  # why a static count says it fits


class TestStarCoderAt8k:
    """huggingface/accelerate#1864: fails in the softmax's backward, whatever is divided."""

    def budget(self, attention: str, gpus: int) -> Budget:
        scenario = parse_scenario(
            {
                "model": {"config": STARCODER},
                "hardware": {"gpu": "A100-80GB", "gpus": gpus, "gpus_per_node": 8},
                "parallelism": {"engine": "fsdp2"},
                "recipe": {"convention": "fsdp2_mixed"},
                "workload": {"seq_len": 8192, "attention": attention, "checkpointing": "full"},
            }
        )
        inventory = load_inventory(count_config({"config": STARCODER})["inventory"])
        return predict(scenario, Evidence(inventory=inventory))

    def test_what_was_asked_for_is_one_fp32_score_matrix_of_all_heads(self, reports: dict[str, dict[str, Any]]):
        report = reports["rep-starcoder-8k-softmax"]
        budget = self.budget("eager", 80)
        assert budget.states.n_params == report["input"]["params"]
        found = model_activations(budget.scenario, budget.states, budget.inventory)
        assert found is not None
        # 7 bytes a score: FP32 softmax 4, dropout's mask 1 and result 2. One key head, 48 score matrices.
        assert found.forms[0].scores(8192, 8192) / 7 * 4 == report["input"]["oom"]["tried_gib"] * GIB

    def test_the_scores_bind_and_more_gpus_do_not_help(self, reports: dict[str, dict[str, Any]]):
        """Reported is more than ours: transformers of 2023 ran the softmax as one TorchScript function, which kept
        two more FP32 copies of the scores; the code of today, traced, takes 12 bytes a score at its fullest."""
        oom = reports["rep-starcoder-8k-softmax"]["input"]["oom"]
        many = self.budget("eager", 80)
        assert many.binding_phase is Phase.BACKWARD
        assert 0.6 < many.peak_bytes / GIB / (oom["allocated_gib"] + oom["tried_gib"]) < 1
        shares = gib(many)
        assert shares["recomputed_scores"] + shares["layer_temporaries"] > 0.7 * many.peak_bytes / GIB
        assert many.peak_bytes / self.budget("eager", 800).peak_bytes < 1.1
        states = sum(state.total_bytes for state in many.states.states) / 80 / GIB
        assert states == pytest.approx(reports["rep-starcoder-8k-softmax"]["right"]["states_gib"], abs=0.01)
        # Not reproduced: "does not fit", which takes those copies, and 12.19 GiB reserved and not allocated.
        assert many.verdict is Verdict.FITS

    def test_flash_fits_on_sixteen(self):
        assert self.budget("flash", 16).verdict is Verdict.FITS


def test_megatron_with_tensor_parallelism_is_refused():
    data = {"model": {"n_params": 2_458_800_000}, "hardware": {"gpus": 16}, "parallelism": {"tp": 2, "dp": 8}}
    with pytest.raises(UserError, match=r"parallelism\.tp is 2; only 1 is predicted so far"):
        parse_scenario(data)


class TestLlama2OnSmallV100:
    """meta-llama/llama-cookbook#234: FP32 shards under a flag called fp16; fails in foreach AdamW's square root."""

    def budget(self, **recipe: Any) -> Budget:
        return predict(
            parse_scenario(
                {
                    "model": {"name": LLAMA_2},
                    "hardware": {"gpu": "V100-16GB", "gpus": 8},
                    "parallelism": {"engine": "fsdp2"},
                    "recipe": {"optimizer": {"name": "adamw", "implementation": "foreach"}, **recipe},
                    "workload": {"seq_len": 1024, "checkpointing": "full"},
                }
            )
        )

    def test_the_terms(self):
        budget = self.budget(convention="fsdp2_mixed", compute_dtype="fp16")
        assert budget.binding_phase is Phase.OPTIMIZER
        found = gib(budget)
        states = [found[name] for name in ("weights", "gradients", "momentum", "variance")]
        assert sum(states) == pytest.approx(12.55, abs=0.01)
        assert found["foreach_temporary"] == pytest.approx(3.14, abs=0.01)
        assert sum(states) + found["foreach_temporary"] == pytest.approx(15.69, abs=0.01)

    def test_one_layers_slice_is_what_was_asked_for(self, reports: dict[str, dict[str, Any]]):
        inventory = self.budget(convention="fsdp2_mixed").inventory
        assert inventory is not None
        mib = inventory.largest_layer.numel * 4 / 8 / 2**20
        assert mib == pytest.approx(96.5, abs=0.01)
        # 2 MiB is the allocator's step.
        assert -(-mib // 2) * 2 == reports["rep-llama2-7b-fsdp-v100-16"]["input"]["oom"]["tried_mib"]

    def test_the_verdict_and_what_16_bit_states_would_have_said(self):
        budget = self.budget(convention="fsdp2_mixed", compute_dtype="fp16")
        assert budget.ladder.device > budget.ladder.usable
        # Not reproduced: "does not fit", for the error band.
        assert budget.verdict is Verdict.UNCERTAIN
        assert self.budget(convention="pure_fp16").verdict is Verdict.FITS
