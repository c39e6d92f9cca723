"""The command ``python -m memcore score``: predictions beside published, measured runs, or runs of one's own."""

import argparse
from collections.abc import Callable, Sequence

from memcore.budget import Ask
from memcore.columns import ProgressBar
from memcore.errors import UserError
from memcore.i18n import gettext as _
from memcore.score.deltas import DeltaScore, read_deltas, score_deltas
from memcore.score.many import many
from memcore.score.record import MAX_RUNS_CHARS, read_runs
from memcore.score.report import score_csv, score_report, score_text
from memcore.score.scoring import Score, Status, score_run
from memcore.units import ByteUnit

ALL_SCORED, SOME_NOT = 0, 3


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command's own options."""
    parser.add_argument("runs", metavar="RUNS.json", help=_('measured runs as JSON; "-" reads standard input'))
    parser.add_argument("--by", choices=("regime", "family", "source"), help=_("group the table by this field"))
    parser.add_argument("--csv", action="store_true", help=_("write CSV, a row for each run"))
    parser.add_argument(
        "--trace",
        action=argparse.BooleanOptionalAction,
        default=True,
        help=_("trace the real model wherever one can be traced; without, only where no closed form answers"),
    )


def answer(
    args: argparse.Namespace, ask: Ask, read: Callable[[str, int], str], at_once: int = 1
) -> tuple[int, dict[str, object] | str]:  # fmt: skip
    """Exit status and output: 0 where every run within the scope, and every difference between two runs, is scored, 3
    where some are not. Raises UserError
    for a file that holds no runs. `at_once`: how many runs are scored side by side."""
    if args.csv and args.json:
        raise UserError(_("Give --csv or --json, and not both."))
    text = read(args.runs, MAX_RUNS_CHARS)
    runs = read_runs(text)
    scores = _scored(runs, ask, traced=args.trace, at_once=at_once)
    deltas = score_deltas(read_deltas(text))
    ended = [*(score.status for score in scores), *(delta.status for delta in deltas)]
    whole = all(status in (Status.PREDICTED, Status.OUT_OF_SCOPE) for status in ended)
    return ALL_SCORED if whole else SOME_NOT, _output(args, scores, deltas)


def _output(
    args: argparse.Namespace, scores: Sequence[Score], deltas: Sequence[DeltaScore]
) -> dict[str, object] | str:  # fmt: skip
    if args.json:
        return score_report(scores, deltas)
    return score_csv(scores) if args.csv else score_text(scores, ByteUnit(args.unit), args.by, deltas)


def _scored(runs: Sequence[object], ask: Ask, *, traced: bool, at_once: int) -> list[Score]:
    """The scores, and on standard error how far they are."""
    bar = ProgressBar(len(runs))

    def heard(done: int) -> None:
        bar.show(done, _("{done} of {all} runs are scored.").format(done=done, all=len(runs)))

    return many(lambda data, number: score_run(data, number, ask, traced=traced), runs, at_once=at_once, heard=heard)
