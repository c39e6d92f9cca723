"""ZeRO stages: what each stage buys at N GPUs, what it moves, and from how many GPUs on it fits."""

import streamlit as st

from memcore.budget import Budget, predict
from memcore.compare import StageRow, paper_table, stage_rows, world_size_curve
from memcore.explain import explain_share
from memcore.fewest_gpus import MOST_GPUS
from memcore.i18n import gettext as _
from memcore.questions import EIGHT_SMALL_CARDS
from memcore.scenario import Parallelism
from memcore.ui import charts, verifying, zero_charts
from memcore.ui.cards import downloads, figures, how_computed, opening, table, text_table
from memcore.units import ByteUnit, format_bytes, format_rate, format_seconds
from memcore.verdict_words import verdict_sentence
from memcore.zero import STAGES, sharing_ranks


def render(budget: Budget, unit: ByteUnit) -> None:
    """The page's body."""
    scenario, states = budget.scenario, budget.states
    rows = stage_rows(budget)
    opening(_("ZeRO stages"), budget, unit)
    _floors(rows, unit)
    usable = budget.ladder.usable
    figure = zero_charts.stages(rows, budget.ladder.for_tensors, unit)
    st.plotly_chart(figure, config=charts.CONFIG, alt=_("Memory per GPU by stage"))
    st.caption(
        _(
            "Bars are the paper's floor for the states; a diamond is where the chosen engine is predicted to peak. The "
            "line is the card's usable memory less the {outside} of CUDA context and NCCL."
        ).format(outside=format_bytes(budget.ladder.runtime.largest, unit))
    )
    how_computed(
        explain_share(state, scenario.parallelism.stage, scenario.parallelism.dp_shard, unit) for state in states.states
    )
    _slices(rows, scenario.parallelism)
    numbers = _fewest(rows)
    curves = {stage: world_size_curve(states, stage) for stage in STAGES}
    st.plotly_chart(
        zero_charts.world_sizes(curves, {row.stage: row.smallest for row in rows}, usable, unit),
        config=charts.CONFIG,
        alt=_("Model states per GPU against the number of GPUs"),
    )
    moved = _communication(rows, unit, budget)
    _paper(unit)
    _eight_cards(unit)
    verifying.render(budget, unit)
    downloads(budget, [row | number for row, number in zip(moved, numbers, strict=True)], "zero")


def _floors(rows: list[StageRow], unit: ByteUnit) -> None:
    """The states per GPU at each stage; once where all stages are the same, as on one GPU."""
    meaning = _("Model states per GPU: the paper's floor.")
    sizes = {f"ZeRO-{row.stage}": format_bytes(row.floor.total_bytes, unit) for row in rows}
    if len(set(sizes.values())) > 1:
        figures([(stage, size, meaning) for stage, size in sizes.items()])
        return
    figures([(_("At every ZeRO stage"), sizes["ZeRO-0"], meaning)])
    st.info(_("Nothing is divided here, so that all stages are the same: choose an engine and more GPUs."))


def _slices(rows: list[StageRow], parallelism: Parallelism) -> None:
    ranks, sharing = parallelism.dp, sharing_ranks(parallelism)
    st.subheader(_("Which rank holds which slice"))
    st.plotly_chart(
        zero_charts.slices(rows, ranks, sharing),
        config=charts.CONFIG,
        alt=_("Slices of the states by rank and stage"),
    )
    if 1 < sharing < ranks:
        text = _("{sharing} ranks share the states; the next {sharing} hold the same again, and so on.")
        st.caption(text.format(sharing=f"{sharing:,}"))
    most = zero_charts.MAX_DRAWN_RANKS
    if ranks > most:
        text = _("The first {drawn} of {ranks} ranks.")
        if sharing > most:
            text = _("The first {drawn} of {ranks} ranks, as if they were all.")
        st.caption(text.format(drawn=most, ranks=f"{ranks:,}"))


def _fewest(rows: list[StageRow]) -> list[dict[str, object]]:
    st.subheader(_("On how few GPUs it fits"))

    def number(count: int | None) -> str:
        return _("none") if count is None else f"{count:,}"

    numbers: list[dict[str, object]] = [
        {
            _("Stage"): f"ZeRO-{row.stage}",
            _("GPUs that share the states alone"): number(row.smallest),
            _("GPUs for the whole peak"): "—" if row.peak_bytes is None else number(row.fewest),
        }
        for row in rows
    ]
    text_table(numbers, _("The fewest GPUs for the states alone, and for the whole peak"))
    st.caption(
        _(
            "The whole peak is this scenario's, error band included, with the same batch on each GPU: tried are up to "
            "8 GPUs one by one, then nodes of 8 up to {most:,}. The curves below are of the states alone."
        ).format(most=MOST_GPUS)
    )
    return numbers


def _communication(rows: list[StageRow], unit: ByteUnit, budget: Budget) -> list[dict[str, object]]:
    st.subheader(_("What each stage moves"))
    moved: list[dict[str, object]] = [
        {
            _("Stage"): f"ZeRO-{row.stage}",
            _("States per GPU"): format_bytes(row.floor.total_bytes, unit),
            _("Moved, in parameters"): f"{row.communication.volume_in_parameters(budget.states.n_params):.3g} Ψ",
            _("Sent by each GPU"): format_bytes(row.communication.bytes_per_gpu, unit),
            _("Time at full rate"): format_seconds(row.communication.seconds),
        }
        for row in rows
    ]
    table(moved, _("Communication per step and stage"))
    own = budget.communication
    st.caption(
        _(
            "Per step, over {link} at {rate} per GPU and direction ({source}); nothing is assumed to hide behind "
            "compute."
        ).format(link=own.link_name, rate=format_rate(own.link_bytes_per_s), source=own.link_source)
    )
    return moved


def _paper(unit: ByteUnit) -> None:
    labels = ("P_os", "P_os+g", "P_os+g+p")
    with st.expander(_("The ZeRO paper's table, from these formulas"), icon=":material/article:"):
        table(
            [
                {
                    _("Model"): name.removeprefix("ZeRO paper "),
                    _("GPUs"): ranks,
                    **{label: format_bytes(total, unit) for label, total in zip(labels, totals, strict=True)},
                }
                for name, ranks, totals in paper_table()
            ],
            _("Model states per GPU, as in the ZeRO paper"),
        )
        st.caption(_("Source: {source}").format(source="arXiv 1910.02054, table 1, K = 12"))


def _eight_cards(unit: ByteUnit) -> None:
    st.subheader(_("Do eight 40 GB A100s train 7B with ZeRO-1?"))
    st.markdown(EIGHT_SMALL_CARDS.answered(unit))
    st.markdown(verdict_sentence(predict(EIGHT_SMALL_CARDS.scenario), unit))
