"""A measured training run as it is published: the fields of a record, all of them, and what a file of runs is.

The format's enumerations are open here: a value that is not known is no scenario's either, and named as such.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from memcore.errors import UserError
from memcore.i18n import gettext as _
from memcore.scenario import decode_json
from memcore.scenario.fields import refuse
from memcore.scenario.sentences import first_error

# Text of a file of runs that is read at all: about 6000 of them.
MAX_RUNS_CHARS = 20_000_000

Metric = Literal["allocated", "active", "reserved", "nvidia_smi", "unknown"]
Positive = Annotated[int, Field(ge=1)]
Rate = Annotated[float, Field(ge=0, le=1)]
Text = Annotated[str, Field(min_length=1, max_length=200)]


class RunPart(BaseModel):
    """A part of a record: frozen, without fields of other names, nothing turned into another type."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


Part = TypeVar("Part", bound=RunPart)


def _month(said: str) -> str:
    if not re.fullmatch(r"20[0-9]{2}-(0[1-9]|1[0-2])", said):
        message = _("{field} is {value!r}; allowed is a month such as 2024-12.")
        raise refuse("software.date", message, value=said[:20])
    return said


class RunSoftware(RunPart):
    """What the run was made with; `date`: its month, or that of the commit that prints it, as in 2024-12."""

    framework: Text
    date: Annotated[str, AfterValidator(_month)]
    torch: Text | None
    transformers: Text | None

    @property
    def transformers_version(self) -> tuple[int, int] | None:
        """Major and minor version; None where they are not said in numbers."""
        numbers = re.match(r"(\d+)\.(\d+)", self.transformers or "")
        return None if numbers is None else (int(numbers[1]), int(numbers[2]))


class RunModel(RunPart):
    """`config`: a Hugging Face config.json's content, which builds a model of `n_params_config` parameters."""

    name: Text
    auto_class: Text
    config: Mapping[str, Any]
    n_params: Positive
    n_params_config: Positive


class RunHardware(RunPart):
    """The GPU, by its name in the accelerator catalogue, and how many."""

    gpu: Text
    gpus: Positive


class RunParallelism(RunPart):
    """How the run is spread; `dp`: data-parallel ranks."""

    engine: Text
    zero_stage: Annotated[int, Field(ge=0, le=3)]
    dp: Positive
    tp: Positive
    sequence_parallel: bool
    pp: Positive
    vpp: Positive | None
    microbatches: Positive | None
    cp: Positive
    ep: Positive
    reshard_after_forward: bool | int | None
    prefetch: Text | None


class RunLora(RunPart):
    """Adapters; `trainable_params`: how many parameters those of the run had."""

    rank: Positive
    targets: list[Text]
    dropout: Rate
    trainable_params: Positive | None
    modules_to_save: list[Text] | None
    adapter_dtype: Text
    sharded: bool | None


class RunRecipe(RunPart):
    """How it is trained. `param_dtype`: storage of what is trained in full, or else of what is frozen and not
    quantised; `grad_dtype` and `optimizer_state_dtype`: of what is trained."""

    method: Text
    param_dtype: Text
    norm_dtype: Text | None
    compute_dtype: Text
    autocast: bool
    grad_dtype: Text
    optimizer: Text
    optimizer_impl: Text | None
    optimizer_state_dtype: Text
    master_weights: bool
    optimizer_in_backward: bool
    quantization: Text | None
    quant_group_size: int | None
    quantize_lm_head: bool | None
    lora: RunLora | None


class RunWorkload(RunPart):
    """What one step processes: `micro_batch` sequences of `seq_len` tokens per GPU and forward."""

    micro_batch: Positive
    seq_len: Positive
    grad_accum: Positive
    attention: Text
    checkpointing: Text
    sac_save: list[Text] | None
    loss: Text
    loss_chunks: Positive | None
    logits_dtype: Text | None
    logits_retained: bool
    dropout: Rate | None
    compile: bool
    loss_compiled: bool
    fused_kernels: list[Text]
    offload: Text


class RunMeasured(RunPart):
    """What was measured, in bytes per GPU. `precision_bytes`: half a unit of the last digit that was printed."""

    bytes: Positive
    metric: Metric
    steady_bytes: Positive | None
    rank: Text
    precision_bytes: Positive
    others: list[Mapping[str, Any]]


class Run(RunPart):
    """One measured run. `gold`: exact bytes, with every input stated."""

    id: Text
    source: Text
    split: Text
    family: Text
    regime: Text
    confidence: Text
    gold: bool
    software: RunSoftware
    model: RunModel
    hardware: RunHardware
    parallelism: RunParallelism
    recipe: RunRecipe
    workload: RunWorkload
    engine_config: Mapping[str, Any] | None
    measured: RunMeasured
    assumptions: list[str]


def read_runs(text: str) -> Sequence[object]:
    """The records of a file: a list of them, or an object with the list `runs`. Raises UserError for other text."""
    data = decode_json(text, MAX_RUNS_CHARS)
    runs = data.get("runs") if isinstance(data, Mapping) else data
    if not isinstance(runs, list):
        raise UserError(_('A file of runs is a list of records, or an object whose "runs" is one.'))
    return runs


def checked(kind: type[Part], data: object) -> Part:
    """A record of a kind from its JSON data. Raises UserError with one sentence that names the first field at fault."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        if first["type"] == "extra_forbidden":
            field = ".".join(map(str, first["loc"]))
            raise UserError(_("{field} is not a field of a run.").format(field=field[:80]), field) from None
        raise first_error(error) from None


def name_of(data: object, number: int) -> str:
    """What a record that cannot be read is called: its id, or its number in the file."""
    given = data.get("id") if isinstance(data, Mapping) else None
    return given[:200] if isinstance(given, str) and given else f"#{number}"


def parse_run(data: object) -> Run:
    """A record from its JSON data. Raises UserError with one sentence that names the first field at fault."""
    run = checked(Run, data)
    degrees = run.parallelism
    ranks = degrees.dp * degrees.tp * degrees.pp * degrees.cp
    if ranks != run.hardware.gpus:
        message = _("dp x tp x pp x cp = {ranks}, but hardware.gpus is {gpus}.")
        raise UserError(message.format(ranks=ranks, gpus=run.hardware.gpus), "parallelism.dp")
    return run
