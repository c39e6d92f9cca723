"""What a user should know beside the verdict: one sentence each, on every page, on the command line and in JSON."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from memcore.budget import Budget
from memcore.engine_options import ENGINE_OPTIONS, EngineName
from memcore.explain import ATTENTION_LABELS
from memcore.i18n import gettext as _
from memcore.recipes import CONVENTIONS
from memcore.units import ByteUnit, format_bytes, format_count


class NoticeKind(StrEnum):
    """What a notice is about."""

    CANNOT_RUN = "cannot_run"
    BEYOND_POSITIONS = "beyond_positions"
    CONVENTION = "convention"
    SAVES_NOTHING = "saves_nothing"
    START = "start"
    NOT_TRACED = "not_traced"
    TRACE = "trace"
    FRAGMENTS = "fragments"
    QUANTISED = "quantised"


@dataclass(frozen=True, kw_only=True, slots=True)
class Notice:
    """One thing to know, as a sentence."""

    kind: NoticeKind
    text: str

    @property
    def stops(self) -> bool:
        """Whether the run cannot take place, whatever the memory."""
        return self.kind is NoticeKind.CANNOT_RUN


def notices(budget: Budget, unit: ByteUnit) -> list[Notice]:
    """All there is to know beside the verdict, what stops the run first."""
    return [
        Notice(kind=kind, text=text) for kind, sentences in _SENTENCES.items() for text in sentences(budget, unit)
    ]  # fmt: skip


def _cannot_run(budget: Budget, _unit: ByteUnit) -> Iterator[str]:
    if not _beyond(budget) or budget.inventory is None or not budget.inventory.learns_positions:
        return
    message = _("It cannot run: workload.seq_len is {seq:,}, and the model has a table of {positions:,} positions.")
    yield message.format(seq=budget.scenario.workload.seq_len, positions=budget.inventory.shapes.max_positions)


def _beyond_positions(budget: Budget, _unit: ByteUnit) -> Iterator[str]:
    """Said where no trace does."""
    inventory = budget.inventory
    if not _beyond(budget) or inventory is None or inventory.learns_positions or budget.evidence.profile is not None:
        return
    message = _("workload.seq_len is {seq:,}, beyond the {positions:,} positions that the model was made for.")
    yield message.format(seq=budget.scenario.workload.seq_len, positions=inventory.shapes.max_positions)


def _beyond(budget: Budget) -> bool:
    return budget.inventory is not None and 0 < budget.inventory.shapes.max_positions < budget.scenario.workload.seq_len


def _foreign_convention(budget: Budget, _unit: ByteUnit) -> Iterator[str]:
    """A convention that no training loop with this engine has, beside the engine's own."""
    scenario, engine = budget.scenario, budget.scenario.parallelism.engine
    named, own = scenario.recipe.convention, scenario.own_convention
    if scenario.has_convention(named):
        return
    message = _(
        'recipe.convention is {named} ("{label}"), which no training loop with {engine} has: its own is {own} '
        '("{own_label}").'
    )
    labels = {"label": CONVENTIONS[named].label, "own_label": CONVENTIONS[own].label}
    shown = _("one GPU") if engine is EngineName.SINGLE else ENGINE_OPTIONS[engine].label
    yield message.format(named=named.value, engine=shown, own=own.value, **labels)


def _saves_nothing(budget: Budget, _unit: ByteUnit) -> Iterator[str]:
    """Scores are what checkpointing of the attention recomputes, and plain attention alone keeps them (arXiv
    2205.05198, section 5; 2205.14135, section 3.1)."""
    work = budget.scenario.workload
    if work.checkpointing != "attention" or work.attention == "eager" or budget.inventory is None:
        return
    message = _("workload.checkpointing is attention, which saves nothing here: {kind} attention keeps no scores.")
    yield message.format(kind=_(ATTENTION_LABELS[work.attention]))


def _start(budget: Budget, unit: ByteUnit) -> Iterator[str]:
    if budget.start is None or budget.start.largest <= budget.peak_bytes:
        return
    message = _(
        "Made whole on the GPU first, the model takes {start} while the engine is started, more than the "
        "step: make it on the meta device (FSDP2) or under zero.Init (DeepSpeed)."
    )
    yield message.format(start=format_bytes(budget.start.largest, unit))


def _not_traced(budget: Budget, unit: ByteUnit) -> Iterator[str]:
    """What cannot run is not traced either, and says why itself."""
    if budget.evidence.untraced and not any(_cannot_run(budget, unit)):
        yield _("Not traced: {reason}").format(reason=budget.evidence.untraced)


def _of_the_trace(budget: Budget, _unit: ByteUnit) -> Iterator[str]:
    if budget.evidence.profile is not None:
        yield from budget.evidence.profile.notes


def _fragments(budget: Budget, _unit: ByteUnit) -> Iterator[str]:
    """Where what is needed is there, but not in pieces of the right sizes."""
    reservation = budget.ladder.reservation
    if reservation is None or not reservation.overfull or budget.ladder.headroom < 0:
        return
    text = _("What is free lies in pieces: replayed through PyTorch's allocator, some tensor finds none large enough.")
    if not budget.scenario.hardware.expandable_segments:
        text += " " + _("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True lets pieces grow.")
    yield text


def _quantised(budget: Budget, _unit: ByteUnit) -> Iterator[str]:
    if not budget.evidence.quantised_as:
        return
    message = _(
        "The checkpoint is stored as {method}: full training needs it dequantised; counted here are {count} whole "
        "parameters, never its packed blocks."
    )
    yield message.format(method=budget.evidence.quantised_as, count=format_count(budget.states.n_params))


_SENTENCES: dict[NoticeKind, Callable[[Budget, ByteUnit], Iterator[str]]] = {
    NoticeKind.CANNOT_RUN: _cannot_run,
    NoticeKind.BEYOND_POSITIONS: _beyond_positions,
    NoticeKind.CONVENTION: _foreign_convention,
    NoticeKind.SAVES_NOTHING: _saves_nothing,
    NoticeKind.START: _start,
    NoticeKind.NOT_TRACED: _not_traced,
    NoticeKind.TRACE: _of_the_trace,
    NoticeKind.FRAGMENTS: _fragments,
    NoticeKind.QUANTISED: _quantised,
}
