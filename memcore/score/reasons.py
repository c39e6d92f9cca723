"""Why predictions of published runs miss, where that is known: kept by hand.

A key is a run; a family of runs; a regime and what was measured, as in ``fsdp/reserved``; or a regime. The first that
a run has stands for it. A reason names a cause that was found in the libraries' code or the runs' own figures: where
there is none the miss is not explained, and scripts/score_published.py says so.
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
# pytorch/torchtitan at both commits: train_configs/llama3_8b.toml and models/norms.py have the norms,
# parallelize_llama.py what selective checkpointing saves. The run of June 2024: pytorch/pytorch#129721.
_TITAN_NORM = mark(
    "The source is a commit's message, which does not name the norm's kernel. With the config's RMSNorm tensors alone "
    "take 77.7 GiB, and three weeks before the same author reserved 77.3 GiB with the same settings. With one of "
    "torchtitan's other RMSNorms, fused or compiled, which keep no FP32 copies, the prediction is 0.2% below."
)
_TITAN_SAVED = mark(
    "The source is a commit's message, which says neither which norm and attention kernels ran nor whether layers were "
    "compiled. It gained 7.83 GiB between its first two steps, as predicted, but is 13 GiB below torchtitan's own "
    "benchmark of the same settings five months later, which was 10% slower and is predicted within 4%. With compiled "
    "layers and cuDNN's attention, whose result the commit's policy does not save, the prediction is 4% above."
)
REASONS: Mapping[str, str] = {
    "llama3-8b.full.fp32-fp8.g32": _NOT_SET,
    "llama3-8b.full.fp32-fp8.g64": _NOT_SET,
    "titan-8b-noAC": _TITAN_NORM,
    "titan-8b-bs2-sac-2024-07": _TITAN_SAVED,
    "titan-8b-bs2-sac-2024-07-split-embed": _TITAN_SAVED,
    # Lightning-AI/litgpt@0cc02afa, finetune/lora.py, train and get_batch.
    "phi-1.5.lora-r8.bf16.g2": mark(
        "The stated length is that of the first micro-batch alone, when no gradients wait to be accumulated yet: its "
        "own peak is predicted 2 to 4% below what was measured. The micro-batches after it are random samples, which "
        "are shorter. Predicted is one of the stated length beside whole gradients that wait."
    ),
    # hpcaitech/ColossalAI-Pytorch-lightning@211e8be, benchmark/gpt/model.py, GPTLitModule.training_step.
    "colossal-pl-gpt2xl-ds-zero3": mark(
        "The record says that logits are held during the backward, but the script's training step returns its loss "
        "alone. With logits let go of, the prediction is 4% above."
    ),
    # modelscope/ms-swift of January 2024, swift/trainers/trainers.py, Seq2SeqTrainer.train; tokens x 151,936 logits.
    "single_gpu_lora/reserved": mark(
        "The figure is the most that the allocator reserved over a whole training run, whose batches are truncated to "
        "the stated length and often shorter; predicted are steps of that length alone. What is missing is about 30 "
        "bytes for each logit of a batch, the same for models of 1.8, 7 and 14 B: it fits segments for logits of "
        "shorter batches, which longer ones cannot use. The lengths themselves are not published."
    ),
    "single_gpu_lora/other": _NOT_SAID,
    "single_gpu_qlora/other": _NOT_SAID,
    # QwenLM/Qwen@85cb093, finetune/ds_config_zero3.json: the "auto" sizes that the record assumes.
    "zero3_lora": mark(
        "The source does not say which memory its figure is; buckets and prefetch are those of its own DeepSpeed file. "
        "Of what the allocator reserves the same 7.3 to 8 GB are missing at all lengths, so it is not of activations: "
        "what holds them was not found."
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


def _keys(run: ScoredRun) -> tuple[str, ...]:
    return run.run_id, run.family, f"{run.regime}/{kind_of(run)}", run.regime


def reason_of(run: ScoredRun) -> str | None:
    """Why the run's prediction misses, in the current language; None where that is not known."""
    return next((_(REASONS[key]) for key in _keys(run) if key in REASONS), None)


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
    known = {key for run in runs for key in _keys(run)}
    return [key for key in REASONS if key not in known]
