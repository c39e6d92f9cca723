"""LoRA's adapters in the sidebar, and the base under them: in 16 bit, or packed in 4."""

from collections.abc import Mapping
from typing import Any

import streamlit as st

from memcore.engine_options import EngineName
from memcore.i18n import gettext as _
from memcore.i18n import mark
from memcore.models import catalogue_inventory
from memcore.packing import GPTQ_GROUP, NF4_BLOCK
from memcore.recipes import DType
from memcore.scenario import Lora, Loss, Method, Quantization, Recipe
from memcore.ui.plan.dtypes import dtype_in_force
from memcore.ui.plan.field import PlanField
from memcore.ui.plan.number import number
from memcore.ui.plan.values import CATALOGUE, USUAL, Values, adapts, engine_in, is_nf4, quantization_in, values_now


def adapter_values(recipe: Recipe) -> dict[str, Any]:
    """The value of each widget."""
    lora = recipe.lora or Lora()
    return {
        "w_quantization": (recipe.quantization or Quantization.NF4_DOUBLE_QUANT).value,
        "w_rank": lora.rank,
        "w_targets": ", ".join(lora.targets),
    }


def chosen_adapters(values: Values, base: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe's adapters and its packing, where it has any; of adapters what no widget edits as `base` has it."""
    if not adapts(values):
        return {}
    targets = [target.strip() for target in values["w_targets"].split(",") if target.strip()]
    packing = quantization_in(values)
    return {
        "lora": {**base, "rank": values["w_rank"], "targets": targets},
        **({} if packing is None else {"quantization": packing.value}),
    }


def draw_adapters() -> None:
    """The widgets, where there are adapters."""
    values = values_now()
    if not adapts(values):
        return
    number(_("LoRA rank"), most=65_536, step=8, key="w_rank")
    st.text_input(
        _("Target modules"), key="w_targets", max_chars=400, help=_("Comma-separated, or all-linear: all but the head.")
    )
    if values["w_method"] == Method.QLORA:
        kinds = {
            Quantization.NF4.value: _("NF4"),
            Quantization.NF4_DOUBLE_QUANT.value: _("NF4, double quantisation"),
            Quantization.GPTQ_INT4.value: _("GPTQ"),
        }
        st.selectbox(_("Base weights in 4 bits"), list(kinds), key="w_quantization", format_func=kinds.__getitem__)


def _is_gptq(values: Values) -> bool:
    return quantization_in(values) is Quantization.GPTQ_INT4


def _group_sizes(values: Values) -> dict[int | str, str]:
    if not _is_gptq(values):
        return {USUAL: "", NF4_BLOCK: ""}
    usual = _("AutoGPTQ's default: {size}").format(size=GPTQ_GROUP)
    return {USUAL: usual, 32: "32", 64: "64", 128: "128", -1: _("a whole column")}


def _packs_head(values: Values) -> bool:
    return is_nf4(values) and values["w_loss"] != Loss.FUSED


def _has_head(values: Values) -> bool:
    """Whether the head is a weight of its own, as far as is known."""
    inventory = catalogue_inventory(values["w_name"]) if values["w_source"] == CATALOGUE else None
    return inventory is None or not inventory.tied


def _casts(values: Values) -> bool:
    """Autocast has something to cast: FP32 adapters on 16-bit weights, where an engine leaves them so."""
    engines = (EngineName.SINGLE, EngineName.DDP, EngineName.FSDP1)
    dtypes = (dtype_in_force(values, "param_dtype"), dtype_in_force(values, "compute_dtype"))
    return (
        adapts(values) and engine_in(values) in engines and DType.FP32 not in dtypes
        and values["w_recipe_lora_adapter_dtype"] == DType.FP32
    )  # fmt: skip


def _copies(values: Values) -> bool:
    """Whole modules can be trained beside the adapters: in their dtype, where an engine leaves it as it is."""
    stored = dtype_in_force(values, "param_dtype")
    return (
        values["w_method"] == Method.LORA and engine_in(values) in (EngineName.SINGLE, EngineName.DDP)
        and values["w_recipe_lora_adapter_dtype"] == stored and values["w_code"] == "transformers"
    )  # fmt: skip


def _keeps_norms(values: Values) -> bool:
    """What is packed, or autocast, takes the results of FP32 norms; FSDP1 cannot flatten them with the rest."""
    plain = not values["w_fused"] and values["w_code"] == "transformers"
    around = values["w_recipe_lora_autocast"] and _casts(values)
    return bool(quantization_in(values) and around and plain and engine_in(values) is not EngineName.FSDP1)


ADAPTER_FIELDS = (
    PlanField(
        part=Recipe,
        name="quant_group_size",
        label=mark("Group size"),
        help=mark("How many weights share a scale and a zero point (group_size of a GPTQ model)."),
        allowed=lambda values: quantization_in(values) is not None,
        shown=_is_gptq,
        choices=_group_sizes,
    ),
    PlanField(
        part=Recipe,
        name="quantize_lm_head",
        label=mark("Head in 4 bits too"),
        help=mark("As where every linear module is replaced; transformers leaves the head as it is."),
        allowed=_packs_head,
        shown=_has_head,
    ),
    PlanField(
        part=Recipe,
        name="keeps_packed_inputs",
        label=mark("4-bit products keep their inputs"),
        help=mark("For the backward, as bitsandbytes had it before 0.43.2, though frozen weights need none."),
        allowed=is_nf4,
    ),
    PlanField(
        part=Lora,
        name="adapter_dtype",
        label=mark("Adapters in"),
        help=mark("The dtype of the adapters. peft keeps them in FP32 (autocast_adapter_dtype); DeepSpeed casts them."),
        allowed=adapts,
        shown=lambda values: engine_in(values) is not EngineName.DEEPSPEED,
        choices=lambda _values: {dtype.value: dtype.value.upper() for dtype in DType},
    ),
    PlanField(
        part=Lora,
        name="autocast",
        label=mark("Autocast around the forward"),
        help=mark("torch.autocast, as Hugging Face's Trainer has it in bf16 or fp16: FP32 adapters compute in 16 bit."),
        allowed=_casts,
    ),
    PlanField(
        part=Recipe,
        name="fp32_norms",
        label=mark("Norms in FP32"),
        help=mark("As peft's prepare_model_for_kbit_training leaves them: what they give is in FP32 too."),
        allowed=_keeps_norms,
    ),
    PlanField(
        part=Lora,
        name="dropout",
        label="lora_dropout",
        help=mark("The rate at which the adapters' inputs are dropped out. Above 0, more is kept for the backward."),
        allowed=adapts,
        step=0.05,
    ),
    PlanField(
        part=Lora,
        name="modules_to_save",
        label="modules_to_save",
        help=mark("Modules of which a whole copy is trained beside the adapters; peft keeps the original too."),
        allowed=_copies,
        shown=_has_head,
        choices=lambda _values: {"embed_tokens": "embed_tokens", "lm_head": "lm_head"},
    ),
)
