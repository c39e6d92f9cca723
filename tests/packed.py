"""Real models packed by bitsandbytes, on the CPU."""

from typing import Any

import bitsandbytes
from torch import nn


def pack(model: Any, double: bool) -> None:
    """bitsandbytes' module in place of each linear one but the head."""
    model.is_loaded_in_4bit = True  # what peft asks
    head = model.get_output_embeddings()
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and child is not head:
                packed = bitsandbytes.nn.Linear4bit(
                    child.in_features,
                    child.out_features,
                    bias=child.bias is not None,
                    compute_dtype=child.weight.dtype,
                    compress_statistics=double,
                    quant_type="nf4",
                )
                packed.weight = bitsandbytes.nn.Params4bit(
                    child.weight.data, requires_grad=False, quant_type="nf4", compress_statistics=double
                )
                setattr(module, name, packed.to("cpu"))
