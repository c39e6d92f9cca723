"""What the parts of a scenario are made of: the base class, numbers as people write them, and refusals."""

import math
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from memcore.configs import check_config, normalise_config
from memcore.errors import UserError
from memcore.units import parse_count

MAX_GPUS = 1_000_000
MAX_TOKENS = 100_000_000


def whole(value: object) -> object:
    """Take 8, 8.0 and "8" as whole numbers; leave the rest to pydantic's own refusal."""
    if isinstance(value, bool):
        raise ValueError("true and false are not numbers")  # noqa: TRY004  pydantic reports ValueError only
    if isinstance(value, float) and math.isfinite(value) and value == int(value):
        return int(value)
    return value


def count_of(value: object) -> object:
    """A parameter count, also as text such as 7b."""
    return parse_count(value) if isinstance(value, str) else whole(value)


def named_only(value: object) -> object:
    """Let an optimizer be written as its name alone."""
    return {"name": value} if isinstance(value, str) else value


def config_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json that was checked, in its normalised form."""
    check_config(config)
    return normalise_config(config)


Whole = Annotated[int, BeforeValidator(whole)]
Degree = Annotated[Whole, Field(ge=1, le=MAX_GPUS)]
Tokens = Annotated[Whole, Field(ge=1, le=MAX_TOKENS)]


class Part(BaseModel):
    """A part of a scenario: frozen, and without fields of other names."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def refuse(field: str, message: str, **values: object) -> UserError:
    """The refusal of a field: the message with `field` and the other values put in."""
    return UserError(message.format(field=field, **values), field)
