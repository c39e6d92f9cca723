"""All widgets of the plan for a scenario, and a scenario's data from them."""

from collections.abc import Mapping
from typing import Any

from memcore.scenario import Scenario
from memcore.ui.plan.engine import chosen_engine_config, chosen_parallelism, engine_values
from memcore.ui.plan.hardware import chosen_hardware, hardware_values
from memcore.ui.plan.model import chosen_model, model_values
from memcore.ui.plan.offload import chosen_offload, offload_values
from memcore.ui.plan.recipe import chosen_recipe, recipe_values
from memcore.ui.plan.values import Values
from memcore.ui.plan.workload import chosen_workload, workload_values


def widget_values(scenario: Scenario) -> dict[str, Any]:
    """The value of every widget of the sidebar for a scenario."""
    return {
        **model_values(scenario.model),
        **hardware_values(scenario.hardware),
        **engine_values(scenario),
        **recipe_values(scenario.recipe),
        **offload_values(scenario.offload),
        **workload_values(scenario.workload),
    }


def scenario_from(values: Values, base: Mapping[str, Any]) -> dict[str, Any]:
    """Scenario data from the widgets' values over `base`, whose fields that no widget edits are kept.

    Widgets that do not apply (a stage without DeepSpeed, a rank without adapters) are left out. Raises
    UserError where a text widget cannot be read.
    """
    config = chosen_engine_config(values, base.get("engine_config", {}))
    return {
        **{key: value for key, value in base.items() if key != "engine_config"},
        "model": chosen_model(values, base.get("model", {})),
        "hardware": chosen_hardware(values, base.get("hardware", {})),
        "parallelism": chosen_parallelism(values),
        "recipe": chosen_recipe(values, base.get("recipe", {})),
        "offload": chosen_offload(values),
        "workload": chosen_workload(values, base.get("workload", {})),
        **({"engine_config": config} if config else {}),
    }
