"""Hold the closed form of activations against the trace, for every architecture, and write
memcore/data/closed_forms.json.

For the catalogue's models and for the default config of every causal language model that transformers knows:
what all layers keep for the backward, without checkpointing, in BF16, without dropout. Run it after a change of
the closed forms, of the trace, or of the transformers version: ``python -m scripts.hold_closed_forms``.
"""

import json
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from memcore.activations.held import architecture
from memcore.activations.terms import layer_forms
from memcore.counting import count_config
from memcore.errors import UserError
from memcore.inventory import Inventory
from memcore.models import catalogue, load_inventory
from memcore.scenario import Scenario, decode_config, parse_scenario
from memcore.states import model_states
from memcore.trace.request import read_request, trace_request
from memcore.trace.tracer import trace

TARGET = Path(__file__).parent.parent / "memcore" / "data" / "closed_forms.json"
ATTENTIONS = ("flash", "memory_efficient", "eager")
SEQ_LEN = 512


def main() -> None:
    """Compare all, print a line each, and write the largest deviation of each architecture."""
    transformers.logging.set_verbosity_error()
    found: dict[str, dict[str, float]] = {}
    for name, config in configs():
        try:
            compare(name, config, found)
        except UserError as error:
            print(f"{name:45} {error}")
    lines = [f"{json.dumps(name)}: {json.dumps(by_attention)}" for name, by_attention in sorted(found.items())]
    TARGET.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def configs() -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Names and configs: the catalogue's, then the default of each type."""
    for name, model in catalogue().items():
        if model.config is not None:
            yield name, model.config
    for model_type in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                text = json.dumps(CONFIG_MAPPING[model_type]().to_dict(), default=str)
        except Exception as error:
            print(f"{model_type:45} has no default config: {type(error).__name__}")
            continue
        yield model_type, decode_config(text)


def compare(name: str, config: Mapping[str, Any], found: dict[str, dict[str, float]]) -> None:
    """Compare one config's closed forms, and keep what is further off than what was found before."""
    plain = {key: 0.0 if "drop" in key and isinstance(value, float) else value for key, value in config.items()}
    inventory = load_inventory(count_config({"config": plain})["inventory"])
    row = []
    for attention in ATTENTIONS:
        workload = {"seq_len": SEQ_LEN, "attention": attention}
        recipe = {"convention": "pure_bf16"}
        scenario = parse_scenario({"model": {"config": plain}, "recipe": recipe, "workload": workload})
        off = deviation(scenario, inventory)
        row.append("-" if off is None else f"{off:+.3f}")
        entry = found.setdefault(architecture(inventory.model_class), {})
        if off is not None and abs(off) > abs(entry.get(attention, 0)):
            entry[attention] = round(off, 4)
    print(f"{name:45} {inventory.model_class:40} " + " ".join(f"{each:>8}" for each in row), flush=True)


def deviation(scenario: Scenario, inventory: Inventory) -> float | None:
    """Closed form over trace, less one. None where there is no form, or no trace of this attention."""
    forms = layer_forms(scenario, model_states(scenario, inventory.n_params, inventory), inventory)
    request = trace_request(scenario)
    if forms is None or isinstance(request, str):
        return None
    tokens, seq_len = scenario.workload.micro_batch * scenario.workload.seq_len, scenario.workload.seq_len
    try:
        profile = trace(read_request(request))
    except UserError:
        return None
    if profile.attention != scenario.workload.attention:
        return None
    return sum(form.total(tokens, seq_len) for form in forms) / profile.of("saved")[profile.num_layers - 1] - 1


if __name__ == "__main__":
    main()
