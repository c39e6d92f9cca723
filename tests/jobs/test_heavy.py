"""The heavy lane against real worker processes. Run: pytest tests/jobs/test_heavy.py."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_runner import TEST_TASKS, is_running, read_pid, wait_until

from memcore.errors import UserError
from memcore.i18n import use_language
from memcore.jobs import HeavyLane, HeavyLimits, JobResult, JobStatus, Step
from memcore.jobs.heavy import finish
from memcore.units import GIB, MIB

ROOT = Path(__file__).resolve().parents[2]
LIMITS = HeavyLimits(case_timeout_s=10, job_timeout_s=30, memory_bytes=GIB)


@pytest.fixture
def make_lane() -> Iterator[Callable[..., HeavyLane]]:
    """Make a lane with limits of the test's own."""
    lanes = []

    def make(**limits: Any) -> HeavyLane:
        lanes.append(HeavyLane(replace(LIMITS, **limits), extra_tasks=TEST_TASKS, quiet=True))
        return lanes[-1]

    yield make
    for lane in lanes:
        lane.close()


def echo(value: object) -> Step:
    return Step(task="echo", payload={"value": value}, estimate_s=1.0)


def sleep(path: Path, seconds: float = 60.0) -> Step:
    return Step(task="sleep", payload={"seconds": seconds, "pid_file": str(path)}, estimate_s=seconds)


def statuses(results: tuple[JobResult, ...]) -> list[JobStatus]:
    return [result.status for result in results]


def does_the_next_job(lane: HeavyLane) -> None:
    """The lane does the next job."""
    progress = finish(lane, lane.submit([echo("after")], device="cpu"))
    assert progress.status is JobStatus.DONE
    assert progress.results[0].value == {"value": "after"}


class TestResults:
    def test_cases_run_in_order_in_one_process(self, make_lane):
        lane = make_lane()
        who = Step(task="who", payload={})
        progress = finish(lane, lane.submit([who, echo(1), who], device="cpu"))
        assert progress.status is JobStatus.DONE
        first, second, third = (result.value for result in progress.results)
        assert second == {"value": 1}
        assert first == third
        assert first["pid"] != os.getpid()

    def test_the_worker_ends_with_the_job(self, make_lane):
        lane = make_lane()
        progress = finish(lane, lane.submit([Step(task="who", payload={})], device="cpu"))
        assert not is_running(progress.results[0].value["pid"])

    def test_each_result_is_passed_on_as_it_ends(self, make_lane):
        lane, seen = make_lane(), []
        job = lane.submit([echo("a"), echo("b")], device="cpu", on_result=lambda *each: seen.append(each))
        results = finish(lane, job).results
        assert seen == list(enumerate(results))

    def test_a_result_that_cannot_be_passed_on_stays_with_the_job(self, make_lane):
        def refuse(_index: int, _result: JobResult) -> None:
            raise UserError("The file is locked.")

        lane = make_lane()
        progress = finish(lane, lane.submit([echo("a"), echo("b")], device="cpu", on_result=refuse))
        assert progress.status is JobStatus.DONE
        assert progress.complaint == "The file is locked."
        assert [result.value for result in progress.results] == [{"value": "a"}, {"value": "b"}]


class TestFailures:
    def test_sigkill_in_mid_case_costs_that_case_alone(self, make_lane, tmp_path):
        lane = make_lane()
        job = lane.submit([echo("before"), sleep(tmp_path / "pid"), echo("after")], device="cpu")
        os.kill(read_pid(tmp_path / "pid"), signal.SIGKILL)
        progress = finish(lane, job)
        assert statuses(progress.results) == [JobStatus.DONE, JobStatus.CRASHED, JobStatus.DONE]
        assert progress.results[1].message == "The calculation stopped unexpectedly (signal 9)."
        assert progress.status is JobStatus.DONE

    def test_a_case_past_its_memory_limit(self, make_lane):
        lane = make_lane(memory_bytes=256 * MIB)
        fill = Step(task="fill_memory", payload={})
        progress = finish(lane, lane.submit([fill, echo("after")], device="cpu"))
        assert statuses(progress.results) == [JobStatus.OUT_OF_MEMORY, JobStatus.DONE]
        assert "0.25 GiB" in progress.results[0].message

    def test_a_case_past_its_time_limit(self, make_lane, tmp_path):
        lane = make_lane(case_timeout_s=0.6)
        progress = finish(lane, lane.submit([sleep(tmp_path / "pid"), echo("after")], device="cpu"))
        assert statuses(progress.results) == [JobStatus.TIMED_OUT, JobStatus.DONE]
        assert not is_running(read_pid(tmp_path / "pid"))

    def test_a_job_past_its_time_limit_ends_with_what_it_has(self, make_lane, tmp_path):
        lane = make_lane(job_timeout_s=1.0)
        job = lane.submit([echo("before"), sleep(tmp_path / "pid"), echo("never")], device="cpu")
        progress = finish(lane, job)
        assert statuses(progress.results) == [JobStatus.DONE, JobStatus.TIMED_OUT]
        assert progress.status is JobStatus.TIMED_OUT
        does_the_next_job(lane)

    def test_a_crash_of_the_task_is_a_result(self, make_lane):
        lane = make_lane()
        steps = [Step(task="break_down", payload={}), Step(task="leave", payload={"hard": True}), echo("after")]
        progress = finish(lane, lane.submit(steps, device="cpu"))
        assert statuses(progress.results) == [JobStatus.CRASHED, JobStatus.CRASHED, JobStatus.DONE]

    def test_sentences_are_in_the_language_of_who_asked(self, make_lane, tmp_path):
        lane = make_lane(case_timeout_s=0.3)
        use_language("zh")
        try:
            job = lane.submit([sleep(tmp_path / "pid")], device="cpu")
        finally:
            use_language("en")
        assert "秒" in finish(lane, job).results[0].message


class TestQueue:
    def test_two_users_take_turns_on_one_device(self, make_lane, tmp_path):
        lane = make_lane()
        first = lane.submit([sleep(tmp_path / "first", 1.0)], device="cpu")
        second = lane.submit([sleep(tmp_path / "second", 0.1)], device="cpu")
        read_pid(tmp_path / "first")
        waiting = lane.look(second)
        assert waiting.place == 1
        assert waiting.status is None
        assert waiting.estimate_s >= 0.1
        assert not (tmp_path / "second").exists()
        assert finish(lane, first).status is JobStatus.DONE
        assert finish(lane, second).status is JobStatus.DONE
        assert lane.look(second).place == 0

    def test_devices_do_not_wait_for_one_another(self, make_lane, tmp_path):
        lane = make_lane()
        job = lane.submit([sleep(tmp_path / "pid")], device="cpu")
        read_pid(tmp_path / "pid")
        assert finish(lane, lane.submit([echo(1)], device="cuda")).status is JobStatus.DONE
        job.cancel()

    def test_a_full_queue_refuses_with_a_sentence(self, make_lane, tmp_path):
        lane = make_lane(queue=1)
        lane.submit([sleep(tmp_path / "pid")], device="cpu")
        read_pid(tmp_path / "pid")
        lane.submit([echo(1)], device="cpu")
        with pytest.raises(UserError, match="busy"):
            lane.submit([echo(2)], device="cpu")

    def test_cancel_frees_the_device(self, make_lane, tmp_path):
        lane = make_lane()
        job = lane.submit([echo("before"), sleep(tmp_path / "pid"), echo("never")], device="cpu")
        pid = read_pid(tmp_path / "pid")
        job.cancel()
        progress = finish(lane, job)
        assert progress.status is JobStatus.CANCELLED
        assert progress.results[0].value == {"value": "before"}
        assert not is_running(pid)
        does_the_next_job(lane)

    def test_cancel_while_waiting(self, make_lane, tmp_path):
        lane = make_lane()
        running = lane.submit([sleep(tmp_path / "pid", 0.5)], device="cpu")
        waiting = lane.submit([echo("never")], device="cpu")
        waiting.cancel()
        assert finish(lane, running).status is JobStatus.DONE
        progress = finish(lane, waiting)
        assert progress.status is JobStatus.CANCELLED
        assert progress.results == ()

    def test_a_user_who_leaves_is_dropped_running(self, make_lane, tmp_path):
        lane = make_lane(heartbeat_s=0.5)
        lane.submit([sleep(tmp_path / "pid")], device="cpu")
        pid = read_pid(tmp_path / "pid")
        wait_until(lambda: not is_running(pid))
        does_the_next_job(lane)

    def test_a_user_who_leaves_is_dropped_waiting(self, make_lane, tmp_path):
        lane = make_lane(heartbeat_s=0.6)
        stays = lane.submit([sleep(tmp_path / "pid", 1.5)], device="cpu")
        lane.submit([Step(task="log_and_sleep", payload={"log": str(tmp_path / "log")})], device="cpu")
        assert finish(lane, stays).status is JobStatus.DONE
        does_the_next_job(lane)
        assert not (tmp_path / "log").exists()


class TestEnd:
    def test_close_cancels_what_waits_and_what_runs(self, make_lane, tmp_path):
        lane = make_lane()
        running = lane.submit([sleep(tmp_path / "pid")], device="cpu")
        waiting = lane.submit([echo(1)], device="cpu")
        pid = read_pid(tmp_path / "pid")
        lane.close()
        assert running.wait(2)
        assert waiting.wait(2)
        assert not is_running(pid)
        with pytest.raises(UserError):
            lane.submit([echo(1)], device="cpu")

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
    def test_the_server_stopping_during_a_job_leaves_no_worker(self, tmp_path, number):
        code = """
            import signal, sys, time
            from memcore.jobs import HeavyLane, Step
            # A shell has what it starts in the background ignore it.
            signal.signal(signal.SIGINT, signal.default_int_handler)
            lane = HeavyLane(extra_tasks={"sleep": "tests.jobs.tasks_for_tests:sleep"})
            job = lane.submit([Step(task="sleep", payload={"seconds": 60, "pid_file": sys.argv[1]})], device="cpu")
            while True:
                lane.look(job)
                time.sleep(0.05)
        """
        command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "pid")]
        with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL) as server:
            pid = read_pid(tmp_path / "pid")
            server.send_signal(number)
            server.wait(10)
        wait_until(lambda: not is_running(pid))

    def test_looking_from_many_threads(self, make_lane):
        lane = make_lane()
        job = lane.submit([echo(number) for number in range(20)], device="cpu")
        threads = [threading.Thread(target=finish, args=(lane, job)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert [result.value["value"] for result in lane.look(job).results] == list(range(20))

    @pytest.mark.parametrize("name", ["case_timeout_s", "job_timeout_s", "memory_bytes", "heartbeat_s", "reply_bytes"])
    def test_limits_that_leave_nothing_are_refused(self, name):
        with pytest.raises(ValueError, match=name):
            HeavyLimits(**{name: 0})

    def test_the_estimate_follows_the_pace_of_the_cases_so_far(self, make_lane, tmp_path):
        lane = make_lane()
        slow = Step(task="sleep", payload={"seconds": 0.5}, estimate_s=0.1)
        job = lane.submit([slow, sleep(tmp_path / "pid", 10)], device="cpu")
        read_pid(tmp_path / "pid")
        time.sleep(0.1)
        assert lane.look(job).estimate_s > 20
        job.cancel()
