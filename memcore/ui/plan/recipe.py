"""The recipe in the sidebar: what is trained, in which dtypes, by which optimizer."""

from collections.abc import Mapping
from typing import Any

import streamlit as st

from memcore.engine_options import ENGINES_OWN
from memcore.explain import METHOD_LABELS
from memcore.i18n import gettext as _
from memcore.recipes import CONVENTIONS, ConventionName
from memcore.scenario import Scenario
from memcore.ui.plan.adapters import ADAPTER_FIELDS, adapter_values, chosen_adapters, draw_adapters
from memcore.ui.plan.dtypes import DTYPE_FIELDS
from memcore.ui.plan.field import more
from memcore.ui.plan.float8 import FLOAT8_FIELDS
from memcore.ui.plan.optimizer import chosen_optimizer, draw_optimizer, optimizer_values
from memcore.ui.plan.values import USUAL, Values, own_convention_in, values_now

RECIPE_FIELDS = (*ADAPTER_FIELDS, *DTYPE_FIELDS, *FLOAT8_FIELDS)


def recipe_values(scenario: Scenario) -> dict[str, Any]:
    """The value of each widget. A convention that is the engine's own follows the engine."""
    recipe = scenario.recipe
    is_own = recipe.convention is scenario.own_convention
    return {
        "w_method": recipe.method.value,
        "w_convention": USUAL if is_own else recipe.convention.value,
        **adapter_values(recipe),
        **optimizer_values(recipe.optimizer),
    }


def chosen_recipe(values: Values, base: Mapping[str, Any]) -> dict[str, Any]:
    """The scenario's recipe, what no widget edits as `base` has it."""
    return {
        **{name: value for name, value in base.items() if name not in ("lora", "quantization", "convention")},
        "method": values["w_method"],
        "convention": ENGINES_OWN if values["w_convention"] == USUAL else values["w_convention"],
        "optimizer": chosen_optimizer(values),
        **chosen_adapters(values, base.get("lora", {})),
    }


def draw_recipe() -> None:
    """The widgets."""
    methods = {method.value: _(label) for method, label in METHOD_LABELS.items()}
    st.segmented_control(_("Method"), list(methods), key="w_method", required=True, format_func=methods.__getitem__)
    draw_adapters()
    own = _("the engine's own: {name}").format(name=CONVENTIONS[own_convention_in(values_now())].label)
    conventions = {USUAL: own, **{name.value: CONVENTIONS[name].label for name in ConventionName}}
    st.selectbox(
        _("Convention"), list(conventions), key="w_convention", format_func=conventions.__getitem__,
        help=_("The dtypes of weights, gradients, master copy and states; the Static accounting page compares them."),
    )  # fmt: skip
    draw_optimizer()
    more("recipe", RECIPE_FIELDS)
