"""Any batch and sequence from the tapes of a few sizes: equal to a trace of its own, to the byte, and at once.

Run: pytest tests/trace/test_sizes.py (a minute).
"""

import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from small_models import CONFIGS

from memcore.trace import task
from memcore.trace.kept import Kept, KeptFiles
from memcore.trace.profile import load_profile
from memcore.trace.request import Adapters, Request
from memcore.trace.sizes import NotPolynomialError, preparation, sampled_sizes, tape_at
from memcore.trace.tape import dump_tape, load_tape
from memcore.trace.tracer import record, trace

# Those of the depth test but Qwen3-Next, whose linear attention works on blocks of 64 tokens.
ARCHITECTURES = (
    "llama", "tied llama", "qwen3", "gpt2, dropout", "gpt_neox", "gemma3_text", "smollm3", "mixtral", "gpt_oss",
    "deepseek_v3",
)  # fmt: skip
# For batch 1 and for more, whose steps have changes of their own.
SETTINGS: dict[int, dict[str, Any]] = {
    1: {"attention": "flash", "checkpointing": "none"},
    3: {"attention": "eager", "checkpointing": "full"},
}


def request(name: str, batch: int, length: int, **wanted: Any) -> Request:
    given = {"dtype": "bf16", "attention": "flash", "checkpointing": "none", "loss": "unfused", **wanted}
    return Request(config=CONFIGS[name], micro_batch=batch, seq_len=length, **given)


@pytest.fixture(autouse=True)
def _nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """What other tests keep must not answer here."""
    kept = Kept(None)
    monkeypatch.setattr(task, "_kept", lambda: kept)


@pytest.mark.parametrize("batch", SETTINGS)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_any_size_is_a_trace_of_its_own(name: str, batch: int):
    asked = request(name, batch, 200, **SETTINGS[batch])
    assert task.sizes_task(asdict(asked)) == {"any_size": True}
    for length in (64, 333, 1000):
        sized = replace(asked, seq_len=length, micro_batch=batch if batch == 1 else length % 7 + 2)
        assert load_profile(task.trace_task(asdict(sized))) == trace(sized)


@pytest.mark.parametrize(
    "wanted",
    [
        {"adapters": Adapters(rank=8, targets=("all-linear",), dtype="fp32", dropout=0.1)},
        {"adapters": Adapters(rank=8, targets=("all-linear",), dtype="bf16", quantization="nf4_double_quant")},
        {"autocast": True},
        {"fused_kernels": ("rmsnorm", "rope", "swiglu")},
        {"code": "litgpt"},
        {"checkpointing": "save(attention,mm)"},
        {"checkpointing": "segments(2)", "reentrant": True},
        {"dtype": "fp32", "logits_retained": True},
        {"loss": "none"},
    ],
    ids=str,
)
def test_other_recipes_too(wanted: dict[str, Any]):
    asked = request("llama", 2, 200, **wanted)
    assert task.sizes_task(asdict(asked)) == {"any_size": True}
    sized = replace(asked, micro_batch=5, seq_len=777)
    assert load_profile(task.trace_task(asdict(sized))) == trace(sized)


def test_what_works_in_blocks_is_traced_each_time():
    """Qwen3-Next's linear attention pads to 64 tokens; chunks of a loss are a token longer or not."""
    for asked in (request("qwen3_next", 1, 100), request("llama", 1, 100, loss="chunked")):
        assert task.sizes_task(asdict(asked)) == {"any_size": False}
        assert load_profile(task.trace_task(asdict(asked))) == trace(asked)


def test_batch_1_has_changes_of_its_own():
    """So its tapes say nothing of larger batches, and are refused."""
    tapes = {(1, length): record(request("llama", 1, length)) for length in (128, 256)}
    tapes[2, 128] = record(request("llama", 2, 128))
    assert len(tapes[1, 128].changes) != len(tapes[2, 128].changes)
    with pytest.raises(NotPolynomialError):
        tape_at(tapes, (1, 512))


def test_preparing_asks_for_one_size_at_a_time():
    """So that a user who comes meanwhile waits for one trace at the most."""
    payload = asdict(request("llama", 4, 4096))
    jobs = preparation(payload)
    assert [name for name, _payload in jobs] == ["trace"] * 6 + ["trace_sizes"]
    assert [(job["micro_batch"], job["seq_len"]) for _name, job in jobs[:-1]] == list(sampled_sizes(4))
    assert jobs[-1][1] == payload


def test_an_answer_from_kept_tapes_takes_a_moment():
    """No trace is made: that takes a hundred times as long."""
    asked = request("llama", 1, 100)
    task.sizes_task(asdict(asked))
    start = time.perf_counter()
    task.trace_task(asdict(replace(asked, seq_len=901)))
    answered = time.perf_counter() - start
    start = time.perf_counter()
    trace(replace(asked, seq_len=902))
    assert answered < (time.perf_counter() - start) / 4


# --- what is kept ---------------------------------------------------------------------------------------------------


def test_tapes_survive_their_data():
    tape = record(request("gemma3_text", 1, 100))
    assert load_tape(json.loads(json.dumps(dump_tape(tape)))) == tape


def test_files_are_found_again_and_bounded(tmp_path: Path):
    files = KeptFiles(tmp_path / "new", max_bytes=2_000)
    for number in range(40):
        files.put(f"key{number}", {"number": number, "noise": [number * 7919 % 997 + i * i for i in range(60)]})
    kept = [number for number in range(40) if files.get(f"key{number}") is not None]
    assert kept == list(range(kept[0], 40))
    assert 0 < len(kept) < 40
    assert sum(file.stat().st_size for file in (tmp_path / "new").iterdir()) <= 2_000
    assert KeptFiles(tmp_path / "new", 2_000).get("key39")["number"] == 39


@pytest.mark.parametrize("damage", [b"", b"not compressed", b"x\x9c\x03\x00\x00\x00\x00\x01"])
def test_a_damaged_file_is_as_good_as_none(tmp_path: Path, damage: bytes):
    files = KeptFiles(tmp_path, 10**6)
    files.put("key", {"a": 1})
    (tmp_path / "key.json.z").write_bytes(damage)
    assert files.get("key") is None
    files.put("key", {"a": 2})
    assert files.get("key") == {"a": 2}


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path):
    in_the_way = tmp_path / "file"
    in_the_way.write_text("here")
    files = KeptFiles(in_the_way, 10**6)
    files.put("key", {"a": 1})
    assert files.get("key") is None


def test_memory_is_bounded_too():
    kept = Kept(None)
    for number in range(100):
        kept.put(str(number), {"n": number})
    assert kept.get("99") == {"n": 99}
    assert kept.get("0") is None


def test_what_is_made_of_a_tape_is_made_once_for_its_content_and_code(tmp_path: Path):
    made: list[int] = []

    def make() -> dict[str, Any]:
        made.append(len(made))
        return {"bytes": made[-1]}

    folders = [tmp_path / name for name in ("one", "another")]
    for number, folder in enumerate(folders):
        folder.mkdir()
        (folder / "code.py").write_text(f"value = {number}\n", encoding="utf-8")
    asked = [(1, folders[0]), (1, folders[0]), (2, folders[0]), (1, folders[1]), (2, folders[0])]
    found = [task.kept_answer({"micro_batch": batch}, folder, make)["bytes"] for batch, folder in asked]
    assert found == [0, 0, 1, 2, 1]
