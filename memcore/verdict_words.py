"""The verdict in words, the figures under it, and what a user should know beside it."""

from collections.abc import Callable

from memcore.budget import Budget, Verdict
from memcore.explain import MISSING_LABELS, PHASE_LABELS, term_label
from memcore.i18n import gettext as _
from memcore.ladder import Ladder
from memcore.units import ByteUnit, format_bytes, format_count


def headroom(budget: Budget) -> int:
    """Bytes of the card's usable memory that are left at the peak; below 0 where it does not fit."""
    return budget.ladder.usable - budget.ladder.device


def reserved_label(ladder: Ladder) -> str:
    """What the figure of reserved memory is, as a label."""
    if ladder.reservation is None:
        return _("Reserved by the allocator, at least")
    return _("Reserved by the allocator, after some steps")


def device_label(ladder: Ladder) -> str:
    """The same of what nvidia-smi shows."""
    return _("What nvidia-smi shows, at least") if ladder.reservation is None else _("What nvidia-smi shows")


def reserved_help(ladder: Ladder) -> str:
    """What is in the figure of reserved memory, as a sentence."""
    if ladder.reservation is None:
        return _("The same in the allocator's 2 MiB segments; fragmentation comes on top.")
    return _(
        "What PyTorch's allocator holds after some steps, from every block of the trace: "
        "torch.cuda.max_memory_reserved. Where the card is full it gives back what it keeps."
    )


def verdict_sentence(budget: Budget, unit: ByteUnit) -> str:
    """The verdict in words: what is needed, what there is, and which phase binds."""
    sentences: dict[Verdict, Callable[[], str]] = {
        Verdict.FITS: lambda: _("Fits: the peak needs {need} of the {usable} usable on the {gpu}. The {phase} binds."),
        Verdict.UNCERTAIN: lambda: _(
            "Tight: the peak needs {need} of the {usable} usable on the {gpu}, within the {band}% error band. "
            "The {phase} binds."
        ),
        Verdict.DOES_NOT_FIT: lambda: _(
            "Does not fit: the peak needs {need}, and {usable} is usable on the {gpu}. The {phase} binds."
        ),
    }
    sentence = sentences[budget.verdict]().format(
        need=format_bytes(budget.ladder.needed, unit),
        usable=format_bytes(budget.ladder.usable, unit),
        gpu=budget.scenario.hardware.gpu,
        phase=_(PHASE_LABELS[budget.binding_phase]),
        band=budget.band.percent,
    )
    return " ".join([sentence, *_binding_reason(budget, unit), *missing_sentences(budget, unit)])


def _binding_reason(budget: Budget, unit: ByteUnit) -> list[str]:
    """Why that phase: the term that is larger there than between steps, where one stands out."""
    idle = len(budget.timeline) - 1
    grown = [(term.at(budget.peak_index) - term.at(idle), term) for term in budget.terms]
    most, term = max(grown, key=lambda pair: pair[0])
    if most * 20 < budget.peak_bytes:
        return []
    reason = _("What makes it the largest: {term}, {size}.")
    return [reason.format(term=term_label(term.name), size=format_bytes(most, unit))]


def warnings(budget: Budget, unit: ByteUnit) -> list[str]:
    """What the user should know beside the verdict, one sentence each."""
    found = []
    workload, inventory = budget.scenario.workload, budget.inventory
    positions = inventory.shapes.max_positions if inventory else 0
    if 0 < positions < workload.seq_len:
        message = _("workload.seq_len is {seq:,}, beyond the {positions:,} positions that the model was made for.")
        found.append(message.format(seq=workload.seq_len, positions=positions))
    if budget.start is not None and budget.start.largest > budget.peak_bytes:
        message = _(
            "Made whole on the GPU first, the model takes {start} while the engine is started, more than the "
            "step: make it on the meta device (FSDP2) or under zero.Init (DeepSpeed)."
        )
        found.append(message.format(start=format_bytes(budget.start.largest, unit)))
    if budget.evidence.untraced:
        found.append(_("Not traced: {reason}").format(reason=budget.evidence.untraced))
    if budget.evidence.profile is not None:
        found.extend(budget.evidence.profile.notes)
    if budget.evidence.quantised_as:
        message = _(
            "The checkpoint is stored as {method}: full training needs it dequantised; counted here are {count} whole "
            "parameters, never its packed blocks."
        )
        count = format_count(budget.states.n_params)
        found.append(message.format(method=budget.evidence.quantised_as, count=count))
    return found


def missing_sentences(budget: Budget, unit: ByteUnit) -> list[str]:
    """What the budget leaves out, and what is left for it."""
    if not budget.missing:
        return []
    parts = ", ".join(_(MISSING_LABELS[part]) for part in budget.missing)
    left = headroom(budget)
    if left < 0:
        return [_("Not counted: {parts}; they come on top.").format(parts=parts)]
    return [_("Not counted: {parts}; {left} is left for them.").format(parts=parts, left=format_bytes(left, unit))]
