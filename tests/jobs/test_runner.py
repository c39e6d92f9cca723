"""The runner against real worker processes. Run: pytest tests/jobs/test_runner.py."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from memcore.i18n import use_language
from memcore.jobs import JobResult, JobStatus, LaneLimits, LightLane
from memcore.jobs.runner import IDLE_QUEUE
from memcore.jobs.tasks import TASKS
from memcore.units import GIB, MIB

ROOT = Path(__file__).resolve().parents[2]
TEST_TASKS = {
    **{
        name: f"tests.jobs.tasks_for_tests:{name}"
        for name in (
            "allocate",
            "answer_list",
            "answer_long",
            "break_down",
            "complain",
            "die",
            "echo",
            "fail_to_allocate",
            "fill_memory",
            "leave",
            "loaded_modules",
            "log_and_sleep",
            "note",
            "print_everywhere",
            "reserve",
            "sleep",
            "sleep_with_child",
            "who",
        )
    },
    "no_module": "tests.jobs.no_such_module:echo",
}
LIMITS = LaneLimits(timeout_s=10)


@pytest.fixture(scope="module")
def shared_lane() -> Iterator[LightLane]:
    """One lane for the tests that leave it as they found it."""
    lane = LightLane(LIMITS, extra_tasks=TEST_TASKS)
    yield lane
    lane.close()


@pytest.fixture
def make_lane() -> Iterator[Callable[..., LightLane]]:
    """Make a lane with limits of the test's own."""
    lanes = []

    def make(**limits: Any) -> LightLane:
        lanes.append(LightLane(replace(LIMITS, **limits), extra_tasks=TEST_TASKS))
        return lanes[-1]

    yield make
    for lane in lanes:
        lane.close()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(max_workers=8) as executor:
        yield executor


def pid_of(lane: LightLane) -> int:
    result = lane.run("who", {"asked_at": time.monotonic_ns()})
    assert result.value is not None, result
    return int(result.value["pid"])


def is_running(pid: int) -> bool:
    """Whether any thread is alive: the first can be a zombie while another still holds the files."""
    try:
        stats = [(thread / "stat").read_text() for thread in Path(f"/proc/{pid}/task").iterdir()]
    except (FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/task").exists()
    return any(stat.rpartition(")")[2].split()[0] not in "ZX" for stat in stats)


def wait_until(condition: Callable[[], object], timeout_s: float = 8.0) -> None:
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, "waited in vain"
        time.sleep(0.01)


def read_pid(path: Path) -> int:
    wait_until(lambda: path.exists() and path.read_text())
    return int(path.read_text())


def start_sleep(pool: ThreadPoolExecutor, lane: LightLane, path: Path, **options: Any) -> Future[JobResult]:
    """Have the lane sleep for a long time; return when it does."""
    future = pool.submit(lane.run, "sleep", {"seconds": 60, "pid_file": str(path)}, **options)
    read_pid(path)
    return future


class TestAnswers:
    def test_echo_comes_back_unchanged(self, shared_lane):
        payload = {
            "text": "显存 ≤ 80 GiB 🙂\n\ud800",
            "deep": [{"a": None, "b": [1.5, True]}],
            "inf": float("inf"),
        }
        result = shared_lane.run("echo", payload)
        assert result.status is JobStatus.DONE
        assert result.value == payload
        assert result.message == ""
        assert 0 < result.seconds < 10

    def test_payload_larger_than_a_pipe(self, shared_lane):
        payload = {"text": "é" * 500_000}
        assert shared_lane.run("echo", payload).value == payload

    def test_second_call_uses_the_same_process(self, shared_lane):
        assert pid_of(shared_lane) == pid_of(shared_lane) != os.getpid()

    def test_worker_starts_without_heavy_imports(self, shared_lane):
        modules = set(shared_lane.run("loaded_modules", {}).value["modules"])
        assert not {"torch", "transformers", "streamlit", "numpy"} & modules

    def test_output_of_a_task_does_not_reach_the_protocol(self, capfd, make_lane):
        lane = make_lane()  # its worker starts under capfd and so logs to it
        assert lane.run("print_everywhere", {}).value == {"stdin": ""}
        assert lane.run("echo", {"after": "printing"}).value == {"after": "printing"}
        logged = capfd.readouterr()
        assert logged.out == ""
        assert all(text in logged.err for text in ("forged", "from a C library", "from a child"))

    def test_traceback_of_a_task_goes_to_the_log(self, capfd, make_lane):
        assert "Traceback" not in make_lane().run("break_down", {}).message
        logged = capfd.readouterr().err
        assert "Traceback" in logged
        assert "second" in logged

    def test_worker_speaks_the_callers_language(self, shared_lane):
        use_language("zh")
        try:
            assert shared_lane.run("who", {}).value["language"] == "zh"
        finally:
            use_language("en")
        assert shared_lane.run("who", {}).value["language"] == "en"

    def test_works_from_another_directory(self, make_lane, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        assert make_lane().run("echo", {"a": 1}).value == {"a": 1}

    def test_payload_that_is_not_json_is_the_callers_mistake(self, shared_lane):
        with pytest.raises(TypeError):
            shared_lane.run("echo", {"a": object()})


class TestTaskErrors:
    """An error in a task is a result, and the worker lives on."""

    @pytest.fixture(autouse=True)
    def _worker_stays(self, shared_lane):
        before = pid_of(shared_lane)
        yield
        assert pid_of(shared_lane) == before

    def test_user_error_comes_back_as_its_text(self, shared_lane):
        result = shared_lane.run("complain", {"layers": -1})
        assert result.status is JobStatus.FAILED
        assert result.message == "层数 is -1; it must be above 0."
        assert result.field == "model.config"
        assert result.value is None

    def test_other_error_shows_class_and_first_line_only(self, shared_lane):
        result = shared_lane.run("break_down", {})
        assert result.status is JobStatus.CRASHED
        assert "ValueError: first)" in result.message
        assert "second" not in result.message

    @pytest.mark.parametrize("name", ["no such task", "memcore.units:format_bytes", "os:getcwd", ""])
    def test_only_tasks_in_the_table_run(self, shared_lane, name):
        result = shared_lane.run(name, {})
        assert result.status is JobStatus.CRASHED
        assert f"LookupError: no task is named {name!r}" in result.message

    @pytest.mark.parametrize(
        ("task", "reason"),
        [("no_module", "ModuleNotFoundError"), ("answer_list", "TypeError"), ("leave", "SystemExit: 3")],
    )
    def test_bad_task(self, shared_lane, task, reason):
        result = shared_lane.run(task, {})
        assert result.status is JobStatus.CRASHED
        assert reason in result.message

    def test_answer_over_the_limit(self, shared_lane):
        result = shared_lane.run("answer_long", {"num_chars": 8 * MIB})
        assert result.status is JobStatus.CRASHED
        assert "ReplyTooLargeError" in result.message


class TestEndedWorkers:
    """Whatever ends a worker, its caller gets a result and the next job a fresh process."""

    @pytest.mark.parametrize(
        ("task", "payload", "reason"),
        [
            ("die", {"signal": signal.SIGKILL}, "signal 9"),
            ("die", {"signal": signal.SIGSEGV}, "signal 11"),
            ("leave", {"hard": True}, "exit code 3"),
        ],
    )
    def test_worker_that_dies_in_a_job(self, shared_lane, task, payload, reason):
        before = pid_of(shared_lane)
        result = shared_lane.run(task, payload)
        assert result.status is JobStatus.CRASHED
        assert reason in result.message
        assert pid_of(shared_lane) != before

    def test_worker_killed_from_outside_in_a_job(self, shared_lane, pool, tmp_path):
        future = start_sleep(pool, shared_lane, tmp_path / "pid")
        os.kill(read_pid(tmp_path / "pid"), signal.SIGKILL)
        assert future.result(timeout=5).status is JobStatus.CRASHED
        assert shared_lane.run("echo", {"after": "kill"}).status is JobStatus.DONE

    def test_worker_killed_between_jobs_costs_no_job(self, shared_lane):
        pid = pid_of(shared_lane)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not is_running(pid))
        assert pid_of(shared_lane) != pid

    def test_time_limit_ends_the_worker_with_its_children(self, shared_lane, tmp_path):
        before = pid_of(shared_lane)
        result = shared_lane.run("sleep_with_child", {"pid_file": str(tmp_path / "pid")}, timeout_s=0.5)
        assert result.status is JobStatus.TIMED_OUT
        assert "0.5 s" in result.message
        assert 0.5 <= result.seconds < 5
        assert not is_running(before)
        child = read_pid(tmp_path / "pid")
        wait_until(lambda: not is_running(child))
        assert pid_of(shared_lane) != before

    def test_time_limit_holds_for_a_worker_that_does_not_read(self, shared_lane):
        pid = pid_of(shared_lane)
        os.kill(pid, signal.SIGSTOP)
        result = shared_lane.run("echo", {"text": "x" * MIB}, timeout_s=0.3)
        assert result.status is JobStatus.TIMED_OUT

    def test_worker_that_cannot_start(self, make_lane, monkeypatch):
        monkeypatch.setattr(sys, "executable", "/nowhere/python")
        result = make_lane().run("echo", {})
        assert result.status is JobStatus.CRASHED
        assert "FileNotFoundError" in result.message

    def test_worker_that_fails_at_its_start(self, make_lane, monkeypatch):
        monkeypatch.setattr(sys, "executable", "/bin/false")
        result = make_lane().run("echo", {"text": "x" * MIB})
        assert result.status is JobStatus.CRASHED
        assert "exit code 1" in result.message


class TestMemory:
    @pytest.mark.parametrize("piece_bytes", [64, MIB, 64 * MIB])
    def test_out_of_memory_is_a_result_and_retires_the_worker(self, make_lane, piece_bytes):
        lane = make_lane(memory_bytes=96 * MIB)
        before = pid_of(lane)
        result = lane.run("fill_memory", {"piece_bytes": piece_bytes})
        assert result.status is JobStatus.OUT_OF_MEMORY
        assert "0.0938 GiB" in result.message
        assert pid_of(lane) != before

    def test_allocators_that_raise_runtime_error_count_too(self, shared_lane):
        assert shared_lane.run("fail_to_allocate", {}).status is JobStatus.OUT_OF_MEMORY

    def test_memory_below_the_limit_is_there(self, make_lane):
        lane = make_lane(memory_bytes=GIB)
        assert lane.run("allocate", {"num_bytes": 512 * MIB}).value == {"num_bytes": 512 * MIB}

    def test_address_space_that_is_only_reserved_does_not_count(self, make_lane):
        lane = make_lane(memory_bytes=128 * MIB)
        assert lane.run("reserve", {"num_bytes": 8 * GIB}).value == {"num_bytes": 8 * GIB}


class TestConcurrency:
    def test_two_workers_run_two_jobs_at_once(self, make_lane, pool, tmp_path):
        lane, cancel = make_lane(workers=2), threading.Event()
        first = start_sleep(pool, lane, tmp_path / "first", cancel=cancel)
        assert pid_of(lane) == pid_of(lane) != read_pid(tmp_path / "first")
        assert not first.done()
        cancel.set()

    def test_one_worker_runs_two_jobs_in_turn(self, make_lane, pool):
        lane = make_lane()
        futures = [pool.submit(lane.run, "sleep", {"seconds": 0.2 + 0.01 * i}) for i in range(2)]
        results = [future.result(timeout=5) for future in futures]
        assert [result.status for result in results] == [JobStatus.DONE] * 2
        assert len({result.value["pid"] for result in results}) == 1
        assert all(result.seconds < 1 for result in results)

    def test_many_callers_of_many_jobs(self, make_lane, pool):
        lane = make_lane(workers=2, queue=100)
        results = list(pool.map(lambda i: lane.run("echo", {"i": i % 40}), range(200)))
        assert [result.value for result in results] == [{"i": i % 40} for i in range(200)]

    def test_over_the_queue_is_busy(self, make_lane, pool, tmp_path):
        lane = make_lane(queue=1)
        cancel = threading.Event()
        start_sleep(pool, lane, tmp_path / "pid", cancel=cancel)
        waiting = pool.submit(lane.run, "echo", {"i": 1})
        wait_until(lambda: len(lane._waiting) == 1)
        result = lane.run("echo", {"i": 2})
        assert result.status is JobStatus.BUSY
        assert "busy" in result.message
        assert result.seconds == 0
        cancel.set()
        assert waiting.result(timeout=5).value == {"i": 1}

    def test_equal_questions_at_once_run_once(self, make_lane, pool, tmp_path):
        lane = make_lane(workers=2)
        log = tmp_path / "log"
        payload = {"log": str(log), "seconds": 0.3}
        turned = dict(reversed(payload.items()))
        results = list(pool.map(lambda p: lane.run("log_and_sleep", p), [payload, turned] * 4))
        assert {result.status for result in results} == {JobStatus.DONE}
        assert log.read_text() == "run\n"
        results[0].value["items"].append("changed by one caller")
        assert results[1].value == {"items": [1, 2]}


class TestPreparing:
    def test_it_waits_until_nobody_else_does(self, make_lane, pool, tmp_path):
        """What is prepared last comes first, in its order; a user's job comes before all of it."""
        lane, cancel, log = make_lane(), threading.Event(), tmp_path / "log"
        start_sleep(pool, lane, tmp_path / "pid", cancel=cancel)

        def job(name: str) -> tuple[str, dict[str, str]]:
            return "note", {"log": str(log), "name": name}

        lane.prepare([job("first of old"), job("second of old")])
        lane.prepare([job("first of new"), job("second of new")])
        users = pool.submit(lane.run, *job("user"))
        wait_until(lambda: len(lane._waiting) == 1)
        cancel.set()
        assert users.result(timeout=10).status is JobStatus.DONE
        wait_until(lambda: log.read_text().count("\n") == 5)
        assert log.read_text().split("\n")[:5] == [
            "user", "first of new", "second of new", "first of old", "second of old",
        ]  # fmt: skip

    def test_it_starts_a_worker_by_itself_and_a_failure_harms_nobody(self, make_lane, tmp_path):
        lane, log = make_lane(), tmp_path / "log"
        lane.prepare([("die", {"signal": 9}), ("complain", {"layers": 0}), ("note", {"log": str(log), "name": "x"})])
        wait_until(lambda: log.exists() and log.read_text() == "x\n")
        assert lane.run("echo", {"i": 1}).value == {"i": 1}

    def test_it_is_bounded_and_ends_with_the_lane(self, make_lane, pool, tmp_path):
        lane = make_lane()
        start_sleep(pool, lane, tmp_path / "pid")
        lane.prepare([("echo", {"i": i}) for i in range(10 * IDLE_QUEUE)])
        assert len(lane._idle_work) == IDLE_QUEUE
        lane.close()
        lane.prepare([("echo", {"i": 1})])
        assert len(lane._idle_work) == IDLE_QUEUE


class TestKeptAnswers:
    def ask(self, lane: LightLane, log: Path, i: int = 0) -> JobResult:
        return lane.run("log_and_sleep", {"log": str(log), "i": i})

    def test_answer_is_kept(self, make_lane, tmp_path):
        lane, log = make_lane(), tmp_path / "log"
        assert self.ask(lane, log) == self.ask(lane, log)
        assert log.read_text() == "run\n"

    def test_oldest_answer_goes_first(self, make_lane, tmp_path):
        lane, log = make_lane(cache_entries=2), tmp_path / "log"
        for i in (0, 1, 0, 2):  # 1 is now the one unused for longest
            self.ask(lane, log, i)
        assert log.read_text().count("run") == 3
        self.ask(lane, log, 0)
        assert log.read_text().count("run") == 3
        self.ask(lane, log, 1)
        assert log.read_text().count("run") == 4

    def test_answers_are_bounded_in_bytes(self, make_lane):
        lane = make_lane(cache_bytes=2500)
        for i in range(5):
            lane.run("answer_long", {"num_chars": 1000 + i})
        assert len(lane._kept._entries) == 2
        assert lane._kept._num_bytes <= 2500

    def test_failures_are_not_kept(self, make_lane, tmp_path):
        lane = make_lane()
        payload = {"seconds": 0.4}
        assert lane.run("sleep", payload, timeout_s=0.1).status is JobStatus.TIMED_OUT
        assert lane.run("sleep", payload).status is JobStatus.DONE


class TestCancel:
    def test_running_job(self, make_lane, pool, tmp_path):
        lane, cancel = make_lane(), threading.Event()
        future = start_sleep(pool, lane, tmp_path / "pid", cancel=cancel)
        cancel.set()
        assert future.result(timeout=5).status is JobStatus.CANCELLED
        wait_until(lambda: not is_running(read_pid(tmp_path / "pid")))
        assert lane.run("echo", {}).status is JobStatus.DONE

    def test_waiting_job_leaves_the_queue(self, make_lane, pool, tmp_path):
        lane, first, second = make_lane(), threading.Event(), threading.Event()
        start_sleep(pool, lane, tmp_path / "pid", cancel=first)
        log = tmp_path / "log"
        waiting = pool.submit(lane.run, "log_and_sleep", {"log": str(log)}, cancel=second)
        wait_until(lambda: len(lane._waiting) == 1)
        second.set()
        assert waiting.result(timeout=5).status is JobStatus.CANCELLED
        first.set()
        assert lane.run("echo", {}).status is JobStatus.DONE
        assert not log.exists()

    def test_before_the_start(self, make_lane):
        lane, cancel = make_lane(), threading.Event()
        cancel.set()
        assert lane.run("echo", {}, cancel=cancel).status is JobStatus.CANCELLED
        assert not lane._threads

    def test_one_of_two_callers_does_not_take_the_answer_from_the_other(self, make_lane, pool, tmp_path):
        lane, cancel, log = make_lane(), threading.Event(), tmp_path / "log"
        payload = {"log": str(log), "seconds": 0.5}
        first = pool.submit(lane.run, "log_and_sleep", payload, cancel=cancel)
        wait_until(log.exists)
        second = pool.submit(lane.run, "log_and_sleep", payload)
        wait_until(lambda: next(iter(lane._flights.values())).num_callers == 2)
        cancel.set()
        assert first.result(timeout=5).status is JobStatus.CANCELLED
        assert second.result(timeout=5).status is JobStatus.DONE
        assert log.read_text() == "run\n"

    def test_asking_again_after_a_cancel_starts_anew(self, make_lane, pool, tmp_path):
        lane, cancel, log = make_lane(), threading.Event(), tmp_path / "log"
        payload = {"log": str(log), "seconds": 0.3}
        first = pool.submit(lane.run, "log_and_sleep", payload, cancel=cancel)
        wait_until(log.exists)
        cancel.set()
        first.result(timeout=5)
        assert lane.run("log_and_sleep", payload).status is JobStatus.DONE


class TestLife:
    def test_nothing_starts_before_the_first_job(self, make_lane):
        lane = make_lane()
        assert not lane._threads

    def test_warm_imports_in_the_background(self, make_lane):
        lane = make_lane()
        assert not {"wave", "colorsys"} & set(lane.run("loaded_modules", {"ask": 1}).value["modules"])
        lane.warm(["no_such_module_to_import"])
        lane.warm(["wave", "colorsys"])
        assert {"wave", "colorsys"} <= set(lane.run("loaded_modules", {"ask": 2}).value["modules"])

    def test_warm_again_works_on_a_fresh_worker(self, make_lane):
        lane = make_lane()
        lane.warm(["colorsys"])
        lane.run("die", {"signal": signal.SIGKILL})
        lane.warm(["colorsys"])
        assert "colorsys" in lane.run("loaded_modules", {}).value["modules"]

    def test_close_ends_workers_and_cancels_jobs(self, make_lane, pool, tmp_path):
        lane = make_lane()
        running = start_sleep(pool, lane, tmp_path / "pid")
        waiting = pool.submit(lane.run, "echo", {})
        wait_until(lambda: len(lane._waiting) == 1)
        lane.close()
        assert running.result(timeout=5).status is JobStatus.CANCELLED
        assert waiting.result(timeout=5).status is JobStatus.CANCELLED
        assert lane.run("echo", {}).status is JobStatus.CANCELLED
        assert not is_running(read_pid(tmp_path / "pid"))
        lane.close()

    @pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
    @pytest.mark.parametrize("end", [signal.SIGKILL, None], ids=["killed", "exits"])
    def test_worker_ends_with_its_server(self, busy, end):
        server = subprocess.Popen(
            [
                sys.executable,
                "-c",
                SERVER,
                json.dumps({"tasks": TEST_TASKS, "busy": busy, "stay": bool(end)}),
            ],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        with server:
            worker = int(server.stdout.readline())
            if end:
                assert is_running(worker)
                server.send_signal(end)
            # The worker holds the other end of stderr as well: this waits for both to let go of it.
            _out, err = server.communicate(timeout=8)
        wait_until(lambda: not is_running(worker), timeout_s=2)
        assert server.returncode == (-end if end else 0), err

    def test_limits_leave_something_to_work_with(self):
        with pytest.raises(ValueError, match="workers is 0"):
            LaneLimits(workers=0)
        with pytest.raises(ValueError, match="queue is -1"):
            LaneLimits(queue=-1)


# A server of its own: says its worker's process number, has it busy or not, and stays or ends.
SERVER = textwrap.dedent(
    """
    import json, sys, threading, time
    from memcore.jobs import LightLane

    order = json.loads(sys.argv[1])
    lane = LightLane(extra_tasks=order["tasks"])
    pid = lane.run("who", {}).value["pid"]
    if order["busy"]:
        threading.Thread(target=lane.run, args=("sleep", {"seconds": 60}), daemon=True).start()
        time.sleep(0.3)
    print(pid, flush=True)
    if order["stay"]:
        time.sleep(60)
    """
)


def test_server_side_imports_nothing_heavy():
    code = "import memcore.jobs, sys; print({'torch', 'transformers', 'streamlit', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_every_task_names_a_module_and_a_function_of_ours():
    for where in TASKS.values():
        module, _, function = where.partition(":")
        assert module.startswith("memcore.")
        assert function.isidentifier()
