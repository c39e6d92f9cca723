"""The command ``python -m memcore bench``: a sweep, its table and its store, without a browser."""

import argparse
from collections.abc import Callable, Iterable
from time import sleep
from typing import Any

from memcore.bench.curves import Ask, formula_bytes, predicted_k
from memcore.bench.findings import findings
from memcore.bench.measurement import Measurement
from memcore.bench.report import sweep_report, sweep_text
from memcore.bench.results import Result
from memcore.bench.running import RunningSweep, State, find_device, measuring_lane
from memcore.bench.slices import make_slice
from memcore.bench.store import MAX_EXPORT_CHARS, Store
from memcore.bench.sweeps import SweepKind, plan
from memcore.bench.words import WAITS_FOR_OTHERS, case_label
from memcore.budget import evidence_for
from memcore.columns import say
from memcore.errors import UserError
from memcore.i18n import gettext as _
from memcore.scenario import MAX_SCENARIO_CHARS, Scenario, decode_json, parse_scenario
from memcore.score.own import rows_data
from memcore.score.points import point_rows
from memcore.settings import settings
from memcore.units import ByteUnit

_LOOK_S = 0.2

Read = Callable[[str, int], str]


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command's own options."""
    scenario = _('a scenario as JSON; "-" reads standard input')
    parser.add_argument("scenario", nargs="?", metavar="SCENARIO.json", help=scenario)
    parser.add_argument("--model", metavar="NAME", help=_("a model of the catalogue, instead of a scenario"))
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--sweep", choices=[kind.value for kind in SweepKind], help=_("what to measure over"))
    what.add_argument("--export", action="store_true", help=_("write all measurements that are kept, as JSON"))
    what.add_argument("--import", dest="taken_in", metavar="FILE", help=_("keep the measurements of an export"))
    dtypes = ("fp32", "bf16", "fp16")
    parser.add_argument("--dtype", choices=dtypes, help=_("measure in this dtype, whatever is usual on the device"))
    about_own = _("write what was measured as runs of one's own instead, as home's scoreboard takes them")
    parser.add_argument("--own-runs", action="store_true", help=about_own)
    parser.add_argument("--known", action="store_true", help=_("do not measure again what this device has measured"))


def answer(args: argparse.Namespace, ask: Ask, read: Read) -> dict[str, Any] | str:
    """The command's output, as data for JSON or as text. Raises UserError."""
    store = Store(settings().store_path)
    if args.sweep is None and (args.scenario or args.model or args.dtype or args.known):
        raise UserError(_("A scenario, --model, --dtype and --known go with --sweep alone."))
    if args.own_runs and args.taken_in is not None:
        raise UserError(_("--own-runs goes with --sweep or --export."))
    if args.export:
        return _own_runs(store.everything(), ask) if args.own_runs else store.export()
    if args.taken_in is not None:
        data = decode_json(read(args.taken_in, MAX_EXPORT_CHARS), MAX_EXPORT_CHARS)
        count = store.take_in(data)
        return {"taken_in": count} if args.json else _("{count} measurements were taken in.").format(count=count)
    if not settings().measuring:
        raise UserError(_("Measuring is switched off on this machine (MEMCORE_MEASURING=0)."))
    return _sweep(args, store, _scenario(args, read), ask)


def _scenario(args: argparse.Namespace, read: Read) -> Scenario:
    if (args.scenario is None) == (args.model is None):
        raise UserError(_("Give a scenario or --model, and not both."))
    if args.model is not None:
        return parse_scenario({"model": {"name": args.model}})
    return parse_scenario(read(args.scenario, MAX_SCENARIO_CHARS))


def _sweep(args: argparse.Namespace, store: Store, scenario: Scenario, ask: Ask) -> dict[str, Any] | str:
    lane = measuring_lane()
    try:
        device = find_device(lane)
        part = make_slice(scenario, evidence_for(scenario, ask), device.kind, args.dtype)
        sweep = plan(SweepKind(args.sweep), part)
        running = RunningSweep(lane, store, sweep, device, reuse=args.known)
        state = _finish(running)
    finally:
        lane.close()
    if state.progress.complaint:
        say(state.progress.complaint)
    if args.own_runs:
        return _own_runs(state.measured.values(), ask)
    formulas = formula_bytes(sweep, ask)
    found = findings(sweep, state.measured, predicted_k(sweep, ask))
    result = Result(sweep=sweep, device=device, measured=state.measured)
    if args.json:
        return sweep_report(result, formulas, found)
    return sweep_text(result, formulas, found, ByteUnit(args.unit))


def _own_runs(measured: Iterable[Measurement], ask: Ask) -> dict[str, Any]:
    rows = point_rows(measured, ask)
    if not rows:
        raise UserError(_("Nothing that was measured has a prediction to lie beside."))
    return rows_data(rows)


def _finish(running: RunningSweep) -> State:
    """Wait for the end, and say on standard error how far it is."""
    said, waits = -1, False
    while (state := running.look()).progress.status is None:
        if state.progress.waits_for_others and not waits:
            say(_(WAITS_FOR_OTHERS))
        waits = state.progress.waits_for_others
        done = len(state.progress.results)
        if state.running is not None and done > said:
            said = done
            sentence = _("{number} of {all}: {case}; about {seconds:.0f} s left")
            numbers = {"number": done + 1, "all": state.progress.num_steps, "seconds": state.progress.estimate_s}
            say(sentence.format(case=case_label(state.running), **numbers))
        sleep(_LOOK_S)
    return state
