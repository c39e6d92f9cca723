"""LoRA through peft's own modules, on plain weights or on packed ones.

Worker processes only: imports torch and peft.
"""

import warnings
from collections.abc import Sequence

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.utils.other import set_additional_trainable_modules
from torch import nn
from transformers.pytorch_utils import Conv1D

from memcore.trace.packing import AdaptedIntegers, AdaptedPacked, PackedIntegers, PackedLinear
from memcore.trace.request import Adapters


def attach(model: nn.Module, adapters: Adapters, *, autocast: bool) -> None:
    """Put adapters on a model's targets and freeze all the rest."""
    config = LoraConfig(
        r=adapters.rank,
        lora_dropout=adapters.dropout,
        target_modules=list(adapters.targets) if "all-linear" not in adapters.targets else "all-linear",
        fan_in_fan_out=False,
        modules_to_save=list(adapters.copies) or None,
    )
    if adapters.quantization is not None:
        own: dict[type[nn.Module], type[nn.Module]] = {PackedIntegers: AdaptedIntegers, PackedLinear: AdaptedPacked}
        config._register_custom_module(own)  # noqa: SLF001  peft's way in for own modules
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft mends the settings for Conv1D, and says so
        inject_adapter_in_model(config, model)
        if adapters.copies:
            set_additional_trainable_modules(model, config, {}, "default")
    for module in model.modules():
        if isinstance(module, AdaptedPacked):
            module.autocast = autocast


def pack(
    model: nn.Module,
    adapters: Adapters,
    skipped: Sequence[nn.Module],
    computed: torch.dtype,
    packed_from: torch.dtype | None = None,
) -> None:
    """A stand-in for each linear module but those skipped (the head), as transformers 5.24 does it (integrations/
    bitsandbytes.py, replace_with_bnb_linear). `packed_from`: the dtype that bitsandbytes' weights are unpacked to, None
    where it is that of the computation."""
    integers, double = adapters.quantization == "gptq_int4", adapters.quantization == "nf4_double_quant"
    storage: torch.dtype = getattr(torch, adapters.storage)
    kept = adapters.keeps_inputs
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear | Conv1D) and not any(child is left for left in skipped):
                packed = (
                    PackedIntegers(child, computed, storage=storage)
                    if integers
                    else PackedLinear(
                        child, computed, packed_from, storage=storage, double_quant=double, keeps_input=kept
                    )
                )
                setattr(module, name, packed)
