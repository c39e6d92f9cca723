"""Communication buffers: why the real peak is above the floor, which setting does it, and what it costs to send."""

import json
from collections.abc import Mapping

import streamlit as st

from memcore.budget import Budget
from memcore.buffers import (
    GATHER_KNOBS,
    above_floor,
    estimator_bytes,
    knob_effects,
    link_times,
    two_against_three,
    with_zero,
)
from memcore.ds_config import EFFECT_LABELS, Effect, KeyReading, Reading, read_ds_config
from memcore.engine_options import EngineName
from memcore.errors import UserError
from memcore.explain import explain_term, term_label
from memcore.i18n import gettext as _
from memcore.i18n import ngettext
from memcore.report import budget_rows
from memcore.ui import charts, state, verifying
from memcore.ui.cards import downloads, figures, how_computed, opening, table, text_table
from memcore.ui.goal_settings import settings_for_goal
from memcore.ui.step_charts import step_of_engine
from memcore.units import ByteUnit, format_bytes, format_rate, format_seconds

# Steps of the what-if sliders, in elements.
SLIDER_STEPS = (0, 10**6, 10**7, 5 * 10**7, 10**8, 5 * 10**8, 10**9, 5 * 10**9)


def render(budget: Budget, unit: ByteUnit) -> None:
    """The page's body."""
    of_deepspeed = budget.scenario.parallelism.engine is EngineName.DEEPSPEED
    opening(_("Communication buffers"), budget, unit)
    rows = above_floor(budget)
    beside = max(sum(share for _term, share in row.terms) for row in rows)
    figures(
        [
            (_("Floor"), format_bytes(budget.static.total_bytes, unit), _("All states of a GPU in theory, at once.")),
            (_("Expected peak"), format_bytes(budget.peak_bytes, unit), _("With buffers, activations and loss.")),
            (_("Engine's additions, at most"), format_bytes(beside, unit), _("Buffers, copies and what is gathered.")),
            (
                _("Sent per step"),
                format_bytes(budget.communication.bytes_per_gpu, unit),
                _("By each GPU, over {link}.").format(link=budget.communication.link_name),
            ),
        ]
    )
    if budget.scenario.hardware.gpus == 1:
        st.info(_("One GPU communicates nothing: choose an engine and more GPUs in the sidebar."))
    st.plotly_chart(charts.above_floor(rows, unit), config=charts.CONFIG, alt=_("From the floor to the peak, by phase"))
    st.caption(
        _(
            "Of the floor each phase has the states that are alive in it: without accumulation there are no gradients "
            "before the backward."
        )
    )
    names = {term.name for row in rows for term, _share in row.terms}
    peak = budget.peak_index
    how_computed(explain_term(term, unit, term.at(peak)) for term in budget.terms if term.name in names)
    _one_step(budget, unit)
    verifying.render(budget, unit)
    settings_for_goal(budget, unit)
    if of_deepspeed:
        _ds_config(budget, unit)
        if budget.scenario.parallelism.stage == 3 and budget.inventory is not None:
            _what_if(budget, unit)
    _two_or_three(budget, unit)
    if of_deepspeed:
        _estimator(budget, unit)
    _bandwidth(budget, unit)
    downloads(budget, budget_rows(budget), "buffers")


def _one_step(budget: Budget, unit: ByteUnit) -> None:
    st.subheader(_("One step, moment by moment"))
    activations = st.toggle(_("with activations and loss"), value=True, key="step_activations")
    figure = step_of_engine(budget, unit, activations=activations)
    st.plotly_chart(figure, config=charts.CONFIG, alt=_("What the engine holds over one step"))
    if any(term.name == "gathered_parameters" for term in budget.terms):
        text = _(
            "Below: the layers that are gathered at some time during each moment, paler where only a part of one is; "
            "above the first the embedding, under the last the output head."
        )
        st.caption(text)


def _ds_config(budget: Budget, unit: ByteUnit) -> None:
    st.subheader(_("Your ds_config.json"))
    uploaded = st.file_uploader(
        _("Upload ds_config.json"), type=["json", "yaml", "yml"], key="ds_upload", max_upload_size=1
    )
    pasted = st.text_area(_("or paste its text"), key="w_ds_config", height=120, max_chars=200_000)
    text = uploaded.getvalue() if uploaded is not None else pasted
    given = bool(text.strip())
    if not given:
        st.caption(_("Every key is then classed for this scenario: allocated, a cap, or without effect."))
        text = json.dumps({"zero_optimization": _own_settings(budget)})
    try:
        reading = read_ds_config(text, budget.scenario, budget.evidence)
    except UserError as error:
        st.error(str(error), icon=":material/error:")
        return
    if given:
        _notes(reading)
    _show_reading(reading, unit)
    if given:
        _take_over(reading, budget)


def _notes(reading: Reading) -> None:
    for note in reading.notes:
        st.warning(note, icon=":material/rule:")
    if reading.unknown:
        st.warning(_("Unknown keys: {keys}.").format(keys=", ".join(reading.unknown)), icon=":material/help:")


def _own_settings(budget: Budget) -> dict[str, object]:
    """The scenario's own settings, for the table that is shown before a file is given."""
    zero = budget.scenario.zero_config.model_dump(mode="json", exclude_defaults=True)
    offload = budget.scenario.offload
    sections = {
        name: {"device": device.value}
        for name, device in (("offload_optimizer", offload.optimizer), ("offload_param", offload.parameters))
        if device.value != "none"
    }
    return {**zero, **sections, "stage": budget.scenario.parallelism.stage}


def _show_reading(reading: Reading, unit: ByteUnit) -> None:
    costliest = reading.costliest()
    if costliest:
        named = ", ".join(f"`{key.path}` ({format_bytes(key.cost_bytes or 0, unit)})" for key in costliest)
        st.markdown(_("The settings that cost the most: {keys}.").format(keys=named))
    ordered = sorted(reading.keys, key=lambda key: -(key.cost_bytes or -1))
    idle = [key for key in ordered if key.effect is Effect.NO_EFFECT]
    text_table(
        [_key_row(key, unit) for key in ordered if key.effect is not Effect.NO_EFFECT],
        _("Each key's effect on this scenario's memory"),
    )
    if idle:
        said = ngettext("Without effect here: {count} setting", "Without effect here: {count} settings", len(idle))
        with st.expander(said.format(count=len(idle))):
            text_table([_key_row(key, unit) for key in idle], _("Keys without effect on this scenario's memory"))


def _key_row(key: KeyReading, unit: ByteUnit) -> dict[str, object]:
    unlimited = isinstance(key.value, int) and key.value >= 2**62
    return {
        _("Setting"): key.path,
        _("Given"): "—" if key.given is None else _shown(key.given)[:60],
        _("In force"): _("no limit") if unlimited else _shown(key.value)[:40],
        _("Effect"): _(EFFECT_LABELS[key.effect]),
        _("Costs"): "—" if key.cost_bytes is None else format_bytes(key.cost_bytes, unit),
        _("Why"): key.why,
    }


def _shown(value: object) -> str:
    """A JSON value; sizes, which files give as 1e9 too, as whole numbers with separators."""
    whole = not isinstance(value, bool) and isinstance(value, int | float) and value == value // 1
    return f"{value:,.0f}" if whole else json.dumps(value)


def _take_over(reading: Reading, budget: Budget) -> None:
    with st.container(horizontal=True):
        st.download_button(
            _("Corrected file"),
            json.dumps(reading.corrected, indent=2),
            "ds_config.json",
            "application/json",
            on_click="ignore",
            icon=":material/download:",
        )
        st.button(
            _("Use this file in the scenario"),
            on_click=state.adopt,
            args=(reading.scenario,),
            icon=":material/input:",
            disabled=reading.scenario == budget.scenario,
        )


def _what_if(budget: Budget, unit: ByteUnit) -> None:
    st.subheader(_("Which setting does it? Move them together"))
    zero = budget.scenario.zero_config
    wanted: dict[str, int] = {}
    with st.grid(len(GATHER_KNOBS) + 1, min_column_width=200):
        for name in ("reduce_bucket_size", *GATHER_KNOBS):
            options = sorted({*SLIDER_STEPS, getattr(zero, name)} - ({0} if name == "reduce_bucket_size" else set()))
            wanted[name] = st.select_slider(
                name, options, value=getattr(zero, name), key=f"what_if_{name}_{getattr(zero, name)}",
                format_func=lambda count: f"{count:,}",
            )  # fmt: skip
    changed = {name: value for name, value in wanted.items() if value != getattr(zero, name)}
    if not changed:
        st.caption(_("Move a slider: the table then says what it saves alone, and what all of them save together."))
        return
    text_table(_effect_rows(budget, changed, unit), _("What the settings save"))
    st.button(
        _("Use these settings"),
        on_click=state.adopt,
        args=(with_zero(budget, changed).scenario,),
        icon=":material/input:",
    )


def _effect_rows(budget: Budget, changed: Mapping[str, int], unit: ByteUnit) -> list[dict[str, object]]:
    effects = knob_effects(budget, changed)
    return [
        {
            _("Settings"): ", ".join(f"{name} = {value:,}" for name, value in effect.changes.items()),
            _("Gathered and buckets, before"): format_bytes(effect.before, unit),
            _("after"): format_bytes(effect.after, unit),
            _("saved"): format_bytes(effect.before - effect.after, unit),
        }
        for effect in (effects if len(changed) > 1 else effects[:1])
    ]


def _two_or_three(budget: Budget, unit: ByteUnit) -> None:
    compared = two_against_three(budget)
    if compared is None:
        return
    two, three, rows = compared
    st.subheader(_("ZeRO-3 or ZeRO-2?"))
    if three.peak_bytes > two.peak_bytes:
        text = _("ZeRO-3 peaks at {three}, above ZeRO-2's {two}: gathering costs more than the division saves.")
    else:
        text = _("ZeRO-3 peaks at {three}, ZeRO-2 at {two}: dividing the weights saves more than gathering them costs.")
    st.markdown(text.format(three=format_bytes(three.peak_bytes, unit), two=format_bytes(two.peak_bytes, unit)))
    text_table(
        [
            {
                _("Term, at the peak"): term_label(row.name),
                "ZeRO-2": format_bytes(row.at_two, unit),
                "ZeRO-3": format_bytes(row.at_three, unit),
            }
            for row in rows
        ],
        _("Terms of ZeRO-2 and ZeRO-3 at their peaks"),
    )


def _estimator(budget: Budget, unit: ByteUnit) -> None:
    st.subheader(_("What DeepSpeed's own estimator says"))
    answers = estimator_bytes(budget)
    text = _(
        "Its estimator answers {two} for ZeRO-2 and {three} for ZeRO-3. It counts 16-bit and FP32 gradients "
        "both, for ZeRO-3 four bytes per parameter of the largest layer, and no buckets, no prefetching, no copies for "
        "the step, no activations; here the peak is {peak} at ZeRO-{stage}."
    )
    st.markdown(
        text.format(
            two=format_bytes(answers[2], unit),
            three=format_bytes(answers[3], unit),
            peak=format_bytes(budget.peak_bytes, unit),
            stage=budget.scenario.parallelism.stage,
        )
    )
    st.caption(
        _("Source: {source}").format(
            source="deepspeed 0.19.8, estimate_zero2_model_states_mem_needs, estimate_zero3_model_states_mem_needs"
        )
    )


def _bandwidth(budget: Budget, unit: ByteUnit) -> None:
    st.subheader(_("Bandwidth pressure"))
    hide = {True: _("can hide"), False: _("cannot hide"), None: "—"}
    table(
        [
            {
                _("Link"): row.link,
                _("Rate per GPU"): format_rate(row.bytes_per_s),
                _("Time to send {size}").format(
                    size=format_bytes(budget.communication.bytes_per_gpu, unit)
                ): format_seconds(row.seconds),
                _("Computation of the step"): "—"
                if row.compute_seconds is None
                else format_seconds(row.compute_seconds),
                _("Behind it"): hide[row.can_hide],
            }
            for row in link_times(budget)
        ],
        _("Time of a step's communication on each link"),
    )
    st.caption(
        _(
            "Both at their full rates: real kernels reach perhaps half of either, and what hides must also be allowed "
            "to overlap. Computation: matrix products only, arXiv 2001.08361, section 2.1."
        )
    )
