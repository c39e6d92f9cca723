"""From a scenario to what is traced for it, and whether it can be."""

from collections.abc import Mapping
from typing import Any

from memcore.i18n import gettext as _
from memcore.models import catalogue_model
from memcore.recipes import ConventionName
from memcore.scenario import Method, Scenario
from memcore.states import precision_of


def trace_request(scenario: Scenario) -> dict[str, Any] | str:
    """The payload of the worker's task "trace", or one sentence that says why this scenario is not traced yet."""
    config = _config(scenario)
    if config is None:
        return _("A parameter count has no model to trace.")
    if scenario.recipe.method is not Method.FULL:
        return _("Adapters are not traced yet.")
    if scenario.recipe.convention is ConventionName.AMP_AUTOCAST:
        return _("Autocast over FP32 weights is not traced yet.")
    work = scenario.workload
    return {
        "config": dict(config),
        "micro_batch": work.micro_batch,
        "seq_len": work.seq_len,
        "dtype": precision_of(scenario.recipe).convention.compute_dtype.value,
        "attention": work.attention,
        "checkpointing": work.checkpointing,
        "loss": "unfused" if work.loss == "unfused" else "none",
        "logits_retained": work.logits_retained,
    }


def _config(scenario: Scenario) -> Mapping[str, Any] | None:
    model = scenario.model
    return catalogue_model(model.name).config if model.name is not None else model.config
