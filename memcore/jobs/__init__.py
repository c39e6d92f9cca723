"""Work that must stay out of the server process: one runner, and the worker processes it keeps.

The light lane answers in about a second, from warm workers::

    lane = LightLane()
    result = lane.run("count_config", {"config": config})
    if result.status is JobStatus.DONE:
        use(result.value)
    else:
        show(result.message)
"""

from memcore.jobs.results import JobResult, JobStatus, LaneLimits
from memcore.jobs.runner import LightLane

__all__ = ["JobResult", "JobStatus", "LaneLimits", "LightLane"]
