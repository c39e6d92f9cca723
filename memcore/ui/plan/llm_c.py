"""llm.c's options in the sidebar."""

from memcore.engine_options import EngineName
from memcore.i18n import gettext as _
from memcore.i18n import mark
from memcore.scenario import LlmcConfig
from memcore.ui.plan.field import PlanField
from memcore.ui.plan.values import Values, engine_in


def _is_llm_c(values: Values) -> bool:
    return engine_in(values) is EngineName.LLM_C


def _recomputed(values: Values) -> dict[int, str]:
    levels = {0: _("nothing"), 1: _("GELU")}
    earlier = values["w_engine_config_layout"] == "2024-05"
    return levels if earlier else {**levels, 2: _("GELU and norms")}


LLM_C_FIELDS = (
    PlanField(
        part=LlmcConfig,
        name="recompute",
        label=mark("Recomputed (-r)"),
        help=mark("What is run again in the backward."),
        allowed=_is_llm_c,
        choices=_recomputed,
    ),
    PlanField(
        part=LlmcConfig,
        name="layout",
        label=mark("Program as of"),
        help=mark("Until June 2024 each layer kept what its two projections give, too."),
        allowed=_is_llm_c,
        choices=lambda _values: {"2025-05": "2025-05", "2024-05": "2024-05"},
    ),
)
