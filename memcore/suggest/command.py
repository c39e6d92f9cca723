"""The command that suggests settings: its options, and its answer."""

import argparse
from collections.abc import Callable
from typing import Any

from memcore.budget import Ask, evidence_for, predict
from memcore.engine_options import ENGINE_OPTIONS
from memcore.errors import UserError
from memcore.i18n import gettext as _
from memcore.scenario import MAX_SCENARIO_CHARS, parse_scenario
from memcore.suggest.grid import DEFAULT_LEAST_BUCKET
from memcore.suggest.report import suggestion_report, suggestion_text
from memcore.suggest.search import Goal, GoalKind, Suggestion, suggest
from memcore.units import ByteUnit, parse_count


def add_options(parser: argparse.ArgumentParser) -> None:
    """The scenario, the goal and the bucket."""
    parser.add_argument("scenario", metavar="SCENARIO.json", help=_('a scenario as JSON; "-" reads standard input'))
    about_goal = _("memory: the least; speed: the most that fits the card with the error band")
    parser.add_argument("--goal", choices=[kind.value for kind in GoalKind], required=True, help=about_goal)
    about_bucket = _("the least reduce bucket, in elements, for --goal memory; 1e7 by default")
    parser.add_argument("--bucket", metavar="N", help=about_bucket)


def answer(
    args: argparse.Namespace, ask: Ask, read: Callable[[str, int], str]
) -> tuple[Suggestion, str | dict[str, Any]]:
    """The suggestion, and what is written of it. Raises UserError for what cannot be asked."""
    goal = _goal(args)
    scenario = parse_scenario(read(args.scenario, MAX_SCENARIO_CHARS))
    suggestion = suggest(predict(scenario, evidence_for(scenario, ask)), goal)
    if suggestion is None:
        message = _(
            "No settings are suggested for {engine} here: only for DeepSpeed from stage 1 on, and FSDP2 that shards."
        )
        raise UserError(message.format(engine=ENGINE_OPTIONS[scenario.parallelism.engine].label))
    if args.json:
        return suggestion, suggestion_report(suggestion)
    return suggestion, suggestion_text(suggestion, ByteUnit(args.unit))


def _goal(args: argparse.Namespace) -> Goal:
    kind = GoalKind(args.goal)
    if kind is not GoalKind.MEMORY and args.bucket is not None:
        raise UserError(_("--bucket does nothing with --goal {goal}: leave it out.").format(goal=kind.value))
    return Goal(kind=kind, least_bucket=_elements(args.bucket))


def _elements(text: str | None) -> int:
    """The bucket that was asked for, in any spelling of a count."""
    if text is None:
        return DEFAULT_LEAST_BUCKET
    try:
        return parse_count(text)
    except UserError:
        message = _("--bucket is {value!r}; allowed is a whole number above 0, such as 5e7.")
        raise UserError(message.format(value=text[:40])) from None
