"""What a pasted text says a GPU's memory was: PyTorch's out-of-memory messages of every version, its memory summary,
DeepSpeed's see_memory_usage, nvidia-smi's table.

Forms: torch 1.0 to 2.13, c10/cuda/CUDACachingAllocator.cpp, and torch/cuda/memory.py, memory_summary; deepspeed 0.19.8,
runtime/utils.py, see_memory_usage, whose "GB" are GiB.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from memcore.errors import UserError
from memcore.i18n import gettext as _
from memcore.units import GIB, MIB

MAX_REPORT_CHARS = 400_000


class Quantity(StrEnum):
    """What is told of one GPU. Peaks are since the last reset; `unallocated` is reserved and not allocated; `process`
    what the card says that the failing process holds, `others` what it says of other processes."""

    ASKED = "asked"
    ALLOCATED = "allocated"
    ALLOCATED_PEAK = "allocated_peak"
    UNALLOCATED = "unallocated"
    RESERVED = "reserved"
    RESERVED_PEAK = "reserved_peak"
    FREE = "free"
    CAPACITY = "capacity"
    PROCESS = "process"
    OTHERS = "others"


@dataclass(frozen=True, kw_only=True, slots=True)
class Amount:
    """Bytes as a text gives them, and by how many it may be off since it is rounded."""

    num_bytes: int
    within: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """The quantities of one report. `failures`: how many out-of-memory messages the text has; the first is read."""

    amounts: Mapping[Quantity, Amount]
    failures: int = 0

    def of(self, quantity: Quantity) -> int | None:
        """A quantity's bytes, where they are known."""
        found = self.amounts.get(quantity)
        return None if found is None else found.num_bytes


# Colours, and what launchers put before each line.
_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_PREFIXES = re.compile(
    r"^[>|\s]*(?:\[(?:default)?(?:rank)?[0-9]+\]:|[0-9]+: |\([\w ,=-]*pid=[0-9]+[^)]*\))?[ \t]*", re.MULTILINE
)
# deepspeed 0.19.8, runtime/zero/stage3.py and stage_1_and_2.py, model_states_mem_needs.
_ESTIMATE = "Estimated memory needed for params, optim states and gradients"
_UNITS = {"bytes": 1, "B": 1, "KiB": 2**10, "KB": 2**10, "MiB": MIB, "MB": MIB, "GiB": GIB, "GB": GIB, "TiB": 2**40}
_AMOUNT = r"([0-9][0-9,]{0,20}(?:\.[0-9]{1,9})?)\s?(bytes|[KMGT]iB|[KMG]?B)"
_FAILED = re.compile(rf"out of memory\W+Tried to allocate {_AMOUNT}", re.IGNORECASE)
_OLD = re.compile(
    rf"\(\s?GPU [0-9]+; {_AMOUNT} total capacity; {_AMOUNT} already allocated; {_AMOUNT} free"
    rf"(?:; {_AMOUNT} allowed)?(?:; {_AMOUNT} (cached|reserved))?"
)
_NEW: Mapping[Quantity, re.Pattern[str]] = {
    # A letter was missing in torch 2.0 to 2.2.
    Quantity.CAPACITY: re.compile(rf"total capaci?ty of {_AMOUNT}"),
    Quantity.FREE: re.compile(rf"of which {_AMOUNT} is free"),
    Quantity.PROCESS: re.compile(rf"this process has {_AMOUNT} memory in use"),
    Quantity.ALLOCATED: re.compile(rf"allocated memory {_AMOUNT} is allocated by PyTorch"),
    Quantity.UNALLOCATED: re.compile(rf"{_AMOUNT} is reserved by PyTorch but unallocated"),
}
_PROCESSES = re.compile(rf"Process [0-9]+ has {_AMOUNT} memory in use")
_SUMMARY = re.compile(rf"(Allocated|GPU reserved) memory\s*\|\s*{_AMOUNT}\s*\|\s*{_AMOUNT}\s*\|")
_DEEPSPEED = re.compile(r"\bMA ([0-9.]+) GB\s+Max_MA ([0-9.]+) GB\s+CA ([0-9.]+) GB\s+Max_CA ([0-9.]+) GB")
_NVIDIA_SMI = re.compile(r"\|\s*([0-9]+)MiB\s*/\s*([0-9]+)MiB\s*\|")


def read_report(text: str) -> Report:
    """The first report in a text. Raises UserError where it has none that is known."""
    if len(text) > MAX_REPORT_CHARS:
        message = _("The text is {size:,} characters long; up to {limit:,} are read.")
        raise UserError(message.format(size=len(text), limit=MAX_REPORT_CHARS))
    if _ESTIMATE in text:
        message = _(
            "This is DeepSpeed's estimate of model states, not a measurement; the communication buffers page has it "
            "beside the prediction."
        )
        raise UserError(message)
    lines = _PREFIXES.sub("", _COLOURS.sub("", text))
    for reader in (_failure, _summary, _deepspeed, _nvidia_smi):
        found = reader(lines)
        if found is not None:
            return found
    message = _(
        "No memory report is known in this text: paste an out-of-memory message of PyTorch, "
        "torch.cuda.memory_summary(), DeepSpeed's line with MA and Max_MA, or nvidia-smi's table."
    )
    raise UserError(message)


def _failure(lines: str) -> Report | None:
    # Terminals and trackers break the sentence anywhere between words.
    text = " ".join(lines.split())
    failures = list(_FAILED.finditer(text))
    if not failures:
        return None
    end = failures[1].start() if len(failures) > 1 else len(text)
    part = text[failures[0].start() : end]
    amounts = {Quantity.ASKED: _amount(*failures[0].groups())}
    old = _OLD.search(part)
    amounts |= _old_form(old) if old is not None else _new_form(part)
    capacity = amounts.get(Quantity.CAPACITY)
    most = capacity.num_bytes + capacity.within if capacity else 2**50
    # Where the driver does not tell, 2^64 bytes are written.
    kept = {
        quantity: each for quantity, each in amounts.items() if each.num_bytes <= most or quantity is Quantity.ASKED
    }
    return Report(amounts=kept, failures=len(failures))


def _old_form(match: re.Match[str]) -> dict[Quantity, Amount]:
    groups = match.groups()
    names = (Quantity.CAPACITY, Quantity.ALLOCATED, Quantity.FREE)
    found = {name: _amount(*groups[2 * index : 2 * index + 2]) for index, name in enumerate(names)}
    if groups[10] is not None:
        # Up to torch 1.3 "cached" is what is reserved and not allocated.
        name = Quantity.UNALLOCATED if groups[10] == "cached" else Quantity.RESERVED
        found[name] = _amount(*groups[8:10])
    return found


def _new_form(part: str) -> dict[Quantity, Amount]:
    matches = {quantity: pattern.search(part) for quantity, pattern in _NEW.items()}
    found = {quantity: _amount(*match.groups()) for quantity, match in matches.items() if match is not None}
    processes = [_amount(*groups) for groups in _PROCESSES.findall(part)]
    if processes and Quantity.PROCESS not in found:
        # Without a name of its own, the failing process is one of those; alone, it is that.
        found[Quantity.PROCESS] = processes.pop(0) if len(processes) == 1 else max(processes, key=_size)
        processes = [each for each in processes if each is not found[Quantity.PROCESS]]
    if processes:
        found[Quantity.OTHERS] = Amount(num_bytes=sum(map(_size, processes)), within=sum(p.within for p in processes))
    return found


def _size(amount: Amount) -> int:
    return amount.num_bytes


def _amount(number: str, unit: str) -> Amount:
    size = _UNITS.get(unit, 1)
    digits = number.replace(",", "")
    decimals = len(digits.partition(".")[2])
    # Half of the last digit; whole bytes are exact.
    return Amount(num_bytes=round(float(digits) * size), within=0 if size == 1 else -(-size // (2 * 10**decimals)))


def _summary(lines: str) -> Report | None:
    rows = {found[0]: found[1:] for found in reversed(_SUMMARY.findall(lines))}
    names = {
        "Allocated": (Quantity.ALLOCATED, Quantity.ALLOCATED_PEAK),
        "GPU reserved": (Quantity.RESERVED, Quantity.RESERVED_PEAK),
    }
    amounts = {
        quantity: _amount(*rows[row][2 * index : 2 * index + 2])
        for row, quantities in names.items()
        if row in rows
        for index, quantity in enumerate(quantities)
    }
    return Report(amounts=amounts) if amounts else None


def _deepspeed(lines: str) -> Report | None:
    """Of many such lines the one with the highest peak."""
    found = _DEEPSPEED.findall(lines)
    if not found:
        return None
    fullest = max(found, key=lambda groups: float(groups[1]))
    names = (Quantity.ALLOCATED, Quantity.ALLOCATED_PEAK, Quantity.RESERVED, Quantity.RESERVED_PEAK)
    return Report(amounts={name: _amount(number, "GiB") for name, number in zip(names, fullest, strict=True)})


def _nvidia_smi(lines: str) -> Report | None:
    """Of several cards the fullest."""
    found = _NVIDIA_SMI.findall(lines)
    if not found:
        return None
    used, capacity = max(found, key=lambda groups: int(groups[0]))
    names = ((Quantity.PROCESS, used), (Quantity.CAPACITY, capacity))
    return Report(amounts={name: _amount(number, "MiB") for name, number in names})
