"""Run a model's real forward and backward on fake tensors and record what is alive.

Worker processes only: imports torch and transformers.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from memcore.errors import UserError
from memcore.i18n import gettext as _
from memcore.trace import flat_sharding, kernels, sharding
from memcore.trace.autocasting import cuda_lists
from memcore.trace.building import DTYPES, Built, build, make_fake, trained_shapes
from memcore.trace.cache import keys_and_values
from memcore.trace.fused import fused
from memcore.trace.limits import check_sizes, positions_notes
from memcore.trace.losses import hidden_of, loss_of
from memcore.trace.offloading import offloaded
from memcore.trace.optimizer_step import step_transient
from memcore.trace.profile import ActivationProfile, profile_of
from memcore.trace.recorder import Recorder
from memcore.trace.request import FlatSharding, Request, Step
from memcore.trace.sorting import tape_of
from memcore.trace.tape import Tape

if TYPE_CHECKING:
    from memcore.trace.compiling import Compiler

# torch keeps the result of each operation on each set of shapes for as long as the process lives, about 3 KB each
# and some 300 for a trace of new sizes; a worker must not grow. Enough are kept for quick answers to equal questions.
_MOST_CACHED_SHAPES = 10_000


def trace(request: Request) -> ActivationProfile:
    """Trace one training step of a model. Raises UserError with the reason where that fails."""
    return in_words(record(request), request)


def in_words(tape: Tape, request: Request) -> ActivationProfile:
    """The tape of a request's trace as a profile, with notes for the user. Raises UserError where the sequence is too
    long for the model."""
    notes = []
    if tape.attention != request.attention:
        message = _("The model refuses {asked} attention; traced is plain attention.")
        notes.append(message.format(asked=request.attention.replace("_", "-")))
    notes.extend(positions_notes(tape.positions, tape.has_table, request.seq_len))
    if tape.text_alone:
        notes.append(_("Traced is the text model alone: no images or sound."))
    sharding = None if request.sharding is None else asdict(request.sharding)
    return profile_of(tape, request.kernels, notes, sharding)


def record(request: Request) -> Tape:
    """The tape of one training step. Raises UserError with the reason where the model cannot be traced."""
    check_sizes(request.micro_batch, request.seq_len)
    kernels.register()
    attentions = [request.attention] if request.attention == "eager" else [request.attention, "eager"]
    for attention in attentions:
        try:
            return _record(request, attention)
        except UserError:
            if attention == attentions[-1]:
                raise
        except Exception as error:
            if attention == attentions[-1]:
                reason = " ".join(str(error).split())[:200]
                # A bare key or number says nothing by itself.
                reason = reason if " " in reason else f"{type(error).__name__} {reason}".strip()
                raise UserError(_("The model could not be traced: {reason}").format(reason=reason)) from error
    raise AssertionError("the last attention returns or raises")


def _record(request: Request, attention: str) -> Tape:
    tags = _Tags()
    compiler = _compiler(fuses=request.kernels == "cuda") if request.compiled or request.loss_compiled else None
    built = build(request, attention, tags.tagger, compiler if request.compiled else None)
    positions_notes(built.positions, built.has_table, request.seq_len)
    with ExitStack() as stack:
        mesh = stack.enter_context(sharding.ranks(request.sharding)) if request.sharding else None
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        make_fake(built.model, DTYPES[request.adapters.dtype] if request.adapters else None)
        if request.float8 is not None:
            _multiply_in_float8(built.model, request.float8)
        stack.enter_context(kernels.grouped_products())
        stack.enter_context(fused(built.model, request.fused_kernels))
        stack.enter_context(kernels.cuda_dropout() if request.kernels == "cuda" else nullcontext())
        if request.autocast and request.kernels == "cuda":
            stack.enter_context(cuda_lists())
        if built.plan.attention_only:
            stack.enter_context(kernels.recomputed_attention())
        if request.offloads_activations:
            stack.enter_context(offloaded(built.model.get_decoder()))
        if compiler is not None:
            stack.enter_context(compiler)
        tape = _run(built, tags, request, attention, mesh, compiler)
    if FakeTensorMode.cache_info().size > _MOST_CACHED_SHAPES:
        FakeTensorMode.cache_clear()
    return tape


def _compiler(*, fuses: bool) -> "Compiler":
    from memcore.trace.compiling import Compiler  # torch's compiler takes a second to import

    return Compiler(fuses=fuses)


def _multiply_in_float8(model: Any, recipe: str) -> None:
    from memcore.trace.float8 import convert  # it knows torch's compiler too

    convert(model, recipe)


class _Tags:
    """Tells the recorder which segment of the step it is in, as the units call."""

    def __init__(self) -> None:
        self.recorder: Recorder | None = None
        self.backward = False
        self.last = 0

    def begin_backward(self) -> None:
        """What units run from here on is recomputed."""
        self.backward = True
        if self.recorder is not None:
            self.recorder.begin_backward()

    def reduce(self) -> None:
        """The backward of all units is done."""
        assert self.recorder is not None, "it is told of a run"
        self.recorder.segment, self.recorder.next_segment = "reduce", None

    def tagger(self, place: int) -> Callable[[str], None]:
        """The tag function of the unit at that place."""

        def tag(what: str) -> None:
            if self.recorder is None:
                return
            self.recorder.next_segment = None
            if what == "backward":
                self.recorder.segment = f"backward {place}"
            elif not self.backward and what == "forward":
                self.recorder.segment = f"forward {place}"
            elif not self.backward and place == self.last:
                # The caller lets go of the unit's input first: still that unit's forward, as between two units.
                self.recorder.next_segment = "loss"

        return tag


def _run(built: Built, tags: _Tags, request: Request, attention: str, mesh: Any, compiler: "Compiler | None") -> Tape:
    """Run the step and return what was recorded. `mesh`: the ranks, None for one."""
    model, plan = built.model, built.plan
    tokens = torch.zeros((request.micro_batch, request.seq_len), dtype=torch.int64)
    root = sharding.Root(model, partial(_forward, model, request, compiler if request.loss_compiled else None))
    step = _sharded(root, request, mesh)
    hidden = kernels.cuda_hidden if request.kernels == "cuda" else kernels.cpu_hidden
    known = [*_kept(step, request), *model.buffers(), tokens]
    paths = {**built.paths, id(root): "loss"}
    recorder = Recorder(known, hidden, paths)
    if compiler is not None:
        _step(step, tokens, tags, request)  # unseen: what is compiled is so as it first runs
        step.zero_grad()
        tags.backward, compiler.recorder = False, recorder
    tags.recorder, tags.last = recorder, len(plan.picked) - 1
    # The hooks know the recorder alone: one that knew the model would keep it alive for good, since the garbage
    # collector cannot see that a parameter holds its hook.
    take = partial(_step_one, recorder, _transients(built, request)) if request.step_in_backward else None
    for parameter in _whole(model, request):
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(take or (lambda trained: recorder.is_gradient(trained.grad)))
    with ExitStack() as stack:
        if isinstance(request.sharding, FlatSharding):
            stack.enter_context(flat_sharding.observed(root, recorder, tags.reduce))
        elif request.sharding is not None:
            on_cpu = request.kernels == "cpu"
            units = request.sharding.fsdp_units
            stack.enter_context(sharding.observed(root, recorder, tags.reduce, units=units, on_cpu=on_cpu))
        stack.enter_context(recorder.recording())
        _step(step, tokens, tags, request)
    transient = 0 if request.step_in_backward else _transient(trained_shapes(built, step), request.step)
    return tape_of(
        recorder.changes,
        recorder.gradients,
        recorder.forward_changes,
        recorder.told,
        order=plan.order,
        unit_sizes=tuple(len(unit) for unit in plan.units),
        traced_layers=plan.traced_layers,
        attention=attention,
        positions=built.positions,
        has_table=built.has_table,
        text_alone=built.text_alone,
        optimizer_step_bytes=transient,
        trained_bytes=next(p.element_size() for p in model.parameters() if p.requires_grad),
        versions=f"torch {torch.__version__}, transformers {transformers.__version__}",
    )


def _transient(shapes: Sequence[tuple[tuple[int, ...], int]], step: Step | None) -> int | None:
    """What the optimizer's step makes for a moment; None where it is not one of torch's."""
    return None if step is None else step_transient(shapes, step, DTYPES[step.dtype])


def _transients(built: Built, request: Request) -> dict[tuple[int, ...], int]:
    """The same for a step on one parameter alone, by its shape."""
    return {shape: _transient([(shape, 1)], request.step) or 0 for shape, _count in trained_shapes(built, built.model)}


def _step_one(recorder: Recorder, transients: Mapping[tuple[int, ...], int], trained: torch.Tensor) -> None:
    """Step one parameter in the backward, and let its gradient go.

    Source: torchtune 0.4, training/memory.py, register_optim_in_bwd_hooks.
    """
    recorder.is_gradient(trained.grad)
    if transient := transients[tuple(trained.shape)]:
        recorder.for_a_moment(transient)
    trained.grad = None


def _sharded(root: sharding.Root, request: Request, mesh: Any) -> nn.Module:
    """The step's forward under the engine that shards, where there is one."""
    if isinstance(request.sharding, FlatSharding):
        return flat_sharding.shard(root, request.sharding, mesh)
    if request.sharding is not None:
        sharding.shard(root, request.sharding, None if request.autocast else request.dtype, mesh)
    return root


def _kept(step: nn.Module, request: Request) -> list[torch.Tensor]:
    """The weights that are there all the time."""
    if isinstance(request.sharding, FlatSharding):
        return flat_sharding.kept(step, request.sharding)
    return list(step.parameters())


def _whole(model: Any, request: Request) -> list[Any]:
    """The parameters that autograd accumulates gradients at; a flat one's are seen where they are reduced."""
    if isinstance(request.sharding, FlatSharding):
        return flat_sharding.ignored(model, request.sharding)
    return list(model.parameters())


def _forward(
    model: Any, request: Request, compiler: "Compiler | None", tokens: torch.Tensor
) -> tuple[torch.Tensor, Any]:
    """The loss, or the decoder's hidden states; and what else a training loop may hold."""
    with ExitStack() as stack:
        cached = stack.enter_context(keys_and_values(model)) if request.use_cache else None
        if request.autocast:
            stack.enter_context(torch.autocast("cpu", DTYPES[request.dtype]))
        if request.loss == "none":
            return hidden_of(model, tokens), cached
        compiled = {} if compiler is None else {"compiled": compiler.compiled}
        loss, outputs = loss_of(model, tokens, request, **compiled)
        return loss, (outputs, cached)


def _step(root: nn.Module, tokens: torch.Tensor, tags: _Tags, request: Request) -> None:
    """Forward, loss and backward."""
    result, outputs = root(tokens)
    gradient = torch.empty_like(result) if request.loss == "none" else None
    if not request.logits_retained:
        del outputs
    tags.begin_backward()
    torch.autograd.backward(result, gradient)
