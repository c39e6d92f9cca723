"""Configs as they are published and pasted: odd forms, other files, keys that decide a shape under any name.

Run: pytest tests/test_odd_configs.py. Counts are held against published ones, against transformers' own model on the
meta device, or against hand arithmetic.
"""

import json
import math
import warnings
from typing import Any

import pytest
import torch
import transformers

from memcore.allocator.task import reserve_task
from memcore.budget import evidence_for, predict
from memcore.configs import MAX_LAYERS, normalise_config, packed_as
from memcore.counting import count_config
from memcore.errors import UserError
from memcore.inventory import Inventory, Role
from memcore.models import load_inventory
from memcore.scenario import decode_config, parse_scenario
from memcore.terms import Category
from memcore.trace.task import trace_task

LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100, "tie_word_embeddings": False,
}  # fmt: skip
# Embedding and head, two norms for each layer and one at the end; q and o, k and v with half the heads, the MLP.
LLAMA_COUNT = 2 * 100 * 64 + 5 * 64 + 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128)


@pytest.fixture(autouse=True)
def _quiet_transformers():
    transformers.logging.set_verbosity_error()


def count(config: dict[str, Any]) -> Inventory:
    """As the product counts it: from the form that a scenario and a link carry."""
    kept = parse_scenario({"model": {"config": config}}).model.config
    assert kept is not None
    return load_inventory(json.loads(json.dumps(count_config({"config": dict(kept)})["inventory"])))


def own(config: dict[str, Any], auto: Any = transformers.AutoModelForCausalLM) -> int:
    """Parameters of the model that transformers makes of the whole file."""
    fields = {key: value for key, value in config.items() if key != "model_type"}
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = auto.from_config(transformers.AutoConfig.for_model(config["model_type"], **fields)).num_parameters()
        assert isinstance(found, int)
        return found


# --- how the text is written ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "\ufeff" + json.dumps(LLAMA),
        json.dumps(LLAMA).replace("}", ",}"),
        json.dumps(LLAMA).replace('"vocab_size"', "// words\n/* all */ 'vocab_size'"),
        f"config = {LLAMA!r}",
        json.dumps({**LLAMA, "limits": [0.0, math.inf]}),
    ],
    ids=["byte order mark", "commas", "comments", "program", "infinity"],
)
def test_what_is_nearly_json_is_counted(text: str):
    assert count(decode_config(text)).n_params == LLAMA_COUNT


@pytest.mark.parametrize("text", ['{"hidden_size": 64', '{"hidden_size" 64}', "{hidden size: 64}", "[1, 2", "nothing"])
def test_what_is_not_is_refused(text: str):
    with pytest.raises(UserError, match="This is not JSON"):
        decode_config(text)


@pytest.mark.parametrize(("key", "value"), [("hidden_size", math.nan), ("rope_theta", math.nan), ("eps", -math.inf)])
def test_what_is_no_number_is_named(key: str, value: float):
    with pytest.raises(UserError, match=rf"model\.config\.{key} is {value}"):
        count(decode_config(json.dumps({**LLAMA, key: value})))


# --- other files ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ({"peft_type": "LORA", "base_model_name_or_path": "a/b", "r": 64, "target_modules": ["q_proj"]}, "rank 64"),
        ({"zero_optimization": {"stage": 3}, "train_batch_size": "auto"}, "a ds_config"),
        ({"metadata": {"total_size": 1}, "weight_map": {"a": "b"}}, "index of a checkpoint's files"),
        ({"_class_name": "UNet2DConditionModel", "act_fn": "silu"}, "diffusion pipeline"),
        ({"dim": 4096, "n_layers": 32, "n_heads": 32, "multiple_of": 1024}, "a params.json"),
        ({"d_model": 2560, "n_layer": 64, "ssm_cfg": {}, "rms_norm": True}, "mamba_ssm"),
        ({"add_bos_token": True, "tokenizer_class": "LlamaTokenizer"}, "a tokenizer's file"),
        ({"image_processor_type": "CLIPImageProcessor", "size": 336}, "a preprocessor's config"),
        ({"bos_token_id": 1, "eos_token_id": 2, "transformers_version": "4.31.0"}, "a generation_config.json"),
    ],
)
def test_a_file_that_is_no_models_config_is_told_apart(data: dict[str, Any], sentence: str):
    with pytest.raises(UserError, match=sentence):
        count(data)


def test_a_models_config_without_a_type_is_not_taken_for_another_file():
    with pytest.raises(UserError, match="model_type is missing"):
        count({"hidden_size": 64, "tokenizer_class": "GPT2Tokenizer", "eos_token_id": 2, "transformers_version": "4.1"})


def test_a_config_without_a_type_is_that_of_the_class_it_names():
    """Files of before 2020 have no model_type."""
    old = {key: value for key, value in LLAMA.items() if key != "model_type"}
    assert count({**old, "architectures": ["LlamaForCausalLM"]}).n_params == LLAMA_COUNT
    with pytest.raises(UserError, match="no class 'NoSuchModel'"):
        count({**old, "architectures": ["NoSuchModel"]})
    with pytest.raises(UserError, match="model_type is missing"):
        count(old)


def test_a_type_of_its_own_with_a_class_of_transformers():
    """Kimi K2: model_type kimi_k2 and remote code, the class is DeepSeek-V3's. One trillion parameters, 32 billion of
    which are active (arXiv 2507.20534)."""
    file = {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2", "auto_map": {"AutoModel": "modeling.X"},
        "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61,
        "num_attention_heads": 64, "num_key_value_heads": 64, "n_routed_experts": 384, "n_shared_experts": 1,
        "num_experts_per_tok": 8, "first_k_dense_replace": 1, "q_lora_rank": 1536, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_group": 1, "topk_group": 1,
        "vocab_size": 163840, "tie_word_embeddings": False,
    }  # fmt: skip
    found = count(file)
    assert round(found.n_params / 1e10) == 103
    assert 31e9 < found.n_active < 34e9
    assert count_config({"config": file})["defaults"]["model_type"] == "deepseek_v3"
    with pytest.raises(UserError, match=r"does not know model_type 'kimi_k2'.*remote code"):
        count({**file, "architectures": ["KimiForCausalLM"]})


def test_a_file_of_the_authors_own_form_is_not_read_as_another_model():
    """LLaVA 1.5 13B as its authors wrote it: the sizes at the top, where transformers' llava has none. Read by that
    class, it would be the 7B of its defaults."""
    file = {
        "architectures": ["LlavaLlamaForCausalLM"], "model_type": "llava", "hidden_size": 5120, "num_hidden_layers": 40,
        "num_attention_heads": 40, "intermediate_size": 13824, "vocab_size": 32000, "mm_hidden_size": 1024,
    }  # fmt: skip
    with pytest.raises(UserError, match=r"hidden_size is 5120, but transformers' llava class .* take 4096"):
        count(file)


def test_a_library_that_is_missing_leaves_the_text_part():
    text = {
        "model_type": "gemma3n_text", "hidden_size": 64, "intermediate_size": [128, 128], "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 100,
        "vocab_size_per_layer_input": 100, "hidden_size_per_layer_input": 8, "laurel_rank": 4,
        "num_kv_shared_layers": 0, "layer_types": ["sliding_attention", "full_attention"],
        "activation_sparsity_pattern": [0.95, 0.0],
    }  # fmt: skip
    assert count(text).n_params == own(text)
    if not transformers.utils.is_timm_available():
        with pytest.raises(UserError, match=r"timm library.*under text_config"):
            count({"model_type": "gemma3n", "text_config": text})


# --- keys that decide a shape -----------------------------------------------------------------------------------------


def test_a_pattern_of_layers_is_kept_whatever_its_letters():
    """Nemotron-H: M a Mamba layer, * attention, - an MLP."""
    pattern = "M-M*-M-M*-"
    file = {
        "model_type": "nemotron_h", "hidden_size": 64, "hybrid_override_pattern": pattern, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128, "vocab_size": 100, "mamba_num_heads": 4,
        "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 1,
    }  # fmt: skip
    found = count(file)
    assert len(found.layers) == found.shapes.num_layers == len(pattern)
    assert found.n_params == own(file)
    assert normalise_config({"hybrid_override_pattern": "M-" * 59})["hybrid_override_pattern"] == "M-" * 59
    assert "hybrid_override_pattern" not in normalise_config({"hybrid_override_pattern": "M" * (MAX_LAYERS + 1)})
    assert "some_pattern" not in normalise_config({"some_pattern": "a sentence of several words, not for a link"})


@pytest.mark.parametrize("labels", [1, 2, 3, 1000, 21_843])
def test_a_classifiers_head_is_as_wide_as_its_labels(labels: int):
    names = {str(index): f"label {index}" for index in range(labels)}
    file = {
        "model_type": "bert", "architectures": ["BertForSequenceClassification"], "hidden_size": 64, "vocab_size": 100,
        "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 128, "max_position_embeddings": 32,
        "id2label": names, "label2id": {name: index for index, name in enumerate(names.values())},
    }  # fmt: skip
    two = {key: value for key, value in file.items() if key not in ("id2label", "label2id")}
    assert count(file).n_params - count(two).n_params == (labels - 2) * (64 + 1)


def test_keys_that_look_like_notes_and_are_none():
    """OPT's _remove_final_layer_norm: that norm's weight and bias. RemBERT's head is output_embedding_size wide."""
    opt = {
        "model_type": "opt", "hidden_size": 64, "word_embed_proj_dim": 64, "ffn_dim": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "vocab_size": 100, "max_position_embeddings": 32,
    }  # fmt: skip
    assert count(opt).n_params - count({**opt, "_remove_final_layer_norm": True}).n_params == 2 * 64
    rembert = {
        "model_type": "rembert", "hidden_size": 64, "input_embedding_size": 16, "output_embedding_size": 48,
        "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 100,
    }  # fmt: skip
    assert count(rembert).n_params == own(rembert)


# --- what the model is ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("own_architecture", "multi_query", "given", "heads"),
    [(False, True, 71, 1), (True, True, 8, 8), (False, False, 71, 71)],
)
def test_falcons_key_heads(own_architecture: bool, multi_query: bool, given: int, heads: int):
    """arXiv 2311.16867: one key head in the 7B, eight in the 40B. transformers, FalconAttention."""
    file = {
        "model_type": "falcon", "hidden_size": 71 * 8 if heads != 8 else 16 * 8, "num_hidden_layers": 1,
        "num_attention_heads": 71 if heads != 8 else 16, "num_kv_heads": given, "multi_query": multi_query,
        "new_decoder_architecture": own_architecture, "vocab_size": 100, "alibi": False, "bias": False,
    }  # fmt: skip
    found = count(file)
    assert found.shapes.num_kv_heads == heads
    # Queries, and keys and values of that many heads, in one matrix.
    (fused,) = [tensor for tensor in found.tensors() if "query_key_value" in tensor.name]
    assert fused.shape[0] == (found.shapes.num_heads + 2 * heads) * 8


def test_dbrx_has_its_experts_in_a_part():
    """databricks/dbrx-base, model card: 132B parameters, of which 36B are active on any input: 4 of 16 experts."""
    found = count(
        {
            "model_type": "dbrx", "d_model": 6144, "n_heads": 48, "n_layers": 40, "max_seq_len": 32768,
            "vocab_size": 100352, "attn_config": {"clip_qkv": 8, "kv_n_heads": 8, "rope_theta": 500000},
            "ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4},
        }
    )  # fmt: skip
    assert round(found.n_params / 1e9) == 132
    assert round(found.n_active / 1e9) == 36


def test_a_number_of_experts_for_each_layer():
    """Hunyuan's moe_topk; transformers' own class takes the layer's."""
    file = {
        "model_type": "hunyuan_v1_moe", "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 8, "moe_topk": [2, 2],
        "vocab_size": 100, "rope_theta": 10000.0,
    }  # fmt: skip
    used = {(t.experts_used, t.experts_held) for t in count(file).tensors() if t.experts_held > 1}
    assert used == {(2, 8)}


@pytest.mark.parametrize("model_type", ["voxtral", "qwen3_asr", "granite_speech", "phi4_multimodal", "video_llava"])
def test_the_decoders_layers_are_the_texts(model_type: str):
    """Audio and video towers may have more tensors than the language model."""
    found = load_inventory(count_config({"config": {"model_type": model_type}})["inventory"])
    assert len(found.layers) == found.shapes.num_layers


def test_heads_that_are_wider_than_the_model():
    """google-t5/t5-11b: 128 heads of d_kv = 128 on d_model = 1024."""
    assert count({"model_type": "t5", "d_model": 1024, "d_kv": 128, "num_heads": 128}).shapes.head_dim == 128


def test_a_model_without_one_embedding_is_counted():
    """openai/clip-vit-base-patch32, its checkpoint's size: 151,277,313."""
    file = {"model_type": "clip", "architectures": ["CLIPModel"], "projection_dim": 512}
    found = count(
        {**file, "text_config": {"hidden_size": 512}, "vision_config": {"hidden_size": 768, "patch_size": 32}}
    )
    assert found.n_params == 151_277_313
    assert not found.tied


# --- packed checkpoints -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "method"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4, "desc_act": True}}, "gptq"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}, "fp8"),
        # transformers.quantizers.auto: bitsandbytes, where loading in 4 or 8 bits is all that is said.
        ({"quantization_config": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}}, "bitsandbytes"),
        ({"quantization_config": {"load_in_8bit": True}}, "bitsandbytes"),
        ({"quantization_config": {"quant_algo": "NVFP4", "producer": {"name": "modelopt"}}}, "NVFP4"),
        ({"quantization_config": {"ignore": [f"layers.{index}" for index in range(5000)]}}, "unnamed"),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, "compressed-tensors"),
        ({"quantization": {"group_size": 64, "bits": 4}}, "mlx"),
        ({"quantization_config": None}, None),
        ({}, None),
    ],
)
def test_a_packed_checkpoint_is_known_in_any_form(section: dict[str, Any], method: str | None):
    config = {**LLAMA, **section}
    assert packed_as(config) == packed_as(normalise_config(config)) == method
    assert count(config).n_params == LLAMA_COUNT
    kept = parse_scenario({"model": {"config": config}}).model.config
    assert count_config({"config": dict(kept or {})})["quantised_as"] == method


def test_a_part_may_be_packed_by_itself():
    """Kimi-K2.5: the section lies in text_config."""
    file = {
        "model_type": "llava", "text_config": {**LLAMA, "quantization_config": {"quant_method": "compressed-tensors"}},
        "vision_config": {
            "model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
        },
    }  # fmt: skip
    kept = parse_scenario({"model": {"config": file}}).model.config
    counted = count_config({"config": dict(kept or {})})
    assert counted["quantised_as"] == "compressed-tensors"
    roles = load_inventory(counted["inventory"]).by_role()
    assert roles[Role.HEAD] == roles[Role.EMBEDDING] == 100 * 64


# --- encoder-decoders -------------------------------------------------------------------------------------------------


def test_an_encoder_decoder_is_traced():
    """T5 shifts its labels itself, behind a token whose number a scenario's config does not carry."""
    file = {
        "model_type": "t5", "d_model": 32, "d_kv": 8, "d_ff": 64, "num_heads": 4, "num_layers": 2, "vocab_size": 100,
        "decoder_start_token_id": 0,
    }  # fmt: skip
    scenario = parse_scenario({"model": {"config": file}, "workload": {"seq_len": 64, "attention": "eager"}})
    tasks = {"count_config": count_config, "trace": trace_task, "reserve": reserve_task}
    evidence = evidence_for(scenario, lambda task, data: tasks[task](data))
    assert evidence.untraced == ""
    kept = [term.largest for term in predict(scenario, evidence).terms if term.category is Category.ACTIVATIONS]
    # At least each of the four layers' FP32 scores, of all heads, in encoder, decoder and between the two.
    assert sum(kept) > 6 * 4 * 64 * 64 * 4
