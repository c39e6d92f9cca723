"""Small transformers models by name, four to six layers deep, and a trace of one."""

from typing import Any

from memcore.trace.profile import ActivationProfile
from memcore.trace.request import Request
from memcore.trace.tracer import trace

COMMON: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT: dict[str, Any] = {
    "model_type": "gpt2",
    "n_embd": 256,
    "n_layer": 4,
    "n_head": 8,
    "vocab_size": 512,
    "n_positions": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2}

CONFIGS: dict[str, dict[str, Any]] = {
    **{name: {"model_type": name, **COMMON} for name in ("llama", "qwen2", "phi3", "olmo2")},
    **{name: {"model_type": name, "head_dim": 32, **COMMON} for name in ("qwen3", "gemma2", "glm")},
    "tied llama": {"model_type": "llama", **COMMON, "tie_word_embeddings": True},
    "llama, 32000 words": {"model_type": "llama", **COMMON, "vocab_size": 32_000},
    "gpt2": {**GPT, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "gpt2, dropout": {**GPT, "attn_pdrop": 0.1, "resid_pdrop": 0.1, "embd_pdrop": 0.1},
    "gpt_neox": {"model_type": "gpt_neox", **{k: v for k, v in COMMON.items() if k != "num_key_value_heads"}},
    "gemma3_text": {
        "model_type": "gemma3_text",
        "head_dim": 32,
        "sliding_window": 32,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        **COMMON,
        "num_hidden_layers": 6,
    },
    "smollm3": {"model_type": "smollm3", "no_rope_layer_interval": 3, **COMMON, "num_hidden_layers": 6},
    "mixtral": {"model_type": "mixtral", **_EXPERTS, **COMMON},
    "gpt_oss": {"model_type": "gpt_oss", "head_dim": 32, **_EXPERTS, **COMMON, "rope_parameters": None},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "head_dim": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 192,
        **COMMON,
    },
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        **COMMON,
        "num_key_value_heads": 8,
        "q_lora_rank": 96,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
    },
    "qwen3_next": {
        "model_type": "qwen3_next",
        "head_dim": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 128,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2,
        **COMMON,
        "num_hidden_layers": 6,
    },
}

KINDS = ("none", "full", "segments(2)", "every_nth(2)", "first(2)", "attention")


def requested(config: dict[str, Any], **wanted: Any) -> Request:
    """What to trace of a step, by default of 64 tokens in FP32 with flash attention on CPU kernels."""
    defaults: dict[str, Any] = {
        "micro_batch": 1,
        "seq_len": 64,
        "dtype": "fp32",
        "attention": "flash",
        "checkpointing": "none",
        "loss": "unfused",
        "kernels": "cpu",
    }
    return Request(config=config, **{**defaults, **wanted})


def traced(config: dict[str, Any], **wanted: Any) -> ActivationProfile:
    """The trace of a step, by default of 64 tokens in FP32 with flash attention on CPU kernels."""
    return trace(requested(config, **wanted))


def of_depth(name: str, num_layers: int) -> dict[str, Any]:
    """A model's config with another number of layers, whose kinds go on as they began."""
    config = dict(CONFIGS[name])
    config["n_layer" if "n_layer" in config else "num_hidden_layers"] = num_layers
    if "layer_types" in config:
        config["layer_types"] = [config["layer_types"][i % 3] for i in range(num_layers)]
    return config
