"""The error band, and the published runs beside a prediction, in words."""

from collections.abc import Sequence

from memcore.accuracy.band import FEWEST_RUNS, Band, band_for
from memcore.accuracy.calibration import Calibrated
from memcore.accuracy.nearest import Like, nearest
from memcore.accuracy.scored import Figure, ScoredRun, published
from memcore.budget import Budget, Missing
from memcore.engine_options import ENGINE_OPTIONS, EngineName
from memcore.explain import EVIDENCE_LABELS, METHOD_LABELS
from memcore.i18n import gettext as _
from memcore.i18n import mark
from memcore.scenario import Method
from memcore.terms import EvidenceKind
from memcore.units import ByteUnit, format_bytes, format_count
from memcore.verdict_words import verdict_word

FIGURE_LABELS = {
    Figure.TENSORS: mark("what tensors take"),
    Figure.CARD: mark("what the allocator holds of the card"),
    Figure.ACTIVATIONS: mark("what layers alone take beyond their weights"),
}
METRIC_LABELS = {
    "allocated": mark("allocated"),
    "active": mark("active"),
    "reserved": mark("reserved"),
    "nvidia_smi": mark("nvidia-smi"),
    "activations": mark("activations"),
    "unknown": mark("not known"),
}
# Engines of published runs by the names that they go by; the project's own have theirs.
_OTHER_ENGINES = {"megatron": "Megatron-LM", "megatron_fsdp": "Megatron FSDP"}


def metric_label(metric: str) -> str:
    """What was measured, as it is published."""
    label = METRIC_LABELS.get(metric)
    return metric if label is None else _(label)


def engine_label(name: str) -> str:
    """The engine's name as it is written; one that is not known as it was given."""
    if name in set(EngineName):
        return _("single GPU") if name == EngineName.SINGLE else ENGINE_OPTIONS[EngineName(name)].label
    return _OTHER_ENGINES.get(name, name)


def method_label(name: str) -> str:
    """The method's name as it is written."""
    return _(METHOD_LABELS[Method(name)]) if name in set(Method) else name


def evidence_label(name: str | None) -> str:
    """What a prediction rests on, as it is written."""
    if name is None:
        return "-"
    return _(EVIDENCE_LABELS[EvidenceKind(name)]) if name in set(EvidenceKind) else name


def band_sentence(budget: Budget) -> str:
    """What the error band rests on, and what to do where that is nothing."""
    band, scenario = budget.band, budget.scenario
    named = {
        "band": band.percent,
        "engine": engine_label(scenario.parallelism.engine.value),
        "method": method_label(scenario.recipe.method.value),
    }
    said = [_earned(band, named), *_held(budget)] if band.earned else [*_wide(budget, band, named), *_instead(budget)]
    return " ".join(said)


def _earned(band: Band, named: dict[str, object]) -> str:
    assert band.figure is not None
    counts = {"runs": band.runs, "families": band.families, "figure": _(FIGURE_LABELS[band.figure]), **named}
    if band.covers_all:
        sentence = _(
            "Error band ±{band}%: all {runs} published runs ({families} kinds) of {engine} with {method} lie within "
            "it, measured as {figure}."
        )
    else:
        sentence = _(
            "Error band ±{band}%: nine of ten runs like the {runs} published ones ({families} kinds) of {engine} with "
            "{method} lie within it, measured as {figure}."
        )
    return sentence.format(**counts)


def _held(budget: Budget) -> list[str]:
    """What a band of what tensors take leaves out: what the allocator holds beyond them, and how far off that was."""
    if budget.band.figure is not Figure.TENSORS:
        return []
    said, scenario = [_("What the allocator reserves beyond that is not part of it.")], budget.scenario
    kind = (scenario.parallelism.engine.value, scenario.recipe.method.value, budget.activations_from)
    held = band_for(*kind, (Figure.CARD,))
    if held.earned:
        message = _(
            "Reserved itself is ±{band}%, by {runs} published runs; of it, segments that are wholly free are given "
            "back before an allocation fails."
        )
        said.append(message.format(band=held.percent, runs=held.runs))
    return said


def _wide(budget: Budget, band: Band, named: dict[str, object]) -> list[str]:
    if Missing.ACTIVATIONS in budget.missing:
        sentence = _("Error band ±{band}%, assumed: no published run is predicted without its activations.")
        return [sentence.format(**named)]
    if band.runs:
        sentence = _(
            "Error band ±{band}%, assumed: published runs of {engine} with {method} that are predicted this way: "
            "{runs}; fewer than {fewest} give no band."
        )
        return [sentence.format(runs=band.runs, fewest=FEWEST_RUNS, **named)]
    return [_("Error band ±{band}%, assumed: no published runs like this, of {engine} with {method}.").format(**named)]


def _instead(budget: Budget) -> list[str]:
    """What would say more: the band of a trace, where published runs give one, or the real engine."""
    scenario, said = budget.scenario, []
    traced = band_for(scenario.parallelism.engine.value, scenario.recipe.method.value, EvidenceKind.TRACE)
    if budget.evidence.profile is None and not budget.missing and traced.earned:
        message = _("From a trace it is ±{band}%, by {runs} published runs.")
        said.append(message.format(band=traced.percent, runs=traced.runs))
    return [*said, _("`python -m memcore verify` runs the real engine beside its prediction.")]


def nearest_runs(budget: Budget) -> list[ScoredRun]:
    """The published runs that are most like the budget's scenario, of those that are predicted the same way."""
    scenario = budget.scenario
    like = Like(
        engine=scenario.parallelism.engine.value,
        method=scenario.recipe.method.value,
        n_params=budget.states.n_params,
        seq_len=scenario.workload.seq_len,
    )
    return nearest(like, published().runs, budget.activations_from)


def nearest_gist(budget: Budget, found: Sequence[ScoredRun]) -> str:
    """How far off the nearest runs are predicted, where they are of the scenario's engine and method."""
    kind = (budget.scenario.parallelism.engine.value, budget.scenario.recipe.method.value)
    alike = [run for run in found if (run.engine, run.method) == kind]
    if Missing.ACTIVATIONS in budget.missing or not found:
        return ""
    if not alike:
        return _("no published run of this engine and method is predicted this way")
    errors = ", ".join(error_text(run.error_of(budget.activations_from)) for run in alike)
    return _("errors of published runs of this kind: {errors}").format(errors=errors)


def run_label(run: ScoredRun) -> str:
    """What a run is, in a few words: model, engine, method, sequence and cards."""
    sequence = _("{batch} × {tokens:,} tokens").format(batch=run.micro_batch, tokens=run.seq_len)
    count = format_count(run.n_params)
    parts = [
        run.model if count in run.model else f"{run.model} ({count})",
        engine_label(run.engine),
        method_label(run.method),
        sequence,
        f"{run.gpus} × {run.gpu}",
    ]
    return ", ".join(parts)


def error_text(error: float | None) -> str:
    """An error in per cent with its sign."""
    if error is None:
        return "-"
    return "0.0%" if round(error, 1) == 0 else f"{error:+.1f}%".replace("-", "−")


def calibration_sentence(budget: Budget, found: Calibrated, unit: ByteUnit) -> str:
    """A calibrated figure, marked as such, with the number of runs behind it and the figure without."""
    scenario = budget.scenario
    sentence = _(
        "Calibrated by {runs} of your own runs ({engine}, {method}; median of measured over predicted {ratio:.3f}, "
        "measured as {figure}): {need} instead of the predicted {raw}. Of {usable} usable, so calibrated: {verdict}."
    )
    return sentence.format(
        runs=found.by.runs,
        engine=engine_label(scenario.parallelism.engine.value),
        method=method_label(scenario.recipe.method.value),
        ratio=found.by.ratio,
        figure=_(FIGURE_LABELS[found.by.figure]),
        need=format_bytes(found.needed, unit),
        raw=format_bytes(budget.ladder.needed, unit),
        usable=format_bytes(budget.ladder.usable, unit),
        verdict=verdict_word(found.verdict, found.needed, budget.ladder.usable),
    )
