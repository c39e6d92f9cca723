"""Fused kernels in a trace against real steps on the CPU, whose kernels are plain loops, and against published runs.

Run: pytest tests/trace/test_fused.py
"""

import warnings
from typing import Any

import pytest
import torch
from allocator import allocator_peak
from fused_for_real import fuse
from peft import LoraConfig, get_peft_model
from small_models import CONFIGS, traced
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama import modeling_llama

from memcore.budget import Evidence, predict
from memcore.counting import count_config
from memcore.errors import UserError
from memcore.models import load_inventory
from memcore.scenario import parse_scenario
from memcore.terms import Category
from memcore.trace import kernels
from memcore.trace.profile import load_profile
from memcore.trace.request import Adapters, Request, trace_request
from memcore.trace.task import trace_task
from memcore.trace.tracer import trace
from memcore.units import MIB

pytestmark = pytest.mark.usefixtures("one_torch_thread")
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
LORA = Adapters(rank=8, targets=ATTENTION, dtype="fp32")
SIZE = (2, 33)


@pytest.fixture(autouse=True)
def _own_rotary_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", modeling_llama.apply_rotary_pos_emb)


def real_llama(*, adapted: bool, recomputed: bool = False) -> Any:
    kernels.register()
    torch.manual_seed(0)
    config = AutoConfig.for_model(**CONFIGS["llama"])
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=kernels.FLASH)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers 5.24 on what its callers have always asked
        if recomputed:
            model.activation_checkpointing_enable({"use_reentrant": True, "preserve_rng_state": False})
            model.get_input_embeddings().register_forward_hook(lambda _module, _args, out: out.requires_grad_(True))
        if adapted:
            model = get_peft_model(model, LoraConfig(r=8, target_modules=list(ATTENTION), init_lora_weights=False))
    return model.train()


def step(model: Any) -> None:
    """One step: the model's own loss on the same tokens, and its backward."""
    tokens = torch.arange(SIZE[0] * SIZE[1]).view(SIZE) % 512
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()


@pytest.mark.parametrize("recomputed", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize(
    "names", [("rmsnorm",), ("rope",), ("swiglu",), ("lora",), ("rmsnorm", "rope", "swiglu", "lora")], ids="+".join
)
def test_a_real_step_takes_what_the_trace_says(names: tuple[str, ...], recomputed: bool):
    adapted = "lora" in names
    model = real_llama(adapted=adapted, recomputed=recomputed)
    fuse(model, names, modeling_llama)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        real = allocator_peak(lambda: step(model), lambda: model.zero_grad(set_to_none=True))
    profile = traced(
        CONFIGS["llama"], micro_batch=SIZE[0], seq_len=SIZE[1], dtype="fp32", fused_kernels=names,
        checkpointing="full" if recomputed else "none", reentrant=recomputed, adapters=LORA if adapted else None,
    )  # fmt: skip
    # The real loops take a row or two at a time.
    assert max(profile.with_gradients) == pytest.approx(real, abs=16 * 1024)


@pytest.mark.parametrize("adapted", [False, True], ids=["full", "adapters"])
def test_the_plain_loops_train_as_the_model_does(adapted: bool):
    """What they keep is enough: their gradients are those of the model's own code."""
    names = ("rmsnorm", "rope", "swiglu", *(["lora"] if adapted else []))
    own = real_llama(adapted=adapted)
    step(own)
    fused = real_llama(adapted=adapted)
    fuse(fused, names, modeling_llama)
    step(fused)
    pairs = [(a.grad, b.grad) for a, b in zip(own.parameters(), fused.parameters(), strict=True) if b.grad is not None]
    assert len(pairs) == (32 if adapted else 30)
    for ours, theirs in pairs:
        assert torch.allclose(ours, theirs, rtol=1e-3, atol=1e-5)


LLAMA_3_8B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128258, "max_position_embeddings": 8192,
    "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip
# torch 2.13, aten/src/ATen/cuda/CUDABlas.cpp, parseChosenWorkspaceSize: 8192 KiB and 128 KiB for each thread that
# multiplies: the caller's, and the one that runs the backward.
CUBLAS_WORKSPACES = 2 * 8_519_680
# Token ids, mask and labels of a batch.
BATCH_BYTES_PER_TOKEN = 24


@pytest.mark.parametrize(
    ("method", "batch", "measured"),
    [
        ("lora", 4, 24_905_936_896),
        ("lora", 8, 33_567_698_944),
        ("lora", 16, 50_891_223_040),
        ("qlora", 4, 14_411_297_792),
        ("qlora", 8, 22_936_744_960),
        ("qlora", 16, 39_987_639_296),
        ("qlora", 32, 74_089_427_968),
    ],
)
def test_llama_3_8b_with_adapters_on_an_a100(method: str, batch: int, measured: int):
    """fms-acceleration, scripts/benchmarks/refs/a100_80gb_liger.csv: exact bytes of torch 2.4.1 and transformers
    4.45.2. Beside cuBLAS's workspaces and the batch itself what is left is under a megabyte."""
    names = ("rmsnorm", "rope", "lora") if method == "qlora" else ("rmsnorm", "rope")
    scenario = parse_scenario(
        {
            "model": {"config": LLAMA_3_8B},
            "hardware": {"gpu": "A100-80GB"},
            "recipe": {
                "method": method,
                "convention": "pure_bf16",
                "quantization": "nf4_double_quant" if method == "qlora" else None,
                "lora": {"rank": 16, "targets": ATTENTION, "dropout": 0.1, "autocast": True},
            },
            "workload": {
                "micro_batch": batch, "seq_len": 4096, "checkpointing": "full", "reentrant": True, "loss": "fused",
                "fused_kernels": names,
            },
        }
    )  # fmt: skip
    request = trace_request(scenario)
    assert isinstance(request, dict)
    inventory = load_inventory(count_config({"config": LLAMA_3_8B})["inventory"])
    budget = predict(scenario, Evidence(inventory=inventory, profile=load_profile(trace_task(request))))
    known = CUBLAS_WORKSPACES + BATCH_BYTES_PER_TOKEN * batch * 4096
    tensors = budget.peak_bytes - sum(term.largest for term in budget.terms if term.category is Category.WORKSPACE)
    assert tensors + known == pytest.approx(measured, abs=MIB)


@pytest.mark.parametrize(("model", "name"), [("gpt2", "rmsnorm"), ("gpt2", "rope"), ("gpt2", "swiglu")])
def test_a_kernel_that_replaces_nothing_is_refused(model: str, name: str):
    request = Request(
        config=CONFIGS[model], micro_batch=1, seq_len=16, dtype="bf16", attention="flash", checkpointing="none",
        loss="unfused", fused_kernels=(name,),
    )  # fmt: skip
    with pytest.raises(UserError, match=f"names {name}, but the model has nothing"):
        trace(request)


def test_the_models_own_rotary_function_is_back_afterwards():
    own = modeling_llama.apply_rotary_pos_emb
    traced(CONFIGS["llama"], fused_kernels=("rope",))
    assert modeling_llama.apply_rotary_pos_emb is own


def test_with_less_kept_less_is_alive():
    whole, fused = traced(CONFIGS["llama"]), traced(CONFIGS["llama"], fused_kernels=("rmsnorm", "swiglu"))
    assert max(fused.of("saved")) < 0.85 * max(whole.of("saved"))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"workload": {"fused_kernels": ["rope", "rope"]}}, "names a kernel twice"),
    ({"model": {"n_params": 7_000_000_000}, "workload": {"fused_kernels": ["rope"]}}, "does nothing for a parameter"),
    ({"workload": {"fused_kernels": ["lora"]}}, "does nothing when recipe.method is full"),
    ({"recipe": {"method": "lora"}, "workload": {"fused_kernels": ["lora"]}}, "there are some on all-linear"),
    (
        {"recipe": {"method": "lora", "lora": {"targets": ATTENTION}}, "workload": {"fused_kernels": ["lora"]}},
        "FP32 adapters under autocast alone",
    ),
    (
        {
            "recipe": {"method": "qlora", "quantization": "nf4", "lora": {"targets": ATTENTION, "autocast": True}},
            "workload": {"fused_kernels": ["lora"]},
        },
        "4-bit weights of double quantisation alone",
    ),
]


@pytest.mark.parametrize(("given", "sentence"), REFUSED)
def test_contradictions_are_refused(given: dict[str, Any], sentence: str):
    with pytest.raises(UserError, match=sentence) as refusal:
        parse_scenario({"model": {"config": LLAMA_3_8B}, **given})
    assert refusal.value.field == "workload.fused_kernels"
