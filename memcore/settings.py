"""Every limit in one place, from the environment: ``MEMCORE_HOSTED=1``, ``MEMCORE_LIGHT_TIMEOUT_S=30`` ...

Defaults suit one team on one machine. Hosted mode is for a shared demo: no look-ups by hub id.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any

from memcore.errors import UserError
from memcore.i18n import gettext as _
from memcore.jobs import LaneLimits
from memcore.units import MIB

PREFIX = "MEMCORE_"
LIGHT_PREFIX = "MEMCORE_LIGHT_"


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """A field is set by an environment variable of its name in capitals after ``MEMCORE_``; the light lane's
    limits (:class:`memcore.jobs.LaneLimits`) by theirs after ``MEMCORE_LIGHT_``.

    `hosted`: a shared demo. `hub_lookup`: whether a config may be fetched by its hub id. `max_upload_chars`: of a
    text. `cache_dir`: the folder for traces, of `cache_bytes` together, that later starts find again; empty for none.
    `warm_catalogue`: whether the catalogue's models are traced while nobody waits for anything else.
    """

    hosted: bool = False
    hub_lookup: bool = True
    max_upload_chars: int = 400_000
    cache_dir: str = "~/.cache/memcore"
    cache_bytes: int = 200 * MIB
    warm_catalogue: bool = True
    light_lane: LaneLimits = field(default_factory=LaneLimits)

    @property
    def may_look_up(self) -> bool:
        """Whether a config may be fetched by its hub id: never in hosted mode."""
        return self.hub_lookup and not self.hosted


def read_settings(environment: Mapping[str, str]) -> Settings:
    """Settings with what the environment sets. Raises UserError naming a variable that cannot be read."""
    lane = _read(environment, LIGHT_PREFIX, LaneLimits())
    try:
        limits = LaneLimits(**lane)
    except ValueError as error:
        raise UserError(str(error)) from None
    return Settings(light_lane=limits, **_read(environment, PREFIX, Settings()))


def _read(environment: Mapping[str, str], prefix: str, defaults: Settings | LaneLimits) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for each in fields(defaults):
        name, default = prefix + each.name.upper(), getattr(defaults, each.name)
        if name not in environment or not isinstance(default, bool | int | float | str):
            continue
        text = environment[name]
        try:
            given[each.name] = {"1": True, "0": False}[text] if isinstance(default, bool) else type(default)(text)
        except (KeyError, ValueError):
            allowed = _("0 or 1") if isinstance(default, bool) else _("a number")
            message = _("{name} is {value!r}; allowed is {allowed}.")
            raise UserError(message.format(name=name, value=text[:40], allowed=allowed)) from None
    return given


@cache
def settings() -> Settings:
    """The settings of this process."""
    return read_settings(os.environ)
