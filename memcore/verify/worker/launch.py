"""The worker's task "verify": start one rank for each GPU of the cases with torchrun, and gather what they measured.

One launch runs all cases, since starting ranks takes longer than a case. After a case that failed the rest is launched
again. The ranks end with this process: torchrun is in its process group, and a rank dies with torchrun.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from memcore.engine_options import EngineName
from memcore.errors import UserError
from memcore.i18n import gettext as _
from memcore.settings import settings
from memcore.verify.case import MAX_LOCAL_RANKS, WITHOUT_DEEPSPEED
from memcore.verify.worker.meter import build_meter

_ROOT = Path(__file__).resolve().parents[3]
_ATTEMPTS = 3
_PORT_IN_USE = re.compile(r"EADDRINUSE|address already in use", re.IGNORECASE)
# torchrun's report of each rank that failed (torch 2.13, distributed/elastic/multiprocessing/errors).
_FAILURE = re.compile(r"^\s*rank\s*:\s*(\d+)[^\n]*\n\s*exitcode\s*:\s*(-?\d+)", re.MULTILINE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendezvous:
    """How the ranks find each other: on this machine alone, or over `nodes` machines, of which this is number
    `node`; `address` and `port` are those of machine 0. `port` None: any that is free."""

    nodes: int = 1
    node: int = 0
    address: str = "127.0.0.1"
    port: int | None = None


def verify_task(payload: dict[str, Any]) -> dict[str, Any]:
    """Payload: `cases` as data (memcore.verify.case), all on as many ranks; `device` "cpu" or an accelerator's kind;
    `rendezvous`. Returns `results`: for each case its name and either `ranks`, what each measured, or `reason`.

    Raises UserError where no rank can be started here.
    """
    meeting = Rendezvous(**payload.get("rendezvous", {}))
    cases: Sequence[Mapping[str, Any]] = payload["cases"]
    local = _local_ranks(cases, meeting)
    _check(cases, payload["device"], local, meeting)
    results: list[dict[str, Any]] = []
    while len(results) < len(cases):
        results += _launch(cases[len(results) :], payload["device"], local, meeting)
    return {"results": results}


def _local_ranks(cases: Sequence[Mapping[str, Any]], meeting: Rendezvous) -> int:
    ranks = {case["ranks"] for case in cases}
    if len(ranks) != 1:
        raise ValueError("the cases of a launch have one number of ranks")
    (number,) = ranks
    if number % meeting.nodes:
        sentence = _("{ranks} ranks cannot be spread evenly over {nodes} machines.")
        raise UserError(sentence.format(ranks=number, nodes=meeting.nodes))
    return int(number) // meeting.nodes


def _check(cases: Sequence[Mapping[str, Any]], device: str, local: int, meeting: Rendezvous) -> None:
    """Refuse what cannot run, before anything is started."""
    if local > MAX_LOCAL_RANKS:
        sentence = _("{ranks} ranks are too many for one machine here; at most {most} are run.")
        raise UserError(sentence.format(ranks=local, most=MAX_LOCAL_RANKS))
    engines = {case["engine"] for case in cases}
    if EngineName.DEEPSPEED in engines and find_spec("deepspeed") is None:
        raise UserError(_(WITHOUT_DEEPSPEED))
    if device != "cpu" and (found := torch.accelerator.device_count()) < local:
        sentence = _("{ranks} ranks need as many GPUs on this machine, and it has {found}.")
        raise UserError(sentence.format(ranks=local, found=found))
    if meeting.port is not None and meeting.node == 0 and not _is_free(meeting.port):
        raise UserError(_("Port {port} is in use by another program; choose another.").format(port=meeting.port))


def _is_free(port: int) -> bool:
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind(("", port))
        except OSError:
            return False
        return True


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _launch(cases: Sequence[Mapping[str, Any]], device: str, local: int, meeting: Rendezvous) -> list[dict[str, Any]]:
    """Results of the first cases: of all, or up to and with the first that failed."""
    with tempfile.TemporaryDirectory(prefix="memcore-verify-") as place:
        folder = Path(place)
        (folder / "cases.json").write_text(json.dumps(list(cases)), encoding="utf-8")
        said = _run(folder, device, local, meeting)
        results: list[dict[str, Any]] = _read(folder / "results.json") or []
        if said is not None:
            running = folder / "running"
            if not running.is_file():
                raise UserError(_("The ranks could not be started ({reason}).").format(reason=_last_words(said)))
            results.append({"name": cases[len(results)]["name"], "reason": _reason(folder, said)})
        return results


def _read(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None


def _run(folder: Path, device: str, local: int, meeting: Rendezvous) -> str | None:
    """Run torchrun to its end: None where all went well, else what it said."""
    text = ""
    for _attempt in range(_ATTEMPTS):
        port = meeting.port or _free_port()
        with (folder / "said").open("w+", encoding="utf-8", errors="replace") as said:
            command = [
                sys.executable, "-m", "torch.distributed.run",
                f"--nnodes={meeting.nodes}", f"--node-rank={meeting.node}", f"--nproc-per-node={local}",
                f"--master-addr={meeting.address}", f"--master-port={port}",
                "-m", "memcore.verify.worker.rank", str(folder / "cases.json"), str(folder),
            ]  # fmt: skip
            done = subprocess.run(  # noqa: S603 (our own module; no shell)
                command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, check=False,
                env=_environment(device, meeting), cwd=_ROOT,
            )  # fmt: skip
            if done.returncode == 0:
                return None
            said.seek(0)
            text = said.read()
        # A port that was free a moment ago can be taken by now.
        if not _PORT_IN_USE.search(text):
            return text
        if meeting.port is not None:
            raise UserError(_("Port {port} is in use by another program; choose another.").format(port=meeting.port))
    return text


def _environment(device: str, meeting: Rendezvous) -> dict[str, str]:
    # DeepSpeed looks for ninja beside the interpreter, to build its operators the first time.
    search = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
    own = {"MEMCORE_VERIFY_DEVICE": device, "MEMCORE_VERIFY_LAUNCHER": str(os.getpid())}
    variables = {**os.environ, **own, "PATH": search, "OMP_NUM_THREADS": "1"}
    if device == "cpu":
        cache = settings().cache_dir
        folder = Path(cache).expanduser() if cache else Path(tempfile.gettempdir())
        variables |= {"DS_ACCELERATOR": "cpu", "LD_PRELOAD": str(build_meter(folder / "meter"))}
    if meeting.nodes == 1 and sys.platform == "linux":
        # A machine may not know its own name.
        variables["GLOO_SOCKET_IFNAME"] = "lo"
    return variables


def _reason(folder: Path, said: str) -> str:
    """Why the running case failed, as a sentence."""
    failures = [(rank, int(code)) for rank, code in _FAILURE.findall(said)]
    # A rank that was killed comes first: the others then fail at it. torchrun itself ends the rest with SIGTERM.
    killed = [(rank, code) for rank, code in failures if code < 0 and code != -signal.SIGTERM]
    failed = sorted(folder.glob("failed-*.json"))
    if failed and not killed:
        reason = _read(failed[0])["reason"]
        return _("The engine refused this case or failed in it: {reason}").format(reason=reason)
    if not failures:
        return _("The ranks ended before this case was done ({reason}).").format(reason=_last_words(said))
    rank, code = (killed or failures)[0]
    return _("Rank {rank} ended with {ending} before this case was done.").format(rank=rank, ending=_ending(code))


def _ending(code: int) -> str:
    if code >= 0:
        return _("exit code {code}").format(code=code)
    name = signal.Signals(-code).name
    if name == "SIGKILL":
        return _("{signal}, often because the machine's memory was full").format(signal=name)
    return name


def _last_words(said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip(" =-")]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return ((errors or lines or ["?"])[-1])[:200]
