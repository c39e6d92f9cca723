"""Score the published runs, and write everything that is made of the scores.

``python -m scripts.score_published [RUNS.json]`` reads a file in the published format, or without one the records that
are in the project already, and writes memcore/data/published_runs.json and published_deltas.json beside it,
memcore/data/published_scores.json (which the error band comes from), docs/accuracy.md, and the table of README.md. Run
it after a change of what is predicted. It ends with 1, and says why, where a regime misses to one side and has no
reason in memcore/score/reasons.py. ``--check`` writes nothing, and ends with 1 where a file is not what it would write.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from memcore.accuracy.scored import Published, ScoredRun, dump_published, published
from memcore.budget import Ask
from memcore.columns import ProgressBar
from memcore.jobs import LightLane
from memcore.score.deltas import read_deltas, score_deltas
from memcore.score.document import accuracy_document, readme_table
from memcore.score.many import many
from memcore.score.published import dump_deltas, pack, published_deltas, published_records
from memcore.score.reasons import one_sided_without_reason
from memcore.score.record import MAX_RUNS_CHARS, read_runs
from memcore.score.rows import scored_run
from memcore.score.scoring import Score
from memcore.settings import settings

ROOT = Path(__file__).parent.parent
WORKERS = 2
DATA = ROOT / "memcore" / "data"
BEGIN, END = "<!-- accuracy: written by scripts/score_published.py -->", "<!-- accuracy ends -->"


@dataclass(frozen=True, kw_only=True, slots=True)
class Made:
    """What is made of the scores: the contents of files, by their paths from the project's folder."""

    files: Mapping[str, str]
    published: Published
    complaints: tuple[str, ...]


def main() -> int:
    """Score, write the files, and say what is left to explain."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="?", help="measured runs in the published format")
    parser.add_argument("--check", action="store_true", help="write nothing, and name the files that are out of date")
    args = parser.parse_args()
    lane = LightLane(replace(settings().light_lane, workers=WORKERS), quiet=True)
    today = datetime.now(tz=UTC).date().isoformat()
    made = make(records(args.runs), lane.ask, today=today, deltas=deltas(args.runs), at_once=WORKERS)
    lane.close()
    complaints = list(made.complaints)
    for name, content in made.files.items():
        if not args.check:
            (ROOT / name).write_text(content, encoding="utf-8")
        elif (ROOT / name).read_text(encoding="utf-8") != content:
            complaints.append(f"{name} is out of date: run python -m scripts.score_published")
    print(f"{len(made.published.predicted)} of {len(made.published.runs)} runs are predicted.")
    for complaint in complaints:
        print(complaint, file=sys.stderr)
    return int(bool(complaints))


def records(path: str | None) -> list[Mapping[str, Any]]:
    """The records of a file, or those of the project, in their order."""
    if path is None:
        return list(published_records().values())
    text = Path(path).read_text(encoding="utf-8")
    assert len(text) <= MAX_RUNS_CHARS
    return [dict(record) for record in read_runs(text) if isinstance(record, Mapping)]


def deltas(path: str | None) -> Sequence[object]:
    """The records of differences between two runs of a file, or those of the project."""
    return published_deltas() if path is None else read_deltas(Path(path).read_text(encoding="utf-8"))


def make(
    runs: Sequence[Mapping[str, Any]], ask: Ask, today: str, deltas: Sequence[object], at_once: int = 1
) -> Made:  # fmt: skip
    """All files, from the records. `today`: the date that the scores get, if they are not those of the project.
    `at_once`: how many runs are scored side by side."""
    scores = scored(runs, ask, at_once)
    rows = tuple(row for _score, row in scores)
    kept = published() if (DATA / "published_scores.json").exists() else None
    found = Published(date=kept.date if kept is not None and kept.runs == rows else today, runs=rows)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    files = {
        "memcore/data/published_runs.json": pack(runs),
        "memcore/data/published_deltas.json": dump_deltas(deltas),
        "memcore/data/published_scores.json": dump_published(found),
        "docs/accuracy.md": accuracy_document(found, [score for score, _row in scores], score_deltas(deltas)),
        "README.md": between_markers(readme, readme_table(found)),
    }
    return Made(files=files, published=found, complaints=tuple(one_sided_without_reason(rows)))


def scored(runs: Sequence[Mapping[str, Any]], ask: Ask, at_once: int) -> list[tuple[Score, ScoredRun]]:
    """Each run's score and row. A record that cannot be read is an error of the file."""
    bar = ProgressBar(len(runs))
    found = []
    for score, row in many(
        lambda record, number: scored_run(record, number, ask), runs, at_once=at_once,
        heard=lambda done: bar.show(done, f"{done} of {len(runs)} runs are scored."),
    ):  # fmt: skip
        assert row is not None, f"{score.run_id}: {score.reason}"
        found.append((score, row))
    return found


def between_markers(text: str, table: str) -> str:
    """A document with the table in its place."""
    before, begin, rest = text.partition(BEGIN)
    _old, end, after = rest.partition(END)
    assert begin, "the document has no place for the table"
    assert end, "the document has no place for the table"
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


if __name__ == "__main__":
    sys.exit(main())
