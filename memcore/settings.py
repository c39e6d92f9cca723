"""Every limit in one place, from the environment: ``MEMCORE_HOSTED=1``, ``MEMCORE_LIGHT_TIMEOUT_S=30`` ...

Defaults suit one team on one machine. Hosted mode is for a shared demo: no look-ups by hub id.
Measuring can be switched off with ``MEMCORE_MEASURING=0``.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

from memcore.errors import UserError
from memcore.i18n import gettext as _
from memcore.jobs import HeavyLimits, LaneLimits
from memcore.units import MIB

PREFIX = "MEMCORE_"
LIGHT_PREFIX = "MEMCORE_LIGHT_"
HEAVY_PREFIX = "MEMCORE_HEAVY_"


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """A field is set by an environment variable of its name in capitals after ``MEMCORE_``; the light lane's
    limits (:class:`memcore.jobs.LaneLimits`) by theirs after ``MEMCORE_LIGHT_``, the heavy lane's
    (:class:`memcore.jobs.HeavyLimits`) after ``MEMCORE_HEAVY_``.

    `hosted`: a shared demo. `hub_lookup`: whether a config may be fetched by its hub id. `max_upload_chars`: of a
    text. `cache_dir`: the folder for traces, of `cache_bytes` together, that later starts find again; empty for none.
    `warm_catalogue`: whether the catalogue's models are traced while nobody waits for anything else. `measuring`:
    whether this machine measures; what was measured is shown in any case. `store`: the file of measurements, empty
    for one in the user's own data folder.
    """

    hosted: bool = False
    hub_lookup: bool = True
    max_upload_chars: int = 400_000
    cache_dir: str = "~/.cache/memcore"
    cache_bytes: int = 200 * MIB
    warm_catalogue: bool = True
    measuring: bool = True
    store: str = ""
    light_lane: LaneLimits = field(default_factory=LaneLimits)
    heavy_lane: HeavyLimits = field(default_factory=HeavyLimits)

    @property
    def may_look_up(self) -> bool:
        """Whether a config may be fetched by its hub id: never in hosted mode."""
        return self.hub_lookup and not self.hosted

    @property
    def may_take_in(self) -> bool:
        """Whether a visitor may add measurements made elsewhere: never in hosted mode, where all would see them."""
        return not self.hosted

    @property
    def store_path(self) -> Path:
        """The file of measurements."""
        if self.store:
            return Path(self.store)
        data = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
        return Path(data) / "memcore" / "measurements.sqlite"


def read_settings(environment: Mapping[str, str]) -> Settings:
    """Settings with what the environment sets. Raises UserError naming a variable that cannot be read."""
    light, heavy = _read(environment, LIGHT_PREFIX, LaneLimits()), _read(environment, HEAVY_PREFIX, HeavyLimits())
    try:
        light_lane, heavy_lane = LaneLimits(**light), HeavyLimits(**heavy)
    except ValueError as error:
        raise UserError(str(error)) from None
    return Settings(light_lane=light_lane, heavy_lane=heavy_lane, **_read(environment, PREFIX, Settings()))


def _read(environment: Mapping[str, str], prefix: str, defaults: Settings | LaneLimits | HeavyLimits) -> dict[str, Any]:
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
