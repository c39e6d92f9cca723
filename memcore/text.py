"""The answer as text for a terminal, at most 100 columns wide."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from memcore.alive import alive_by_module
from memcore.assumptions import assumptions
from memcore.budget import Budget
from memcore.columns import table, wrap
from memcore.compare import beside_closed_form
from memcore.ds_config import EFFECT_LABELS, Reading
from memcore.explain import (
    EVIDENCE_LABELS,
    NO_CLOSED_FORM,
    PHASE_LABELS,
    about_trace,
    alive_rows,
    difference,
    explain_term,
    moment_label,
    term_label,
)
from memcore.i18n import gettext as _
from memcore.ladder import SEGMENT_SOURCE, Ladder
from memcore.model_text import counted_text
from memcore.notices import notices
from memcore.terms import EvidenceKind
from memcore.units import ByteUnit, format_bytes, format_rate, format_seconds
from memcore.verdict_words import host_parts, signed, verdict_sentence


class _Sources:
    """Sources by number, in the order in which a report names them."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def mark(self, source: str) -> str:
        return f"[{self._numbers.setdefault(source, len(self._numbers) + 1)}]"

    def text(self) -> str:
        return table([(f"[{number}]", source) for source, number in self._numbers.items()], "<~", heading=False)


def budget_text(budget: Budget, unit: ByteUnit) -> str:
    """A budget for reading: verdict, assumptions, terms, ladder, phases, states, communication and sources."""
    sources = _Sources()
    parts = [
        *_verdict(budget, unit),
        "\n".join(wrap(assumptions(budget, unit))),
        _terms_table(budget, unit, sources),
        _ladder_table(budget, unit, sources),
        _phases_table(budget, unit),
        _states_table(budget, unit),
        _communication_text(budget, unit, sources),
        *_host_text(budget, unit),
    ]
    if budget.evidence.config_defaults is not None:
        parts += counted_text(budget.evidence.config_defaults, budget.evidence.quantised_as)
    return "\n\n".join([*parts, _("Sources") + "\n" + sources.text()])


def _verdict(budget: Budget, unit: ByteUnit) -> list[str]:
    """The verdict, and what there is to know beside it; what stops the run comes before it."""
    known = notices(budget, unit)
    stops = [line for notice in known if notice.stops for line in wrap(notice.text)]
    beside = [line for notice in known if not notice.stops for line in wrap(f"* {notice.text}")]
    parts = ("\n".join(stops), "\n".join(wrap(verdict_sentence(budget, unit))), "\n".join(beside))
    return [part for part in parts if part]


def _terms_table(budget: Budget, unit: ByteUnit, sources: _Sources) -> str:
    rows = [(_("Term"), _("At the peak"), _("Evidence"), _("At its largest"), _("Source"))]
    for term in sorted(budget.terms, key=lambda term: -term.at(budget.peak_index)):
        explained = explain_term(term, unit)
        at_peak = format_bytes(term.at(budget.peak_index), unit)
        largest = f"{explained.numbers} = {explained.result}"
        rows.append((explained.label, at_peak, explained.evidence, largest, sources.mark(term.source)))
    return table(rows, "<><~<")


def _ladder_table(budget: Budget, unit: ByteUnit, sources: _Sources) -> str:
    ladder, device = budget.ladder, budget.device
    runtime = ladder.runtime
    rows = [
        (_("From tensors to the card"), _("Bytes"), _("Evidence"), _("Source")),
        (_("Allocated at the peak, the sum of all terms"), format_bytes(ladder.allocated, unit), "", ""),
        (
            _("The same in whole segments of the allocator"),
            format_bytes(ladder.held, unit),
            _(EVIDENCE_LABELS[EvidenceKind.FORMULA]),
            sources.mark(SEGMENT_SOURCE),
        ),
        (
            term_label(runtime.name),
            format_bytes(runtime.largest, unit),
            _(EVIDENCE_LABELS[runtime.evidence]),
            sources.mark(runtime.source),
        ),
        (_("Needed, at least"), format_bytes(ladder.needed, unit), "", ""),
        *_after_steps(ladder, unit, sources),
        (
            _("What the card can give ({gpu})").format(gpu=device.label),
            format_bytes(ladder.usable, unit),
            _(EVIDENCE_LABELS[device.usable_evidence]),
            sources.mark(device.usable_source),
        ),
        (_("Headroom, less what is needed"), signed(ladder.headroom, unit), "", ""),
    ]
    return table(rows, "~><<")


def _after_steps(ladder: Ladder, unit: ByteUnit, sources: _Sources) -> list[tuple[str, str, str, str]]:
    """What the allocator holds after some steps, where a trace says so and the card has it."""
    if not ladder.steady:
        return []
    evidence, source = _(EVIDENCE_LABELS[ladder.reserved_evidence]), sources.mark(ladder.reserved_source)
    return [
        (_("Reserved after some steps, cache included"), format_bytes(ladder.reserved, unit), evidence, source),
        (_("What nvidia-smi then shows, about"), format_bytes(ladder.device, unit), "", ""),
    ]


def _phases_table(budget: Budget, unit: ByteUnit) -> str:
    rows = [(_("Phase"), _("Its peak"), _("Moment"))]
    for phase, index in budget.phase_peaks().items():
        rows.append((_(PHASE_LABELS[phase]), format_bytes(budget.totals[index], unit), budget.timeline[index].label))
    return table(rows, "<><")


def _states_table(budget: Budget, unit: ByteUnit) -> str:
    static = budget.static
    rows = [
        (_("Model states per GPU, in theory, before offload"), _("Bytes")),
        (_("Weights"), format_bytes(static.weights_bytes, unit)),
        (_("Gradients"), format_bytes(static.gradients_bytes, unit)),
        (_("Optimizer"), format_bytes(static.optimizer_bytes, unit)),
        (_("Total"), format_bytes(static.total_bytes, unit)),
    ]
    return table(rows, "<>")


def _communication_text(budget: Budget, unit: ByteUnit, sources: _Sources) -> str:
    moved = budget.communication
    if not moved.bytes_per_gpu:
        return _("Communication: none.")
    sentence = _(
        "Communication: each GPU sends {size} in a step, {time} over {link} at {rate} {source} if nothing hides."
    )
    text = sentence.format(
        size=format_bytes(moved.bytes_per_gpu, unit),
        time=format_seconds(moved.seconds),
        link=moved.link_name,
        rate=format_rate(moved.link_bytes_per_s),
        source=sources.mark(moved.link_source),
    )
    return "\n".join(wrap(text))


def _host_text(budget: Budget, unit: ByteUnit) -> list[str]:
    """What offloading and paging take on each node; nothing where they take nothing."""
    rows = [(name, format_bytes(num_bytes, unit)) for name, num_bytes in host_parts(budget)]
    return [table([(_("Host, per node"), _("Bytes")), *rows], "<>")] if rows else []


def ds_config_text(reading: Reading, unit: ByteUnit) -> str:
    """A ds_config's reading: what to mend, each key with its effect and cost, and the verdict that follows."""
    rows = [(_("setting"), _("in force"), _("effect"), _("costs"), _("why"))]
    for key in sorted(reading.keys, key=lambda key: -(key.cost_bytes or -1)):
        value = json.dumps(key.value)
        rows.append(
            (
                key.path,
                _("no limit") if len(value) > 15 else value,
                _(EFFECT_LABELS[key.effect]),
                "-" if key.cost_bytes is None else format_bytes(key.cost_bytes, unit),
                key.why,
            )
        )
    unknown = [_("Unknown keys: {keys}.").format(keys=", ".join(reading.unknown))] if reading.unknown else []
    notes = [line for note in [*reading.notes, *unknown] for line in wrap(f"* {note}")]
    parts = (*_verdict(reading.budget, unit), "\n".join(notes), table(rows, "<><>~"))
    return "\n\n".join(part for part in parts if part)


def trace_text(budget: Budget, unit: ByteUnit) -> str:
    """A trace for reading: the verdict it gives, each phase beside the closed form, and what is alive at the peak."""
    profile = budget.evidence.profile
    assert profile is not None, "a trace was asked for"
    rows = [
        (
            _(PHASE_LABELS[pair.phase]),
            format_bytes(pair.traced, unit),
            format_bytes(pair.closed, unit),
            difference(pair),
        )
        for pair in beside_closed_form(budget)
    ]
    header = (_("Phase"), _("traced"), _("closed form"), _("difference, mostly in"))
    beside = table([header, *rows], "<>><") if rows else "\n".join(wrap(_(NO_CLOSED_FORM)))
    alive = [(_("At the peak"), "", "")]
    alive += [
        (term_label(term.name), format_bytes(share, unit), _(EVIDENCE_LABELS[term.evidence]))
        for term, share in budget.at_peak()
    ]
    parts = [*_verdict(budget, unit), "\n".join(wrap(about_trace(profile)))]
    return "\n\n".join([*parts, beside, table(alive, "<><"), *_modules_text(budget, unit)])


def _modules_text(budget: Budget, unit: ByteUnit) -> Iterator[str]:
    """What each module has alive at the fullest moment of forward and backward."""
    found = alive_by_module(budget)
    if found is not None:
        title = _("Alive at {moment}, by module").format(moment=moment_label(found.moment))
        yield table([(title, "", ""), *alive_rows(found, unit)], "<><")


def events_text(events: Sequence[Sequence[Any]]) -> str:
    """Every storage that a traced step takes and gives back, one in a line: moment, category, module, bytes."""
    return "\n".join(",".join(map(str, event)) for event in events)
