"""A proof as JSON data and as text for a terminal."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from memcore.bench.measurement import DeviceFacts
from memcore.columns import table, wrap
from memcore.explain import PHASE_LABELS, term_label
from memcore.i18n import gettext as _
from memcore.i18n import mark
from memcore.terms import Phase
from memcore.units import ByteUnit, format_precisely
from memcore.verify.case import RankFigures
from memcore.verify.proof import IDLE, PhaseProof, Proof
from memcore.verify.scaling import crowding

# A case counts only where its steps agree so far.
STEADY_PERCENT = 0.5
UNSTEADY = mark("The steps differ by {percent:.1f}%: measured is the least, and another run may say another figure.")
STAGING = mark("the communication backend's staging")
OTHER = mark("the process beside tensors")


def phase_label(name: str) -> str:
    """The phase in words."""
    return _(PHASE_LABELS[Phase(name)])


def proof_report(proof: Proof, device: DeviceFacts, reductions: Sequence[str]) -> dict[str, Any]:
    """Everything as JSON data, in whole bytes of the fullest rank. Errors are predicted over measured, less one."""
    spread = proof.case.scenario.parallelism
    return {
        "case": proof.case.data(),
        "engine": spread.engine.value,
        "stage": spread.zero_stage,
        "ranks": proof.case.ranks,
        "device": asdict(device),
        "resident_error_pct": round(proof.resident.error_percent, 4),
        "phase_error_pct": {phase.name: round(phase.error_percent, 4) for phase in proof.phases if phase.name != IDLE},
        "phases": {phase.name: _phase(phase) for phase in proof.phases},
        "start": {
            "predicted_bytes": None if proof.budget.start is None else proof.budget.start.largest,
            "measured_bytes": max(rank.init for rank in proof.ranks),
        },
        "process_overhead_bytes": proof.other,
        "per_rank": [asdict(rank) for rank in proof.ranks],
        "steady": is_steady(proof.ranks),
        "reductions": list(reductions),
    }


def is_steady(ranks: Iterable[RankFigures]) -> bool:
    """Whether the steps that were measured agree."""
    return max(rank.spread_percent for rank in ranks) <= STEADY_PERCENT


def _phase(phase: PhaseProof) -> dict[str, Any]:
    return {
        "predicted_bytes": phase.predicted,
        "measured_bytes": phase.measured,
        "error_pct": round(phase.error_percent, 4),
        "staging_bytes": phase.staging,
        "terms": [
            {"name": term.name, "category": term.category.value, "bytes": share, "evidence": term.evidence.value}
            for term, share in phase.terms
        ],
    }


def signed(percent: float) -> str:
    """A difference in percent with its sign, to two digits; none has no sign."""
    rounded = round(percent, 2)
    return f"{rounded:+.2f}%" if rounded else "0.00%"


def phase_rows(proof: Proof, unit: ByteUnit) -> list[tuple[str, str, str, str, str]]:
    """A row for each phase: its name, predicted, measured, the difference, and staging beside it."""
    return [
        (
            phase_label(phase.name),
            format_precisely(phase.predicted, unit),
            format_precisely(phase.measured, unit),
            signed(phase.error_percent),
            format_precisely(phase.staging, unit) if phase.name != IDLE else "",
        )
        for phase in proof.phases
    ]


def term_rows(proof: Proof, unit: ByteUnit) -> list[tuple[str, ...]]:
    """A row for each term with its share of each phase's predicted peak, then sum, measured, staging and the rest."""
    names = dict.fromkeys(term.name for phase in proof.phases for term, _share in phase.terms)
    shares = [{term.name: share for term, share in phase.terms} for phase in proof.phases]

    def row(label: str, values: Iterable[int]) -> tuple[str, ...]:
        return (label, *(format_precisely(value, unit) if value else "" for value in values))

    rows = [row(term_label(name), (share.get(name, 0) for share in shares)) for name in names]
    rows.append(row(_("predicted"), (phase.predicted for phase in proof.phases)))
    rows.append(row(_("measured"), (phase.measured for phase in proof.phases)))
    rows.append(row(_(STAGING), (phase.staging if phase.name != IDLE else 0 for phase in proof.phases)))
    rows.append(row(_(OTHER), (proof.other for _phase in proof.phases)))
    return rows


def term_headings(proof: Proof) -> tuple[str, ...]:
    """Headings of :func:`term_rows`."""
    return (_("term"), *(phase_label(phase.name) for phase in proof.phases))


def proof_headings() -> tuple[str, ...]:
    """Headings of :func:`phase_rows`."""
    return (_("phase"), _("predicted"), _("measured"), _("difference"), _("staging beside it"))


def verdict(proof: Proof) -> str:
    """How far the prediction was off, in one sentence."""
    worst = max(proof.phases, key=lambda phase: abs(phase.error_percent))
    sentence = _(
        "{name} on {ranks} ranks: what stays between steps is predicted within {resident:.2f}%, every phase's peak "
        "within {worst:.2f}% ({phase})."
    )
    return sentence.format(
        name=proof.case.name,
        ranks=proof.case.ranks,
        resident=abs(proof.resident.error_percent),
        worst=abs(worst.error_percent),
        phase=phase_label(worst.name),
    )


def notes(proof: Proof, device: DeviceFacts, unit: ByteUnit) -> list[str]:
    """What must be known to read the figures, as sentences."""
    found = [
        _(
            "The fullest of {ranks} ranks on {device}, in the steps after the first; predicted and measured count "
            "tensors alone."
        ).format(ranks=proof.case.ranks, device=device.name)
    ]
    first = max(max(rank.first.values()) for rank in proof.ranks)
    measured = max(rank.init for rank in proof.ranks)
    numbers = {"start": format_precisely(measured, unit), "first": format_precisely(first, unit)}
    sentence = _("While the engine was started {start} were held at the most, in the first step {first}.")
    if proof.budget.start is not None:
        sentence = _(
            "While the engine was started {start} were held at the most ({predicted} predicted), in the first step "
            "{first}."
        )
        numbers["predicted"] = format_precisely(proof.budget.start.largest, unit)
    found.append(sentence.format(**numbers))
    if device.kind == "cpu":
        found.append(
            _(
                "Over gloo a collective stages copies of its tensors, which NCCL does not: they are a line of their "
                "own and part of no prediction. oneDNN is switched off, since it packs operands as no GPU does."
            )
        )
    if crowded := crowding(proof.case.ranks):
        found.append(crowded)
    if not is_steady(proof.ranks):
        found.append(_(UNSTEADY).format(percent=max(rank.spread_percent for rank in proof.ranks)))
    return found


def proof_text(proof: Proof, device: DeviceFacts, reductions: Sequence[str], unit: ByteUnit) -> str:
    """The same as tables, notes and every reduction."""
    parts = [
        "\n".join(wrap(verdict(proof))),
        table([proof_headings(), *phase_rows(proof, unit)], "~>>>>"),
        table([term_headings(proof), *term_rows(proof, unit)], "~>>>>"),
        "\n".join(line for note in notes(proof, device, unit) for line in wrap(note)),
    ]
    if reductions:
        parts.append("\n".join(line for each in reductions for line in wrap(f"- {each}")))
    return "\n\n".join(parts)
