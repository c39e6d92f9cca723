"""Static accounting: where the bytes per parameter go, and which cards hold the model's states."""

import streamlit as st

from memcore.budget import Budget
from memcore.compare import CardRow, card_rows, convention_rows, parameter_costs, tool_rows
from memcore.explain import explain_share
from memcore.i18n import gettext as _
from memcore.i18n import ngettext
from memcore.report import budget_rows
from memcore.scenario import Method
from memcore.ui import charts
from memcore.ui.cards import downloads, figures, how_computed, opening, table, text_table
from memcore.units import ByteUnit, format_bytes, format_count
from memcore.zero import account, sharing_ranks

LINES = ("A100-40GB", "H200-141GB")


def render(budget: Budget, unit: ByteUnit) -> None:
    """The page's body."""
    states = budget.states
    whole = account(states.states, 0, 1)
    costs = parameter_costs(states)
    opening(_("Static accounting"), budget, unit)
    figures(
        [
            (
                _("Bytes per parameter"),
                f"{whole.total_bytes / states.n_params:.4g}",
                _("Weights, gradients and optimizer states, undivided, over all of the model's parameters."),
            ),
            (
                _("States, undivided"),
                format_bytes(whole.total_bytes, unit),
                _("Over the whole model, on one GPU."),
            ),
            (
                _("States per GPU"),
                format_bytes(budget.static.total_bytes, unit),
                _("With what the scenario's engine divides, before any offload."),
            ),
            (
                _("Trained parameters"),
                format_count(states.trained),
                _("Out of {count}.").format(count=f"{states.n_params:,}"),
            ),
        ]
    )
    st.subheader(_("What one parameter costs"))
    st.plotly_chart(
        charts.parameter_cost(costs, _("one parameter")), config=charts.CONFIG, alt=_("Bytes per parameter by state")
    )
    how_computed(explain_share(state, 0, 1, unit) for state in states.states)
    cards = card_rows(budget)
    st.subheader(_("This model's states against cards"))
    chosen = [card for card in cards if card.device.name in LINES or card.device.name == budget.device.name]
    st.plotly_chart(
        charts.states_against_cards(whole, chosen, unit), config=charts.CONFIG, alt=_("States against usable memory")
    )
    _cards(cards, unit)
    _conventions(budget, unit)
    _tools(budget, unit)
    downloads(budget, budget_rows(budget), "static")


def _cards(cards: list[CardRow], unit: ByteUnit) -> None:
    table(
        [
            {
                _("Accelerator"): card.device.label,
                _("Usable"): format_bytes(card.device.usable_bytes, unit),
                _("Largest model"): format_count(card.largest_model),
                _("This model takes"): f"{card.share:.0%}",
                _("GPUs that hold it, all divided"): "—" if card.smallest_gpus is None else f"{card.smallest_gpus:,}",
            }
            for card in cards
        ],
        _("The largest model that each accelerator holds, and this model on it"),
    )
    st.caption(_("States only, with this recipe; activations and buffers come on top."))


def _conventions(budget: Budget, unit: ByteUnit) -> None:
    st.subheader(_("Why other tools say 18 or 20"))
    text_table(
        [
            {
                _("Convention"): row.convention.label,
                _("Weights"): row.trained_as.param_dtype.value,
                _("Gradients"): " + ".join(
                    dtype.value for dtype in (row.trained_as.grad_dtype, row.trained_as.accumulate_dtype) if dtype
                ),
                _("Master"): row.trained_as.master_dtype.value if row.trained_as.master_dtype else "—",
                _("States"): row.trained_as.state_dtype.value,
                _("Bytes per trained parameter"): f"{row.bytes_per_parameter:.4g}",
                _("This run, per GPU"): "—" if row.floor is None else format_bytes(row.floor.total_bytes, unit),
                _("Source"): row.convention.citation,
            }
            for row in convention_rows(budget)
        ],
        _("Conventions, their dtypes and bytes per parameter"),
    )
    st.caption(_("—: no training loop with this engine keeps its states so, or none at this stage."))
    if budget.scenario.recipe.method is not Method.FULL:
        text = _(
            "Dtypes and bytes are of the adapters, but where the convention has no form at this stage; what is frozen "
            "is in this run's figure alone."
        )
        st.caption(text)


def _tools(budget: Budget, unit: ByteUnit) -> None:
    ranks = sharing_ranks(budget.scenario.parallelism)
    text = ngettext(
        "What other tools answer for full training of {count} parameters with AdamW on {ranks} GPU:",
        "What other tools answer for full training of {count} parameters with AdamW, shared by {ranks} GPUs, per GPU:",
        ranks,
    )
    st.markdown(text.format(count=format_count(budget.states.n_params), ranks=f"{ranks:,}"))
    text_table(
        [
            {
                _("Tool"): row.tool.label,
                **{
                    # The unit stands in the heading, below the stage: seven columns of text are wide enough.
                    f"ZeRO\N{NON-BREAKING HYPHEN}{stage} ({unit.value})": "—"
                    if total is None
                    else f"{total / unit.size:,.2f}"
                    for stage, total in enumerate(row.bytes_by_stage)
                },
                _("Because of"): _(row.tool.why),
                _("Source"): row.tool.source,
            }
            for row in tool_rows(budget)
        ],
        _("Other tools' answers by stage"),
    )
