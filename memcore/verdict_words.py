"""The verdict in words, and the figures under it."""

from collections.abc import Callable

from memcore.budget import Budget, Verdict
from memcore.explain import EVIDENCE_LABELS, MISSING_LABELS, PHASE_LABELS, Explanation, term_label
from memcore.i18n import gettext as _
from memcore.i18n import mark
from memcore.ladder import SEGMENT_SOURCE, Ladder
from memcore.terms import EvidenceKind
from memcore.trace.request import trace_request
from memcore.units import ByteUnit, format_bytes

_WORDS = {
    Verdict.FITS: mark("Fits"),
    Verdict.UNCERTAIN: mark("Tight"),
    Verdict.DOES_NOT_FIT: mark("Does not fit"),
}


def verdict_word(verdict: Verdict, needed: int, usable: int) -> str:
    """The verdict in a few words: within the error band, also on which side of the card's memory the figure is."""
    if verdict is Verdict.UNCERTAIN and needed > usable:
        return _("Probably does not fit")
    return _(_WORDS[verdict])


def headline(budget: Budget, unit: ByteUnit) -> str:
    """Whether it fits: what is needed, and what there is."""
    ladder = budget.ladder
    sentences: dict[Verdict, Callable[[], str]] = {
        Verdict.FITS: lambda: _("Fits: the peak needs at least {need} of the {usable} usable on the {gpu}."),
        Verdict.UNCERTAIN: lambda: (
            _(
                "Probably does not fit: the peak needs at least {need}, and {usable} is usable on the {gpu}; "
                "the figure may be {band}% off."
            )
            if ladder.headroom < 0
            else _(
                "Tight: the peak needs at least {need} of the {usable} usable on the {gpu}; "
                "the figure may be {band}% off."
            )
        ),
        Verdict.DOES_NOT_FIT: lambda: _(
            "Does not fit: the peak needs at least {need}, and {usable} is usable on the {gpu}."
        ),
    }
    return sentences[budget.verdict]().format(
        need=format_bytes(ladder.needed, unit),
        usable=format_bytes(ladder.usable, unit),
        gpu=budget.scenario.hardware.gpu,
        band=budget.band.percent,
    )


def reasons(budget: Budget, unit: ByteUnit) -> str:
    """What is to be said after the headline: what nvidia-smi shows, which phase binds and why, what is left out."""
    binds = _("The {phase} binds.").format(phase=_(PHASE_LABELS[budget.binding_phase]))
    sentences = [
        binds,
        *_binding_reason(budget, unit),
        *_on_the_device(budget.ladder, unit),
        *missing_sentences(budget, unit),
    ]
    return " ".join(sentences)


def verdict_sentence(budget: Budget, unit: ByteUnit) -> str:
    """The verdict in words, whole."""
    return f"{headline(budget, unit)} {reasons(budget, unit)}"


def _on_the_device(ladder: Ladder, unit: ByteUnit) -> list[str]:
    """What nvidia-smi shows, where a trace says so and the run gets that far."""
    if not ladder.steady or ladder.headroom < 0:
        return []
    if ladder.cached * 100 < ladder.device:
        return [_("nvidia-smi will show about {device}.").format(device=format_bytes(ladder.device, unit))]
    sentence = _(
        "nvidia-smi will show about {device}: {cached} of it is PyTorch's cache, given back before memory runs out."
    )
    return [sentence.format(device=format_bytes(ladder.device, unit), cached=format_bytes(ladder.cached, unit))]


def _binding_reason(budget: Budget, unit: ByteUnit) -> list[str]:
    """Why that phase: the term that is larger there than between steps, where one stands out."""
    idle = len(budget.timeline) - 1
    grown = [(term.at(budget.peak_index) - term.at(idle), term) for term in budget.terms]
    most, term = max(grown, key=lambda pair: pair[0])
    if most * 20 < budget.peak_bytes:
        return []
    reason = _("What makes it the largest: {term}, {size}.")
    return [reason.format(term=term_label(term.name), size=format_bytes(most, unit))]


def missing_sentences(budget: Budget, unit: ByteUnit) -> list[str]:
    """What the budget leaves out, and what is left for it."""
    if not budget.missing:
        return []
    parts = ", ".join(_(MISSING_LABELS[part]) for part in budget.missing)
    left = budget.ladder.headroom
    if left < 0:
        return [_("Not counted: {parts}; they come on top.").format(parts=parts)]
    return [_("Not counted: {parts}; {left} is left for them.").format(parts=parts, left=format_bytes(left, unit))]


def host_parts(budget: Budget) -> list[tuple[str, int]]:
    """What each node gives beside its GPUs, by what it is; none where nothing leaves them."""
    host = budget.host
    held = ((_("CPU memory"), host.cpu_bytes), (_("NVMe"), host.nvme_bytes), (_("Unified memory"), host.unified_bytes))
    return [(name, num_bytes) for name, num_bytes in held if num_bytes]


def host_sentence(budget: Budget, unit: ByteUnit) -> str:
    """The same as a sentence; empty where nothing leaves the GPUs."""
    parts = [f"{name} {format_bytes(num_bytes, unit)}" for name, num_bytes in host_parts(budget)]
    if not parts:
        return ""
    return _("Beside its GPUs each node must give: {parts}.").format(parts=", ".join(parts))


def signed(num_bytes: int, unit: ByteUnit) -> str:
    """Bytes with their sign."""
    return ("+" if num_bytes >= 0 else "−") + format_bytes(abs(num_bytes), unit)


def ladder_figures(ladder: Ladder, unit: ByteUnit) -> list[tuple[str, str, str]]:
    """The rungs from what tensors take to what is left of the card: label, figure, and what is in it."""
    outside = format_bytes(ladder.runtime.largest, unit)
    found = [
        (
            _("Peak, allocated"),
            format_bytes(ladder.allocated, unit),
            _("What tensors take at the peak: torch.cuda.max_memory_allocated."),
        ),
        (
            _("Needed, at least"),
            format_bytes(ladder.needed, unit),
            _("That in whole segments of the allocator, with {outside} of CUDA context and NCCL beside it.").format(
                outside=outside
            ),
        ),
    ]
    if ladder.steady:
        shown = _(
            "After some steps: the allocator's {reserved} (torch.cuda.max_memory_reserved) with the {outside} beside "
            "it. {cached} of it is a cache, whose free segments go back before memory runs out."
        )
        sizes = {"reserved": ladder.reserved, "outside": ladder.runtime.largest, "cached": ladder.cached}
        text = shown.format(**{name: format_bytes(size, unit) for name, size in sizes.items()})
        found.append((_("nvidia-smi, about"), format_bytes(ladder.device, unit), text))
    help_text = _("The card's usable memory, {usable}, less what is needed.")
    left = signed(ladder.headroom, unit)
    return [*found, (_("Headroom"), left, help_text.format(usable=format_bytes(ladder.usable, unit)))]


def explain_ladder(budget: Budget, unit: ByteUnit) -> list[Explanation]:
    """How the figures between tensors and the card come about."""
    ladder, device = budget.ladder, budget.device
    outside = ladder.runtime
    found = [
        Explanation(
            label=_("Needed, at least"),
            symbols="R + C",
            numbers=f"{ladder.held:,} + {outside.largest:,}",
            result=format_bytes(ladder.needed, unit),
            evidence=_(EVIDENCE_LABELS[EvidenceKind.FORMULA]),
            source=SEGMENT_SOURCE,
        ),
        _counted(
            term_label(outside.name),
            _("What a process takes of the card outside PyTorch's allocator."),
            (outside.largest, outside.evidence, outside.source),
            unit,
        ),
    ]
    if ladder.steady:
        found.append(
            _counted(
                _("Reserved after some steps, cache included"),
                _("Every storage of the trace, through a model of PyTorch's allocator, step after step."),
                (ladder.reserved, ladder.reserved_evidence, ladder.reserved_source),
                unit,
            )
        )
    usable = (ladder.usable, device.usable_evidence, device.usable_source)
    label = _("What the card can give ({gpu})").format(gpu=device.label)
    return [*found, _counted(label, _("What a program can use of the card's memory."), usable, unit)]


def _counted(label: str, how: str, figure: tuple[int, EvidenceKind, str], unit: ByteUnit) -> Explanation:
    """A figure that has no formula: bytes, evidence and source."""
    num_bytes, evidence, source = figure
    return Explanation(
        label=label,
        symbols="",
        numbers=f"{num_bytes:,}",
        result=format_bytes(num_bytes, unit),
        evidence=_(EVIDENCE_LABELS[evidence]),
        source=source,
        how=how,
    )


def what_a_trace_adds(budget: Budget) -> str:
    """What the ladder lacks without a trace, where one could be had; else empty."""
    if budget.evidence.profile is not None or isinstance(trace_request(budget.scenario), str):
        return ""
    return _(
        "nvidia-smi will show more than what is needed: PyTorch's allocator keeps a cache. How much, a trace says "
        "(in the sidebar: Activations from)."
    )
