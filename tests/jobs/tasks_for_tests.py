"""Tasks that the runner's tests have workers do: the good ones and the bad ones."""

import mmap
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from memcore.errors import UserError
from memcore.i18n import language

Payload = dict[str, Any]


def echo(payload: Payload) -> Payload:
    return payload


def who(payload: Payload) -> Payload:
    return {"pid": os.getpid(), "language": language()}


def sleep(payload: Payload) -> Payload:
    if "pid_file" in payload:
        Path(payload["pid_file"]).write_text(str(os.getpid()))
    time.sleep(payload["seconds"])
    return {"slept_s": payload["seconds"], "pid": os.getpid()}


def sleep_with_child(payload: Payload) -> Payload:
    child = subprocess.Popen(["sleep", "60"])
    Path(payload["pid_file"]).write_text(str(child.pid))
    time.sleep(60)
    return {}


def log_and_sleep(payload: Payload) -> Payload:
    with Path(payload["log"]).open("a") as log:
        log.write("run\n")
    time.sleep(payload.get("seconds", 0))
    return {"items": [1, 2]}


def note(payload: Payload) -> Payload:
    with Path(payload["log"]).open("a") as log:
        log.write(payload["name"] + "\n")
    return {}


def die(payload: Payload) -> Payload:
    os.kill(os.getpid(), payload["signal"])
    time.sleep(60)
    return {}


def leave(payload: Payload) -> Payload:
    if payload.get("hard"):
        os._exit(3)
    sys.exit(3)


def complain(payload: Payload) -> Payload:
    raise UserError(f"层数 is {payload['layers']}; it must be above 0.", field="model.config")


def break_down(payload: Payload) -> Payload:
    raise ValueError("first\nsecond")


def fill_memory(payload: Payload) -> Payload:
    pieces = []
    while True:
        pieces.append(b"x" * payload.get("piece_bytes", 2**20) + bytes(len(pieces) % 7))


def allocate(payload: Payload) -> Payload:
    return {"num_bytes": len(bytearray(payload["num_bytes"]))}


def reserve(payload: Payload) -> Payload:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    with mmap.mmap(-1, payload["num_bytes"], flags=flags, prot=mmap.PROT_READ) as reserved:
        return {"num_bytes": len(reserved)}


def fail_to_allocate(payload: Payload) -> Payload:
    raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 byte")


def print_everywhere(payload: Payload) -> Payload:
    print('{"status": "done", "value": {"forged": true}}', flush=True)
    os.write(1, b"from a C library\n")
    subprocess.run(["echo", "from a child"], check=True)
    return {"stdin": sys.stdin.read()}


def answer_long(payload: Payload) -> Payload:
    return {"text": "x" * payload["num_chars"]}


def answer_list(payload: Payload) -> Any:
    return [1]


def loaded_modules(payload: Payload) -> Payload:
    return {"modules": sorted(sys.modules)}
