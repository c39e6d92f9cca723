"""The command ``python -m memcore verify``: the real engine beside its prediction, without a browser."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from time import sleep
from typing import Any

from memcore.bench.measurement import DeviceFacts
from memcore.bench.running import find_device, measuring_lane
from memcore.bench.words import WAITS_FOR_OTHERS
from memcore.budget import Ask, evidence_for
from memcore.columns import say
from memcore.engine_options import EngineName
from memcore.errors import UserError
from memcore.i18n import gettext as _
from memcore.jobs import HeavyLane
from memcore.recipes import ConventionName
from memcore.scenario import MAX_SCENARIO_CHARS, decode_json, movable_data, parse_scenario
from memcore.settings import settings
from memcore.units import ByteUnit
from memcore.verify.case import MAX_LOCAL_RANKS, Case
from memcore.verify.matrix import MODEL, TOKENS, in_ci, matrix
from memcore.verify.proof import case_evidence
from memcore.verify.report import proof_report, proof_text
from memcore.verify.running import Proven, RunningProof
from memcore.verify.scaling import Scaled, check_runnable, engine_label, scale

_LOOK_S = 0.5
_DEFAULT_RANKS = 2
_MAX_SETTING_CHARS = 100

Read = Callable[[str, int], str]


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command's own options."""
    scenario = _('a scenario as JSON, made small enough for this machine; "-" reads standard input')
    parser.add_argument("scenario", nargs="?", metavar="SCENARIO.json", help=scenario)
    parser.add_argument("--model", metavar="NAME", help=_("a model of the catalogue, made small; else a small Llama"))
    engines = [engine.value for engine in EngineName if engine is not EngineName.LLM_C]  # no PyTorch program
    parser.add_argument("--engine", choices=engines, help=_("the engine that runs"))
    parser.add_argument("--stage", type=int, choices=(0, 1, 2, 3), help=_("DeepSpeed's ZeRO stage"))
    parser.add_argument("--ranks", type=int, help=_("processes in all, from 1 to {most}").format(most=MAX_LOCAL_RANKS))
    setting = _("a setting of the engine, such as reduce_bucket_size=1000000; may be repeated")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", dest="settings", help=setting)
    conventions = [name.value for name in ConventionName]
    parser.add_argument("--convention", choices=conventions, help=_("dtypes of weights, gradients and states"))
    kinds = ("foreach", "fused", "for_loop")
    parser.add_argument("--implementation", choices=kinds, help=_("torch's AdamW instead of the engine's own"))
    parser.add_argument("--checkpointing", choices=("none", "full"), help=_("whether layers are recomputed"))
    parser.add_argument("--grad-accum", type=int, metavar="N", help=_("micro-steps of one step"))
    parser.add_argument("--nnodes", type=int, default=1, metavar="N", help=_("machines; start this on each of them"))
    parser.add_argument("--node-rank", type=int, default=0, metavar="R", help=_("the number of this machine, from 0"))
    parser.add_argument("--master-addr", default="127.0.0.1", metavar="HOST", help=_("the address of machine 0"))
    parser.add_argument(
        "--port", type=int, metavar="PORT", help=_("the port of machine 0; any that is free by default")
    )
    sets = ("all", "ci")
    parser.add_argument(
        "--matrix", choices=sets, help=_("the project's own cases instead, all or the twelve of its tests")
    )


def answer(args: argparse.Namespace, ask: Ask, read: Read) -> dict[str, Any] | str:
    """The command's output, as data for JSON or as text. Raises UserError."""
    if not settings().measuring:
        raise UserError(_("Measuring is switched off on this machine (MEMCORE_MEASURING=0)."))
    lane = measuring_lane()
    try:
        device = find_device(lane)
        cases = _cases(args, ask, read, device)
        proven = _prove(lane, [each.case for each in cases], ask, device, _rendezvous(args))
    finally:
        lane.close()
    return _output(args, cases, proven, device)


def _rendezvous(args: argparse.Namespace) -> dict[str, Any]:
    if args.nnodes > 1 and args.port is None:
        raise UserError(_("Over several machines --port is needed, and the same on each."))
    return {"nodes": args.nnodes, "node": args.node_rank, "address": args.master_addr, "port": args.port}


def _cases(args: argparse.Namespace, ask: Ask, read: Read, device: DeviceFacts) -> list[Scaled]:
    ranks = _DEFAULT_RANKS if args.ranks is None else args.ranks
    if args.matrix is not None:
        found = in_ci() if args.matrix == "ci" else matrix(ranks)
        return [Scaled(case=case, reductions=()) for case in found]
    if args.scenario is not None and args.model is not None:
        raise UserError(_("Give a scenario or --model, and not both."))
    if args.scenario is None and args.model is None:
        return [Scaled(case=_small_case(args, ranks, device), reductions=())]
    given = {"model": {"name": args.model}} if args.model else decode_json(read(args.scenario, MAX_SCENARIO_CHARS))
    asked = parse_scenario(given)
    scenario = parse_scenario(_changed(movable_data(asked), args, ranks))
    return [scale(scenario, evidence_for(scenario, ask), ask, ranks=ranks, device=device.kind)]


def _small_case(args: argparse.Namespace, ranks: int, device: DeviceFacts) -> Case:
    """The project's own small model, with the settings as they are given."""
    small = {"model": {"config": dict(MODEL)}, "workload": {"micro_batch": 1, "seq_len": TOKENS}}
    scenario = parse_scenario(_changed(small, args, ranks))
    check_runnable(scenario, ranks, device.kind)
    return Case(name=engine_label(scenario), scenario=scenario)


def _changed(data: dict[str, Any], args: argparse.Namespace, ranks: int) -> dict[str, Any]:
    """The scenario with what the options say. A scenario's own engine stands where none is named."""
    parallelism = dict(data.get("parallelism", {}))
    if args.engine is not None:
        parallelism = {"engine": args.engine}
        data.pop("engine_config", None)
    if args.stage is not None:
        parallelism["zero_stage"] = args.stage
    if "gpus" not in data.get("hardware", {}):
        data["hardware"] = {**data.get("hardware", {}), "gpus": ranks}
    engine = parallelism.get("engine")
    if args.settings:
        chosen = {**_settings(args.settings)}
        config = dict(data.get("engine_config") or {})
        if engine == EngineName.DEEPSPEED or args.stage is not None:
            config["zero_optimization"] = {**config.get("zero_optimization", {}), **chosen}
        else:
            config |= chosen
        data["engine_config"] = config
    recipe, workload = dict(data.get("recipe", {})), dict(data.get("workload", {}))
    if args.convention is not None:
        recipe["convention"] = args.convention
    if args.implementation is not None:
        recipe["optimizer"] = {**recipe.get("optimizer", {}), "implementation": args.implementation}
    if args.checkpointing is not None:
        workload["checkpointing"] = args.checkpointing
    if args.grad_accum is not None:
        workload["grad_accum"] = args.grad_accum
    return {**data, "parallelism": parallelism, "recipe": recipe, "workload": workload}


def _settings(pairs: Sequence[str]) -> Mapping[str, Any]:
    found = {}
    for pair in pairs:
        name, sign, text = pair.partition("=")
        if not sign or not name:
            raise UserError(_("--set takes NAME=VALUE, not {given!r}.").format(given=pair[:_MAX_SETTING_CHARS]))
        found[name] = decode_json(text, _MAX_SETTING_CHARS)
    return found


def _prove(
    lane: HeavyLane, cases: Sequence[Case], ask: Ask, device: DeviceFacts, rendezvous: Mapping[str, Any]
) -> Proven:
    evidence = [case_evidence(case, ask, device.kind) for case in cases]
    running = RunningProof(lane, cases, evidence, device.kind, rendezvous)
    said = ""
    while (progress := running.look()).status is None:
        sentence = _(WAITS_FOR_OTHERS) if progress.waits_for_others else ""
        if progress.has_begun:
            sentence = _("{count} cases run on {ranks} ranks.").format(count=len(cases), ranks=cases[0].ranks)
        if sentence != said:
            said = sentence
            say(sentence)
        sleep(_LOOK_S)
    return running.proven()


def _output(
    args: argparse.Namespace, cases: Sequence[Scaled], proven: Proven, device: DeviceFacts
) -> dict[str, Any] | str:
    if len(cases) == 1 and not proven.proofs:
        raise UserError(next(iter(proven.reasons.values())))
    reductions = {each.case.name: each.reductions for each in cases}
    if args.json:
        reports = [proof_report(proof, device, reductions[proof.case.name]) for proof in proven.proofs]
        if len(cases) == 1:
            return reports[0]
        return {"cases": reports, "failed": dict(proven.reasons)}
    unit = ByteUnit(args.unit)
    texts = [proof_text(proof, device, reductions[proof.case.name], unit) for proof in proven.proofs]
    return "\n\n\n".join([*texts, *(f"{name}: {reason}" for name, reason in proven.reasons.items())])
