"""The published runs' records, kept small: for each field its distinct values, and which of them each run has.

The files are made by scripts/score_published.py and hold facts alone, each run with its source. Differences between
two runs are few, and kept as they are.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any

# Parts of a record whose fields are kept one by one; the rest is kept whole.
_PARTS = ("hardware", "parallelism", "recipe", "workload", "measured")
# Between a part's name and its field's; no field has it in its name.
_DOT = "."


def pack(records: Sequence[Mapping[str, Any]]) -> str:
    """Records as JSON text, a line for each field."""
    flat = [_flattened(record) for record in records]
    lines = []
    for name in flat[0] if flat else ():
        values: dict[str, int] = {}
        at = [values.setdefault(json.dumps(each[name], ensure_ascii=False), len(values)) for each in flat]
        lines.append(f"{json.dumps(name)}: [[{', '.join(values)}],{json.dumps(at, separators=(',', ':'))}]")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def unpack(text: str) -> list[dict[str, Any]]:
    """The records of such a text, each with its fields in their order."""
    records: list[dict[str, Any]] = []
    for name, (values, at) in json.loads(text).items():
        part, _dot, field = name.partition(_DOT)
        records = records or [{} for _each in at]
        for record, number in zip(records, at, strict=True):
            if field:
                record.setdefault(part, {})[field] = values[number]
            else:
                record[part] = values[number]
    return records


def _flattened(record: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in record.items():
        if name in _PARTS:
            flat |= {f"{name}{_DOT}{field}": each for field, each in value.items()}
        else:
            flat[name] = value
    return flat


def dump_deltas(deltas: Sequence[object]) -> str:
    """Records of differences between two runs as JSON text, a line for each."""
    return "[\n" + ",\n".join(json.dumps(each, ensure_ascii=False) for each in deltas) + "\n]\n"


@cache
def published_deltas() -> Sequence[object]:
    """The published differences between two runs. Not to be changed."""
    text = resources.files("memcore").joinpath("data", "published_deltas.json").read_text(encoding="utf-8")
    found: list[object] = json.loads(text)
    return found


@cache
def published_records() -> Mapping[str, Mapping[str, Any]]:
    """The published runs' records by their ids. They share their parts: not to be changed."""
    text = resources.files("memcore").joinpath("data", "published_runs.json").read_text(encoding="utf-8")
    return {record["id"]: record for record in unpack(text)}
