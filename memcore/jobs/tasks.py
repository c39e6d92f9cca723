"""What a worker can do: task names, and where each task's function lives.

Only names travel to a worker, never code, so this table is all that can run there. A task takes the
request's payload (a dict of JSON values) and returns a dict of JSON values. It raises
:class:`memcore.errors.UserError` for what the user should read. Its answer may depend on the payload
and the language alone, because the light lane keeps answers and gives them again. What measures is for the heavy
lane, which does not.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, cast

Task = Callable[[dict[str, Any]], dict[str, Any]]

TASKS: Mapping[str, str] = {
    "count_config": "memcore.counting:count_config",
    "device": "memcore.bench.worker.device:device_task",
    "fetch_config": "memcore.hub:fetch_config",
    "reserve": "memcore.allocator.task:reserve_task",
    "measure": "memcore.bench.worker.measure:measure_task",
    "trace": "memcore.trace.task:trace_task",
    "trace_events": "memcore.trace.task:events_task",
    "trace_sizes": "memcore.trace.task:sizes_task",
    "verify": "memcore.verify.worker.launch:verify_task",
}


def load_task(name: str, table: Mapping[str, str]) -> Task:
    """The function behind a task's name. Called in workers only: it imports the function's module.

    Raises `LookupError` for a name that is not in the table.
    """
    if name not in table:
        raise LookupError(f"no task is named {name!r}")
    module, _, function = table[name].partition(":")
    return cast(Task, getattr(import_module(module), function))
