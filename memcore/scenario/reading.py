"""A scenario from outside data and back."""

import json
import math
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from memcore import __version__
from memcore.engine_options import ENGINES_OWN
from memcore.errors import UserError
from memcore.i18n import gettext as _
from memcore.loose_json import as_json
from memcore.scenario.sentences import first_error, kind_of
from memcore.scenario.whole import Scenario

# Text of a scenario, config.json included, that is read at all.
MAX_SCENARIO_CHARS = 400_000
# What an exported scenario says of the program that wrote it; it is not read.
_VERSION_KEY = "memcore"


def parse_scenario(data: object) -> Scenario:
    """A Scenario from outside data: JSON text, or what JSON decodes to.

    Raises UserError with one sentence that names the first field at fault, its value and what is allowed.
    """
    if isinstance(data, str | bytes):
        data = decode_json(data)
    if not isinstance(data, Mapping):
        raise UserError(_("A scenario is a JSON object with a model; this is {kind}.").format(kind=kind_of(data)))
    try:
        return Scenario.model_validate({name: part for name, part in data.items() if name != _VERSION_KEY})
    except ValidationError as error:
        raise first_error(error) from None
    except RecursionError:
        raise UserError(_("The scenario is nested too deeply to be read.")) from None


def decode_json(text: str | bytes, limit: int = MAX_SCENARIO_CHARS) -> Any:
    """JSON text to data. Raises UserError where it is too long, not JSON, or holds NaN or infinity."""
    return _decoded(text, limit, finite=True)


def decode_config(text: str | bytes, limit: int = MAX_SCENARIO_CHARS) -> Any:
    """The text of a config.json to data: JSON, or nearly (memcore.loose_json), in which Python's spellings of NaN and
    infinity may stand, as they do in published files (Mamba-2's time_step_limit).

    Raises UserError where it is too long, or not that.
    """
    try:
        return _decoded(text, limit, finite=False)
    except UserError as error:
        nearly = as_json(text) if isinstance(text, str) and len(text) <= limit else None
        if nearly is None or nearly == text:
            raise
        try:
            return _decoded(nearly, limit, finite=False)
        except UserError:
            raise error from None


def _decoded(text: str | bytes, limit: int, *, finite: bool) -> Any:
    if len(text) > limit:
        message = _("The text is {size:,} characters long; up to {limit:,} are read.")
        raise UserError(message.format(size=len(text), limit=limit))

    def constant(name: str) -> float:
        if finite:
            raise ValueError(name)
        return float(name)

    def number(digits: str) -> float:
        value = float(digits)
        if not math.isfinite(value):
            raise ValueError(digits)
        return value

    try:
        # Files that Windows wrote begin with a byte order mark.
        unmarked = text.removeprefix("\ufeff") if isinstance(text, str) else text
        return json.loads(unmarked, parse_constant=constant, parse_float=number)
    except (ValueError, RecursionError) as error:
        where = f" ({error.msg}, line {error.lineno})" if isinstance(error, json.JSONDecodeError) else ""
        raise UserError(_("This is not JSON{where}.").format(where=where)) from None


def scenario_data(scenario: Scenario) -> dict[str, Any]:
    """The scenario as JSON data, without what is at its default. :func:`parse_scenario` reads it back.

    The convention is always there, by its name.
    """
    data: dict[str, Any] = scenario.model_dump(mode="json", exclude_defaults=True)
    data["recipe"] = {"convention": scenario.recipe.convention.value, **data.get("recipe", {})}
    return data


def exported_data(scenario: Scenario) -> dict[str, Any]:
    """The scenario with all of its defaults and this program's version, for files: what a later version fills in
    otherwise does not change it. :func:`parse_scenario` reads it back."""
    return {_VERSION_KEY: __version__, **scenario.model_dump(mode="json")}


def movable_data(scenario: Scenario) -> dict[str, Any]:
    """The same for another engine to be put in: an engine's own convention becomes the other's there."""
    data = scenario_data(scenario)
    if scenario.recipe.convention is scenario.own_convention:
        data["recipe"]["convention"] = ENGINES_OWN
    return data
