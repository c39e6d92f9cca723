"""Activation explorer: what flash attention and checkpointing save, in closed form from the model's own layers,
and measured."""

import streamlit as st

from memcore.budget import Budget
from memcore.explain import KEPT_LABELS, LOSS_LABELS, explain_term
from memcore.explore import (
    Segments,
    depth_curves,
    layer_of,
    layer_rows,
    loss_rows,
    segments,
    sequence_curves,
    takeover,
    without_autocast,
)
from memcore.i18n import gettext as _
from memcore.terms import Category
from memcore.ui import charts, explorer_charts, measuring
from memcore.ui.cards import beside_trace, downloads, figures, how_computed, opening, text_table
from memcore.units import ByteUnit, format_bytes


def render(budget: Budget, unit: ByteUnit) -> None:
    """The page's body."""
    opening(_("Activation explorer"), budget, unit)
    formed = without_autocast(budget)
    found = segments(formed)
    if found is None:
        _without_form(budget, unit)
        return
    if formed is not budget:
        st.info(
            _(
                "Autocast has no closed form. The curves and tables of this page are of the same layers in {label}, "
                "without autocast's casts; what all layers take, and the step, are traced."
            ).format(label=formed.states.precision.label),
            icon=":material/info:",
        )
    losses = dict(loss_rows(formed))
    chosen = budget.scenario.workload.loss
    at_most = format_bytes(_peak_of(budget, Category.ACTIVATIONS), unit)
    figures(
        [
            (
                _("One layer keeps"),
                format_bytes(found.layer_bytes, unit),
                _("For its backward, without checkpointing."),
            ),
            (
                _("Its input"),
                format_bytes(found.input_bytes, unit),
                _("What full checkpointing keeps of a layer instead."),
            ),
            (
                _("All layers"),
                at_most,
                _("In this scenario, at the most: all that is saved, and what one layer adds for a moment."),
            ),
            (_("Logits and loss"), format_bytes(losses[chosen], unit), _("At their peak, with the loss chosen.")),
        ]
    )
    _link_to_measuring()
    for_tensors, workload = budget.ladder.for_tensors, budget.scenario.workload
    st.subheader(_("Over the sequence length"))
    curves = sequence_curves(formed)
    st.plotly_chart(
        explorer_charts.sequence(curves, for_tensors, workload.seq_len, unit),
        config=charts.CONFIG,
        alt=_("Activations by sequence length"),
    )
    _takeover(formed)
    how_computed(
        explain_term(term, unit, term.at(budget.peak_index))
        for term in budget.terms
        if term.category in (Category.ACTIVATIONS, Category.LOSS)
    )
    _over_the_step(budget, unit)
    _layer(formed, unit)
    _depth_and_segments(formed, found, unit)
    _loss(losses, unit)
    rows = [{"part": row.name, "bytes_per_token": row.per_token, "bytes": row.num_bytes} for row in layer_rows(formed)]
    downloads(budget, rows, "activations")
    measuring.render(budget, unit)


def _without_form(budget: Budget, unit: ByteUnit) -> None:
    """What there is to show where no closed form is: nothing of a bare count, the trace of a model."""
    if budget.inventory is None:
        st.info(_("A parameter count has no shapes: choose a model of the catalogue, or give a config.json."))
        return
    st.info(_("The curves of this page are closed forms, and none stands for this model under this recipe."))
    if budget.evidence.profile is not None:
        _over_the_step(budget, unit)
        layers = (Category.ACTIVATIONS, Category.LOSS)
        peak = budget.peak_index
        how_computed(explain_term(term, unit, term.at(peak)) for term in budget.terms if term.category in layers)
    measuring.render(budget, unit)


def _over_the_step(budget: Budget, unit: ByteUnit) -> None:
    st.subheader(_("Over the step"))
    st.plotly_chart(charts.step(budget, unit), config=charts.CONFIG, alt=_("Memory over one step"))
    beside_trace(budget, unit)


def _link_to_measuring() -> None:
    text = _("The same, measured on real kernels")
    st.markdown(f"[{text}](#{measuring.ANCHOR})")


def _peak_of(budget: Budget, category: Category) -> int:
    return max(budget.by_category(index).get(category, 0) for index in range(len(budget.timeline)))


def _takeover(budget: Budget) -> None:
    plain = layer_of(budget, "eager")
    length = takeover(plain) if plain is not None else None
    if length is not None:
        text = _("With plain attention the scores take more than all the rest of a layer from {length:,} tokens on.")
        st.markdown(text.format(length=length))


def _layer(budget: Budget, unit: ByteUnit) -> None:
    st.subheader(_("What one layer keeps"))
    text_table(
        [
            {
                _("Kept"): _(KEPT_LABELS[row.name]),
                _("Bytes per token"): f"{row.per_token:,.0f}",
                _("In all"): format_bytes(row.num_bytes, unit),
            }
            for row in layer_rows(budget)
        ],
        _("What one layer keeps for its backward"),
    )


def _depth_and_segments(budget: Budget, found: Segments, unit: ByteUnit) -> None:
    st.subheader(_("Over the depth"))
    st.plotly_chart(
        explorer_charts.depth(depth_curves(budget), found.num_layers, unit),
        config=charts.CONFIG,
        alt=_("Activations by depth"),
    )
    st.subheader(_("When does O(√L) pay?"))
    st.plotly_chart(explorer_charts.segments(found, unit), config=charts.CONFIG, alt=_("Activations by segment length"))
    law = found.law
    text = _(
        "Here a layer keeps {ratio:.0f} times its input, so the best whole k is {best} (the continuous optimum "
        "sqrt(c L / a) is {continuous:.2f}): {peak}. The textbook's sqrt(L) = {textbook} layers per segment holds "
        "where a layer keeps about as much as its input; on this model it takes {textbook_peak}."
    )
    st.markdown(
        text.format(
            ratio=found.layer_bytes / found.input_bytes,
            best=law.best,
            continuous=law.continuous,
            peak=format_bytes(law.peaks[law.best - 1], unit),
            textbook=law.textbook,
            textbook_peak=format_bytes(law.peaks[law.textbook - 1], unit),
        )
    )
    st.latex(r"c \lceil L / k \rceil + a\,k")
    st.caption(_("Source: {source}").format(source="arXiv 1604.06174, section 4"))


def _loss(losses: dict[str, int], unit: ByteUnit) -> None:
    st.subheader(_("What the loss adds"))
    text_table(
        [
            {_("Loss"): _(LOSS_LABELS[name]), _("At its peak"): format_bytes(size, unit)}
            for name, size in losses.items()
        ],
        _("Bytes of logits and loss by implementation"),
    )
