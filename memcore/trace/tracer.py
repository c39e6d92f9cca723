"""Run a model's real forward and backward on fake tensors and record what is alive.

Worker processes only: imports torch and transformers. A model is built at full depth as fake tensors (nothing
is allocated), and its layers are thinned out to one of each kind, with the first and the last;
:mod:`memcore.trace.replay` puts the others back.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, PretrainedConfig

from memcore.counting import build_model, load_config
from memcore.errors import UserError
from memcore.i18n import gettext as _
from memcore.trace import kernels
from memcore.trace.limits import check_sizes, positions_note
from memcore.trace.plan import Plan, make_plan, thin_out
from memcore.trace.profile import ActivationProfile, dump_profile
from memcore.trace.recorder import Recorder
from memcore.trace.replay import GRADIENTS, Event, Replayed, TracedStep, TracedUnit, replay

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# torch keeps the result of each operation on each set of shapes for as long as the process lives, about 3 KB each
# and some 300 for a trace of new sizes; a worker must not grow. Enough are kept for quick answers to equal questions.
_MOST_CACHED_SHAPES = 10_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What to trace. `config` is a config.json's content; sizes in tokens; `loss` "unfused" or "none" (the decoder
    alone, where the loss is added in closed form). `full_depth`: run every layer, to check the replay."""

    config: Mapping[str, Any]
    micro_batch: int
    seq_len: int
    dtype: str
    attention: str
    checkpointing: str
    loss: str
    logits_retained: bool = False
    kernels: str = "cuda"
    full_depth: bool = False


def trace_task(payload: dict[str, Any]) -> dict[str, Any]:
    """The worker's task: a Request's fields in, a profile's data out. Raises UserError where it cannot be traced."""
    return dump_profile(trace(Request(**payload)))


def trace(request: Request) -> ActivationProfile:
    """Trace one training step of a model. Raises UserError with the reason where that fails."""
    check_sizes(request.micro_batch, request.seq_len)
    kernels.register()
    attentions = [request.attention] if request.attention == "eager" else [request.attention, "eager"]
    for attention in attentions:
        try:
            return _trace(request, attention)
        except UserError:
            if attention == attentions[-1]:
                raise
        except Exception as error:
            if attention == attentions[-1]:
                reason = " ".join(str(error).split())[:200] or type(error).__name__
                raise UserError(_("The model could not be traced: {reason}").format(reason=reason)) from error
    raise AssertionError("the last attention returns or raises")


def _trace(request: Request, attention: str) -> ActivationProfile:
    whole = load_config(request.config)
    config = _text_alone(whole)
    names = {"flash": kernels.FLASH, "memory_efficient": kernels.MEMORY_EFFICIENT, "eager": "eager"}
    config._attn_implementation = names[attention]  # noqa: SLF001  how transformers is told before a model is built
    config.use_cache = False
    with ExitStack() as stack:
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(kernels.grouped_products())
        stack.enter_context(kernels.cuda_dropout() if request.kernels == "cuda" else nullcontext())
        with kernels.flash_taken(config) if attention == "flash" else nullcontext():
            model = build_model(config, device="cpu", dtype=DTYPES[request.dtype])
        notes = [*_attention_notes(request, attention), *positions_note(model, request.seq_len)]
        if config is not whole:
            notes.append(_("Traced is the text model alone: no images or sound."))
        plan = make_plan(model, request.checkpointing, full_depth=request.full_depth)
        if plan.attention_only:
            stack.enter_context(kernels.recomputed_attention())
        step = _Stepper(model, plan, request).run()
    if FakeTensorMode.cache_info().size > _MOST_CACHED_SHAPES:
        FakeTensorMode.cache_clear()
    return _profile(replay(step, plan.order), plan, request, attention, notes)


def _text_alone(config: PretrainedConfig) -> PretrainedConfig:
    """The text part of a config for several kinds of input, where it is a language model by itself."""
    text = config.get_text_config()
    return text if type(text) in AutoModelForCausalLM._model_mapping else config  # noqa: SLF001  no public way to ask


class _Stepper:
    """One traced step: puts the picked units into the model, runs it, and sorts the events by segment."""

    def __init__(self, model: nn.Module, plan: Plan, request: Request) -> None:
        self._plan, self._request = plan, request
        self._model: Any = model
        self._backward = False
        self._tokens = torch.zeros((request.micro_batch, request.seq_len), dtype=torch.int64)
        thin_out(model, plan, self._tagger)
        # Only now: the layers that were left out have given their storages' addresses back.
        hidden = kernels.cuda_hidden if request.kernels == "cuda" else kernels.no_hidden
        self._recorder = Recorder([*model.parameters(), *model.buffers(), self._tokens], hidden)

    def run(self) -> TracedStep:
        """Run the step and return its events by unit."""
        # The hooks know the recorder alone: one that knew the model would keep it alive for good, since the garbage
        # collector cannot see that a parameter holds its hook.
        recorder = self._recorder
        for parameter in self._model.parameters():
            hook: Any = parameter.register_post_accumulate_grad_hook
            hook(lambda trained: recorder.is_gradient(trained.grad))
        with self._recorder:
            if self._request.loss == "unfused":
                output = self._model(input_ids=self._tokens, labels=self._tokens, use_cache=False)
                loss = output.loss
                if not self._request.logits_retained:
                    del output
                self._backward = True
                loss.backward()
            else:
                hidden = self._model.get_decoder()(input_ids=self._tokens, use_cache=False)[0]
                gradient = torch.empty_like(hidden)
                self._backward = True
                torch.autograd.backward(hidden, gradient)
                del hidden, gradient
        return self._sorted()

    def _tagger(self, place: int) -> Callable[[str], None]:
        def tag(what: str) -> None:
            if what == "backward":
                self._recorder.segment = f"backward {place}"
            elif not self._backward and what == "forward":
                self._recorder.segment = f"forward {place}"
            elif not self._backward and place == len(self._plan.picked) - 1:
                # Between two units the caller lets go of the first one's input: still that unit's forward.
                self._recorder.segment = "loss"

        return tag

    def _sorted(self) -> TracedStep:
        """Events by segment, each with the category of its storage."""
        categories = self._categories()
        segments: dict[str, list[Event]] = {}
        repeated: dict[str, list[Event]] = {}
        shared: set[int | None] = set()
        for change in self._recorder.changes:
            if change.gradient:
                category = GRADIENTS
            else:
                category = "temporary" if change.storage is None else categories[change.storage]
            event = (change.num_bytes, category)
            segments.setdefault(change.segment, []).append(event)
            if change.segment == "before":
                shared.add(change.storage)
            elif change.storage not in shared:
                repeated.setdefault(change.segment, []).append(event)
        units = tuple(
            TracedUnit(
                forward=tuple(segments.get(f"forward {place}", ())),
                backward=tuple(segments.get(f"backward {place}", ())),
                repeated=tuple(repeated.get(f"backward {place}", ())),
            )
            for place in range(len(self._plan.picked))
        )
        return TracedStep(before=tuple(segments.get("before", ())), units=units, loss=tuple(segments.get("loss", ())))

    def _categories(self) -> dict[int, str]:
        """Saved: made in a forward and alive after it. Loss: made between the last forward and the first backward.
        Recomputed: made in a backward that runs a forward again."""
        found: dict[int, str] = {}
        born: dict[int, str] = {}
        for change in self._recorder.changes:
            number, segment = change.storage, change.segment
            if number is None:
                continue
            if number not in born:
                born[number] = segment
                if segment == "loss":
                    found[number] = "loss"
                elif segment.startswith("backward"):
                    found[number] = "recomputed" if change.recomputed else "temporary"
                else:
                    found[number] = "saved"
            elif change.num_bytes < 0 and found[number] == "saved" and segment == born[number]:
                found[number] = "temporary"
        return found


def _attention_notes(request: Request, attention: str) -> list[str]:
    if attention == request.attention:
        return []
    message = _("The model refuses {asked} attention; traced is plain attention.")
    return [message.format(asked=request.attention.replace("_", "-"))]


def _profile(
    replayed: Replayed, plan: Plan, request: Request, attention: str, notes: Sequence[str]
) -> ActivationProfile:
    """The units' figures spread over their layers."""
    sizes = [len(unit) for unit in plan.units]

    def spread(moments: Sequence[Mapping[str, int]]) -> tuple[Mapping[str, int], ...]:
        return tuple(dict(moment) for moment, size in zip(moments, sizes, strict=True) for _layer in range(size))

    return ActivationProfile(
        forward=spread(replayed.forward),
        backward=spread(replayed.backward),
        loss=dict(replayed.loss),
        with_gradients=replayed.with_gradients,
        kernels=request.kernels,
        attention=attention,
        num_layers=plan.num_layers,
        traced_layers=plan.traced_layers,
        versions=f"torch {torch.__version__}, transformers {transformers.__version__}",
        notes=tuple(notes),
    )
