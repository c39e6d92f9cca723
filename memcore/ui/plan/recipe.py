"""The recipe in the sidebar: what is trained, on which base, in which dtypes."""

from collections.abc import Mapping
from typing import Any

import streamlit as st

from memcore.explain import METHOD_LABELS
from memcore.i18n import gettext as _
from memcore.recipes import CONVENTIONS, ConventionName
from memcore.scenario import Lora, Method, Quantization, Recipe
from memcore.ui.plan.optimizer import chosen_optimizer, draw_optimizer, optimizer_values
from memcore.ui.plan.values import Values


def recipe_values(recipe: Recipe) -> dict[str, Any]:
    """The value of each widget."""
    lora = recipe.lora or Lora()
    return {
        "w_method": recipe.method.value,
        "w_convention": recipe.convention.value,
        "w_quantization": (recipe.quantization or Quantization.NF4_DOUBLE_QUANT).value,
        "w_rank": lora.rank,
        "w_targets": ", ".join(lora.targets),
        **optimizer_values(recipe.optimizer),
    }


def chosen_recipe(values: Values, base: Mapping[str, Any]) -> dict[str, Any]:
    """The scenario's recipe, what no widget edits as `base` has it."""
    method = Method(values["w_method"])
    recipe = {key: value for key, value in base.items() if key not in ("lora", "quantization")}
    recipe |= {
        "method": method.value,
        "convention": values["w_convention"],
        "optimizer": chosen_optimizer(values),
    }
    if method is not Method.FULL:
        targets = [target.strip() for target in values["w_targets"].split(",") if target.strip()]
        recipe["lora"] = {**base.get("lora", {}), "rank": values["w_rank"], "targets": targets}
    if method is Method.QLORA:
        recipe["quantization"] = values["w_quantization"]
    if method is not Method.QLORA or values["w_quantization"] != base.get("quantization"):
        # Of another packing, they say nothing of this one.
        own = ("quant_group_size", "quantize_lm_head", "keeps_packed_inputs", "fp32_norms")
        recipe = {key: value for key, value in recipe.items() if key not in own}
    return recipe


def draw_recipe() -> None:
    """The widgets."""
    methods = {method.value: _(label) for method, label in METHOD_LABELS.items()}
    st.segmented_control(_("Method"), list(methods), key="w_method", required=True, format_func=methods.__getitem__)
    _draw_adapters(Method(st.session_state["w_method"]))
    conventions = {name.value: CONVENTIONS[name].label for name in ConventionName}
    st.selectbox(
        _("Convention"), list(conventions), key="w_convention", format_func=conventions.__getitem__,
        help=_("The dtypes of weights, gradients, master copy and states; the Static accounting page compares them."),
    )  # fmt: skip
    draw_optimizer()


def _draw_adapters(method: Method) -> None:
    if method is Method.FULL:
        return
    st.number_input(_("LoRA rank"), min_value=1, max_value=65_536, step=8, key="w_rank")
    st.text_input(
        _("Target modules"), key="w_targets", max_chars=400, help=_("Comma-separated, or all-linear: all but the head.")
    )
    if method is Method.QLORA:
        kinds = {
            Quantization.NF4.value: _("NF4"),
            Quantization.NF4_DOUBLE_QUANT.value: _("NF4, double quantisation"),
            Quantization.GPTQ_INT4.value: _("GPTQ"),
        }
        st.selectbox(_("Base weights in 4 bits"), list(kinds), key="w_quantization", format_func=kinds.__getitem__)
