"""A pasted out-of-memory message, or another memory report, beside the scenario's prediction."""

import streamlit as st

from memcore.budget import Budget
from memcore.errors import UserError
from memcore.i18n import gettext as _
from memcore.reported import MAX_REPORT_CHARS, figures, find, read_report, sentences
from memcore.ui.cards import text_table
from memcore.units import ByteUnit, format_bytes


def render(budget: Budget, unit: ByteUnit) -> None:
    """The expander: a text, what it says, and what in the scenario is as large as what was asked for."""
    with st.expander(_("Out of memory? Paste the message"), key="memory_report", icon=":material/report:"):
        text = st.text_area(
            _("PyTorch's message, torch.cuda.memory_summary(), DeepSpeed's MA line or nvidia-smi's table"),
            key="memory_report_text",
            height=120,
            max_chars=MAX_REPORT_CHARS,
        )
        if not text.strip():
            return
        try:
            found = find(read_report(text), budget)
        except UserError as error:
            st.error(str(error), icon=":material/error:")
            return
        rows = [{_("Memory report"): label, _("Bytes"): format_bytes(value, unit)} for label, value in figures(found)]
        text_table(rows, _("What the report tells"))
        for sentence in sentences(found, unit):
            st.markdown(sentence)
