"""What workers do for the trace: answer a request, from kept tapes where there are, and make tapes to keep.

Worker processes only: imports torch and transformers.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from memcore.errors import UserError
from memcore.scenario import IN_CHUNKS, Loss
from memcore.settings import settings
from memcore.trace.kept import Kept, KeptFiles
from memcore.trace.limits import check_sizes
from memcore.trace.profile import dump_profile
from memcore.trace.replay import timeline
from memcore.trace.request import Request, read_request
from memcore.trace.sizes import NotPolynomialError, Size, checked_sizes, sampled_sizes, tape_at
from memcore.trace.tape import Tape, dump_tape, load_tape
from memcore.trace.tracer import in_words, record

# These losses cut the tokens into chunks: no polynomial, but for sizes that the chunks divide.
_CUT_INTO_CHUNKS = (*IN_CHUNKS, Loss.FUSED)


def trace_task(payload: dict[str, Any]) -> dict[str, Any]:
    """The worker's task "trace": a request's data in, a profile's data out. Raises UserError where it cannot be
    traced."""
    request = read_request(payload)
    check_sizes(request.micro_batch, request.seq_len)
    return dump_profile(in_words(kept_tape(request), request))


def events_task(payload: dict[str, Any]) -> dict[str, Any]:
    """The worker's task "trace_events": every storage taken and given back, see memcore.trace.replay.timeline."""
    request = read_request(payload)
    check_sizes(request.micro_batch, request.seq_len)
    return {"events": [list(event) for event in timeline(kept_tape(request))]}


def trace_anew(payload: dict[str, Any]) -> dict[str, Any]:
    """The same without what is kept: for measuring how long a trace takes."""
    request = read_request(payload)
    return dump_profile(in_words(record(request), request))


def sizes_task(payload: dict[str, Any]) -> dict[str, Any]:
    """The worker's task "trace_sizes": trace what is needed to answer the same request at any other size at once.

    Returns whether it now is: ``{"any_size": True}``. Raises UserError where the model cannot be traced.
    """
    request = read_request(payload)
    key = _key(request, any_size=True)
    kept = _kept().get(key)
    if kept is None:
        kept = _all_sizes(request)
        _kept().put(key, kept)
    return {"any_size": bool(kept["tapes"])}


def kept_tape(request: Request) -> Tape:
    """A request's tape: from those of the sampled sizes, or its own, kept or made now. Raises UserError."""
    sampled = _kept().get(_key(request, any_size=True))
    if sampled is not None and sampled["tapes"]:
        return tape_at(_load(sampled), (request.micro_batch, request.seq_len))
    return _exact(request)


def kept_answer(
    content: Mapping[str, Any], folder: Path, make: Callable[[], dict[str, Any]]
) -> dict[str, Any]:  # fmt: skip
    """What `make` makes of a tape, kept beside the tapes. `content`: all that it depends on but for code, the tracer's
    and that of `folder`."""
    key = _digest([content, _made_by(), _code(folder)])
    found: dict[str, Any] | None = _kept().get(key)
    if found is None:
        found = make()
        _kept().put(key, found)
    return found


def _exact(request: Request) -> Tape:
    """The tape of this very request: kept, or made and kept."""
    key = _key(request, any_size=False)
    kept = _kept().get(key)
    if kept is not None:
        return load_tape(kept)
    tape = record(request)
    _kept().put(key, dump_tape(tape))
    return tape


def _all_sizes(request: Request) -> dict[str, Any]:
    """Tapes of the sampled sizes as data; none where others do not follow from them."""
    if request.loss in _CUT_INTO_CHUNKS:
        return {"tapes": []}

    def at(size: Size) -> Tape:
        return _exact(replace(request, micro_batch=size[0], seq_len=size[1]))

    try:
        tapes = {size: at(size) for size in sampled_sizes(request.micro_batch)}
        first = next(iter(tapes.values()))
        checked = checked_sizes(request.micro_batch, first.positions if first.has_table else 0)
        follow = all(tape_at(tapes, size) == at(size) for size in checked)
    except (NotPolynomialError, UserError):
        # A size that cannot be traced, where another can, is no polynomial either.
        follow = False
    return {"tapes": [[*size, dump_tape(tape)] for size, tape in tapes.items()] if follow else []}


def _load(kept: Mapping[str, Any]) -> dict[Size, Tape]:
    return {(batch, length): load_tape(data) for batch, length, data in kept["tapes"]}


def _key(request: Request, *, any_size: bool) -> str:
    """By the request's content, without the size or but for the batch's kind, and by all that its tape depends on."""
    content = asdict(request)
    if any_size:
        del content["seq_len"]
        content["micro_batch"] = min(request.micro_batch, 2)
    return _digest([content, any_size, _made_by()])


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


@cache
def _made_by() -> str:
    """The libraries' versions, and the tracer's own code."""
    folder = Path(__file__).parent
    versions = map(version, ("torch", "transformers", "peft"))
    return " ".join((*versions, _code(folder, folder.parent / "counting.py")))


@cache
def _code(folder: Path, *others: Path) -> str:
    code = b"".join(file.read_bytes() for file in sorted((*folder.glob("*.py"), *others)))
    return hashlib.sha256(code).hexdigest()


@cache
def _kept() -> Kept:
    limits = settings()
    if not limits.cache_dir:
        return Kept(None)
    return Kept(KeptFiles(Path(limits.cache_dir).expanduser() / "traces", limits.cache_bytes))
