"""The scoreboard view of home: every published run beside its prediction."""

import streamlit as st

from memcore.accuracy.scored import published
from memcore.i18n import gettext as _
from memcore.score.published import published_records
from memcore.score.scoring import Status
from memcore.ui.run_board import board
from memcore.units import ByteUnit


def render(unit: ByteUnit) -> None:
    """Predictions of the published runs, as this version of memcore makes them."""
    found = published()
    within = sum(run.status != Status.OUT_OF_SCOPE for run in found.runs)
    sentence = _(
        "Training runs that others measured and published, each predicted from its configuration alone. {predicted} of "
        "{within} with data parallelism have a prediction, as of {date}; no constant is fitted to them."
    )
    st.caption(sentence.format(predicted=len(found.predicted), within=within, date=found.date))
    board("published", found.runs, published_records().get, unit)
