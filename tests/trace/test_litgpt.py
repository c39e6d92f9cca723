"""litgpt's model code in a trace, against what litgpt's own code takes.

The figures are those of litgpt's lit_gpt/model.py and lit_gpt/lora.py (Lightning-AI/litgpt, 0cc02afa of October 2023)
run on a CPU with torch 2.13: what the allocator holds at most in a step, in FP32, beyond weights and rotary tables.
model.py of May 2024 (5dabf5f6) takes the same to the byte, its lora.py up to 17 KB less.

Run: pytest tests/trace/test_litgpt.py
"""

from typing import Any

import pytest
from small_models import traced

from memcore.budget import Evidence, predict
from memcore.counting import count_config
from memcore.errors import UserError
from memcore.models import load_inventory
from memcore.scenario import parse_scenario, scenario_data
from memcore.trace.profile import load_profile
from memcore.trace.request import Adapters, trace_request
from memcore.trace.task import trace_task

BATCH, TOKENS = 2, 101
COMMON: dict[str, Any] = {
    "num_hidden_layers": 4, "num_attention_heads": 8, "hidden_size": 256, "vocab_size": 512,
    "max_position_embeddings": 1024,
}  # fmt: skip
LLAMA = {**COMMON, "model_type": "llama", "num_key_value_heads": 2, "intermediate_size": 704}
PHI = {**COMMON, "model_type": "phi", "intermediate_size": 1024, "partial_rotary_factor": 0.5}
GPT_NEOX = {**COMMON, "model_type": "gpt_neox", "intermediate_size": 1024, "rotary_pct": 0.25}


@pytest.mark.parametrize(
    ("config", "rotated", "targets", "real"),
    [
        (LLAMA, 32, (), 20_825_672),
        (LLAMA, 32, ("q_proj", "v_proj"), 15_451_968),
        (PHI, 16, (), 16_710_216),
        (PHI, 16, ("q_proj", "v_proj"), 12_509_720),
        (GPT_NEOX, 8, (), 17_542_024),
        (GPT_NEOX, 8, ("query_key_value",), 12_514_568),
    ],
)
def test_a_step_takes_what_litgpts_own_code_takes(config: dict[str, Any], rotated: int, targets: Any, real: int):
    profile = traced(
        config, micro_batch=BATCH, seq_len=TOKENS, dtype="fp32", checkpointing="none", code="litgpt", kernels="cpu",
        adapters=Adapters(rank=8, targets=targets, dtype="fp32") if targets else None,
    )  # fmt: skip
    tables = 2 * 4 * TOKENS * rotated
    assert max(profile.with_gradients) - tables == pytest.approx(real, abs=64)


def test_other_code_keeps_other_tensors():
    """Grouped keys and values are repeated for every query head, and the joint projection has one input for two."""
    own, litgpt = (traced(LLAMA, dtype="bf16", checkpointing="none", code=code) for code in ("transformers", "litgpt"))
    assert max(litgpt.of("saved")) > 1.05 * max(own.of("saved"))


@pytest.mark.parametrize(
    ("config", "targets", "sentence"),
    [
        ({**COMMON, "model_type": "qwen2", "intermediate_size": 704}, (), "the model is of type qwen2"),
        (LLAMA, ("gate",), "has no adapter on gate"),
    ],
)
def test_what_litgpts_code_is_not_traced_for_is_refused(config: dict[str, Any], targets: Any, sentence: str):
    adapters = Adapters(rank=8, targets=targets, dtype="bf16") if targets else None
    with pytest.raises(UserError, match=sentence):
        traced(config, code="litgpt", adapters=adapters)


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"model": {"n_params": 7_000_000_000, "code": "litgpt"}}, "model.code"),
        ({"workload": {"attention": "eager"}}, "workload.attention"),
        ({"workload": {"fused_kernels": ["rmsnorm"]}}, "workload.fused_kernels"),
    ],
)
def test_contradictions_are_refused(given: dict[str, Any], field: str):
    with pytest.raises(UserError) as refusal:
        parse_scenario({"model": {"config": LLAMA, "code": "litgpt"}, **given})
    assert refusal.value.field == field


def test_it_travels_with_the_scenario():
    scenario = parse_scenario({"model": {"config": LLAMA, "code": "litgpt"}})
    assert scenario_data(scenario)["model"]["code"] == "litgpt"
    assert parse_scenario(scenario_data(scenario)) == scenario


def a_layer_of(*args: Any, **kwargs: Any) -> int:
    """What the third layer adds to what is saved."""
    saved = traced(*args, **kwargs).of("saved")
    return saved[2] - saved[1]


def test_older_bitsandbytes_keeps_the_input_of_each_product():
    """Before 0.43.2, autograd/_functions.py, MatMul4Bit: ``ctx.tensors = (A, B)``. Of a layer's products with 4-bit
    weights that is the normalised input of attention and MLP, and what their last projections read."""
    each = {"rank": 8, "targets": ("q_proj", "v_proj"), "dtype": "bf16", "quantization": "nf4", "dropout": 0.05}
    kept, let_go = (
        a_layer_of(LLAMA, seq_len=TOKENS, dtype="bf16", checkpointing="none", code="litgpt",
               adapters=Adapters(**each, keeps_inputs=keeps))
        for keeps in (True, False)
    )  # fmt: skip
    assert kept - let_go == 2 * TOKENS * (256 + 256 + 256 + 704)


def test_a_weight_packed_from_fp16_is_there_twice_for_a_moment_where_bf16_computes():
    """lightning 2.1, fabric/plugins/precision/bitsandbytes.py: the head of 32,000 words, unpacked and cast."""
    each = {"rank": 8, "targets": ("q_proj", "v_proj"), "dtype": "bf16", "quantization": "nf4"}
    config = {**LLAMA, "vocab_size": 32_000}
    packed, plain = (
        traced(config, seq_len=1, dtype="bf16", checkpointing="none", code="litgpt",
               adapters=Adapters(**each, packs_head=packs))
        for packs in (True, False)
    )  # fmt: skip
    more = max(packed.with_gradients) - max(plain.with_gradients)
    assert more == pytest.approx(2 * 2 * 32_000 * 256, rel=0.05)


@pytest.mark.parametrize(
    ("recipe", "sentence"),
    [
        ({"keeps_packed_inputs": True}, "does nothing when recipe.method is full"),
        ({"method": "qlora", "quantization": "gptq_int4", "keeps_packed_inputs": True}, "which is bitsandbytes'"),
    ],
)
def test_kept_inputs_are_bitsandbytes_own(recipe: dict[str, Any], sentence: str):
    with pytest.raises(UserError, match=sentence):
        parse_scenario({"model": {"config": LLAMA}, "recipe": recipe})


def test_the_head_can_carry_an_adapter():
    """peft takes lm_head as it takes any linear module, and litgpt has lora_head: rank x (hidden + words)."""
    inventory = load_inventory(count_config({"config": LLAMA})["inventory"])
    (head,) = inventory.lora_modules(["lm_head"])
    assert head.tensor.shape == (512, 256)


LLAMA_2_13B = {
    "model_type": "llama", "hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 40,
    "num_key_value_heads": 40, "intermediate_size": 13824, "vocab_size": 32000, "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
}  # fmt: skip
MISTRAL_7B = {
    "model_type": "mistral", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 14336, "vocab_size": 32000,
    "tie_word_embeddings": False, "max_position_embeddings": 32768, "sliding_window": 4096,
}  # fmt: skip
NF4 = {
    "method": "qlora", "optimizer": {"name": "adamw", "paged": True}, "quantize_lm_head": True,
    "keeps_packed_inputs": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "recipe", "work", "measured"),
    [
        (LLAMA_2_13B, {"method": "lora"}, {"seq_len": 1304, "loss_chunks": 11}, 38.12e9),
        (LLAMA_2_13B, {**NF4, "quantization": "nf4"}, {"seq_len": 1304, "loss_chunks": 11}, 23.14e9),
        (LLAMA_2_13B, {**NF4, "quantization": "nf4_double_quant"}, {"seq_len": 1304, "loss_chunks": 11}, 22.55e9),
        (MISTRAL_7B, {"method": "lora"}, {"micro_batch": 2, "seq_len": 512, "loss_chunks": 4}, 20.66e9),
        (MISTRAL_7B, {**NF4, "quantization": "nf4"},
         {"micro_batch": 2, "seq_len": 512, "loss_chunks": 4, "last_loss_held": True}, 14.29e9),
    ],
)  # fmt: skip
def test_published_runs_of_litgpt(
    config: dict[str, Any], recipe: dict[str, Any], work: dict[str, Any], measured: float
):
    """tutorials/resource-tables.md of October 2023 and config_hub/finetune/README.md of April 2024, in units of 10 MB;
    Fabric makes FP32 of the logits (lightning 2.1, fabric/wrappers.py)."""
    rank = 8 if config is LLAMA_2_13B else 32
    scenario = parse_scenario(
        {
            "model": {"config": config, "code": "litgpt"},
            "hardware": {"gpu": "A100-40GB"},
            "recipe": {
                "convention": "pure_bf16",
                "lora": {"rank": rank, "targets": ["q_proj", "v_proj"], "dropout": 0.05, "adapter_dtype": "bf16"},
                **recipe,
            },
            "workload": {"loss": "chunked", "logits_upcast": "model", "logits_retained": True, "grad_accum": 4, **work},
        }
    )
    request = trace_request(scenario)
    assert isinstance(request, dict)
    inventory = load_inventory(count_config({"config": config})["inventory"])
    budget = predict(scenario, Evidence(inventory=inventory, profile=load_profile(trace_task(request))))
    assert budget.peak_bytes == pytest.approx(measured, rel=0.005)
