"""What the figures rest on, in one line, so that a screenshot carries its own context."""

from memcore.accuracy.band import Band
from memcore.budget import Budget
from memcore.configs import named_class
from memcore.engine_options import ENGINE_OPTIONS, EngineName
from memcore.explain import ATTENTION_LABELS, LOSS_LABELS, METHOD_LABELS, OPERATION_LABELS
from memcore.i18n import gettext as _
from memcore.i18n import mark, ngettext
from memcore.optimizers import OPTIMIZERS
from memcore.scenario import Device, Scenario
from memcore.units import ByteUnit, format_count

_CHECKPOINTING_LABELS = {
    "none": mark("no checkpointing"),
    "full": mark("full checkpointing"),
    "segments": mark("checkpointing in segments of {k}"),
    "every_nth": mark("checkpointing of every layer in {k}"),
    "first": mark("checkpointing of the first {k} layers"),
    "attention": mark("checkpointing of attention scores"),
}


def assumptions(budget: Budget, unit: ByteUnit) -> str:
    """One line with all that the figures rest on."""
    scenario = budget.scenario
    parts = [
        model_name(budget),
        _(METHOD_LABELS[scenario.recipe.method]),
        budget.states.precision.label,
        _float8_name(scenario),
        _optimizer_name(scenario),
        _engine_name(scenario),
        f"{scenario.hardware.gpus} × {budget.device.label}",
        *_workload_names(budget),
        _("per-GPU figures in {unit}").format(unit=_UNIT_NAMES[unit]),
        _band_name(budget.band),
    ]
    return " · ".join(part for part in parts if part)


def _band_name(band: Band) -> str:
    if band.earned:
        return _("error band {band}% ({runs} published runs)").format(band=band.percent, runs=band.runs)
    return _("error band {band}%, assumed").format(band=band.percent)


_UNIT_NAMES = {ByteUnit.GB: "GB (1e9 bytes)", ByteUnit.GIB: "GiB (2^30 bytes)"}


def model_name(budget: Budget) -> str:
    """The model as people call it, with its parameter count."""
    model, count = budget.scenario.model, format_count(budget.states.n_params)
    if model.name is not None:
        return f"{model.name} ({count})"
    if model.config is not None:
        return _("uploaded {kind} config ({count})").format(
            kind=model.config.get("model_type") or named_class(model.config), count=count
        )
    return _("{count} parameters").format(count=count)


def _float8_name(scenario: Scenario) -> str:
    if scenario.recipe.fp8 is None:
        return ""
    gathered = scenario.fsdp2_config.enable_fsdp_float8_all_gather
    return f"FP8 {scenario.recipe.fp8}" + (_(", gathered in float8") if gathered else "")


def _workload_names(budget: Budget) -> list[str]:
    """What one step processes and keeps; of a bare count, which has no activations, how many micro-steps alone."""
    work = budget.scenario.workload
    size = _("{batch} × {tokens:,} tokens").format(batch=work.micro_batch, tokens=work.seq_len)
    steps = ngettext("{count} micro-step", "{count} micro-steps", work.grad_accum).format(count=work.grad_accum)
    if budget.inventory is None:
        return [steps]
    return [
        size,
        steps,
        _("{kind} attention").format(kind=_(ATTENTION_LABELS[work.attention])),
        checkpointing_name(work.checkpointing),
        _("loss {kind}").format(kind=_(LOSS_LABELS[work.loss])),
    ]


def checkpointing_name(kind: str) -> str:
    """A kind of checkpointing in a few words."""
    name, _bracket, rest = kind.rstrip(")").partition("(")
    if name == "save":
        saved = ", ".join(_(OPERATION_LABELS[operation]) for operation in rest.split(","))
        return _("checkpointing but for {saved}").format(saved=saved)
    return _(_CHECKPOINTING_LABELS[name]).format(k=rest)


def _optimizer_name(scenario: Scenario) -> str:
    optimizer = scenario.recipe.optimizer
    label = OPTIMIZERS[optimizer.name].label
    return " ".join(
        part
        for part in (_("paged") if optimizer.paged else "", _("8-bit") if optimizer.bits == 8 else "", label)
        if part
    )


def _engine_name(scenario: Scenario) -> str:
    parallelism = scenario.parallelism
    parts = [_("single GPU") if parallelism.engine is EngineName.SINGLE else ENGINE_OPTIONS[parallelism.engine].label]
    if parallelism.zero_stage is not None:
        parts.append(f"ZeRO-{parallelism.zero_stage}")
    if parallelism.dp_replicate > 1 and parallelism.dp_shard > 1:
        parts.append(f"HSDP {parallelism.dp_replicate} × {parallelism.dp_shard}")
    staged = len(parts)
    for device, what in (
        (scenario.offload.optimizer, _("optimizer on")),
        (scenario.offload.parameters, _("weights on")),
    ):
        if device is not Device.NONE:
            parts.append(f"{what} {device.value}")
    return ", ".join([" ".join(parts[:staged]), *parts[staged:]])
