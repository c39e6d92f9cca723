"""What is wrong with outside data, as one sentence."""

import re
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from memcore.errors import UserError
from memcore.i18n import gettext as _
from memcore.scenario.synonyms import hint


def kind_of(value: object) -> str:
    """What JSON calls a value, in words."""
    names = {list: _("a list"), str: _("text"), bool: _("true or false"), type(None): _("null")}
    return names.get(type(value), _("a number"))


def first_error(error: ValidationError, prefix: str = "") -> UserError:
    """The first refusal as one sentence; `prefix` is the path of the part that was read."""
    first = error.errors()[0]
    inner = first.get("ctx", {}).get("error")
    if isinstance(inner, UserError) and inner.field:
        return inner
    parts = [prefix, *first["loc"]] if prefix else list(first["loc"])
    field = ".".join(str(part) for part in parts if not (isinstance(part, str) and "[" in part))
    if isinstance(inner, UserError):
        return UserError(str(inner), field)
    value = first.get("input")
    shown = repr(value)[:60] if not isinstance(value, Mapping) else _("an object")
    if first["type"] == "extra_forbidden":
        message = _("{field} is not a field of a scenario.")
    elif first["type"] == "missing":
        message = _("{field} is missing.")
    else:
        message = _("{field} is {value}; allowed is {allowed}.")
    allowed = _allowed(first)
    near = hint(field, value, re.findall(r"\w+", allowed)) if "expected" in first.get("ctx", {}) else ""
    return UserError(message.format(field=field, value=shown, allowed=allowed) + near, field)


def _allowed(error: Any) -> str:
    """What a field takes, in words, from pydantic's error."""
    context, kind = error.get("ctx", {}), error["type"]
    if "expected" in context:
        # Members of an enumeration come as <Device.CPU: 'cpu'>.
        return re.sub(r"<[^:>]*: ([^>]*)>", r"\1", str(context["expected"]).replace("'", ""))
    if "ge" in context:
        return _("a whole number of {least:,} or more").format(least=context["ge"])
    if "le" in context:
        return _("at most {most:,}").format(most=context["le"])
    if kind.startswith(("int_", "finite", "value_error")):
        return _("a whole number")
    if kind.startswith("tuple"):
        return _("a list")
    if kind.startswith("bool"):
        return _("true or false")
    if kind.startswith("string"):
        return _("a text of up to {most} characters").format(most=context.get("max_length", 120))
    return _("an object with its fields")
