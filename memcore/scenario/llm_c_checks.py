"""What llm.c can be asked for: GPT-2, in one dtype, with AdamW."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from memcore.engine_options import EngineName
from memcore.i18n import gettext as _
from memcore.models import catalogue_model
from memcore.optimizers import OptimizerName
from memcore.recipes import CONVENTIONS, DType
from memcore.scenario.fields import refuse
from memcore.scenario.losses import Loss
from memcore.scenario.parts import Method, Workload

if TYPE_CHECKING:
    from memcore.scenario.whole import Scenario

# llm.c f1e2ace6, train_gpt2.py, pad_vocab: multiple=128.
_WORDS = 128


def check_llm_c(scenario: "Scenario") -> None:
    """Raise UserError, naming the engine, for the first thing that its program does not do."""
    if scenario.parallelism.engine is not EngineName.LLM_C:
        return
    for what in _beyond(scenario):
        message = _("{field} is llm_c, whose program {what}.")
        raise refuse("parallelism.engine", message, what=what)


def _beyond(scenario: "Scenario") -> Iterator[str]:
    """What the scenario asks for beside what the program does, in words."""
    model, recipe, work = scenario.model, scenario.recipe, scenario.workload
    config = catalogue_model(model.name).config if model.name is not None else model.config
    if config is None or config.get("model_type") != "gpt2" or model.code != "transformers":
        yield _("trains GPT-2 alone: give a config.json of that kind")
        return
    if config.get("vocab_size", 0) % _WORDS:
        yield _("pads the vocabulary to multiples of {words}: give vocab_size as it is then").format(words=_WORDS)
    if scenario.parallelism.stage > 1:
        yield _("has the ZeRO stages 0 and 1 alone")
    optimizer = recipe.optimizer
    plain = optimizer.name is OptimizerName.ADAMW and optimizer.bits == 32 and not optimizer.paged
    if not plain or optimizer.in_backward or optimizer.implementation not in (None, "fused"):
        yield _("has an AdamW of its own alone, in one kernel")
    if recipe.method is not Method.FULL or recipe.fp8 is not None:
        yield _("trains every parameter, in the dtype that it was compiled for")
    convention = CONVENTIONS[recipe.convention]
    dtypes = {getattr(recipe, name) or getattr(convention, name) for name in _DTYPES}
    if len(dtypes) > 1 or (recipe.state_dtype or convention.state_dtype) is not DType.FP32 or _accumulates(scenario):
        yield _("has weights, gradients and activations in one dtype, and optimizer states in FP32")
    if work.attention == "memory_efficient" or work.checkpointing != "none":
        yield _("has cuDNN's attention or plain one, and recomputes by engine_config.recompute alone")
    usual = Workload(loss=Loss.FUSED_CE)
    others = ("logits_upcast", "shifted_copy", "logits_retained", "use_cache", "fused_kernels", "compile", "reentrant")
    if work.loss is not Loss.FUSED_CE or any(getattr(work, name) != getattr(usual, name) for name in others):
        yield _("writes the logits' gradients over them (workload.loss fused_ce), and has no other settings of a loss")
    if scenario.llm_c_config.layout == "2024-05" and scenario.llm_c_config.recompute == 2:
        yield _("recomputed no norms yet in the layout 2024-05")
    if scenario.hardware.expandable_segments:
        yield _("does not use PyTorch's allocator: leave hardware.expandable_segments out")


_DTYPES = ("param_dtype", "compute_dtype", "grad_dtype", "reduce_dtype")


def _accumulates(scenario: "Scenario") -> bool:
    return CONVENTIONS[scenario.recipe.convention].accumulate_dtype is not None
