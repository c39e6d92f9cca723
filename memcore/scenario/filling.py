"""What the engine and the number of GPUs imply for the rest, filled in before the parts are made."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from memcore.engine_options import ENGINE_OPTIONS, ENGINES_OWN, EngineName, own_convention
from memcore.i18n import gettext as _
from memcore.models import catalogue
from memcore.scenario.engine_configs import ENGINE_CONFIGS, DeepSpeedConfig
from memcore.scenario.fields import refuse, whole
from memcore.scenario.sentences import first_error


def _integer(value: object) -> int | None:
    """The whole number that `Whole` makes of a value, or None where it is refused."""
    try:
        return int(str(whole(value)))
    except (ValueError, OverflowError):
        return None


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def filled_parallelism(given: Mapping[str, Any], gpus: object, config: object) -> dict[str, Any]:
    """The parallelism with its engine, stage and degrees, where they were not given."""
    filled = dict(given)
    number = _integer(gpus)
    several = number is not None and number > 1
    if filled.get("engine") is None:
        of_deepspeed = isinstance(config, DeepSpeedConfig) or "zero_optimization" in _mapping(config)
        staged = filled.get("zero_stage") is not None or of_deepspeed
        filled["engine"] = EngineName.DEEPSPEED if staged else EngineName.DDP if several else EngineName.SINGLE
    if not isinstance(filled["engine"], str) or filled["engine"] not in set(EngineName):
        return filled  # the field's own refusal names it
    options = ENGINE_OPTIONS[EngineName(filled["engine"])]
    if options.stages and filled.get("zero_stage") is None:
        zero = config.get("zero_optimization", {}) if isinstance(config, Mapping) else None
        stage = zero.get("stage") if isinstance(zero, Mapping) else None
        filled["zero_stage"] = 0 if stage is None else stage
    _fill_data_parallel(filled, gpus, options.shards)
    return filled


def filled_recipe(given: object, model: object, engine: object) -> object:
    """The recipe with the engine's own convention by its name, where that is asked for."""
    if not isinstance(given, Mapping) or given.get("convention") != ENGINES_OWN:
        return given
    if not isinstance(engine, str) or engine not in set(EngineName):
        return given  # the engine's own refusal names it
    adapts, fp8 = given.get("method") not in (None, "full"), given.get("fp8") is not None
    own = own_convention(EngineName(engine), adapts=adapts, bare=_is_bare(model), fp8=fp8)
    return {**given, "convention": own}


def _is_bare(model: object) -> bool:
    """Whether a model, before it is made, is no more than a number of parameters."""
    given = _mapping(model)
    known = catalogue().get(str(given.get("name")))
    return given.get("n_params") is not None or (known is not None and known.config is None)


def engine_config_of(given: object, engine: object) -> object:
    """The engine's own settings, read as that engine's; what its model refuses is named below engine_config."""
    if given is None or isinstance(given, BaseModel) or not isinstance(engine, str) or engine not in set(EngineName):
        return given
    if not isinstance(given, Mapping):
        message = _("{field} is {value}; allowed is an object with its fields.")
        raise refuse("engine_config", message, value=repr(given)[:60])
    model = ENGINE_CONFIGS.get(EngineName(engine))
    if model is None:
        raise refuse("engine_config", _("{field} does nothing for {engine}: leave it out."), engine=engine)
    try:
        return model.model_validate(given)
    except ValidationError as error:
        if error.errors()[0]["type"] == "extra_forbidden":
            message = _("{field} is not a setting of {engine} that is read here.")
            raise refuse(f"engine_config.{error.errors()[0]['loc'][-1]}", message, engine=engine) from None
        raise first_error(error, "engine_config") from None


def _fill_data_parallel(filled: dict[str, Any], gpus: object, shards: bool) -> None:
    """Split dp, or else all GPUs, into dp_shard and dp_replicate as the engine uses them."""
    dp = filled.pop("dp", None)
    for name in ("dp_shard", "dp_replicate"):
        if filled.get(name) is None:
            filled.pop(name, None)
    total = _integer(gpus if dp is None else dp)
    if dp is not None and (total is None or total < 1):
        message = _("{field} is {dp}; allowed is a whole number of 1 or more.")
        raise refuse("parallelism.dp", message, dp=repr(dp)[:60])
    given = {name: _integer(filled[name]) for name in ("dp_shard", "dp_replicate") if name in filled}
    if total is None or None in given.values():
        return  # the field's own refusal names it
    # What is given stays; the rest of the ranks goes to the other.
    used, other = ("dp_shard", "dp_replicate") if shards else ("dp_replicate", "dp_shard")
    if used not in given:
        filled[used] = total // max(_integer(filled.get(other, 1)) or 1, 1)
    shard, replicate = (_integer(filled.setdefault(name, 1)) or 0 for name in ("dp_shard", "dp_replicate"))
    if dp is not None and shard * replicate != total:
        message = _("{field} is {dp}, but dp_shard x dp_replicate = {shard} x {replicate} = {product}.")
        raise refuse("parallelism.dp", message, dp=total, shard=shard, replicate=replicate, product=shard * replicate)
