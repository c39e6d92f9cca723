"""Bytes and counts, to and from text. GB is 1e9 bytes, GiB is 2**30 bytes; neither is ever labelled as the other."""

import math
import re
from enum import StrEnum

from memcore.errors import UserError
from memcore.i18n import gettext as _

GB = 10**9
GIB = 2**30
MIB = 2**20

# The largest parameter count that is accepted: 1e15 is a thousand times the largest published model,
# and keeps every product of it with a byte count exact in the JSON that other programs read (2**63).
MAX_PARAMS = 10**15

_SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_COUNT = re.compile(r"(?P<number>[0-9][0-9_,' ]*(?:\.[0-9]+)?(?:e\+?[0-9]{1,3})?)\s*(?P<suffix>[kmbt]?)", re.IGNORECASE)


class ByteUnit(StrEnum):
    """The unit in which byte figures are shown."""

    GB = "GB"
    GIB = "GiB"

    @property
    def size(self) -> int:
        """Bytes in one unit."""
        return GB if self is ByteUnit.GB else GIB


def format_bytes(num_bytes: float, unit: ByteUnit = ByteUnit.GB, digits: int | None = None) -> str:
    """Write a number of bytes in `unit`, with its label: ``38.5 GB``.

    `digits` fixes the number of decimals; without it the text keeps about four significant digits,
    and steps down to MB or MiB, then KB or KiB, where the figure would read as zero.
    """
    step, labels = (1000, ("GB", "MB", "KB", "B")) if unit is ByteUnit.GB else (1024, ("GiB", "MiB", "KiB", "B"))
    if digits is not None:
        return f"{num_bytes / unit.size:,.{digits}f} {unit.value}"
    scale = float(unit.size)
    for label in labels:
        if abs(num_bytes) >= 0.1 * scale or label == "B":
            return f"{_significant(num_bytes / scale)} {label}"
        scale /= step
    raise AssertionError("the last label is taken for any size")


def axis_unit(num_bytes: int, unit: ByteUnit) -> tuple[int, str]:
    """What an axis up to `num_bytes` is in, bytes and label: `unit`, or its thousandth part where that is below 1."""
    if num_bytes >= unit.size:
        return unit.size, unit.value
    return (10**6, "MB") if unit is ByteUnit.GB else (MIB, "MiB")


def format_precisely(num_bytes: int, unit: ByteUnit) -> str:
    """Three decimals in `unit`, or in MB or MiB where it is less than one: what differs by a part of a percent must not
    read as equal."""
    size, label = axis_unit(num_bytes, unit)
    return f"{num_bytes / size:,.3f} {label}"


def _significant(value: float) -> str:
    """At most two decimals, no trailing zeros: 38.5, 26.25, 112, 1,024."""
    text = f"{value:,.2f}"
    return text.rstrip("0").rstrip(".")


def format_count(count: float) -> str:
    """Write a parameter count as people say it: ``8.03 B``, ``124 M``."""
    for limit, label in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K")):
        if abs(count) >= limit:
            return f"{count / limit:.4g} {label}"
    return f"{count:g}"


def format_rate(bytes_per_s: float) -> str:
    """Write a bandwidth in GB/s (1e9 bytes), as vendors state it."""
    return f"{_significant(bytes_per_s / GB)} GB/s"


def format_seconds(seconds: float) -> str:
    """Write a duration in s, ms or µs, whichever reads as a number above one."""
    for scale, label in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if seconds >= scale or label == "µs":
            return f"{seconds / scale:.3g} {label}"
    raise AssertionError("the last label is taken for any duration")


def format_percent(value: float) -> str:
    """A signed share with one decimal, without a minus before nothing: ``+0.0%``, ``-3.7%``."""
    return f"{round(value, 1) + 0.0:+.1f}%"


def parse_count(text: str) -> int:
    """Read a parameter count such as ``7b``, ``7e9``, ``6,738,415,616`` or ``1.5 T``.

    Raises UserError, naming the text and what is allowed, for anything else.
    """
    refused = _("{text!r} is not a parameter count: write a whole number above 0, such as 7b, 7e9 or 6,738,415,616.")
    match = _COUNT.fullmatch(text.strip())
    if match is None:
        raise UserError(refused.format(text=text[:40]))
    number = float(re.sub(r"[_,' ]", "", match["number"])) * _SUFFIXES[match["suffix"].lower()]
    if not math.isfinite(number) or number > MAX_PARAMS:
        raise UserError(
            _("{text!r} is more than {limit}, the largest parameter count that is accepted.").format(
                text=text[:40], limit=format_count(MAX_PARAMS)
            )
        )
    digits = re.sub(r"[_,' ]", "", match["number"])
    count = int(digits) if digits.isdigit() and not match["suffix"] else round(number)
    if count < 1:
        raise UserError(refused.format(text=text[:40]))
    return count


def ceil_div(numerator: int, denominator: int) -> int:
    """Whole quotient rounded up; exact for integers of any size."""
    return -(-numerator // denominator)


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below `value`."""
    return ceil_div(value, multiple) * multiple
