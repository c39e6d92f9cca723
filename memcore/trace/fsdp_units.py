"""Which modules beside the decoder layers are FSDP2's own units in a trace.

Worker processes only: imports torch.

Source: torchtitan, models/llama3/infra/parallelize.py, apply_fsdp (commit b00e484e): the embedding by itself, the final
norm and the head together. Of tied weights, which can be in one unit only, that unit is needed from the beginning to
the end of the step and never resharded (torchtitan's apply_fsdp of Qwen3): as the root's is.
"""

from collections.abc import Sequence
from typing import Any

from torch import nn


def own_units(model: Any, layers: Sequence[nn.Module], units: str) -> dict[str, list[nn.Module]]:
    """The modules of each unit, by its name: "embedding" and "head"; none where all is the root's."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if units == "block_root" or head is None or head.weight is embedding.weight:
        return {}
    return {"embedding": [embedding], "head": [*_after(model.get_decoder(), layers), head]}


def _after(decoder: nn.Module, layers: Sequence[nn.Module]) -> list[nn.Module]:
    """What of the decoder comes after its layers: the final norm."""
    children = list(decoder.children())
    place = next(index for index, child in enumerate(children) if layers[0] in child.modules())
    return [child for child in children[place + 1 :] if any(True for _parameter in child.parameters())]
