"""All widgets of the plan for a scenario, and a scenario's data from them."""

from collections.abc import Mapping
from typing import Any

from memcore.scenario import Scenario
from memcore.ui.plan.engine import ENGINE_FIELDS, chosen_engine_config, chosen_parallelism, engine_values
from memcore.ui.plan.field import more_key, put
from memcore.ui.plan.hardware import HARDWARE_FIELDS, chosen_hardware, hardware_values
from memcore.ui.plan.loss import LOSS_FIELDS
from memcore.ui.plan.model import MODEL_FIELDS, chosen_model, model_values
from memcore.ui.plan.offload import chosen_offload, offload_values
from memcore.ui.plan.recipe import RECIPE_FIELDS, chosen_recipe, recipe_values
from memcore.ui.plan.values import Values
from memcore.ui.plan.workload import chosen_workload, workload_values

# The fields that few runs set, by the section that shows them.
_MORE = {"parallelism": ENGINE_FIELDS, "recipe": RECIPE_FIELDS, "workload": LOSS_FIELDS}
FIELDS = (*MODEL_FIELDS, *HARDWARE_FIELDS, *(field for fields in _MORE.values() for field in fields))


def widget_values(scenario: Scenario) -> dict[str, Any]:
    """The value of every widget of the sidebar for a scenario; what few runs set is open where this one does."""
    data = scenario.model_dump(mode="json")
    values = {
        **model_values(scenario.model),
        **hardware_values(scenario.hardware),
        **engine_values(scenario),
        **recipe_values(scenario),
        **offload_values(scenario.offload),
        **workload_values(scenario.workload),
        **{field.key: field.value_in(data) for field in FIELDS},
    }
    opened = {
        more_key(section): any(field.chosen(values) != field.usual for field in fields)
        for section, fields in _MORE.items()
    }
    return values | opened


def scenario_from(values: Values, base: Mapping[str, Any]) -> dict[str, Any]:
    """Scenario data from the widgets' values; what no widget edits is as `base` has it.

    Widgets that do not apply (a stage without DeepSpeed, a rank without adapters) are left out. Raises
    UserError where a text widget cannot be read.
    """
    config = chosen_engine_config(values, base.get("engine_config", {}))
    data: dict[str, Any] = {
        **{key: value for key, value in base.items() if key != "engine_config"},
        "model": chosen_model(values),
        "hardware": chosen_hardware(values, base.get("hardware", {})),
        "parallelism": chosen_parallelism(values),
        "recipe": chosen_recipe(values, base.get("recipe", {})),
        "offload": chosen_offload(values),
        "workload": chosen_workload(values, base.get("workload", {})),
        **({"engine_config": config} if config else {}),
    }
    for field in FIELDS:
        data = put(field, values, data)
    return data
