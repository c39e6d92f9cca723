"""What a worker answers, without the worker."""

from typing import Any

from memcore.jobs.tasks import TASKS, load_task


def ask(task: str, payload: dict[str, Any]) -> dict[str, Any]:
    """The answer of any task in this process. Raises what the task raises."""
    return load_task(task, TASKS)(payload)
