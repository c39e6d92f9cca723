"""A suggestion as JSON data, and as text for a terminal."""

from dataclasses import asdict
from typing import Any

from memcore.columns import table, wrap
from memcore.i18n import gettext as _
from memcore.notices import notices
from memcore.scenario import exported_data
from memcore.suggest.configs import file_of
from memcore.suggest.search import GoalKind, Suggestion
from memcore.suggest.words import outcome, reason, shown, traffic_rows
from memcore.units import ByteUnit
from memcore.verdict_words import verdict_sentence


def suggestion_report(suggestion: Suggestion) -> dict[str, Any]:
    """The suggestion as JSON data, in bytes per GPU; `scenario` is the one with the settings put in."""
    goal, file = suggestion.goal, file_of(suggestion.after)
    return {
        "goal": goal.kind.value,
        "least_bucket_elements": goal.least_bucket if goal.kind is GoalKind.MEMORY else None,
        "met": suggestion.met,
        "combinations_tried": suggestion.tried,
        "changes": [
            {"setting": change.setting, "now": change.now, "suggested": change.suggested}
            for change in suggestion.changes
        ],
        "before": {
            "peak_bytes": suggestion.before.peak_bytes,
            "verdict": suggestion.before.verdict.value,
            **asdict(suggestion.traffic_before),
        },
        "after": {
            "peak_bytes": suggestion.after.peak_bytes,
            "verdict": suggestion.after.verdict.value,
            **asdict(suggestion.traffic_after),
        },
        "scenario": exported_data(suggestion.after.scenario),
        "file": None if file is None else {"name": file[0], "text": file[1]},
    }


def suggestion_text(suggestion: Suggestion, unit: ByteUnit) -> str:
    """The suggestion for reading: outcome, verdict, changes with reasons, what was compared, the file."""
    known = [notice.text for notice in notices(suggestion.after, unit)]
    sentences = (outcome(suggestion, unit), verdict_sentence(suggestion.after, unit), *known)
    parts = ["\n".join(wrap(sentence)) for sentence in sentences]
    if suggestion.changes:
        rows = [
            (change.setting, shown(change.now), shown(change.suggested), reason(change, suggestion, unit))
            for change in suggestion.changes
        ]
        parts.append(table([(_("Setting"), _("Now"), _("Suggested"), _("Why")), *rows], "<>>~"))
    parts.append(table([("", _("Before"), _("After")), *traffic_rows(suggestion, unit)], "<>>"))
    if (file := file_of(suggestion.after)) is not None:
        name, text = file
        parts.append(f"{name}\n\n{text.rstrip()}")
    return "\n\n".join(parts)
