"""What a worker would be asked, answered here: configs counted once, and no traces."""

import json
from typing import Any

from memcore.counting import count_config
from memcore.errors import UserError

_COUNTED: dict[str, dict[str, Any]] = {}


def ask(task: str, payload: dict[str, Any]) -> dict[str, Any]:
    if task != "count_config":
        raise UserError("Nothing is traced here.")
    key = json.dumps(payload, sort_keys=True)
    if key not in _COUNTED:
        _COUNTED[key] = count_config(payload)
    return _COUNTED[key]
