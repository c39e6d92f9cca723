"""Work that must stay out of the server process: one runner, and the worker processes it keeps.

The light lane answers in about a second, from warm workers::

    lane = LightLane()
    result = lane.run("count_config", {"config": config})
    if result.status is JobStatus.DONE:
        use(result.value)
    else:
        show(result.message)

The heavy lane measures, one job per device at a time::

    lane = HeavyLane()
    job = lane.submit([Step(task="measure", payload=case)], device="cpu")
    while (progress := lane.look(job)).status is None:
        show(progress)
"""

from memcore.jobs.heavy import HeavyLane, finish
from memcore.jobs.heavy_job import HeavyJob, HeavyLimits, Progress, Step
from memcore.jobs.results import JobResult, JobStatus, LaneLimits
from memcore.jobs.runner import LightLane

__all__ = [
    "HeavyJob",
    "HeavyLane",
    "HeavyLimits",
    "JobResult",
    "JobStatus",
    "LaneLimits",
    "LightLane",
    "Progress",
    "Step",
    "finish",
]
