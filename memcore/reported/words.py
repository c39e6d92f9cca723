"""A report's findings in words, as text for a terminal and as JSON data."""

from typing import Any

from memcore.columns import table, wrap
from memcore.explain import PHASE_LABELS
from memcore.i18n import gettext as _
from memcore.i18n import mark
from memcore.reported.findings import Candidate, Cause, Findings
from memcore.reported.text import Quantity
from memcore.units import ByteUnit, format_bytes

LABELS = {
    Quantity.ASKED: mark("asked for"),
    Quantity.ALLOCATED: mark("allocated to tensors"),
    Quantity.ALLOCATED_PEAK: mark("allocated at the peak"),
    Quantity.UNALLOCATED: mark("reserved, not allocated"),
    Quantity.RESERVED: mark("reserved by PyTorch"),
    Quantity.RESERVED_PEAK: mark("reserved at the peak"),
    Quantity.FREE: mark("free on the card"),
    Quantity.CAPACITY: mark("the card's memory"),
    Quantity.PROCESS: mark("in use by the process"),
    Quantity.OTHERS: mark("in use by other processes"),
}
_CANDIDATES = {
    "slice": mark(
        "this GPU's slice of all trained parameters: an optimizer state, the step's copy of the gradients, or a "
        "temporary of the update. More GPUs or another ZeRO stage make it smaller, batch and length do not"
    ),
    "all": mark("all trained parameters in one piece: gradients or weights, flattened"),
    "bucket": mark("the reduce bucket"),
    "scores": mark(
        "one layer's attention scores, heads x length x length. Flash attention makes none; sharding and offload do "
        "not change them"
    ),
    "logits": mark("the logits. A fused or chunked loss makes them smaller, sharding does not"),
    "logits_shifted": mark("the logits, shifted against their labels"),
    "inner": mark("an MLP's inner activation"),
    "hidden": mark("the hidden states"),
    "layer": mark("the largest layer's parameters in one piece"),
    "tensor": mark("the largest parameter"),
    "layer_slice": mark("this GPU's slice of the largest layer: an optimizer state or a temporary of the update"),
    "tensor_slice": mark("this GPU's slice of the largest parameter"),
}
# A request of more of the card than this fails on little fragmentation.
_LARGE_SHARE = 0.1


def figures(findings: Findings) -> list[tuple[str, int]]:
    """What the report tells, and what follows from it: a label and bytes each."""
    amounts = findings.report.amounts
    known: dict[Quantity, int | None] = {quantity: findings.report.of(quantity) for quantity in Quantity}
    known[Quantity.UNALLOCATED], known[Quantity.RESERVED] = findings.unallocated, findings.reserved
    found = [(_(LABELS[quantity]), value) for quantity, value in known.items() if value is not None]
    if findings.needed is not None:
        found.append((_("allocated and asked for, together"), findings.needed))
    if findings.outside is not None and Quantity.OTHERS not in amounts:
        found.append((_("outside PyTorch: context, NCCL, other processes"), findings.outside))
    return found


def sentences(findings: Findings, unit: ByteUnit) -> list[str]:
    """What is wrong, and what was asked for, a sentence or two each."""
    found = [_cause(findings, unit)]
    if findings.report.failures > 1:
        message = _("The text has {count} such messages; the first is read.")
        found.append(message.format(count=findings.report.failures))
    return [*filter(None, found), *_beside(findings, unit)]


def _cause(findings: Findings, unit: ByteUnit) -> str:
    of = findings.report.of
    asked, free, capacity = of(Quantity.ASKED), of(Quantity.FREE), of(Quantity.CAPACITY)
    if asked is None:
        return ""
    if findings.cause is Cause.UNKNOWN or free is None:
        return _("The message is cut: without what is free and reserved it does not show why the request failed.")
    if findings.cause is Cause.REFUSED:
        message = _(
            "The card had {free} free, enough for the {asked}: another process took it meanwhile, the process has a "
            "limit of its own, or the driver could not give it in one piece."
        )
        return message.format(free=format_bytes(free, unit), asked=format_bytes(asked, unit))
    together = free + (findings.unallocated or 0)
    if findings.cause is Cause.TOO_LITTLE:
        message = _(
            "What is free and what PyTorch holds unused are {together} together, {missing} less than was asked for: "
            "fragmentation is not the cause, something must take less."
        )
        missing = format_bytes(asked - together, unit)
        return message.format(together=format_bytes(together, unit), missing=missing)
    message = _(
        "What is free and what PyTorch holds unused are {together} together, enough for the {asked}, but not in one "
        "piece: fragmentation. Try PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before a smaller batch."
    )
    said = message.format(together=format_bytes(together, unit), asked=format_bytes(asked, unit))
    if capacity and asked > _LARGE_SHARE * capacity:
        large = _("It asks for {share} of the card at once, though: what it is for matters more than the pieces.")
        said = f"{said} {large.format(share=f'{100 * asked / capacity:.0f}%')}"
    return said


def _beside(findings: Findings, unit: ByteUnit) -> list[str]:
    """The report beside the scenario's prediction."""
    budget = findings.budget
    if budget is None:
        return []
    predicted = _("For this scenario {peak} are predicted to be allocated at the peak ({phase}).").format(
        peak=format_bytes(budget.peak_bytes, unit), phase=_(PHASE_LABELS[budget.binding_phase])
    )
    if findings.report.of(Quantity.ASKED) is None:
        return [predicted]
    if not findings.matches:
        return [predicted, _("None of the scenario's large tensors is as large as what was asked for.")]
    return [predicted, *(_match(candidate, unit) for candidate in findings.matches)]


def _match(candidate: Candidate, unit: ByteUnit) -> str:
    message = _("As large as what was asked for, {size} at {width} bytes each: {what}.")
    return message.format(
        size=format_bytes(candidate.num_bytes, unit), width=candidate.width, what=_(_CANDIDATES[candidate.name])
    )


def findings_text(findings: Findings, unit: ByteUnit) -> str:
    """The findings for reading in a terminal."""
    rows = [(_("Memory report"), _("Bytes"))]
    rows += [(label, format_bytes(value, unit)) for label, value in figures(findings)]
    return "\n\n".join([table(rows, "~>"), *("\n".join(wrap(each)) for each in sentences(findings, unit))])


def findings_report(findings: Findings) -> dict[str, Any]:
    """The findings as JSON data, in whole bytes."""
    return {
        "amounts": {quantity.value: amount.num_bytes for quantity, amount in findings.report.amounts.items()},
        "cause": findings.cause.value,
        "unallocated": findings.unallocated,
        "reserved": findings.reserved,
        "outside": findings.outside,
        "needed": findings.needed,
        "predicted_peak": None if findings.budget is None else findings.budget.peak_bytes,
        "asked_for": [
            {"name": each.name, "bytes": each.num_bytes, "element_bytes": each.width} for each in findings.matches
        ],
    }
