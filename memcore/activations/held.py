"""How far each architecture's closed form lies from the trace of its real model, and where it is used.

The figures are data, made by scripts/hold_closed_forms.py with the trace of memcore.trace (transformers 5.24).
"""

import json
import re
from collections.abc import Mapping
from functools import cache
from importlib import resources

# How far a closed form may lie from its trace and still stand for it.
USED_WITHIN = 0.10


def architecture(model_class: str) -> str:
    """A model class's name without its head: ``Llama`` of ``LlamaForCausalLM``."""
    return re.sub(r"(For[A-Z]\w+|LMHeadModel|Model)$", "", model_class)


def deviation(model_class: str, attention: str) -> float | None:
    """Closed form over trace, less one, of what all layers keep, where the two are furthest apart; None where no
    trace stands beside it.

    Memory-efficient attention, where a model has none of its own, is held by flash attention: the two keep the same
    tensors but for the repeated keys and values.
    """
    found = _deviations().get(architecture(model_class), {})
    return found.get(attention, found.get("flash") if attention == "memory_efficient" else None)


def is_used(model_class: str, attention: str) -> bool:
    """Whether the closed form stands for this architecture: a trace has been beside it, and near enough."""
    found = deviation(model_class, attention)
    return found is not None and abs(found) <= USED_WITHIN


@cache
def _deviations() -> Mapping[str, Mapping[str, float]]:
    text = resources.files("memcore").joinpath("data", "closed_forms.json").read_text(encoding="utf-8")
    found: Mapping[str, Mapping[str, float]] = json.loads(text)
    return found
