"""The command line: ``python -m memcore predict``, ``trace``, ``models`` and others, as tables or as JSON.

Exit status of predict: 0 fits, 1 does not fit, 2 the input cannot be read or answered, the run cannot take place or was
not traced as asked, 3 uncertain. Any command: 70 for an error of this program, 130 when interrupted.
"""

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextvars import copy_context
from dataclasses import asdict, replace
from functools import cache
from typing import Any, NoReturn

from memcore.bench import command as bench_command
from memcore.budget import Budget, Verdict, evidence_for, predict
from memcore.configs import check_config
from memcore.console import complain, json_text, named, read_text, write
from memcore.ds_config import MAX_DS_CONFIG_CHARS, read_ds_config
from memcore.errors import UserError
from memcore.hardware import accelerators
from memcore.i18n import LANGUAGES, use_language
from memcore.i18n import gettext as _
from memcore.jobs import LaneLimits, LightLane
from memcore.model_report import config_report, model_report, model_summary
from memcore.model_text import catalogue_text, config_text, gpus_text, model_text
from memcore.models import catalogue, load_inventory
from memcore.notices import NoticeKind, notices
from memcore.report import budget_report, reading_report, trace_report
from memcore.reported import MAX_REPORT_CHARS, find, findings_report, findings_text, read_report
from memcore.scenario import MAX_SCENARIO_CHARS, decode_config, parse_scenario
from memcore.score import command as score_command
from memcore.settings import settings
from memcore.suggest import command as suggest_command
from memcore.text import (
    budget_text,
    ds_config_text,
    events_text,
    trace_text,
)
from memcore.trace.request import trace_request
from memcore.units import ByteUnit
from memcore.verify import command as verify_command

EXIT_STATUS = {Verdict.FITS: 0, Verdict.DOES_NOT_FIT: 1, Verdict.UNCERTAIN: 3}
EXIT_BAD_INPUT = 2
EXIT_BROKEN = 70  # EX_SOFTWARE of sysexits.h; Python's own 1 would read as "does not fit"
EXIT_INTERRUPTED = 130

# Worker processes that score many runs; each takes a processor and about a gigabyte.
SCORING_WORKERS = 2
WIDTH = 100  # columns of text output


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status. The language that it sets ends with it."""
    return copy_context().run(_run, sys.argv[1:] if argv is None else list(argv))


def _run(argv: list[str]) -> int:
    try:
        status, text = _answer(argv)
        write(text)
    except UserError as error:
        complain(str(error))
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Exception:
        complain(traceback.format_exc(), whole=True)
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
    scenario.add_argument("--trace", action="store_true", help=_("trace the real model for activations and loss"))
    about_trace = _("activations and loss from the real model on fake tensors, beside the closed form")
    traced = command("trace", _trace, about_trace)
    traced.add_argument("scenario", metavar="SCENARIO.json", help=_('a scenario as JSON; "-" reads standard input'))
    about_events = _("every storage that the step takes and gives back instead: moment, category, module and bytes")
    traced.add_argument("--events", action="store_true", help=about_events)
    models = command("models", _models, _("the models of the catalogue, one of them, or a config.json counted"))
    one = models.add_mutually_exclusive_group()
    one.add_argument("name", nargs="?", metavar="NAME", help=_("a model of the catalogue"))
    one.add_argument("--config", metavar="CONFIG.json", help=_('a Hugging Face config.json; "-" reads standard input'))
    command("gpus", _gpus, _("the accelerators of the catalogue"))
    about_ds = _("what each key of a ds_config.json does to a scenario's memory")
    ds_config = command("ds-config", _ds_config, about_ds)
    ds_config.add_argument("file", metavar="DS_CONFIG.json", help=_('a DeepSpeed config; "-" reads standard input'))
    ds_config.add_argument("scenario", metavar="SCENARIO.json", help=_("the scenario that it is for"))
    about_oom = _("what an out-of-memory message or another memory report says, also beside a scenario's prediction")
    oom = command("oom", _oom, about_oom)
    oom.add_argument("file", metavar="REPORT.txt", help=_('the text; "-" reads standard input'))
    oom.add_argument("scenario", metavar="SCENARIO.json", nargs="?", help=_("the scenario that ran out of memory"))
    about_suggest = _(
        "the engine's settings for a goal: least memory, or most speed that fits; with the file that sets them"
    )
    suggest_command.add_options(command("suggest", _suggest, about_suggest))
    about_bench = _("measure a scenario's own layers on this machine, or export and import what was measured")
    bench_command.add_options(command("bench", _bench, about_bench))
    about_verify = _("run the real engine on this machine and lay what it takes beside the prediction")
    verify_command.add_options(command("verify", _verify, about_verify))
    about_score = _("predictions beside what runs were measured to take; exit status 3 where some are not predicted")
    score_command.add_options(command("score", _score, about_score))
    return parser


# The commands: from arguments to exit status and output


def _predict(args: argparse.Namespace) -> tuple[int, str]:
    scenario = parse_scenario(read_text(args.scenario, MAX_SCENARIO_CHARS))
    budget = predict(scenario, evidence_for(scenario, _ask, traced=args.trace))
    text = json_text(budget_report(budget)) if args.json else budget_text(budget, ByteUnit(args.unit))
    return _status(budget, traced=args.trace), text


def _status(budget: Budget, *, traced: bool = False) -> int:
    """The exit status of an answer. `traced`: whether a trace was asked for; what is not answered is not a verdict, and
    standard error says so, whatever is done with the output."""
    known = notices(budget, ByteUnit.GB)
    unanswered = [each for each in known if each.stops or (traced and each.kind is NoticeKind.NOT_TRACED)]
    for notice in unanswered:
        complain(notice.text)
    return EXIT_BAD_INPUT if unanswered else EXIT_STATUS[budget.verdict]


def _trace(args: argparse.Namespace) -> tuple[int, str]:
    scenario = parse_scenario(read_text(args.scenario, MAX_SCENARIO_CHARS))
    evidence = evidence_for(scenario, _ask, traced=True)
    request = trace_request(scenario)
    if evidence.profile is None or isinstance(request, str):
        raise UserError(evidence.untraced)
    if args.events:
        events = _ask("trace_events", request)["events"]
        return 0, json_text(events) if args.json else events_text(events)
    budget = predict(scenario, evidence)
    text = json_text(trace_report(budget)) if args.json else trace_text(budget, ByteUnit(args.unit))
    return _status(budget), text


def _models(args: argparse.Namespace) -> tuple[int, str]:
    unit = ByteUnit(args.unit)
    if args.config is not None:
        counted = _ask("count_config", {"config": dict(_read_config(args.config))})
        report = config_report(counted, load_inventory(counted["inventory"]))
        return 0, json_text(report) if args.json else config_text(report, unit)
    if args.name is not None:
        report = model_report(args.name)
        return 0, json_text(report) if args.json else model_text(report, unit)
    models = [model_summary(model) for model in catalogue().values()]
    return 0, json_text(models) if args.json else catalogue_text(models)


def _gpus(args: argparse.Namespace) -> tuple[int, str]:
    known = list(accelerators().values())
    return 0, json_text([asdict(each) for each in known]) if args.json else gpus_text(known, ByteUnit(args.unit))


def _ds_config(args: argparse.Namespace) -> tuple[int, str]:
    scenario = parse_scenario(read_text(args.scenario, MAX_SCENARIO_CHARS))
    evidence = evidence_for(scenario, _ask)
    reading = read_ds_config(read_text(args.file, MAX_DS_CONFIG_CHARS), scenario, evidence)
    text = json_text(reading_report(reading)) if args.json else ds_config_text(reading, ByteUnit(args.unit))
    return _status(reading.budget), text


def _oom(args: argparse.Namespace) -> tuple[int, str]:
    report = read_report(read_text(args.file, MAX_REPORT_CHARS))
    budget = None
    if args.scenario is not None:
        scenario = parse_scenario(read_text(args.scenario, MAX_SCENARIO_CHARS))
        budget = predict(scenario, evidence_for(scenario, _ask))
    found = find(report, budget)
    return 0, json_text(findings_report(found)) if args.json else findings_text(found, ByteUnit(args.unit))


def _suggest(args: argparse.Namespace) -> tuple[int, str]:
    suggestion, output = suggest_command.answer(args, _ask, read_text)
    return _status(suggestion.after), output if isinstance(output, str) else json_text(output)


def _bench(args: argparse.Namespace) -> tuple[int, str]:
    output = bench_command.answer(args, _ask, read_text)
    return 0, output if isinstance(output, str) else json_text(output)


def _verify(args: argparse.Namespace) -> tuple[int, str]:
    output = verify_command.answer(args, _ask, read_text)
    return 0, output if isinstance(output, str) else json_text(output)


def _score(args: argparse.Namespace) -> tuple[int, str]:
    status, output = score_command.answer(args, _scoring_lane().ask, read_text, _scoring_limits().workers)
    return status, output if isinstance(output, str) else json_text(output)


@cache
def _lane() -> LightLane:
    """The process's lane; its worker ends with the interpreter."""
    return LightLane(settings().light_lane, quiet=True)


def _scoring_limits() -> LaneLimits:
    """Many runs are scored side by side where there is more than one processor."""
    limits = settings().light_lane
    return replace(limits, workers=max(limits.workers, min(SCORING_WORKERS, os.cpu_count() or 1)))


@cache
def _scoring_lane() -> LightLane:
    return LightLane(_scoring_limits(), quiet=True)


def _ask(task: str, payload: dict[str, Any]) -> Mapping[str, Any]:
    return _lane().ask(task, payload)


def _read_config(path: str) -> Mapping[str, Any]:
    limit = settings().max_upload_chars
    config = decode_config(read_text(path, limit), limit)
    if not isinstance(config, Mapping):
        raise UserError(_("{path} holds no JSON object, which a config.json is.").format(path=named(path)))
    check_config(config)
    return config
