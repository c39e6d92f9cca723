"""Memory reports as people paste them: read, and held against a scenario."""

from memcore.reported.findings import Candidate, Cause, Findings, find
from memcore.reported.text import MAX_REPORT_CHARS, Quantity, Report, read_report
from memcore.reported.words import figures, findings_report, findings_text, sentences

__all__ = [
    "MAX_REPORT_CHARS",
    "Candidate",
    "Cause",
    "Findings",
    "Quantity",
    "Report",
    "figures",
    "find",
    "findings_report",
    "findings_text",
    "read_report",
    "sentences",
]
