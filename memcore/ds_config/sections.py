"""The sections of a ds_config beside zero_optimization: what they say of the scenario, and a sentence for what they
decide that is not predicted, or that DeepSpeed refuses.

As deepspeed 0.19.8 reads them: runtime/config.py, DeepSpeedConfig; runtime/precision_config.py;
runtime/engine.py, get_data_types and _configure_basic_optimizer.
"""

from collections.abc import Mapping
from typing import Any

from memcore.ds_config.keys import REMOVED, REMOVED_FROM_ZERO, SECTION_KEYS
from memcore.ds_config.mending import AUTO, number, shown, switch
from memcore.i18n import gettext as _
from memcore.recipes import ConventionName, DType
from memcore.scenario import Scenario
from memcore.states import precision_of
from memcore.units import MAX_PARAMS

# DeepSpeed's own optimizers (in any case), then torch's (in theirs), as ours.
_OPTIMIZERS = {"adam": "adam", "adamw": "adamw", "lion": "lion", "muon": "muon"}
_TORCH_OPTIMIZERS = {"SGD": "sgd", "Adafactor": "adafactor"}
# Others that it makes, whose states are not known here.
_OTHER_OPTIMIZERS = ("adagrad", "lamb", "muadam", "muadamw", "musgd")
_OTHER_TORCH_OPTIMIZERS = ("ASGD", "Adadelta", "Adamax", "LBFGS", "NAdam", "RAdam", "RMSprop", "Rprop", "SparseAdam")
_FP32 = ("fp32", "float32", "float", "torch.float32")
# Settings that decide memory and are not predicted: where they stand, and from which number on they do something.
_NOT_PREDICTED = (
    ("fp16", "fp16_master_weights_and_grads", True),
    ("tensor_parallel", "autotp_size", 2),
    ("expert_parallel", "autoep_size", 2),
    ("hybrid_engine", "enabled", True),
    ("compile", "deepcompile", True),
)


def removed_keys(raw: Mapping[str, Any], notes: list[str]) -> list[str]:
    """The keys that deepspeed 0.19.8 refuses since it has their feature no more."""
    zero = raw.get("zero_optimization")
    inner = REMOVED_FROM_ZERO & zero.keys() if isinstance(zero, Mapping) else ()
    found = [*sorted(REMOVED & raw.keys()), *(f"zero_optimization.{key}" for key in sorted(inner))]
    message = _("{key} was taken out of DeepSpeed: version 0.19.8 refuses a file that has it.")
    notes += [message.format(key=key) for key in found]
    return found


def mend_keys(raw: dict[str, Any], notes: list[str]) -> None:
    """Take the keys out of the other sections that DeepSpeed refuses there."""
    for section, keys in SECTION_KEYS.items():
        part = raw.get(section)
        if not isinstance(part, dict):
            continue
        for key in [*part]:
            if key not in keys:
                message = _("{key} is not a key of DeepSpeed 0.19.8, which refuses it.")
                notes.append(message.format(key=f"{section}.{key[:60]}"))
                del part[key]


def precision(raw: Mapping[str, Any], scenario: Scenario, stage: int, notes: list[str]) -> dict[str, Any]:
    """The recipe's dtypes: bf16, fp16, autocast over FP32 weights, or none of them, which is FP32 training."""
    bf16 = _enabled(raw, "bfloat16" if raw.get("bf16") is None else "bf16", notes)
    fp16 = _enabled(raw, "fp16", notes)
    if bf16 is True and fp16 is True:
        notes.append(_("bf16 and fp16 are both enabled, which DeepSpeed refuses; bf16 is read."))
    if bf16 is True:
        return _bf16(raw, scenario, stage, notes)
    if fp16 is True:
        if _accumulates_in_fp32(raw):
            _not_predicted("data_types.grad_accum_dtype", raw["data_types"]["grad_accum_dtype"], notes)
        return _mixed(scenario, DType.FP16)
    if AUTO in (bf16, fp16):
        message = _(
            "Precision is left to the trainer: Hugging Face fills it in, DeepSpeed alone reads it as off and "
            "trains in FP32. The recipe's convention is kept."
        )
        notes.append(message)
        return {}
    autocast = raw.get("torch_autocast")
    if isinstance(autocast, Mapping) and switch(autocast.get("enabled")):
        half = "fp16" if str(autocast.get("dtype")).removeprefix("torch.") in ("fp16", "float16", "half") else "bf16"
        return {**_cleared(), "convention": ConventionName.AMP_AUTOCAST, "compute_dtype": half}
    if bf16 is None and fp16 is None:
        notes.append(_("The file names no precision; the recipe's convention is kept."))
        return {}
    notes.append(_("Neither bf16 nor fp16 is enabled: DeepSpeed trains in FP32."))
    return {**_cleared(), "convention": ConventionName.FP32}


def _enabled(raw: Mapping[str, Any], name: str, notes: list[str]) -> bool | str | None:
    """Whether a section is on, off or "auto"; None where there is none."""
    section = raw.get(name)
    if section is None:
        return None
    given = section.get("enabled", False) if isinstance(section, Mapping) else section
    if not isinstance(section, Mapping):
        message = _('{key} is {value}, which DeepSpeed refuses: write {{"enabled": {read}}}.')
        notes.append(message.format(key=name, value=shown(section), read="true" if switch(given) else "false"))
    return AUTO if given == AUTO else bool(switch(given))


def mend_precision(raw: dict[str, Any]) -> None:
    """Rewrite the sections of precision so that DeepSpeed takes them: an object each, and one of them on."""
    for name in ("bf16", "bfloat16", "fp16"):
        if raw.get(name) is not None and not isinstance(raw[name], Mapping):
            raw[name] = {"enabled": AUTO if raw[name] == AUTO else bool(switch(raw[name]))}
    halves = [raw[name] for name in ("bf16", "fp16") if isinstance(raw.get(name), dict)]
    if len(halves) == 2 and all(switch(part.get("enabled")) for part in halves):
        halves[1]["enabled"] = False


def _cleared() -> dict[str, Any]:
    """No explicit dtype: what the convention says holds."""
    names = ("param_dtype", "compute_dtype", "grad_dtype", "reduce_dtype", "master_dtype", "state_dtype")
    return dict.fromkeys(names)


def _mixed(scenario: Scenario, dtype: DType) -> dict[str, Any]:
    """16-bit weights and gradients with an FP32 master copy and states."""
    kept = precision_of(scenario.recipe).convention
    full = kept.master_dtype is kept.state_dtype is DType.FP32 and kept.accumulate_dtype is None
    if full and kept.param_dtype is kept.compute_dtype is kept.grad_dtype is dtype:
        return {}
    halves = dict.fromkeys(("param_dtype", "compute_dtype", "grad_dtype", "reduce_dtype"), dtype.value)
    return {**_cleared(), "convention": ConventionName.ZERO_PAPER, **(halves if dtype is DType.FP16 else {})}


def _bf16(raw: Mapping[str, Any], scenario: Scenario, stage: int, notes: list[str]) -> dict[str, Any]:
    section = raw.get("bf16") or raw.get("bfloat16")
    if isinstance(section, Mapping) and switch(section.get("bf16_master_weights_and_grads")):
        if not switch(section.get("bf16_optimizer_states")):
            _not_predicted("bf16.bf16_master_weights_and_grads", section["bf16_master_weights_and_grads"], notes)
            return _mixed(scenario, DType.BF16)
        found = {**_cleared(), "convention": ConventionName.ZERO_PAPER}
        return {**found, "master_dtype": DType.BF16.value, "state_dtype": DType.BF16.value}
    if _accumulates_in_fp32(raw) and stage >= 1:
        return {**_cleared(), "convention": ConventionName.DEEPSPEED_FP32_GRAD}
    if _accumulates_in_fp32(raw):
        notes.append(_("data_types.grad_accum_dtype differs from the model's, which DeepSpeed refuses at stage 0."))
    return _mixed(scenario, DType.BF16)


def _accumulates_in_fp32(raw: Mapping[str, Any]) -> bool:
    types = raw.get("data_types")
    return isinstance(types, Mapping) and types.get("grad_accum_dtype") in _FP32


def optimizer(raw: Mapping[str, Any], offload: Mapping[str, str], notes: list[str]) -> dict[str, Any]:
    """The recipe's optimizer, where the file names one: DeepSpeed then makes it itself."""
    section = raw.get("optimizer")
    given = section.get("type") if isinstance(section, Mapping) else None
    if not isinstance(section, Mapping) or given is None:
        return {}
    name = _OPTIMIZERS.get(str(given).lower()) or _TORCH_OPTIMIZERS.get(str(given))
    if name is None:
        if str(given).lower() in _OTHER_OPTIMIZERS or str(given) in _OTHER_TORCH_OPTIMIZERS:
            message = _("optimizer.type is {value}, whose memory is not predicted; the recipe's optimizer is kept.")
        else:
            message = _("optimizer.type is {value}, which DeepSpeed 0.19.8 does not know; the recipe's is kept.")
        notes.append(message.format(value=shown(given)))
        return {}
    params = section.get("params")
    params = params if isinstance(params, Mapping) else {}
    made: dict[str, Any] = {"name": name}
    if name == "sgd" and (number(params.get("momentum")) or 0) > 0:
        made["momentum"] = True
    if name in ("adam", "adamw") and switch(params.get("torch_adam")) and offload["optimizer"] == "none":
        # torch's own, whose default on a GPU is the foreach implementation.
        made["implementation"] = "foreach"
    return {"optimizer": made}


def not_predicted(raw: Mapping[str, Any], notes: list[str]) -> None:
    """Say which settings of the file decide memory that is not predicted."""
    for section, key, least in _NOT_PREDICTED:
        part = raw.get(section)
        value = part.get(key) if isinstance(part, Mapping) else None
        acts = switch(value) if least is True else (number(value) or 0) >= least
        if acts:
            _not_predicted(f"{section}.{key}", value, notes)
    if (number(raw.get("sequence_parallel_size")) or 1) > 1:
        _not_predicted("sequence_parallel_size", raw["sequence_parallel_size"], notes)
    sent, halves = raw.get("communication_data_type"), ("bf16", "fp16")
    computed = next((half for half in halves if _enabled(raw, half, []) is True), "fp32")
    if isinstance(sent, str) and sent.lower() in (*halves, "fp32") and sent.lower() != computed:
        _not_predicted("communication_data_type", sent, notes)
    part = raw.get("activation_checkpointing")
    if isinstance(part, Mapping) and any(switch(value) or (number(value) or 0) > 1 for value in part.values()):
        message = _(
            "activation_checkpointing sets up deepspeed.checkpointing, which a model must call itself; the workload's "
            "checkpointing is kept."
        )
        notes.append(message)


def _not_predicted(path: str, value: Any, notes: list[str]) -> None:
    message = _("{key} is {value}: its effect on memory is not predicted, the figures are those without it.")
    notes.append(message.format(key=path, value=shown(value)))


def batch(raw: Mapping[str, Any], scenario: Scenario, notes: list[str]) -> dict[str, int]:
    """Micro-batch and accumulation, derived as DeepSpeed derives what is not given
    (DeepSpeedConfig._set_batch_related_parameters)."""
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    total, micro, steps = (_batch_number(raw, name, notes) for name in names)
    work, ranks = scenario.workload, _data_parallel(raw, scenario.hardware.gpus)
    left_open = any(raw.get(name) == AUTO for name in names)
    if total and micro and not steps:
        steps = total // micro // ranks if not left_open else None
    elif total and steps and not micro:
        micro = total // ranks // steps if not left_open else None
    elif total and not left_open:
        micro, steps = micro or total // ranks, steps or 1
    elif micro and not steps and raw.get(names[2]) is None:
        steps = 1
    # What does not divide is 0, which DeepSpeed refuses.
    micro, steps = (None if each is None else max(each, 1) for each in (micro, steps))
    if total and micro and steps and not left_open:
        _check_batch(total, micro, steps, ranks, notes)
    return {"micro_batch": micro or work.micro_batch, "grad_accum": steps or work.grad_accum}


def _data_parallel(raw: Mapping[str, Any], gpus: int) -> int:
    """The ranks that see different data."""
    part = raw.get("tensor_parallel")
    sizes = (raw.get("sequence_parallel_size"), part.get("autotp_size") if isinstance(part, Mapping) else None)
    for size in sizes:
        divisor = number(size)
        if divisor and divisor > 1 and gpus % divisor == 0:
            gpus = int(gpus // divisor)
    return gpus


def _check_batch(total: int, micro: int, steps: int, ranks: int, notes: list[str]) -> None:
    """Say it where the three batch numbers contradict the number of GPUs (DeepSpeedConfig._batch_assertion)."""
    product = micro * steps * ranks
    if total == product:
        return
    message = _(
        "train_batch_size is {total}, but {micro} per GPU x {accumulation} steps x {ranks} GPUs is {product}: "
        "DeepSpeed stops there."
    )
    sentences = [message.format(total=total, micro=micro, accumulation=steps, ranks=ranks, product=product)]
    if total % (micro * steps) == 0:
        sentences.append(_("The file implies {implied} GPUs.").format(implied=total // (micro * steps)))
    notes.append(" ".join(sentences))


def _batch_number(raw: Mapping[str, Any], name: str, notes: list[str]) -> int | None:
    given = raw.get(name)
    if given is None or given == AUTO:
        return None
    value = number(given)
    if value is None or not 1 <= value <= MAX_PARAMS or value != int(value):
        message = _("{key} is {value}; allowed is a whole number above 0. It is left as it was.")
        notes.append(message.format(key=name, value=shown(given)))
        return None
    return int(value)
