"""llm.c beside what its own logs print and what was published of it.

Run: pytest tests/test_llm_c.py. The configs are those of its checkpoints, the vocabulary padded to 50,304.
"""

from typing import Any

import pytest
from worker import ask

from memcore.budget import Budget, evidence_for, predict
from memcore.errors import UserError
from memcore.scenario import parse_scenario
from memcore.symbols import MEANINGS, symbols_of
from memcore.units import MIB

SMALL = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50_304}
LARGEST = {**SMALL, "n_embd": 1600, "n_layer": 48, "n_head": 25}
EARLIER = {"layout": "2024-05", "recompute": 0}


def data(config: dict[str, Any] | None = None, **parts: Any) -> dict[str, Any]:
    workload = {"micro_batch": 4, "seq_len": 1024, "loss": "fused_ce", **parts.pop("workload", {})}
    model = {"config": config or SMALL}
    return {"model": model, "parallelism": {"engine": "llm_c"}, "workload": workload, **parts}


def budget(config: dict[str, Any] | None = None, **parts: Any) -> Budget:
    scenario = parse_scenario(data(config, **parts))
    return predict(scenario, evidence_for(scenario, ask, traced=True))


def parts_of(found: Budget) -> dict[str, int]:
    return {term.name: term.largest for term in found.terms}


def test_what_its_log_prints():
    """karpathy/llm.c pull request 309, 1 process, 4 x 1024 tokens, plain attention: 237 MiB for model parameters, 2853
    for activations, 237 for parameter gradients, 126 for activation gradients, 474 for each of m and v."""
    found = budget(recipe={"master_dtype": "none"}, engine_config=EARLIER, workload={"attention": "eager"})
    parts = parts_of(found)
    forward = parts["saved_activations"] + parts["attention_scores"] + parts["logits_loss"]
    assert all(symbol in MEANINGS for term in found.terms for symbol in symbols_of(term.formula.symbols))
    assert found.states.n_params == 124_475_904
    assert [parts["weights"] // MIB, parts["gradients"] // MIB] == [237, 237]
    assert [forward // MIB, parts["layer_temporaries"] // MIB] == [2853, 126]
    assert [parts["momentum"] // MIB, parts["variance"] // MIB] == [474, 474]
    assert found.evidence.untraced.startswith("llm.c is no PyTorch program")


def test_stage_1_saves_what_was_published():
    """The same pull request, 1558M on 4 GPUs with cuDNN: 35,975 MiB by nvidia-smi at stage 0, 22,601 at stage 1."""

    def at(stage: int) -> int:
        spread = {"engine": "llm_c", "zero_stage": stage}
        hardware = {"gpu": "A100-40GB", "gpus": 4}
        return budget(LARGEST, parallelism=spread, hardware=hardware, engine_config=EARLIER).ladder.device

    assert at(0) - at(1) == pytest.approx((35_975 - 22_601) * MIB, rel=0.001)
    assert at(0) == pytest.approx(35_975 * MIB, rel=0.02)


def test_slices_are_equal_or_there_are_none():
    """124,475,904 parameters are not divided by 5: the program switches stage 1 off."""
    spread = {"engine": "llm_c", "zero_stage": 1}
    found = parts_of(budget(parallelism=spread, hardware={"gpus": 5}))
    assert found["momentum"] == 4 * 124_475_904


def test_what_is_recomputed_is_not_kept():
    """Per token of each of 12 layers, in 16 bits: GELU's result of 4 x 768, and two norms'. Room for one GELU stays."""
    tokens, width = 4 * 1024, 2 * 768
    kept = [parts_of(budget(engine_config={"recompute": level}))["saved_activations"] for level in (0, 1, 2)]
    assert kept[0] - kept[1] == tokens * width * 4 * (12 - 1)
    assert kept[1] - kept[2] == tokens * width * 2 * 12


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": {"name": "meta-llama/Llama-3.1-8B"}}, "trains GPT-2 alone"),
        ({"model": {"n_params": 10**8}}, "trains GPT-2 alone"),
        ({"model": {"name": "openai-community/gpt2"}}, "multiples of 128"),
        ({"parallelism": {"engine": "llm_c", "zero_stage": 2}}, "stages 0 and 1"),
        ({"recipe": {"optimizer": "lion"}}, "AdamW of its own"),
        ({"recipe": {"method": "lora"}}, "trains every parameter"),
        ({"recipe": {"grad_dtype": "fp32"}}, "in one dtype"),
        ({"workload": {"loss": "fused_ce", "checkpointing": "full"}}, "recomputes by engine_config.recompute"),
        ({"workload": {"loss": "unfused"}}, "loss fused_ce"),
        ({"engine_config": {"layout": "2024-05", "recompute": 2}}, "no norms yet"),
        ({"hardware": {"expandable_segments": True}}, "PyTorch's allocator"),
    ],
)
def test_what_its_program_does_not_do(changes: dict[str, Any], words: str):
    with pytest.raises(UserError, match=words) as caught:
        parse_scenario(data() | changes)
    assert caught.value.field == "parallelism.engine"
