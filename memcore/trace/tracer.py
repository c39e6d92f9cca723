"""Run a model's real forward and backward on fake tensors and record what is alive.

Worker processes only: imports torch and transformers. A model is built at full depth on the meta device of
fake tensors (nothing is allocated), and its layers are thinned out to one of each kind, with the first and
the last; :mod:`memcore.trace.replay` puts the others back.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from memcore.activations.recompute import Checkpointing, checkpointing
from memcore.counting import build_model, load_config
from memcore.errors import UserError
from memcore.i18n import gettext as _
from memcore.trace import kernels
from memcore.trace.profile import ActivationProfile, dump_profile
from memcore.trace.recorder import Recorder
from memcore.trace.replay import Event, TracedStep, TracedUnit, replay

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What to trace. `config` is a config.json's content; sizes in tokens; `loss` "unfused" or "none" (the decoder
    alone, where the loss is added in closed form)."""

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
    kernels.register()
    attentions = [request.attention] if request.attention == "eager" else [request.attention, "eager"]
    for attention in attentions:
        try:
            return _trace(request, attention)
        except UserError:
            raise
        except Exception as error:
            if attention == attentions[-1]:
                reason = " ".join(str(error).split())[:200] or type(error).__name__
                raise UserError(_("The model could not be traced: {reason}").format(reason=reason)) from error
    raise AssertionError("the last attention returns or raises")


def _trace(request: Request, attention: str) -> ActivationProfile:
    config = load_config(request.config)
    names = {"flash": kernels.FLASH, "memory_efficient": kernels.MEMORY_EFFICIENT, "eager": "eager"}
    config._attn_implementation = names[attention]  # noqa: SLF001  how transformers is told before a model is built
    config.use_cache = False
    with ExitStack() as stack:
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(kernels.cuda_dropout() if request.kernels == "cuda" else nullcontext())
        model = build_model(config, device="cpu", dtype=DTYPES[request.dtype])
        plan = _plan(model, request)
        step = _Stepper(model, plan, request).run()
    replayed = replay(step, plan.order)
    return _profile(replayed.forward, replayed.backward, replayed.loss, plan, request, attention)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Plan:
    """Which layers run: `units` of consecutive layers, `picked` of them traced, `order[i]` the pick unit i is like.

    `recomputed[i]`: whether unit i is run again in the backward.
    """

    layers: nn.ModuleList
    units: tuple[tuple[int, ...], ...]
    recomputed: tuple[bool, ...]
    picked: tuple[int, ...]
    order: tuple[int, ...]
    attention_only: bool


def _plan(model: nn.Module, request: Request) -> _Plan:
    layers = _decoder_layers(model)
    wanted = checkpointing(request.checkpointing, len(layers))
    units = _units(wanted)
    recomputed = tuple(wanted.groups[unit[0]] is not None for unit in units)
    kinds = [(tuple(_kind(layers[i]) for i in unit), again) for unit, again in zip(units, recomputed, strict=True)]
    picked = tuple(range(len(units))) if request.full_depth else _pick(kinds)
    return _Plan(
        layers=layers,
        units=units,
        recomputed=recomputed,
        picked=picked,
        order=picked if request.full_depth else _order(kinds, picked),
        attention_only=wanted.attention_only,
    )


def _decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The module list of decoder layers: the longest one outside vision towers."""
    lists = [m for name, m in model.named_modules() if isinstance(m, nn.ModuleList) and "vision" not in name]
    if not lists:
        raise UserError(_("The model has no list of layers to trace."))
    return max(lists, key=lambda found: (len(found), sum(p.numel() for p in found.parameters())))


def _units(wanted: Checkpointing) -> tuple[tuple[int, ...], ...]:
    units: list[list[int]] = []
    for index, group in enumerate(wanted.groups):
        if units and group is not None and group != index:
            units[-1].append(index)
        else:
            units.append([index])
    return tuple(tuple(unit) for unit in units)


def _kind(layer: nn.Module) -> tuple[Any, ...]:
    """What makes two layers alike: their parameters, and what their attention looks at."""
    shapes = tuple((name, tuple(parameter.shape)) for name, parameter in layer.named_parameters())
    return (*shapes, getattr(layer, "attention_type", None), getattr(layer, "layer_type", None))


def _pick(kinds: Sequence[Any]) -> tuple[int, ...]:
    """The first unit, one of each kind in between, and the last."""
    inner: dict[Any, int] = {}
    for index in range(1, len(kinds) - 1):
        inner.setdefault(kinds[index], index)
    return tuple(sorted({0, len(kinds) - 1, *inner.values()}))


def _order(kinds: Sequence[Any], picked: Sequence[int]) -> tuple[int, ...]:
    """For each unit the place, among the picked, of the one that it is like."""
    inner = {kinds[index]: place for place, index in enumerate(picked) if 0 < index < len(kinds) - 1}
    places = [inner.get(kind, 0) for kind in kinds]
    places[0], places[-1] = 0, len(picked) - 1
    return tuple(places)


class _Unit(nn.Module):
    """Layers that are recomputed together, or one that is not, in place of one entry of the model's list."""

    def __init__(self, layers: Sequence[nn.Module], recomputed: bool, tag: Callable[[str], None]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self._recomputed = recomputed
        self._tag = tag
        self.forwards = 0

    def __getattr__(self, name: str) -> Any:
        """What the model asks of a layer itself, such as its kind of attention."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.layers[0], name)

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the layers, through a checkpoint where they are recomputed."""
        self._tag("forward")
        if self._recomputed and torch.is_grad_enabled():
            result = checkpoint(self._run, hidden, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
        else:
            result = self._run(hidden, *args, **kwargs)
        first = result[0] if isinstance(result, tuple) else result
        # On the node, not the tensor: a tensor's hook would keep the tensor alive.
        first.grad_fn.register_prehook(lambda _gradients: self._tag("backward"))
        self._tag("between")
        return result

    def _run(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result: Any = hidden
        for layer in self.layers:
            result = layer(result[0] if isinstance(result, tuple) else result, *args, **kwargs)
        return result


class _Stepper:
    """One traced step: puts the picked units into the model, runs it, and sorts the events by segment."""

    def __init__(self, model: nn.Module, plan: _Plan, request: Request) -> None:
        self._plan, self._request = plan, request
        self._model: Any = model
        self._backward = False
        self._thin_out()
        # Only now: the layers that were left out have given their storages' addresses back.
        hidden = kernels.cuda_hidden if request.kernels == "cuda" else kernels.no_hidden
        self._recorder = Recorder([*model.parameters(), *model.buffers()], hidden)

    def run(self) -> TracedStep:
        """Run the step and return its events by unit."""
        for parameter in self._model.parameters():
            hook: Any = parameter.register_post_accumulate_grad_hook
            hook(lambda p: self._recorder.is_gradient(p.grad))
        shape = (self._request.micro_batch, self._request.seq_len)
        tokens = torch.zeros(shape, dtype=torch.int64)
        with self._recorder:
            if self._request.loss == "unfused":
                output = self._model(input_ids=tokens, labels=tokens, use_cache=False)
                loss = output.loss
                if not self._request.logits_retained:
                    del output
                self._backward = True
                loss.backward()
            else:
                hidden = self._model.get_decoder()(input_ids=tokens, use_cache=False)[0]
                gradient = torch.empty_like(hidden)
                self._backward = True
                torch.autograd.backward(hidden, gradient)
                del hidden, gradient
        return self._sorted()

    def _thin_out(self) -> None:
        layers, plan = self._plan.layers, self._plan
        units = [
            _Unit([layers[i] for i in plan.units[unit]], plan.recomputed[unit], self._tagger(place))
            for place, unit in enumerate(plan.picked)
        ]
        for _index in range(len(layers)):
            del layers[-1]
        layers.extend(units)
        for config in {id(m.config): m.config for m in self._model.modules() if hasattr(m, "config")}.values():
            text = config.get_text_config()
            if getattr(text, "num_hidden_layers", None):
                text.num_hidden_layers = len(units)

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
        for segment, number, change in self._recorder.events:
            category = "temporary" if number < 0 else categories[number]
            segments.setdefault(segment, []).append((change, category))
        units = tuple(
            TracedUnit(
                forward=tuple(segments.get(f"forward {place}", ())),
                backward=tuple(segments.get(f"backward {place}", ())),
            )
            for place in range(len(self._plan.picked))
        )
        return TracedStep(
            before=tuple(segments.get("before", ())), units=units, loss=tuple(segments.get("loss", ())), after=()
        )

    def _categories(self) -> dict[int, str]:
        """Saved: made in a forward and alive after it. Loss: made between the last forward and the first backward.
        Recomputed: made in a unit's backward that runs its forward again."""
        born: dict[int, str] = {}
        died: dict[int, str] = {}
        for segment, number, _change in self._recorder.events:
            if number in born:
                died[number] = segment
            else:
                born[number] = segment
        found = {}
        for number, segment in born.items():
            if segment == "loss":
                found[number] = "loss"
            elif segment.startswith(("forward", "before")):
                found[number] = "temporary" if died.get(number) == segment else "saved"
            else:
                place = int(segment.split()[1])
                found[number] = "recomputed" if self._plan.recomputed[self._plan.picked[place]] else "temporary"
        return found


def _profile(
    forward: Sequence[Mapping[str, int]],
    backward: Sequence[Mapping[str, int]],
    loss: Mapping[str, int],
    plan: _Plan,
    request: Request,
    attention: str,
) -> ActivationProfile:
    """The units' figures spread over their layers."""
    notes = []
    if attention != request.attention:
        message = _("The model refuses {asked} attention; traced is plain attention.")
        notes.append(message.format(asked=request.attention.replace("_", "-")))
    sizes = [len(unit) for unit in plan.units]

    def spread(moments: Sequence[Mapping[str, int]]) -> tuple[Mapping[str, int], ...]:
        return tuple(dict(moment) for moment, size in zip(moments, sizes, strict=True) for _layer in range(size))

    return ActivationProfile(
        forward=spread(forward),
        backward=spread(backward),
        loss=dict(loss),
        kernels=request.kernels,
        attention=attention,
        num_layers=sum(sizes),
        traced_layers=sum(sizes[unit] for unit in plan.picked),
        versions=f"torch {torch.__version__}, transformers {transformers.__version__}",
        notes=tuple(notes),
    )
