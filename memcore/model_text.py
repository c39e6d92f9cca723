"""A model's parameters, and what is known of models and cards, as text for a terminal."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from memcore.columns import table, wrap
from memcore.explain import (
    EVIDENCE_LABELS,
)
from memcore.hardware import Accelerator
from memcore.i18n import gettext as _
from memcore.i18n import mark
from memcore.inventory import Role
from memcore.units import GB, ByteUnit, format_bytes, format_count

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


def config_text(report: Mapping[str, Any], unit: ByteUnit) -> str:
    """A counted config.json for reading, from :func:`memcore.model_report.config_report`."""
    return "\n\n".join(
        [
            *_inventory_parts(report, unit),
            *counted_text(report["defaults_filled"], report["quantised_as"]),
        ]
    )


def model_text(report: Mapping[str, Any], unit: ByteUnit) -> str:
    """A catalogue model for reading, from :func:`memcore.model_report.model_report`."""
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


def counted_text(defaults: Mapping[str, Any], quantised_as: str | None) -> list[str]:
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
