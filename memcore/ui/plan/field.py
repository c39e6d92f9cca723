"""A field of the scenario that one widget edits, as data: where it lies, what it says, and beside what it means
something. Drawing it and reading it go by the same conditions."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import streamlit as st

from memcore.i18n import gettext as _
from memcore.scenario import Fsdp1Config, Fsdp2Config, Hardware, LlmcConfig, Lora, Model, Recipe, Workload, ZeroConfig
from memcore.scenario.fields import Part
from memcore.ui.plan.number import number
from memcore.ui.plan.values import USUAL, Values, values_now
from memcore.units import MAX_PARAMS

# Where each part lies in a scenario's data.
_PLACES: Mapping[type[Part], tuple[str, ...]] = {
    Model: ("model",),
    Hardware: ("hardware",),
    ZeroConfig: ("engine_config", "zero_optimization"),
    Fsdp1Config: ("engine_config",),
    Fsdp2Config: ("engine_config",),
    LlmcConfig: ("engine_config",),
    Recipe: ("recipe",),
    Lora: ("recipe", "lora"),
    Workload: ("workload",),
}


def always(_values: Values) -> bool:
    """Beside anything."""
    return True


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanField:
    """One field. `label` and `help` are translated where they are drawn.

    `allowed`: the rest of the plan lets it be set; elsewhere it is left out. `shown`: it does something, too.
    `choices`: the values with their labels, `USUAL` for none. Of a number the `least` and the `step`.
    """

    part: type[Part]
    name: str
    label: str
    help: str
    allowed: Callable[[Values], bool] = always
    shown: Callable[[Values], bool] = always
    choices: Callable[[Values], Mapping[Any, str]] | None = None
    least: int = 0
    step: float = 10_000_000

    @property
    def path(self) -> tuple[str, ...]:
        """Where it lies in a scenario's data."""
        return (*_PLACES[self.part], self.name)

    @property
    def key(self) -> str:
        """Its widget's."""
        return f"w_{'_'.join(self.path)}"

    @property
    def usual(self) -> Any:
        """The widget's value where nothing is said."""
        default = self.part.model_fields[self.name].default
        if default is None:
            return USUAL
        return list(default) if isinstance(default, tuple) else str(default) if isinstance(default, str) else default

    def value_in(self, data: Mapping[str, Any]) -> Any:
        """The widget's value for a scenario's data."""
        found: Any = data
        for name in self.path:
            found = found.get(name) if isinstance(found, Mapping) else None
        return self.usual if found is None else found

    def chosen(self, values: Values) -> Any:
        """What the widget says, where that is allowed."""
        value = values[self.key]
        known = self.choices is None or isinstance(value, list) or value in self.choices(values)
        return value if known and self.allowed(values) else self.usual


def put(field: PlanField, values: Values, data: Mapping[str, Any]) -> dict[str, Any]:
    """A scenario's data with the field as the widget has it; at its usual value it is left out."""
    value = field.chosen(values)
    return _with(data, field.path, None if value == field.usual else value)


def _with(data: Mapping[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    """Nested data with this value at that path; None takes what is there away."""
    name, *rest = path
    if not rest:
        kept = {key: each for key, each in data.items() if key != name}
        return kept if value is None else {**kept, name: value}
    below = data.get(name)
    if value is None and not isinstance(below, Mapping):
        return dict(data)
    return {**data, name: _with(below if isinstance(below, Mapping) else {}, tuple(rest), value)}


def draw(fields: Iterable[PlanField]) -> None:
    """The widgets of those that mean something here."""
    for field in offered(fields):
        _draw(field)


def offered(fields: Iterable[PlanField]) -> list[PlanField]:
    """Those that mean something beside the rest of the plan."""
    values = values_now()
    return [field for field in fields if field.allowed(values) and field.shown(values)]


def more(section: str, fields: Iterable[PlanField]) -> None:
    """What few runs set, behind one line: drawn where that is opened."""
    if not (wanted := offered(fields)):
        return
    expander = st.expander(_("More settings"), key=more_key(section), type="compact", on_change="rerun")
    if expander.open:
        with expander:
            draw(wanted)


def more_key(section: str) -> str:
    """Of the widget that opens a section's rare settings."""
    return f"w_more_{section}"


def _draw(field: PlanField) -> None:
    label, about = _(field.label), _(field.help)
    if field.choices is not None:
        labels = field.choices(values_now())
        if isinstance(field.usual, list):
            st.multiselect(label, list(labels), key=field.key, format_func=labels.__getitem__, help=about)
            return
        if st.session_state[field.key] not in labels:
            st.session_state[field.key] = field.usual
        st.selectbox(label, list(labels), key=field.key, format_func=labels.__getitem__, help=about)
    elif isinstance(field.usual, bool):
        st.toggle(label, key=field.key, help=about)
    elif isinstance(field.usual, float):
        number(label, least=0.0, most=0.99, step=field.step, key=field.key, help=about)
    else:
        number(label, least=field.least, most=MAX_PARAMS, step=int(field.step), key=field.key, help=about)
