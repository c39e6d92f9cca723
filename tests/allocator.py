"""What the CPU's allocator really holds during a run."""

import gc
import warnings
from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def allocator_peak(run: Callable[[], None], reset: Callable[[], None]) -> int:
    """The most bytes that the allocator holds at once during a second run, beyond what it held before.

    From the allocator's events in ``torch.profiler``. The first run is there for what is made only once.
    """
    run()
    reset()
    gc.collect()  # what an earlier model held in a circle must not be given back meanwhile
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            run()
    held = most = 0
    for event in recorded.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most
