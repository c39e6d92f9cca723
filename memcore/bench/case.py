"""What is measured: one forward and backward on one device, as plain data."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any

from pydantic import TypeAdapter


class Part(StrEnum):
    """What runs: the attention alone, the model's own layers, or a stack of its output projections.

    A projection without a bias keeps exactly its input for the backward: the textbook's layer, on which
    sqrt(L) segments take O(sqrt(L)).
    """

    ATTENTION = "attention"
    LAYERS = "layers"
    PROJECTIONS = "projections"


# Kinds of device that are measured: ROCm's is torch's "cuda" too.
DEVICE_KINDS = ("cpu", "cuda", "xpu")
# The names of attention here, and in a scenario's workload and a trace. Plain is torch's math path, or the model's
# own eager code where a whole layer runs.
ATTENTIONS = {"plain": "eager", "flash": "flash", "memory_efficient": "memory_efficient"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One thing to measure. Two equal cases are the same question to a device.

    `config`: the config.json of the slice whose layers run; of the other parts the sizes that follow are enough.
    `checkpointing` as in a scenario's workload: none, full, segments(k), attention (its scores alone, which the
    literature calls selective), save(attention,mm) (all but these operations' results). `device` is "cpu" or the
    accelerator's kind.
    """

    part: Part
    device: str
    dtype: str
    attention: str = "flash"
    checkpointing: str = "none"
    num_layers: int = 1
    micro_batch: int = 1
    seq_len: int
    num_heads: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    hidden_size: int = 0
    config: Mapping[str, Any] | None = None

    @property
    def key(self) -> str:
        """The same for equal cases, and for no others."""
        text = json.dumps(dump_case(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode("ascii")).hexdigest()

    @property
    def checkpointing_kind(self) -> str:
        """The kind of checkpointing without its number or its list."""
        return self.checkpointing.partition("(")[0]

    @property
    def segment_length(self) -> int | None:
        """Layers per segment; None where there are no segments."""
        found = re.fullmatch(r"segments\((\d+)\)", self.checkpointing)
        return int(found[1]) if found else None

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.micro_batch * self.seq_len


def dump_case(case: Case) -> dict[str, Any]:
    """The case as JSON data; the config in it is the case's own."""
    # Not asdict, which copies the whole config: a page asks for hundreds of keys.
    return {**{each.name: getattr(case, each.name) for each in fields(case)}, "part": case.part.value}


def load_case(data: Mapping[str, Any]) -> Case:
    """The inverse of :func:`dump_case`. Raises `ValueError` for data that is no case."""
    return _CASE.validate_python(data)


_CASE = TypeAdapter(Case)
