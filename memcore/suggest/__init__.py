"""Settings suggested for a goal."""

from memcore.suggest.configs import ds_config, file_of, fsdp2_code
from memcore.suggest.grid import DEFAULT_LEAST_BUCKET, LEAST_BUCKETS
from memcore.suggest.search import Change, Goal, GoalKind, Suggestion, suggest
from memcore.suggest.traffic import Traffic

__all__ = [
    "DEFAULT_LEAST_BUCKET",
    "LEAST_BUCKETS",
    "Change",
    "Goal",
    "GoalKind",
    "Suggestion",
    "Traffic",
    "ds_config",
    "file_of",
    "fsdp2_code",
    "suggest",
]
