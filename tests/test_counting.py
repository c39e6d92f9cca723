"""Counting configs of every architecture that transformers trains as a causal language model.

Run: pytest tests/test_counting.py. Each type's default config is counted on the meta device and held against the
library's own count; half a minute.
"""

import json
import warnings

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from memcore.activations.layer import Traits, layer_form
from memcore.budget import Evidence, predict
from memcore.counting import count_config
from memcore.errors import UserError
from memcore.inventory import Inventory
from memcore.models import load_inventory
from memcore.scenario import decode_config, parse_scenario

TRAITS = Traits(width=2, attention="flash")


def config_text(model_type: str) -> str:
    """A default config as transformers writes it to a file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return json.dumps(CONFIG_MAPPING[model_type]().to_dict(), default=str)


def own_count(model_type: str) -> int | None:
    """Parameters of the model that transformers itself builds; None where it cannot build its own default."""
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type]()).num_parameters()
    except Exception:  # whatever the architecture's own code raises
        return None


def counted(text: str) -> Inventory:
    """As an upload is: normalised by the scenario, then counted."""
    config = parse_scenario({"model": {"config": decode_config(text)}}).model.config
    assert config is not None
    return load_inventory(count_config({"config": dict(config)})["inventory"])


# Its default config is one that its own class refuses.
TYPES = sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - {"gemma4_assistant"})


@pytest.mark.parametrize("model_type", TYPES)
def test_every_causal_model_is_counted_and_predicted_or_refused(model_type: str):
    transformers.logging.set_verbosity_error()
    count = own_count(model_type)
    text = config_text(model_type)
    if count is None:
        with pytest.raises(UserError, match=r"transformers cannot build|library, which is not installed"):
            counted(text)
        return
    inventory = counted(text)
    # A config does not say which of its classes is meant; every type here has one for causal language models.
    assert inventory.n_params == count
    scenario = parse_scenario(
        {"model": {"config": decode_config(text)}, "parallelism": {"engine": "deepspeed", "zero_stage": 3}}
    )
    budget = predict(scenario, Evidence(inventory=inventory))
    assert budget.peak_bytes >= 16 * count


def test_infinity_in_a_published_config_is_read():
    """Mamba-2 and its hybrids write an upper limit of time steps as Infinity, which JSON does not have."""
    text = config_text("mamba2")
    assert "Infinity" in text
    assert counted(text).n_params == own_count("mamba2")


@pytest.mark.parametrize(
    "model_type",
    [
        # Linear attention, output gates, convolutions.
        *("kimi_linear", "qwen3_next", "olmo_hybrid", "minimax", "afmoe"),
        # An attention to an encoder beside its own.
        *("bart", "whisper", "trocr"),
        # An indexer beside the attention; a projection of the layer's own; experts of attention.
        *("deepseek_v32", "gemma4_text", "jetmoe"),
    ],
)
def test_no_closed_form_for_a_layer_with_parts_that_it_does_not_know(model_type: str):
    inventory = counted(config_text(model_type))
    forms = {layer_form(block, inventory.shapes, TRAITS, inventory.model_class) for block in inventory.layers}
    assert None in forms
