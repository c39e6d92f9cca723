"""The real model as a trace runs it: thinned out to the layers that matter, with adapters, on fake tensors.

Worker processes only: imports torch and transformers. The model is built at full depth on the meta device, where
nothing is allocated; only what is left of it then becomes fake tensors.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from memcore.configs import SHAPE_NAMES
from memcore.counting import fused_experts, is_vision
from memcore.loading import build_model, load_config, setting, text_config_of
from memcore.trace import kernels
from memcore.trace.experts import separate
from memcore.trace.litgpt import build_litgpt
from memcore.trace.litgpt_lora import PACKED_FROM, attach_litgpt
from memcore.trace.plan import Plan, make_plan, thin_out
from memcore.trace.recorder import local_tensor
from memcore.trace.request import Request
from memcore.trace.units import Unit

if TYPE_CHECKING:
    from memcore.trace.compiling import Compiler

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# What transformers calls each attention.
IMPLEMENTATIONS = {"flash": kernels.FLASH, "memory_efficient": kernels.MEMORY_EFFICIENT, "eager": "eager"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Built:
    """A model on fake tensors, and what of it runs. `paths`: each module's path within its layer, or within the
    model. `positions` and `has_table` as a Tape has them. `text_alone`: only the text part of the config's model."""

    model: Any
    plan: Plan
    paths: dict[int, str]
    positions: int
    has_table: bool
    text_alone: bool


def build(
    request: Request, attention: str, tagger: Callable[[int], Callable[[str], None]], compiler: "Compiler | None" = None
) -> Built:
    """Build the model on the meta device. `tagger(place)` gives the tag function of a unit that runs; `compiler`
    compiles its layers."""
    whole = load_config(request.config)
    config = _text_alone(whole)
    config._attn_implementation = IMPLEMENTATIONS[attention]  # noqa: SLF001  told before a model is built
    config.use_cache = False
    if config.is_encoder_decoder:
        _set_shifting(config)
    model = _model(request, config, attention)
    positions = setting(text_config_of(model.config), SHAPE_NAMES["max_positions"], int)
    has_table = _has_table(model, positions)
    plan = make_plan(
        model,
        request.checkpointing,
        # Which of the saved tensors still wait for their copies goes by all that were saved before.
        full_depth=request.full_depth or request.offloads_activations,
        neighbours=request.sharding is not None,
    )

    def unit(place: int, layers: list[nn.Module], recompute: bool) -> nn.Module:
        saved = plan.saved_operations
        options: dict[str, Any] = {"recompute": recompute, "reentrant": request.reentrant, "saved": saved}
        return Unit(layers, tagger(place), compiler=compiler, **options)

    thin_out(model, plan, unit)
    if request.experts == "separate":
        separate(model, fused_experts(model.config.model_type))
    if request.adapters is not None:
        _adapt(model, request, checkpointed=any(plan.recomputed))
    return Built(
        model=model,
        plan=plan,
        paths=dict(_paths(model)),
        positions=positions,
        has_table=has_table,
        text_alone=config is not whole,
    )


def _model(request: Request, config: PretrainedConfig, attention: str) -> Any:
    if request.code == "litgpt":
        return build_litgpt(config, _stored(request))
    with kernels.flash_taken(config) if attention == "flash" else nullcontext():
        return build_model(config, dtype=_stored(request))


def _stored(request: Request) -> torch.dtype:
    """The dtype in which the model's weights are kept."""
    if request.sharding is not None:
        return DTYPES[request.sharding.param_dtype]
    if request.autocast:
        return DTYPES[request.stored or "fp32"]
    return DTYPES[request.dtype]


def _adapt(model: Any, request: Request, *, checkpointed: bool) -> None:
    from memcore.trace.adapters import attach, pack  # peft takes a second to import

    assert request.adapters is not None, "it is asked for"
    head = model.get_output_embeddings()
    skipped = [] if head is None or request.adapters.packs_head else [head]
    if request.adapters.quantization is not None:
        packed_from = PACKED_FROM if request.code == "litgpt" else None
        pack(model, request.adapters, skipped, DTYPES[request.dtype], packed_from)
    if request.fp32_norms:
        _widen_norms(model)
    if request.code == "litgpt":
        attach_litgpt(model, request.adapters)
    else:
        # What peft does under autocast goes by CUDA's, which is never on in a real run on the CPU.
        attach(model, request.adapters, autocast=request.autocast and request.kernels == "cuda")
    if checkpointed:
        # As transformers 5.24 does with checkpointing (modeling_utils.py, _activation_checkpointing_enable): a frozen
        # embedding's output wants a gradient, without which a reentrant checkpoint would pass none on.
        model.get_input_embeddings().register_forward_hook(lambda _module, _args, out: out.requires_grad_(True))


def _widen_norms(model: nn.Module) -> None:
    """The norms in FP32. Source: trl 0.12, trainer/utils.py, peft_module_casting_to_bf16, after peft's
    prepare_model_for_kbit_training: of what is not packed, modules named so stay in FP32."""
    for name, module in model.named_modules():
        if isinstance(module, nn.LayerNorm) or "norm" in name.rpartition(".")[2]:
            module.to(torch.float32)


def _text_alone(config: PretrainedConfig) -> PretrainedConfig:
    """The text part of a config for several kinds of input, where it is a language model by itself."""
    text = text_config_of(config)
    return text if type(text) in AutoModelForCausalLM._model_mapping else config  # noqa: SLF001  no public way to ask


def _set_shifting(config: PretrainedConfig) -> None:
    """The tokens that an encoder-decoder puts in front of its labels and in their gaps, which take no memory and of
    which a scenario's config holds none."""
    for name in ("decoder_start_token_id", "pad_token_id"):
        if getattr(config, name, None) is None:
            setattr(config, name, 0)


def _has_table(model: nn.Module, positions: int) -> bool:
    """Whether the text model looks positions up, in learned embeddings or in a fixed table."""
    tables = [
        *((name, module.weight) for name, module in model.named_modules() if isinstance(module, nn.Embedding)),
        *model.named_buffers(),
    ]
    words = ("wpe", "position")
    return any(
        any(word in name for word in words) and not is_vision(name) and positions <= table.shape[0] <= positions + 2
        for name, table in tables
        if table.dim() == 2
    )


def make_fake(model: nn.Module, trained_dtype: torch.dtype | None) -> None:
    """A fake tensor in place of each parameter, buffer and other tensor of the meta device; what is tied stays so.

    To be called inside a fake tensor mode. `trained_dtype`: that of trained parameters, where adapters have another
    one than the model.
    """
    made: dict[int, Any] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        trained = isinstance(tensor, nn.Parameter) and tensor.requires_grad
        dtype = trained_dtype if trained and trained_dtype else tensor.dtype
        result = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype)
        return nn.Parameter(result, requires_grad=trained) if isinstance(tensor, nn.Parameter) else result

    for module in model.modules():
        for tensors in (module._parameters, module._buffers, vars(module)):  # noqa: SLF001
            for name, tensor in list(tensors.items()):
                if isinstance(tensor, torch.Tensor) and tensor.is_meta:
                    if id(tensor) not in made:
                        # The meta tensor is kept, or another could take its number.
                        made[id(tensor)] = (fake(tensor), tensor)
                    tensors[name] = made[id(tensor)][0]


def _paths(model: nn.Module) -> Iterator[tuple[int, str]]:
    """Where a module stands: within its layer, "layer" for the layer's own work; or within the model, "loss" for
    what the model's own forward does."""
    for name, module in model.named_modules():
        yield id(module), _plain(name.removeprefix("model.")) or "loss"
    for unit in model.modules():
        if isinstance(unit, Unit):
            yield id(unit), "layer"
            for layer in unit.layers:
                for name, module in layer.named_modules():
                    yield id(module), _plain(name) or "layer"


def _plain(path: str) -> str:
    """A path without the names that adapters put between."""
    return ".".join(part for part in path.split(".") if part not in ("base_layer", "default"))


def trained_shapes(built: Built, wrapped: nn.Module) -> list[tuple[tuple[int, ...], int]]:
    """The shape of each trained parameter that is left, or of this rank's shard of it, in order, and how many the
    whole model has in its place. `wrapped`: the model as an engine has it, which may own parameters itself."""
    counts = Counter(built.plan.order)
    places = {id(p): place for place, unit in enumerate(built.plan.layers) for p in unit.parameters()}
    return [
        (tuple(local_tensor(parameter).shape), counts[places[id(parameter)]] if id(parameter) in places else 1)
        for parameter in wrapped.parameters()
        if parameter.requires_grad
    ]
