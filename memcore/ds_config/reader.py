"""Read a user's ds_config.json: what each key means for this scenario's memory, and the scenario it implies.

Defaults, accepted spellings and deprecated keys are those of deepspeed 0.19.8 (runtime/zero/config.py,
DeepSpeedZeroConfig; config_utils.py). "auto" is resolved as Hugging Face's Trainer does (transformers 5.24,
integrations/deepspeed.py, HfTrainerDeepSpeedConfig.trainer_config_finalize). Sizes are in elements.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from memcore.budget import Budget, Evidence, inventory_for, predict
from memcore.ds_config.effects import ZERO_KEYS, KeyReading, decides_memory, explain_key
from memcore.ds_config.keys import REMOVED, REMOVED_FROM_ZERO, TOP_KEYS
from memcore.ds_config.mending import AUTO, DEPRECATED, by_alias, mend, number, shown, switch
from memcore.ds_config.sections import (
    batch,
    mend_keys,
    mend_precision,
    not_predicted,
    optimizer,
    precision,
    removed_keys,
)
from memcore.ds_config.text import read_text
from memcore.errors import UserError
from memcore.i18n import gettext as _
from memcore.scenario import Scenario, ZeroConfig, movable_data, parse_scenario
from memcore.units import MAX_PARAMS


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """A ds_config read for a scenario: the budget of the scenario it makes, its keys, what to mend, and the mended
    file."""

    budget: Budget
    keys: tuple[KeyReading, ...]
    notes: tuple[str, ...]
    unknown: tuple[str, ...]
    corrected: Mapping[str, Any]

    @property
    def scenario(self) -> Scenario:
        """The scenario that the file makes."""
        return self.budget.scenario

    def costliest(self, count: int = 3) -> list[KeyReading]:
        """The settings that take the most, largest first; the stage itself is not one of them."""
        costly = [key for key in self.keys if key.cost_bytes and key.path != "stage"]
        return sorted(costly, key=lambda key: -(key.cost_bytes or 0))[:count]


_BOOLEANS = ("contiguous_gradients", "overlap_comm")


def read_ds_config(text: str | bytes | Mapping[str, Any], scenario: Scenario, evidence: Evidence) -> Reading:
    """Read a ds_config for the scenario's model and GPUs. Raises UserError for what cannot be one at all."""
    raw, notes = (text, []) if isinstance(text, Mapping) else read_text(text)
    return _Reader(raw, scenario, evidence, notes).read()


class _Reader:
    """One reading in progress: collects notes, the mended file and the scenario's fields as it goes."""

    def __init__(self, raw: Mapping[str, Any], scenario: Scenario, evidence: Evidence, notes: list[str]) -> None:
        self._notes = notes
        zero = self._section(raw)
        if not isinstance(zero, Mapping):
            raise UserError(_("zero_optimization is {value}; it must be an object.").format(value=shown(zero)))
        self._raw, self._zero = raw, by_alias(zero)
        self._scenario, self._evidence = scenario, evidence
        try:
            self._corrected: dict[str, Any] = json.loads(json.dumps({**raw, "zero_optimization": self._zero}))
        except RecursionError:
            raise UserError(_("This is not JSON{where}.").format(where="")) from None
        self._values: dict[str, Any] = {}

    def _section(self, raw: Mapping[str, Any]) -> Any:
        """zero_optimization; a bare true is the form of DeepSpeed's first versions, stage 1
        (runtime/zero/config.py, read_zero_config_deprecated)."""
        given = raw.get("zero_optimization", {})
        if not isinstance(given, bool):
            return given
        read = {"stage": int(given)}
        message = _("zero_optimization is {value}, an old form that DeepSpeed reads as {read}.")
        self._notes.append(message.format(value=json.dumps(given), read=json.dumps(read)))
        return read

    def read(self) -> Reading:
        unknown = self._unknown()
        stage = self._stage()
        self._sizes()
        self._notes.extend(mend(self._corrected["zero_optimization"], stage))
        data = self._scenario_data(stage)
        scenario = parse_scenario(data)
        budget = predict(scenario, self._evidence)
        keys = tuple(explain_key(name, self._zero, scenario, budget) for name in ZERO_KEYS if self._concerns(name))
        return Reading(budget=budget, keys=keys, notes=tuple(self._notes), unknown=unknown, corrected=self._corrected)

    def _concerns(self, name: str) -> bool:
        """Keys of the file, and those defaults of DeepSpeed's that decide memory."""
        return name in self._zero or (name not in DEPRECATED and decides_memory(name))

    def _unknown(self) -> tuple[str, ...]:
        unknown = [key for key in self._raw if key not in TOP_KEYS and key not in REMOVED]
        for key in unknown:
            if key in ZERO_KEYS:
                message = _("{key} lies outside zero_optimization, where DeepSpeed does not read it: it has no effect.")
                self._notes.append(message.format(key=key))
        removed = removed_keys(self._raw, self._notes)
        for key in (*unknown, *removed):
            self._corrected.pop(key, None)
        for key in REMOVED_FROM_ZERO:
            self._corrected["zero_optimization"].pop(key, None)
        inner = [key for key in self._zero if key not in ZERO_KEYS and key not in REMOVED_FROM_ZERO]
        for key in inner:
            message = _("zero_optimization.{key} is not a key of DeepSpeed 0.19.8, which refuses it.")
            self._notes.append(message.format(key=key[:60]))
            self._corrected["zero_optimization"].pop(key, None)
        for old, new in DEPRECATED.items():
            if old in self._zero:
                self._notes.append(_("{old} is deprecated: write {new}.").format(old=old, new=new))
        return (*(key[:60] for key in unknown), *(f"zero_optimization.{key[:60]}" for key in inner))

    def _stage(self) -> int:
        given = self._zero.get("stage", 0)
        stage = self._whole("stage", given, least=0)
        if stage is None or stage not in (0, 1, 2, 3):
            raise UserError(
                _("zero_optimization.stage is {value}; allowed are 0, 1, 2 and 3.").format(value=shown(given))
            )
        return stage

    def _sizes(self) -> None:
        """Take up every size and switch that memory depends on, "auto" resolved."""
        fields = ZeroConfig.model_fields
        for name in fields:
            if name in ("stage", *_BOOLEANS) or name not in self._zero:
                continue
            given = self._zero[name]
            value = self._auto(name) if given == AUTO else self._whole(name, given, least=_LEAST.get(name, 0))
            if value is not None:
                # A sub-group of 0 is closed at its first parameter, as one of 1 (stage3.py, _create_fp16_sub_groups).
                self._values[name] = max(value, 1) if name == "sub_group_size" else value
        for name in _BOOLEANS:
            if (value := switch(self._zero.get(name))) is not None:
                self._values[name] = value

    def _auto(self, name: str) -> int | None:
        """Hugging Face's rules: h^2, 0.9 h^2 and 10 h; without a known hidden size DeepSpeed's default stays."""
        hidden = self._hidden_size()
        rules: dict[str, Callable[[int], int]] = {
            "reduce_bucket_size": lambda h: h * h,
            "stage3_prefetch_bucket_size": lambda h: int(0.9 * h * h),
            "stage3_param_persistence_threshold": lambda h: 10 * h,
        }
        if name not in rules or hidden == 0:
            message = _(
                '{key} is "auto", which only Hugging Face fills in, from the hidden size; DeepSpeed keeps its default.'
            )
            self._notes.append(message.format(key=name))
            self._corrected["zero_optimization"].pop(name, None)
            return None
        value = rules[name](hidden)
        self._corrected["zero_optimization"][name] = value
        return value

    def _hidden_size(self) -> int:
        inventory = inventory_for(self._scenario.model, self._evidence)
        return inventory.shapes.hidden_size if inventory else 0

    def _whole(self, name: str, given: Any, least: int) -> int | None:
        """A size in any of the spellings that people use; what DeepSpeed would refuse is said and mended."""
        value = number(given)
        most = _MOST.get(name, MAX_PARAMS)
        if value is None or not least <= value <= most:
            message = _(
                "zero_optimization.{key} is {value}; allowed is a whole number from {least}. Its default is used."
            )
            self._notes.append(message.format(key=name, value=shown(given), least=least))
            self._corrected["zero_optimization"].pop(name, None)
            return None
        text_ok = isinstance(given, str) and given.strip().lstrip("+").isdigit()
        if not (isinstance(given, int) or text_ok or (isinstance(given, float) and given == int(given))):
            message = _("zero_optimization.{key} is {value}, which DeepSpeed refuses: write {read}.")
            self._notes.append(message.format(key=name, value=shown(given), read=int(value)))
        self._corrected["zero_optimization"][name] = int(value)
        return int(value)

    def _scenario_data(self, stage: int) -> dict[str, Any]:
        """The scenario with what the file says put in; what contradicts it is said."""
        data = movable_data(self._scenario)
        data["parallelism"] = {"engine": "deepspeed", "zero_stage": stage}
        defaults = ZeroConfig()
        zero = {key: value for key, value in self._values.items() if value != getattr(defaults, key)}
        if stage != 3:
            zero.pop("zero_hpz_partition_size", None)
        data["engine_config"] = {"zero_optimization": zero}
        data["offload"] = self._offload(stage)
        raw, scenario, notes = self._raw, self._scenario, self._notes
        mend_keys(self._corrected, notes)
        mend_precision(self._corrected)
        recipe = {**precision(raw, scenario, stage, notes), **optimizer(raw, data["offload"], notes)}
        data["recipe"] = {**data.get("recipe", {}), **recipe}
        data["workload"] = {**data.get("workload", {}), **batch(raw, scenario, notes)}
        not_predicted(raw, notes)
        return data

    def _offload(self, stage: int) -> dict[str, str]:
        found = {
            "optimizer": self._device("offload_optimizer", "cpu_offload"),
            "parameters": self._device("offload_param", "cpu_offload_param"),
        }
        for part, lowest in (("optimizer", 1), ("parameters", 3)):
            needed = 3 if found[part] == "nvme" else lowest
            if found[part] != "none" and stage < needed:
                message = _(
                    "Offloading the {part} to {device} needs ZeRO stage {needed}; at stage {stage} it does nothing."
                )
                self._notes.append(message.format(part=part, device=found[part], needed=needed, stage=stage))
                found[part] = "none"
        return found

    def _device(self, section: str, legacy: str) -> str:
        part = self._zero.get(section)
        device = part.get("device") if isinstance(part, Mapping) else None
        if isinstance(device, str) and device in ("none", "cpu", "nvme"):
            return device
        return "cpu" if switch(self._zero.get(legacy)) else "none"


_MOST = {"stage3_model_persistence_threshold": 2**63 - 1}
_LEAST = {"reduce_bucket_size": 1, "zero_hpz_partition_size": 1}
