"""Find an entry of a catalogue by name, or say which names are near."""

import difflib
from collections.abc import Mapping
from typing import TypeVar

from memcore.errors import UserError
from memcore.i18n import gettext as _

Entry = TypeVar("Entry")


def find(known: Mapping[str, Entry], name: str, field: str) -> Entry:
    """The entry of that name. Raises UserError for `field`, with the nearest names, for an unknown one."""
    if name in known:
        return known[name]
    lower = {each.lower(): each for each in known}
    found = difflib.get_close_matches(name.lower(), lower, n=3, cutoff=0.3)
    near = [lower[each] for each in found] or list(known)[:3]
    message = _("{field} is {name!r}, which is not in the catalogue; the nearest are {near}.")
    raise UserError(message.format(field=field, name=name[:60], near=", ".join(near)), field)
