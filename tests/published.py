"""Published runs of shared/measured/runs.json as scenarios of ours."""

from typing import Any

from memcore.counting import count_config
from memcore.inventory import Inventory
from memcore.models import load_inventory
from memcore.scenario import Scenario, parse_scenario


def published_scenario(run: dict[str, Any], recipe: dict[str, Any] | None = None, **workload: Any) -> Scenario:
    """The run's own config and workload on one A100, fully checkpointed, in pure BF16 with the foreach optimizer."""
    work = run["workload"]
    return parse_scenario(
        {
            "model": {"config": run["model"]["config"]},
            "hardware": {"gpu": "A100-80GB"},
            "recipe": {"convention": "pure_bf16", "optimizer": {"implementation": "foreach"}, **(recipe or {})},
            "workload": {
                "micro_batch": work["micro_batch"],
                "seq_len": work["seq_len"],
                "attention": work["attention"],
                "checkpointing": "full",
                "loss": "unfused",
                "logits_retained": work["logits_retained"],
                **workload,
            },
        }
    )


def published_inventory(run: dict[str, Any]) -> Inventory:
    """The parameters of the run's own config."""
    return load_inventory(count_config({"config": run["model"]["config"]})["inventory"])
