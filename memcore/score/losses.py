"""From what a record says of its loss, and of the software that made it, to a scenario's loss.

A record names the kind, the chunks and the dtype in which logits reach the cross entropy. Whether its library copies
what it shifts, and where it makes FP32 of logits, is a matter of the library and its version, which the record has
too: memcore.scenario.losses says whose does what.
"""

from collections.abc import Iterator
from typing import Any

from memcore.activations.loss import fused_chunk
from memcore.configs import SHAPE_NAMES
from memcore.i18n import gettext as _
from memcore.scenario import IN_CHUNKS, Loss, Upcast
from memcore.score.record import Run
from memcore.units import ceil_div

LOSSES = {
    "unfused": Loss.UNFUSED,
    "unfused_fp32_logits": Loss.UNFUSED,
    "chunked_ce": Loss.CHUNKED_CE,
    "chunked_head_and_ce": Loss.CHUNKED,
    "fused_ce": Loss.FUSED_CE,
    "vocab_parallel_ce": Loss.FUSED_CE,
    "fused_linear_ce": Loss.FUSED,
}
# Frameworks whose models are those of transformers.
_ON_TRANSFORMERS = ("hf_trainer", "ms_swift", "fsdp_qlora", "pytorch_lightning", "llama_recipes", "atorch")
# The months in which transformers 4.46 and 4.49, and Liger Kernel 0.5, came out, for runs without a version.
_LOSS_UPCASTS, _LABELS_SHIFTED, _LIGER_UNCAST = (4, 46), (4, 49), "2024-12"
# Models whose own forwards had a loss of theirs, on logits as they are, up to 4.48; autocast makes FP32 of its input.
_OWN_LOSS = ("gpt2", "gpt_bigcode")
# torchtitan, commit e10cb949 of 22 October 2024, moved the cast of the logits from its model to its loss.
_TITAN_UPCASTS = "2024-10"
_MONTHS = {_LOSS_UPCASTS: "2024-10", _LABELS_SHIFTED: "2025-02"}


def loss_fields(run: Run) -> dict[str, Any]:
    """The fields of a workload that describe the run's loss; its kind must be one of LOSSES."""
    work, kind = run.workload, LOSSES[run.workload.loss]
    fields: dict[str, Any] = {"loss": kind.value, "logits_upcast": _upcast(run, kind).value}
    if kind in IN_CHUNKS:
        fields["loss_chunks"] = work.loss_chunks
    if kind is not Loss.CHUNKED:
        fields["shifted_copy"] = _copies_shifted(run, kind)
    return {**fields, "logits_retained": work.logits_retained, "loss_compiled": _is_compiled(run, kind)}


def _is_compiled(run: Run, kind: Loss) -> bool:
    """Whether the loss that is asked to be compiled is. torchtune's full fine-tuning does not take the compiled one,
    but a chunked one is compiled in itself (recipes/full_finetune_single_device.py and training/_compile.py,
    compile_loss, commit f3d8d3c7)."""
    dropped = run.software.framework == "torchtune" and run.recipe.method == "full" and kind is Loss.UNFUSED
    return run.workload.loss_compiled and not dropped


def loss_gaps(run: Run) -> Iterator[tuple[str, str]]:
    """The fields, and what they say, that no loss of a scenario has."""
    work = run.workload
    if (kind := LOSSES.get(work.loss)) is None:
        yield "workload.loss", f"workload.loss = {work.loss}"
        return
    dtypes = (None,) if kind is Loss.FUSED else ("fp32", run.recipe.compute_dtype)
    if work.logits_dtype not in dtypes:
        what = _("{loss} on logits in {dtype}").format(loss=work.loss, dtype=work.logits_dtype)
        yield "workload.logits_dtype", what
    chunks = {Loss.UNFUSED: None, Loss.FUSED_CE: None, Loss.FUSED: _num_fused_chunks(run)}
    if kind in chunks and work.loss_chunks is not None and work.loss_chunks != chunks[kind]:
        yield "workload.loss_chunks", f"workload.loss_chunks = {work.loss_chunks}"
    if kind is Loss.FUSED and work.logits_retained:
        yield "workload.logits_retained", "workload.logits_retained = True"


def _upcast(run: Run, kind: Loss) -> Upcast:
    """Where the run's logits become FP32."""
    framework, dtype = run.software.framework, run.workload.logits_dtype
    if kind is Loss.FUSED:
        return Upcast.LOSS if run.software.date < _LIGER_UNCAST else Upcast.NONE
    if framework == "litgpt":
        return Upcast.MODEL  # whatever the record says: Fabric casts what a module returns to FP32
    if framework == "torchtune":
        return Upcast.LOSS if kind is Loss.CHUNKED else Upcast.MODEL
    if dtype != "fp32" or (run.recipe.autocast and _has_own_loss(run)):
        return Upcast.NONE
    if framework in _ON_TRANSFORMERS and not _at_least(run, _LOSS_UPCASTS):
        return Upcast.MODEL
    if framework == "torchtitan" and run.software.date < _TITAN_UPCASTS:
        return Upcast.MODEL
    return Upcast.LOSS


def _copies_shifted(run: Run, kind: Loss) -> bool:
    """Whether logits, or the hidden states of a fused loss, are shifted by a copy."""
    if run.software.framework == "litgpt":
        return kind is Loss.CHUNKED_CE  # its full fine-tuning; pretraining takes its labels shifted
    return run.software.framework in _ON_TRANSFORMERS and not _at_least(run, _LABELS_SHIFTED)


def _has_own_loss(run: Run) -> bool:
    """Whether the model's forward does not upcast what it gives torch's cross entropy."""
    of_transformers = run.software.framework in _ON_TRANSFORMERS
    return of_transformers and run.model.config.get("model_type") in _OWN_LOSS and not _at_least(run, _LABELS_SHIFTED)


def _at_least(run: Run, version: tuple[int, int]) -> bool:
    """Whether the run's transformers is of that version or newer; by the run's month where it is not said."""
    said = run.software.transformers_version
    return run.software.date >= _MONTHS[version] if said is None else said >= version


def _num_fused_chunks(run: Run) -> int | None:
    """How many chunks Liger's loss makes of a micro-batch; None without the model's sizes."""
    sizes = [next((run.model.config[name] for name in SHAPE_NAMES[key] if name in run.model.config), None)
             for key in ("vocab_size", "hidden_size")]  # fmt: skip
    vocab, hidden = sizes
    if not (isinstance(vocab, int) and isinstance(hidden, int) and vocab > 0 and hidden > 0):
        return None
    tokens = run.workload.micro_batch * run.workload.seq_len
    return ceil_div(tokens, fused_chunk(tokens, vocab, hidden))
