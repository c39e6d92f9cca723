"""A run that was predicted, in one row of data: what was measured, what is predicted, and what both are of.

The published runs' rows are data, made by scripts/score_published.py; a team's own are made in its session.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import cache
from importlib import resources
from typing import Any

from memcore.terms import EvidenceKind


class Figure(StrEnum):
    """The kind of figure that was measured: what tensors take, or what the allocator holds of the card for them; or
    what layers take beyond their weights, where nothing else of a step ran."""

    TENSORS = "tensors"
    CARD = "card"
    ACTIVATIONS = "activations"


# What a whole step takes, the preferred figure first.
OF_A_STEP = (Figure.TENSORS, Figure.CARD)
# Where the metric is not known, the figure is of no kind.
FIGURES = {
    "allocated": Figure.TENSORS,
    "active": Figure.TENSORS,
    "reserved": Figure.CARD,
    "nvidia_smi": Figure.CARD,
    "activations": Figure.ACTIVATIONS,
}


_COMMIT = "commit-message"


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredRun:
    """A measured run beside its prediction, in bytes per GPU.

    `metric`: what was measured, by the published format's name, or "activations" for what layers alone took beyond
    weights and inputs. `predicted`: None where the run has no prediction;
    then `status` says what became of it. `evidence`: where the prediction's activations come from. `by_formula`: the
    prediction by closed forms alone; None where these do not stand for the run. `source`: as in the published format,
    empty for a run of one's own. `device`: where it ran, such as ``cuda`` or ``cpu``.
    """

    run_id: str
    status: str
    source: str
    family: str
    regime: str
    gold: bool
    model: str
    n_params: int
    gpu: str
    gpus: int
    engine: str
    method: str
    micro_batch: int
    seq_len: int
    metric: str
    measured: int
    predicted: int | None
    evidence: str | None
    by_formula: int | None
    device: str = "cuda"

    @property
    def error_pct(self) -> float | None:
        """The prediction's error in per cent of what was measured; above 0 where too much is predicted."""
        return _error(self.predicted, self.measured)

    def predicted_by(self, evidence: EvidenceKind) -> int | None:
        """The prediction that rests on this evidence; None where there is none."""
        if evidence is EvidenceKind.FORMULA:
            return self.by_formula
        return self.predicted if self.evidence == evidence.value else None

    def error_of(self, evidence: EvidenceKind) -> float | None:
        """Its error in per cent of what was measured; None where there is none."""
        return _error(self.predicted_by(evidence), self.measured)

    @property
    def figure(self) -> Figure | None:
        """The kind of figure that was measured."""
        return FIGURES.get(self.metric)


def _error(predicted: int | None, measured: int) -> float | None:
    return None if predicted is None else 100 * (predicted - measured) / measured


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """The published runs as they are scored. `date`: the day on which the figures last changed."""

    date: str
    runs: tuple[ScoredRun, ...]

    @property
    def predicted(self) -> tuple[ScoredRun, ...]:
        """The runs that have a prediction."""
        return tuple(run for run in self.runs if run.predicted is not None)


_NAMES = tuple(each.name for each in fields(ScoredRun))


def dump_published(published: Published) -> str:
    """The published runs' rows as JSON text, a line for each run."""
    rows = [json.dumps([getattr(run, name) for name in _NAMES], ensure_ascii=False) for run in published.runs]
    head = f'{{"date": {json.dumps(published.date)},\n"fields": {json.dumps(_NAMES)},\n"runs": [\n'
    return head + ",\n".join(rows) + "\n]}\n"


def load_published(data: Mapping[str, Any]) -> Published:
    """The rows from their data."""
    return Published(date=data["date"], runs=_rows(data["fields"], data["runs"]))


def _rows(names: Iterable[str], rows: Iterable[Iterable[Any]]) -> tuple[ScoredRun, ...]:
    named = tuple(names)
    return tuple(ScoredRun(**dict(zip(named, row, strict=True))) for row in rows)


@cache
def published() -> Published:
    """The published runs as this version of memcore predicts them."""
    text = resources.files("memcore").joinpath("data", "published_scores.json").read_text(encoding="utf-8")
    return load_published(json.loads(text))


def source_link(source: str) -> str:
    """The page that a source names: a file at a commit, a commit, or an issue. Empty where it names none.

    The published format's sources are ``owner/name@commit:path`` and ``owner/name#number``, on GitHub; the path
    ``commit-message`` stands for the commit itself.
    """
    repository, at, rest = source.partition("@")
    if at:
        commit, colon, path = rest.partition(":")
        page = f"commit/{commit}" if path == _COMMIT else f"blob/{commit}/{path}"
        return f"https://github.com/{repository}/{page}" if colon else ""
    repository, sign, number = source.partition("#")
    return f"https://github.com/{repository}/issues/{number}" if sign else ""
