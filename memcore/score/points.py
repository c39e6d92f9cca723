"""Measured points of the activation explorer as runs of one's own, each beside its prediction.

What was measured is what layers took beyond weights and inputs, on one device, with every weight trained, whatever the
engine and the method of the scenario whose layers they are. Predicted is what the trace says of it; where there is no
trace, the closed form, which leaves out the gradient that is there for a moment.
"""

from collections.abc import Iterable, Mapping
from hashlib import sha256

from memcore.accuracy.scored import ScoredRun
from memcore.bench.case import Case, Part
from memcore.bench.curves import Closed, closed_form
from memcore.bench.measurement import DeviceFacts, Figures, Measurement
from memcore.budget import Ask
from memcore.engine_options import EngineName
from memcore.scenario import Method
from memcore.score.own import with_rows
from memcore.score.scoring import Status
from memcore.terms import EvidenceKind

REGIME = "bench"
# So much of a digest tells the cases and devices of one team apart.
_DIGITS = 8


def predictable(measured: Iterable[Measurement], formulas: Mapping[str, int]) -> int:
    """How many of these have figures and a prediction to lie beside. `formulas`: closed forms by the case's key."""
    figures = [(each.case, each.figures) for each in measured if each.case.part is not Part.ATTENTION]
    return sum(
        found is not None and (found.traced_bytes is not None or case.key in formulas) for case, found in figures
    )


def point_rows(measured: Iterable[Measurement], ask: Ask) -> tuple[ScoredRun, ...]:
    """A row for each measurement that has figures and a prediction. Of two of one case on one device the later one
    stays."""
    rows = []
    for each in measured:
        closed = None if each.figures is None else closed_form(each.case, ask)
        if each.figures is not None and closed is not None:
            rows += _row(each.case, each.figures, closed, each.device)
    return with_rows((), rows)


def _row(case: Case, figures: Figures, closed: Closed, device: DeviceFacts) -> list[ScoredRun]:
    traced = figures.traced_bytes
    predicted = closed.peak_bytes if traced is None else traced
    if predicted is None:
        return []
    model = str((case.config or {}).get("model_type", Part.PROJECTIONS.value))
    row = ScoredRun(
        run_id=_name(model, case, device),
        status=Status.PREDICTED.value,
        source="",
        family=f"{model}.{_what_ran(case)}.{case.dtype}",
        regime=REGIME,
        gold=False,
        model=model,
        n_params=closed.n_params,
        gpu=device.name,
        gpus=1,
        engine=EngineName.SINGLE.value,
        method=Method.FULL.value,
        micro_batch=case.micro_batch,
        seq_len=case.seq_len,
        metric="activations",
        measured=figures.peak_bytes,
        predicted=predicted,
        evidence=(EvidenceKind.FORMULA if traced is None else EvidenceKind.TRACE).value,
        by_formula=closed.peak_bytes,
        device=device.kind,
    )
    return [row]


def _name(model: str, case: Case, device: DeviceFacts) -> str:
    """The same for the same case on the same device, whatever measures it: what is measured again takes the place of
    what was measured before."""
    digest = sha256(f"{case.key} {device.name}".encode()).hexdigest()[:_DIGITS]
    sizes = f"{case.num_layers}x{case.tokens}"
    return "-".join((REGIME, model, _what_ran(case), case.checkpointing, sizes, device.kind, digest))


def _what_ran(case: Case) -> str:
    return "stack" if case.part is Part.PROJECTIONS else f"{case.part.value}-{case.attention}"
