"""The scoreboard: predictions beside what training runs were measured to take."""

from memcore.score.record import MAX_RUNS_CHARS, read_runs
from memcore.score.scoring import Score, Status, score_run
from memcore.score.summary import summarise

__all__ = ["MAX_RUNS_CHARS", "Score", "Status", "read_runs", "score_run", "summarise"]
