"""Why predictions of published runs miss, where that is known: kept by hand.

A key is a family of runs; a regime and what was measured, as in ``fsdp/reserved``; or a regime. The first that a run
has stands for it. A reason names a cause that was found in the libraries' code or the runs' own figures: where there
is none the miss is not explained, and scripts/score_published.py says so.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from memcore.accuracy.scored import ScoredRun
from memcore.i18n import gettext as _
from memcore.i18n import mark
from memcore.score.summary import GROUPS, percentile

_NOT_SAID = mark(
    "The source does not say which memory its figure is. Predicted is what tensors take, the least of what it may be; "
    "taken as the whole process's, the same predictions lie between 16% below and 10% above."
)
# torchtitan, benchmarks/llama3-8b_h200_202506_trainy-whitefiber.md (the command) and run_train.sh, commit e7c0cae9.
_NOT_SET = mark(
    "The record has expandable segments, which torchtitan's run_train.sh sets, but the published command starts the "
    "training without that script. With segments as they are by default the same prediction is 1% below."
)
REASONS: Mapping[str, str] = {
    "llama3-8b.full.fp32-fp8.g32": _NOT_SET,
    "llama3-8b.full.fp32-fp8.g64": _NOT_SET,
    # modelscope/ms-swift of January 2024, swift/trainers/trainers.py, Seq2SeqTrainer.train; tokens x 151,936 logits.
    "single_gpu_lora/reserved": mark(
        "The figure is the most that the allocator reserved over a whole training run, whose batches are truncated to "
        "the stated length and often shorter; predicted are steps of that length alone. What is missing is about 30 "
        "bytes for each logit of a batch, the same for models of 1.8, 7 and 14 B: it fits segments for logits of "
        "shorter batches, which longer ones cannot use. The lengths themselves are not published."
    ),
    "single_gpu_lora/other": _NOT_SAID,
    "single_gpu_qlora/other": _NOT_SAID,
    "zero3_lora": mark(
        "The source says neither which memory its figure is nor DeepSpeed's settings: buckets and prefetch are those "
        "of a common template. What is missing is nearly the same at all lengths, 9.5 to 11.7 GB, so it is not of "
        "activations."
    ),
}

# A regime of so many predicted runs whose median error is beyond this, in per cent, misses to one side.
FEWEST_RUNS = 5
ONE_SIDED_PCT = 8.0
# What a run's metric is called in a key.
_KINDS = ("allocated", "reserved", "other")


def kind_of(run: ScoredRun) -> str:
    """The group of what was measured that the run is in, gold runs and FSDP2's lines aside; the metric itself where
    no published run has it."""
    return next((name for name in _KINDS if GROUPS[name](run)), run.metric)


def reason_of(run: ScoredRun) -> str | None:
    """Why the run's prediction misses, in the current language; None where that is not known."""
    for key in (run.family, f"{run.regime}/{kind_of(run)}", run.regime):
        if key in REASONS:
            return _(REASONS[key])
    return None


def one_sided_without_reason(runs: Sequence[ScoredRun]) -> Iterator[str]:
    """A sentence for each regime that misses to one side while some of the runs that do so have no reason: by what
    was measured, or as a whole where there are too few of each kind."""
    for regime in sorted({run.regime for run in runs}):
        of_regime = [run for run in runs if run.regime == regime and run.predicted is not None]
        parts = {f"{regime} {kind}": [run for run in of_regime if kind_of(run) == kind] for kind in _KINDS}
        enough = {name: part for name, part in parts.items() if len(part) >= FEWEST_RUNS}
        for name, part in (enough or {regime: of_regime}).items():
            yield from _complaint(name, part)


def _complaint(name: str, runs: Iterable[ScoredRun]) -> Iterator[str]:
    errors = [(error, run) for run in runs if (error := run.error_pct) is not None]
    median = percentile((error for error, _run in errors), 0.5)
    if len(errors) < FEWEST_RUNS or median is None or abs(median) <= ONE_SIDED_PCT:
        return
    side = 1 if median > 0 else -1
    unexplained = [run for error, run in errors if error * side > ONE_SIDED_PCT and reason_of(run) is None]
    if unexplained:
        yield (
            f"{name}: {len(errors)} runs with a median error of {median:+.1f}%, "
            f"and {len(unexplained)} of them have no reason."
        )


def unused_reasons(runs: Iterable[ScoredRun]) -> list[str]:
    """Keys that no run has."""
    known = {key for run in runs for key in (run.family, f"{run.regime}/{kind_of(run)}", run.regime)}
    return [key for key in REASONS if key not in known]
