"""The command line: ``python -m memcore predict``, ``models`` and ``gpus``, as tables or as JSON.

Exit status of predict: 0 fits, 1 does not fit, 2 the input cannot be read or answered, 3 uncertain. Any
command: 70 for an error of this program, 130 when interrupted.
"""

import argparse
import io
import json
import os
import re
import sys
import traceback
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from contextvars import copy_context
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from memcore.budget import Budget, Verdict, evidence_for, predict
from memcore.configs import check_config
from memcore.errors import UserError
from memcore.explain import EVIDENCE_LABELS, PHASE_LABELS, assumptions, explain_term, term_label, verdict_sentence
from memcore.hardware import Accelerator, accelerators
from memcore.i18n import LANGUAGES, mark, use_language
from memcore.i18n import gettext as _
from memcore.jobs import JobStatus, LightLane
from memcore.models import Role, catalogue, load_inventory
from memcore.report import budget_report, config_report, model_report, model_summary
from memcore.scenario import MAX_SCENARIO_CHARS, decode_json, parse_scenario
from memcore.settings import settings
from memcore.units import GB, ByteUnit, format_bytes, format_count, format_rate, format_seconds

EXIT_STATUS = {Verdict.FITS: 0, Verdict.DOES_NOT_FIT: 1, Verdict.UNCERTAIN: 3}
EXIT_BAD_INPUT = 2
EXIT_BROKEN = 70  # EX_SOFTWARE of sysexits.h; Python's own 1 would read as "does not fit"
EXIT_INTERRUPTED = 130

WIDTH = 100  # columns of text output
_MESSAGE_CHARS = 1000
_UTF8_BYTES_PER_CHAR = 4

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


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status. The language that it sets ends with it."""
    return copy_context().run(_run, sys.argv[1:] if argv is None else list(argv))


def _run(argv: list[str]) -> int:
    try:
        status, text = _answer(argv)
        _write(text)
    except UserError as error:
        _complain(str(error))
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Exception:
        _complain(traceback.format_exc(), whole=True)
        return EXIT_BROKEN
    return status


def _answer(argv: list[str]) -> tuple[int, str]:
    """Exit status and output of a command line."""
    language = _Parser(add_help=False, allow_abbrev=False)
    language.add_argument("--lang", choices=list(LANGUAGES), default="en")
    chosen, rest = language.parse_known_args(argv)
    use_language(chosen.lang)
    try:
        args = _parser().parse_args(rest)
    except SystemExit as finished:  # after --help
        return int(finished.code or 0), ""
    run: Callable[[argparse.Namespace], tuple[int, str]] = args.run
    return run(args)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(_("The command line cannot be read: {reason}; see --help.").format(reason=message))


def _parser() -> _Parser:
    parser = _Parser(
        prog="python -m memcore",
        allow_abbrev=False,
        description=_("How much GPU memory a training run takes, with the evidence for every byte."),
    )
    parser.add_argument("--lang", choices=list(LANGUAGES), help=_("language of the output, English by default"))
    common = _Parser(add_help=False, allow_abbrev=False)
    common.add_argument("--json", action="store_true", help=_("write JSON, in whole bytes"))
    common.add_argument(
        "--unit", choices=[unit.value for unit in ByteUnit], default="GB", help=_("GB (1e9 bytes) or GiB (2^30 bytes)")
    )
    commands = parser.add_subparsers(required=True, metavar=_("command"))

    def command(name: str, run: Callable[[argparse.Namespace], tuple[int, str]], text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, parents=[common], allow_abbrev=False, help=text, description=text)
        added.set_defaults(run=run)
        return added

    about_predict = _("the memory budget of a scenario; exit status 0 fits, 1 does not, 2 bad input, 3 uncertain")
    scenario = command("predict", _predict, about_predict)
    scenario.add_argument("scenario", metavar="SCENARIO.json", help=_('a scenario as JSON; "-" reads standard input'))
    models = command("models", _models, _("the models of the catalogue, one of them, or a config.json counted"))
    one = models.add_mutually_exclusive_group()
    one.add_argument("name", nargs="?", metavar="NAME", help=_("a model of the catalogue"))
    one.add_argument("--config", metavar="CONFIG.json", help=_('a Hugging Face config.json; "-" reads standard input'))
    command("gpus", _gpus, _("the accelerators of the catalogue"))
    return parser


# The commands: from arguments to exit status and output


def _predict(args: argparse.Namespace) -> tuple[int, str]:
    scenario = parse_scenario(_read(args.scenario, MAX_SCENARIO_CHARS))
    budget = predict(scenario, evidence_for(scenario, _count))
    text = _json(budget_report(budget)) if args.json else budget_text(budget, ByteUnit(args.unit))
    return EXIT_STATUS[budget.verdict], text


def _models(args: argparse.Namespace) -> tuple[int, str]:
    unit = ByteUnit(args.unit)
    if args.config is not None:
        counted = _count(_read_config(args.config))
        report = config_report(counted, load_inventory(counted["inventory"]))
        return 0, _json(report) if args.json else config_text(report, unit)
    if args.name is not None:
        report = model_report(args.name)
        return 0, _json(report) if args.json else model_text(report, unit)
    models = [model_summary(model) for model in catalogue().values()]
    return 0, _json(models) if args.json else catalogue_text(models)


def _gpus(args: argparse.Namespace) -> tuple[int, str]:
    known = list(accelerators().values())
    return 0, _json([asdict(each) for each in known]) if args.json else gpus_text(known, ByteUnit(args.unit))


@cache
def _lane() -> LightLane:
    """The process's lane; its worker ends with the interpreter."""
    return LightLane(settings().light_lane, quiet=True)


def _count(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Count a config in a worker process. Raises UserError with the reason where that fails."""
    result = _lane().run("count_config", {"config": dict(config)})
    if result.status is not JobStatus.DONE or result.value is None:
        raise UserError(result.message, result.field)
    return result.value


# Input and output


def _read_config(path: str) -> Mapping[str, Any]:
    limit = settings().max_upload_chars
    config = decode_json(_read(path, limit), limit)
    if not isinstance(config, Mapping):
        raise UserError(_("{path} holds no JSON object, which a config.json is.").format(path=_named(path)))
    check_config(config)
    return config


def _read(path: str, limit: int) -> str:
    """The text of a file, or of standard input for "-"; at most `limit` characters of it."""
    name, most = _named(path), limit * _UTF8_BYTES_PER_CHAR
    try:
        if path == "-":
            content = _standard_input().read(most + 1)
        else:
            with Path(path).open("rb") as file:
                content = file.read(most + 1)
        text = content.decode("utf-8-sig")
    except FileNotFoundError:
        raise UserError(_("{path} does not exist.").format(path=name)) from None
    except IsADirectoryError:
        raise UserError(_("{path} is a directory; give a JSON file.").format(path=name)) from None
    except UnicodeDecodeError:
        raise UserError(_("{path} is not text in UTF-8.").format(path=name)) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(_("{path} cannot be read ({reason}).").format(path=name, reason=reason)) from None
    if len(text) > limit:
        raise UserError(
            _("{path} is longer than the {limit:,} characters that are read.").format(path=name, limit=limit)
        )
    return text


def _standard_input() -> BinaryIO:
    if sys.stdin is None:
        raise ValueError(_("it is closed"))
    return sys.stdin.buffer


def _named(path: str) -> str:
    return _("standard input") if path == "-" else path[:200] or '""'


def _json(data: object) -> str:
    """JSON text. ASCII only, so that any encoding of the output can carry it."""
    return json.dumps(data, indent=2, allow_nan=False)


def _write(text: str) -> None:
    """Write the output, whole or with a UserError: a pipe may be closed, a disk full."""
    if sys.stdout is None:
        raise UserError(_("The output cannot be written ({reason}).").format(reason=_("it is closed")))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        sys.stdout.write(f"{text}\n" if text else "")
        sys.stdout.flush()
    except (OSError, ValueError) as error:
        # What is left in the buffer would fail again, with a traceback, when the interpreter ends.
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(_("The output cannot be written ({reason}).").format(reason=reason)) from None


def _complain(message: str, *, whole: bool = False) -> None:
    """Write to standard error, if there is one: a sentence as one line that no terminal takes for a command."""
    if sys.stderr is None:
        return
    if not whole:
        message = "".join(each if each.isprintable() else "?" for each in message)[:_MESSAGE_CHARS] + "\n"
    with suppress(OSError, ValueError):
        sys.stderr.write(message)
        sys.stderr.flush()


# Reports as text


class _Sources:
    """Sources by number, in the order in which a report names them."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def mark(self, source: str) -> str:
        return f"[{self._numbers.setdefault(source, len(self._numbers) + 1)}]"

    def text(self) -> str:
        return _table([(f"[{number}]", source) for source, number in self._numbers.items()], "<~", heading=False)


def budget_text(budget: Budget, unit: ByteUnit) -> str:
    """A budget for reading: verdict, assumptions, terms, ladder, phases, states, communication and sources."""
    sources = _Sources()
    parts = [
        "\n".join(_wrap(verdict_sentence(budget, unit))),
        "\n".join(_wrap(assumptions(budget, unit))),
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
    return _table(rows, "<><~<")


def _ladder_table(budget: Budget, unit: ByteUnit, sources: _Sources) -> str:
    ladder, device = budget.ladder, budget.device
    runtime = ladder.runtime
    rows = [
        (_("From tensors to the card"), _("Bytes"), _("Evidence"), _("Source")),
        (_("Allocated at the peak, the sum of all terms"), format_bytes(ladder.allocated, unit), "", ""),
        (_("Reserved by the allocator, at least"), format_bytes(ladder.reserved, unit), "", ""),
        (
            term_label(runtime.name),
            format_bytes(runtime.largest, unit),
            _(EVIDENCE_LABELS[runtime.evidence]),
            sources.mark(runtime.source),
        ),
        (_("What nvidia-smi shows, at least"), format_bytes(ladder.device, unit), "", ""),
        (
            _("What the card can give ({gpu})").format(gpu=device.label),
            format_bytes(ladder.usable, unit),
            _(EVIDENCE_LABELS[device.usable_evidence]),
            sources.mark(device.usable_source),
        ),
    ]
    return _table(rows, "~><<")


def _phases_table(budget: Budget, unit: ByteUnit) -> str:
    rows = [(_("Phase"), _("Its peak"), _("Moment"))]
    for phase, index in budget.phase_peaks().items():
        rows.append((_(PHASE_LABELS[phase]), format_bytes(budget.totals[index], unit), budget.timeline[index].label))
    return _table(rows, "<><")


def _states_table(budget: Budget, unit: ByteUnit) -> str:
    static = budget.static
    rows = [
        (_("Model states per GPU, in theory, before offload"), _("Bytes")),
        (_("Weights"), format_bytes(static.weights_bytes, unit)),
        (_("Gradients"), format_bytes(static.gradients_bytes, unit)),
        (_("Optimizer"), format_bytes(static.optimizer_bytes, unit)),
        (_("Total"), format_bytes(static.total_bytes, unit)),
    ]
    return _table(rows, "<>")


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
    return "\n".join(_wrap(text))


def _host_text(budget: Budget, unit: ByteUnit) -> list[str]:
    """What offloading and paging take on each node; nothing where they take nothing."""
    host = budget.host
    held = ((_("CPU memory"), host.cpu_bytes), (_("NVMe"), host.nvme_bytes), (_("Unified memory"), host.unified_bytes))
    rows = [(name, format_bytes(num_bytes, unit)) for name, num_bytes in held if num_bytes]
    return [_table([(_("Host, per node"), _("Bytes")), *rows], "<>")] if rows else []


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
            *([_table(published, "<>~")] if len(published) > 1 else [_("No published count to check it against.")]),
            *("\n".join(_wrap(text)) for text in closing if text),
        ]
    )


def _inventory_parts(report: Mapping[str, Any], unit: ByteUnit) -> list[str]:
    """Counts of a model: in all, by part, by role and by block, and what is largest."""
    total = report["total"]

    def counts(heading: str, labels: Mapping[Any, str], found: Mapping[str, int]) -> str:
        rows = [(_(labels[key]), f"{count:,}", f"{100 * count / total:.1f}%") for key, count in found.items()]
        return _table([(heading, _("Parameters"), _("Share")), *rows], "<>>")

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
    return [_table(rows, "<~", heading=False), *by_part, by_role, _blocks_table(report["blocks"])]


def _blocks_table(blocks: Iterable[Mapping[str, Any]]) -> str:
    rows = [(_("Block"), _("How many"), _("Parameters each"), _("In all"))]
    for block in blocks:
        name = block["name"] if block["numbers"] is None else f"{block['name']} {_ranges(block['numbers'])}"
        each, count = block["parameters_each"], block["count"]
        rows.append((name, f"{count:,}", f"{each:,}", f"{each * count:,}"))
    return _table(rows, "~>>>")


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
    return ["\n".join(_wrap(text)) for text in texts]


def catalogue_text(models: Iterable[Mapping[str, Any]]) -> str:
    """The catalogue for reading: parameters in all and per token, layers, and whether a published count agrees."""
    rows = [(_("Model"), _("Parameters"), _("Active"), _("Layers"), _("Cross-checked"))]
    for model in models:
        active = "-" if model["active"] is None else format_count(model["active"])
        layers = "-" if model["layers"] is None else str(model["layers"])
        checked = _("yes") if model["cross_checked"] else _("no")
        rows.append((model["name"], format_count(model["total"]), active, layers, checked))
    return _table(rows, "~>>><")


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
    return _table(rows, "<>><>>~")


# Tables


def _table(rows: Sequence[Sequence[str]], align: str, *, heading: bool = True) -> str:
    """Rows as aligned columns of at most `WIDTH` in all. `align` has a sign for each column: ``<`` and ``>``, and
    ``~`` for the one, left-aligned, that is wrapped where there is no room."""
    widths = [max(_width(cell) for cell in column) for column in zip(*rows, strict=True)]
    gaps = 2 * (len(widths) - 1)
    if "~" in align:
        flexible = align.index("~")
        widths[flexible] = min(widths[flexible], WIDTH - gaps - sum(widths) + widths[flexible])
    lines = []
    for row in rows:
        cells = [
            _wrap(cell, width) if sign == "~" else [cell] for cell, width, sign in zip(row, widths, align, strict=True)
        ]
        for index in range(max(len(cell) for cell in cells)):
            parts = [cell[index] if index < len(cell) else "" for cell in cells]
            lines.append("  ".join(map(_padded, parts, widths, align)).rstrip())
        if heading and row is rows[0]:
            lines.append("  ".join("-" * width for width in widths))
    return "\n".join(lines)


def _padded(text: str, width: int, sign: str) -> str:
    blank = " " * (width - _width(text))
    return blank + text if sign == ">" else text + blank


def _width(text: str) -> int:
    """Columns of a terminal that the text takes: Chinese characters take two each."""
    return sum(2 if unicodedata.east_asian_width(each) in "WF" else 1 for each in text)


def _wrap(text: str, width: int = WIDTH) -> list[str]:
    """Lines of at most `width` columns: broken at spaces and between Chinese characters, and within a word only
    where it is longer than a line."""
    lines, line = [], ""
    for token in re.findall(r"\s+|[^\s\u2e80-\U0010ffff]+|[\u2e80-\U0010ffff]", text):
        for start in range(0, len(token), width):
            piece = " " if token.isspace() else token[start : start + width]
            if line and _width(line + piece.rstrip()) > width:
                lines.append(line.rstrip())
                line = ""
            if line or piece != " ":
                line += piece
    return [*lines, line.rstrip()]
