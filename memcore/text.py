"""Reports as text for a terminal, at most 100 columns wide."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from memcore.alive import alive_by_module
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
    assumptions,
    device_label,
    difference,
    explain_term,
    reserved_label,
    term_label,
    verdict_sentence,
)
from memcore.hardware import Accelerator
from memcore.i18n import gettext as _
from memcore.i18n import mark
from memcore.models import Role
from memcore.units import GB, ByteUnit, format_bytes, format_count, format_rate, format_seconds

ROLE_LABELS = {
    Role.EMBEDDING: mark("embedding"),
    Role.ATTENTION: mark("attention"),
    Role.MLP: mark("MLP"),
    Role.EXPERTS: mark("experts"),
    Role.NORM: mark("norms"),
    Role.HEAD: mark("output head"),
    Role.VISION: mark("vision tower"),
    Role.PROJECTOR: mark("projector"),
    Role.OTHER: mark("other"),
}
PART_LABELS = {"text": mark("text"), "vision": mark("vision tower"), "projector": mark("projector")}


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
        "\n".join(wrap(verdict_sentence(budget, unit))),
        "\n".join(wrap(assumptions(budget, unit))),
        _terms_table(budget, unit, sources),
        _ladder_table(budget, unit, sources),
        _phases_table(budget, unit),
        _states_table(budget, unit),
        _communication_text(budget, unit, sources),
        *_host_text(budget, unit),
    ]
    if budget.evidence.config_defaults is not None:
        parts += _counted_text(budget.evidence.config_defaults, budget.evidence.quantised_as)
    return "\n\n".join([*parts, _("Sources") + "\n" + sources.text()])


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
            reserved_label(ladder),
            format_bytes(ladder.reserved, unit),
            _(EVIDENCE_LABELS[ladder.reserved_evidence]),
            sources.mark(ladder.reserved_source),
        ),
        (
            term_label(runtime.name),
            format_bytes(runtime.largest, unit),
            _(EVIDENCE_LABELS[runtime.evidence]),
            sources.mark(runtime.source),
        ),
        (device_label(ladder), format_bytes(ladder.device, unit), "", ""),
        (
            _("What the card can give ({gpu})").format(gpu=device.label),
            format_bytes(ladder.usable, unit),
            _(EVIDENCE_LABELS[device.usable_evidence]),
            sources.mark(device.usable_source),
        ),
    ]
    return table(rows, "~><<")


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
    host = budget.host
    held = ((_("CPU memory"), host.cpu_bytes), (_("NVMe"), host.nvme_bytes), (_("Unified memory"), host.unified_bytes))
    rows = [(name, format_bytes(num_bytes, unit)) for name, num_bytes in held if num_bytes]
    return [table([(_("Host, per node"), _("Bytes")), *rows], "<>")] if rows else []


def config_text(report: Mapping[str, Any], unit: ByteUnit) -> str:
    """A counted config.json for reading, from :func:`memcore.report.config_report`."""
    return "\n\n".join(
        [
            *_inventory_parts(report, unit),
            *_counted_text(report["defaults_filled"], report["quantised_as"]),
        ]
    )


def model_text(report: Mapping[str, Any], unit: ByteUnit) -> str:
    """A catalogue model for reading, from :func:`memcore.report.model_report`."""
    published = [(_("Published"), _("Parameters"), _("Source"))]
    for label, key in ((_("total"), "published_total"), (_("active"), "published_active")):
        if report[key] is not None:
            published.append((label, f"{report[key]:,}", report[f"{key}_source"] or ""))
    inventory = report["inventory"]
    heading = f"{report['name']} ({report['family']})"
    counted = [_("Only a count is known, no shapes.")] if inventory is None else _inventory_parts(inventory, unit)
    closing = [_("Config: {source}").format(source=report["config_source"]), report["note"] or ""]
    return "\n\n".join(
        [
            heading,
            *counted,
            *([table(published, "<>~")] if len(published) > 1 else [_("No published count to check it against.")]),
            *("\n".join(wrap(text)) for text in closing if text),
        ]
    )


def _inventory_parts(report: Mapping[str, Any], unit: ByteUnit) -> list[str]:
    """Counts of a model: in all, by part, by role and by block, and what is largest."""
    total = report["total"]

    def counts(heading: str, labels: Mapping[Any, str], found: Mapping[str, int]) -> str:
        rows = [(_(labels[key]), f"{count:,}", f"{100 * count / total:.1f}%") for key, count in found.items()]
        return table([(heading, _("Parameters"), _("Share")), *rows], "<>>")

    layer, tensor = report["largest_layer"], report["largest_tensor"]
    shape = " × ".join(f"{size:,}" for size in tensor["shape"])
    rows = [
        (_("Model class"), report["model_class"]),
        (_("Parameters"), f"{total:,} ({format_count(total)})"),
        (_("Active per token"), f"{report['active']:,}"),
        (_("Decoder layers"), f"{report['layers']:,}"),
        (_("Largest layer"), f"{layer['name']}: {layer['parameters']:,}"),
        (_("Largest tensor"), f"{tensor['name']}: {shape} = {tensor['parameters']:,}"),
        (_("Embedding and head"), _("one tensor, counted once") if report["tied"] else _("not shared")),
        (_("Checkpoint in BF16"), format_bytes(report["bf16_bytes"], unit)),
    ]
    by_part = [counts(_("Part"), PART_LABELS, report["by_part"])] if len(report["by_part"]) > 1 else []
    by_role = counts(_("Role"), ROLE_LABELS, report["by_role"])
    return [table(rows, "<~", heading=False), *by_part, by_role, _blocks_table(report["blocks"])]


def _blocks_table(blocks: Iterable[Mapping[str, Any]]) -> str:
    rows = [(_("Block"), _("How many"), _("Parameters each"), _("In all"))]
    for block in blocks:
        name = block["name"] if block["numbers"] is None else f"{block['name']} {_ranges(block['numbers'])}"
        each, count = block["parameters_each"], block["count"]
        rows.append((name, f"{count:,}", f"{each:,}", f"{each * count:,}"))
    return table(rows, "~>>>")


def _ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers as ranges: ``0-2, 5``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _counted_text(defaults: Mapping[str, Any], quantised_as: str | None) -> list[str]:
    """What counting a config assumed, and how its checkpoint is packed."""
    filled = ", ".join(f"{key} = {json.dumps(value)}" for key, value in defaults.items())
    texts = [
        _("Filled in from the class's defaults: {filled}.").format(filled=filled)
        if filled
        else _("No class default had to be filled in."),
        _("The checkpoint is stored as {method}; the counts are those of the unpacked model.").format(
            method=quantised_as
        )
        if quantised_as
        else _("The config names no quantisation of the checkpoint."),
    ]
    return ["\n".join(wrap(text)) for text in texts]


def catalogue_text(models: Iterable[Mapping[str, Any]]) -> str:
    """The catalogue for reading: parameters in all and per token, layers, and whether a published count agrees."""
    rows = [(_("Model"), _("Parameters"), _("Active"), _("Layers"), _("Cross-checked"))]
    for model in models:
        active = "-" if model["active"] is None else format_count(model["active"])
        layers = "-" if model["layers"] is None else str(model["layers"])
        checked = _("yes") if model["cross_checked"] else _("no")
        rows.append((model["name"], format_count(model["total"]), active, layers, checked))
    return table(rows, "~>>><")


def gpus_text(known: Iterable[Accelerator], unit: ByteUnit) -> str:
    """The accelerators for reading: memory, what of it is usable and how that is known, peak rates and link."""
    rows = [
        (
            _("GPU"),
            _("Memory"),
            _("Usable"),
            _("Evidence"),
            _("BF16 TFLOPS"),
            _("Memory GB/s"),
            _("Link, GB/s each way"),
        )
    ]
    for each in known:
        flops, rate = each.peak_dense_bf16_flops_per_s, each.memory_bytes_per_s
        rows.append(
            (
                each.name,
                format_bytes(each.nominal_bytes, unit, 1),
                format_bytes(each.usable_bytes, unit, 1),
                _(EVIDENCE_LABELS[each.usable_evidence]),
                "-" if flops is None else f"{flops / 1e12:,.0f}",
                "-" if rate is None else f"{rate / GB:,.0f}",
                f"{each.link.name}, {each.link.bytes_per_s / GB:,.4g}",
            )
        )
    return table(rows, "<>><>>~")


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
    verdict = wrap(verdict_sentence(reading.budget, unit))
    return "\n\n".join(part for part in ("\n".join(verdict), "\n".join(notes), table(rows, "<><>~")) if part)


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
    parts = ["\n".join(wrap(verdict_sentence(budget, unit))), "\n".join(wrap(about_trace(profile))), *profile.notes]
    return "\n\n".join([*parts, beside, table(alive, "<><"), *_modules_text(budget, unit)])


def _modules_text(budget: Budget, unit: ByteUnit) -> Iterator[str]:
    """What each module has alive at the fullest moment of forward and backward."""
    found = alive_by_module(budget)
    if found is not None:
        title = _("Alive at {moment}, by module").format(moment=found.moment.label)
        yield table([(title, "", ""), *alive_rows(found, unit)], "<><")


def events_text(events: Sequence[Sequence[Any]]) -> str:
    """Every storage that a traced step takes and gives back, one in a line: moment, category, module, bytes."""
    return "\n".join(",".join(map(str, event)) for event in events)
