"""What can go wrong when ranks are started, each as a sentence, without a process left over.

Run: pytest tests/verify/test_launch.py (about a minute: real ranks run, over gloo).
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from memcore.errors import UserError
from memcore.jobs import HeavyJob, HeavyLane, HeavyLimits, JobStatus, Step, finish
from memcore.scenario import parse_scenario
from memcore.verify.case import Case
from memcore.verify.running import verify_step
from memcore.verify.worker import launch

TINY = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128,
}  # fmt: skip
RANK = "memcore.verify.worker.rank"
MOST_S = 120.0
# DeepSpeed refuses FP16 on processors without it, as any is with these instructions alone.
REFUSED = {"convention": "pure_fp16"}
WITHOUT_FP16 = ("ONEDNN_MAX_CPU_ISA", "AVX2")


def case(engine: str, **more: Any) -> Case:
    scenario = {
        "model": {"config": TINY},
        "hardware": {"gpus": more.pop("gpus", 2)},
        "parallelism": {"engine": engine, **more.pop("parallelism", {})},
        "recipe": more.pop("recipe", {"convention": "fp32"}),
        "workload": {"micro_batch": 1, "seq_len": 8},
        **more,
    }
    return Case(name=engine, scenario=parse_scenario(scenario))


def rank_processes() -> list[int]:
    """Ranks that this process started, and those whose launcher is gone."""
    found = []
    for folder in Path("/proc").iterdir():
        with suppress(OSError):  # it may have ended meanwhile
            command = (folder / "cmdline").read_bytes().split(b"\0") if folder.name.isdigit() else []
            if RANK.encode() in command and b"torch.distributed.run" not in command:
                parents = ancestors(int(folder.name))
                found += [int(folder.name)] if os.getpid() in parents or parents[0] == 1 else []
    return found


def ancestors(pid: int) -> list[int]:
    found = []
    while pid > 1:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        found.append(pid)
    return found


def running_case(folder: Path) -> str:
    """What the launch in this folder for temporary files says that it runs."""
    return "".join(file.read_text() for file in folder.glob("memcore-verify-*/running"))


def wait_for(condition: Any, most_s: float = MOST_S) -> Any:
    until = time.monotonic() + most_s
    while time.monotonic() < until:
        if found := condition():
            return found
        time.sleep(0.1)
    raise AssertionError("it did not come about in time")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("temporary")


@pytest.fixture(scope="module")
def lane(folder: Path) -> Iterator[HeavyLane]:
    lane = HeavyLane(HeavyLimits(heartbeat_s=300), quiet=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        patch.setenv(*WITHOUT_FP16)
        yield lane
    lane.close()


def many_steps() -> Step:
    """Cases enough to be in the middle of them."""
    cases = [replace(case("ddp"), name=f"ddp {number}") for number in range(1000)]
    return replace(verify_step(cases, "cpu"), estimate_s=1.0)


def submit(lane: HeavyLane, step: Step) -> HeavyJob:
    return lane.submit([step], device="cpu")


class TestRanks:
    def test_a_rank_that_dies_is_named_with_its_signal_and_the_other_cases_run(self, lane: HeavyLane, folder: Path):
        cases = [replace(case("ddp"), name=f"ddp {number}") for number in range(12)]
        job = submit(lane, verify_step(cases, "cpu"))
        ranks = wait_for(lambda: found if len(found := rank_processes()) == 2 else [])
        wait_for(lambda: running_case(folder) == "ddp 1")
        os.kill(max(ranks), signal.SIGKILL)
        value = finish(lane, job).results[0].value
        assert value is not None
        reasons = [each["reason"] for each in value["results"] if "reason" in each]
        assert len(reasons) == 1
        assert "Rank" in reasons[0]
        assert "SIGKILL" in reasons[0]
        assert len(value["results"]) == len(cases)
        assert rank_processes() == []

    def test_cancelled_in_the_middle_it_leaves_no_process_and_the_queue_goes_on(self, lane: HeavyLane):
        job = submit(lane, many_steps())
        wait_for(lambda: len(rank_processes()) == 2)
        job.cancel()
        wait_for(lambda: lane.look(job).status is JobStatus.CANCELLED, 20)
        wait_for(lambda: rank_processes() == [], 10)
        after = finish(lane, submit(lane, verify_step([case("ddp")], "cpu")))
        assert after.results[0].value is not None
        assert "ranks" in after.results[0].value["results"][0]

    def test_a_case_out_of_time_ends_with_its_ranks(self, lane: HeavyLane):
        progress = finish(lane, submit(lane, replace(many_steps(), timeout_s=15.0)))
        assert progress.results[0].status is JobStatus.TIMED_OUT
        assert "15 s" in progress.results[0].message
        wait_for(lambda: rank_processes() == [], 10)

    def test_a_config_that_deepspeed_refuses_gives_its_reason_and_the_next_case_runs(self, lane: HeavyLane):
        refused = case("deepspeed", parallelism={"zero_stage": 2}, recipe=REFUSED)
        cases = [replace(refused, name="refused"), replace(case("ddp"), name="next")]
        value = finish(lane, submit(lane, verify_step(cases, "cpu"))).results[0].value
        assert value is not None
        first, second = value["results"]
        assert first["name"] == "refused"
        assert "fp16 is not supported" in first["reason"]
        assert second["name"] == "next"
        assert len(second["ranks"]) == 2


def test_a_rank_whose_torchrun_went_before_it_could_say_so_ends_at_once(tmp_path: Path):
    """Its parent is then another's child, not the launcher's."""
    command = [sys.executable, "-m", RANK, str(tmp_path / "cases.json"), str(tmp_path)]
    environment = {**os.environ, "MEMCORE_VERIFY_LAUNCHER": str(os.getpid())}
    assert subprocess.run(command, env=environment, check=False, timeout=60).returncode == 1


def test_two_machines_meet_by_torchruns_own_rendezvous(monkeypatch: pytest.MonkeyPatch):
    """Two launchers of one rank each, as on two machines, here on one: each has what all ranks measured."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    payloads = [payload(case("ddp"), rendezvous={"nodes": 2, "node": node, "port": port}) for node in (0, 1)]
    with ThreadPoolExecutor() as pool:
        answers = list(pool.map(launch.verify_task, payloads))
    assert [[rank["rank"] for rank in answer["results"][0]["ranks"]] for answer in answers] == [[0, 1], [0, 1]]


class TestRefusedBeforeAnythingStarts:
    def test_a_port_in_use(self):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            with pytest.raises(UserError, match=f"Port {port} is in use"):
                launch.verify_task(payload(case("ddp"), rendezvous={"port": port}))

    def test_deepspeed_is_missing(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(launch, "find_spec", lambda name: None)
        with pytest.raises(UserError, match="pip install deepspeed"):
            launch.verify_task(payload(case("deepspeed")))

    def test_more_ranks_than_a_machine_runs(self):
        with pytest.raises(UserError, match="at most 8"):
            launch.verify_task(payload(case("ddp", gpus=9)))

    def test_fewer_gpus_than_ranks(self):
        with pytest.raises(UserError, match="need as many GPUs"):
            launch.verify_task({**payload(case("ddp", gpus=8)), "device": "cuda"})

    def test_ranks_that_do_not_divide_by_the_machines(self):
        with pytest.raises(UserError, match="spread evenly"):
            launch.verify_task(payload(case("ddp", gpus=3), rendezvous={"nodes": 2, "port": 1}))


def payload(*cases: Case, rendezvous: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"cases": [each.data() for each in cases], "device": "cpu", "rendezvous": rendezvous or {}}
