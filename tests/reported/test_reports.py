"""Memory reports as people paste them: what is read, why the request failed, and what it was for.

Run: pytest tests/reported/test_reports.py. The figures are those of public issues, named beside them; the sentences
around them are the forms of PyTorch's versions.
"""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memcore.budget import Evidence, predict
from memcore.cli import main
from memcore.counting import count_config
from memcore.errors import UserError
from memcore.models import load_inventory
from memcore.reported import Cause, Findings, Quantity, find, findings_report, findings_text, read_report, sentences
from memcore.reported.findings import as_requested
from memcore.scenario import parse_scenario
from memcore.units import GIB, MIB, ByteUnit

STARCODER = {
    "model_type": "gpt_bigcode", "n_embd": 6144, "n_head": 48, "n_layer": 40, "n_positions": 8192, "n_inner": 24576,
    "vocab_size": 49152, "multi_query": True, "activation_function": "gelu_pytorch_tanh",
}  # fmt: skip
HINT = "If reserved memory is >> allocated memory try setting max_split_size_mb to avoid fragmentation."


def old(asked: str, capacity: str, allocated: str, free: str, reserved: str) -> str:
    """As torch 1.4 to 1.13 writes it."""
    return (
        f"RuntimeError: CUDA out of memory. Tried to allocate {asked} (GPU 0; {capacity} total capacity; {allocated} "
        f"already allocated; {free} free; {reserved} reserved in total by PyTorch) {HINT}"
    )


def new(asked: str, capacity: str, free: str, process: str, allocated: str, unallocated: str) -> str:
    """As torch 2.1 and later writes it; `process`: its sentence."""
    return (
        f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {asked}. GPU 3 has a total capacity of "
        f"{capacity} of which {free} is free. {process} Of the allocated memory {allocated} is allocated by PyTorch, "
        f"and {unallocated} is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try "
        "setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
    )


def found(text: str) -> Findings:
    return find(read_report(text))


def gib(num_bytes: int | None) -> float:
    assert num_bytes is not None
    return num_bytes / GIB


# --- the public reports -----------------------------------------------------------------------------------------------


def test_megatron_fails_in_pieces():
    """NVIDIA/Megatron-LM#60: 9.10 GiB more reserved than allocated, 2.29 asked for."""
    findings = found(old("2.29 GiB", "31.72 GiB", "19.22 GiB", "1.88 GiB", "28.32 GiB"))
    assert findings.cause is Cause.IN_PIECES
    assert gib(findings.unallocated) == pytest.approx(9.10, abs=0.001)
    assert gib(findings.needed) == pytest.approx(21.51, abs=0.001)
    (cause,) = sentences(findings, ByteUnit.GIB)
    assert "expandable_segments" in cause
    assert "of the card at once" not in cause


def test_llama_on_small_cards_has_much_outside_pytorch():
    """meta-llama/llama-cookbook#234: 1.47 GiB of context and NCCL beside the allocator."""
    process = "Including non-PyTorch memory, this process has 15.76 GiB memory in use."
    findings = found(new("98.00 MiB", "15.77 GiB", "5.12 MiB", process, "13.76 GiB", "540.64 MiB"))
    assert gib(findings.outside) == pytest.approx(1.47, abs=0.01)
    assert findings.cause is Cause.IN_PIECES


def scenario(**parts: Any) -> Any:
    return parse_scenario(parts)


def test_the_step_of_zero_2_is_found():
    """hiyouga/LlamaFactory#1221: 4 bytes for each of an eighth of 6,738,415,616 parameters."""
    half = dict.fromkeys(("param_dtype", "compute_dtype", "grad_dtype", "reduce_dtype"), "fp16")
    budget = predict(
        scenario(
            model={"name": "meta-llama/Llama-2-7b-hf"},
            hardware={"gpu": "V100-32GB", "gpus": 8},
            parallelism={"engine": "deepspeed", "zero_stage": 2},
            recipe=half,
            workload={"seq_len": 1024, "checkpointing": "full"},
        )
    )
    findings = find(read_report(old("3.14 GiB", "31.75 GiB", "28.28 GiB", "1.95 GiB", "28.28 GiB")), budget)
    assert findings.cause is Cause.TOO_LITTLE
    assert [(each.name, each.width, each.num_bytes) for each in findings.matches] == [("slice", 4, 4 * 842_301_952)]
    assert any("batch and length do not" in each for each in sentences(findings, ByteUnit.GIB))


def test_eager_attentions_scores_are_found():
    """huggingface/accelerate#1864: 48 heads x 8192^2 x 4 bytes are 12 GiB; more GPUs change nothing."""
    budget = predict(
        scenario(
            model={"config": STARCODER},
            hardware={"gpu": "A100-80GB", "gpus": 80, "gpus_per_node": 8},
            parallelism={"engine": "fsdp2"},
            recipe={"convention": "fsdp2_mixed"},
            workload={"seq_len": 8192, "attention": "eager", "checkpointing": "full"},
        ),
        Evidence(inventory=load_inventory(count_config({"config": STARCODER})["inventory"])),
    )
    findings = find(read_report(old("12.00 GiB", "79.15 GiB", "56.66 GiB", "9.54 GiB", "68.85 GiB")), budget)
    assert [(each.name, each.num_bytes) for each in findings.matches] == [("scores", 12 * GIB)]
    said = " ".join(sentences(findings, ByteUnit.GIB))
    # The pieces would be enough, which alone would mislead.
    assert findings.cause is Cause.IN_PIECES
    assert "15% of the card at once" in said
    assert "sharding and offload do not" in said


def test_one_layers_slice_is_found():
    """meta-llama/llama-cookbook#234: 202,383,360 x 4 / 8 bytes, 96.5 MiB, asked for as 98."""
    budget = predict(
        scenario(
            model={"name": "meta-llama/Llama-2-7b-hf"},
            hardware={"gpu": "V100-16GB", "gpus": 8},
            parallelism={"engine": "fsdp2"},
            recipe={"convention": "fsdp2_mixed", "compute_dtype": "fp16"},
            workload={"seq_len": 1024, "checkpointing": "full"},
        )
    )
    text = new("98.00 MiB", "15.77 GiB", "5.12 MiB", "", "13.76 GiB", "540.64 MiB")
    matches = {each.name: each.num_bytes for each in find(read_report(text), budget).matches}
    assert matches == {"layer_slice": 202_383_360 * 4 // 8}


# --- forms ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "amounts", "cause"),
    [
        pytest.param(
            # ryujaehun/pytorch-gpu-benchmark#1, torch 1.3: "cached" is what is not allocated.
            "CUDA out of memory. Tried to allocate 32.00 MiB (GPU 0; 7.79 GiB total capacity; 6.64 GiB already "
            "allocated; 21.00 MiB free; 150.86 MiB cached)",
            {"asked": 32 * MIB, "capacity": 7.79, "allocated": 6.64, "free": 21 * MIB, "unallocated": 150.86 * MIB},
            Cause.IN_PIECES,
            id="torch 1.3",
        ),
        pytest.param(
            # RenYurui/StructureFlow#35: more free than asked for.
            "CUDA out of memory. Tried to allocate 8.13 GiB (GPU 0; 10.76 GiB total capacity; 643.57 MiB already "
            "allocated; 8.20 GiB free; 32.43 MiB cached)",
            {"asked": 8.13, "capacity": 10.76, "allocated": 643.57 * MIB, "free": 8.2, "unallocated": 32.43 * MIB},
            Cause.REFUSED,
            id="more free than asked",
        ),
        pytest.param(
            # singhsourabh/Resume-NER#4: cut at its end.
            old("92.00 MiB", "1.96 GiB", "1.46 GiB", "16.38 MiB", "1.51 GiB").split(")")[0],
            {"asked": 92 * MIB, "capacity": 1.96, "allocated": 1.46, "free": 16.38 * MIB, "reserved": 1.51},
            Cause.TOO_LITTLE,
            id="cut at the end",
        ),
        pytest.param(
            "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB",
            {"asked": 2.0},
            Cause.UNKNOWN,
            id="cut in the middle",
        ),
        pytest.param(
            # FoundationVision/GenerateU#10, torch 2.1, with its missing letter.
            new("496.00 MiB", "14.75 GiB", "235.06 MiB", "Process 20398 has 14.52 GiB memory in use.", "14.06 GiB",
                "330.42 MiB").replace("capacity", "capacty"),
            {"asked": 496 * MIB, "capacity": 14.75, "free": 235.06 * MIB, "process": 14.52, "allocated": 14.06,
             "unallocated": 330.42 * MIB},
            Cause.IN_PIECES,
            id="torch 2.1",
        ),
        pytest.param(
            new("20.00 MiB", "79.15 GiB", "0 bytes",
                "Process 11 has 40.00 GiB memory in use. Process 12 has 39.15 GiB memory in use.", "38.50 GiB",
                "10.00 MiB"),
            {"asked": 20 * MIB, "capacity": 79.15, "free": 0, "process": 40.0, "others": 39.15, "allocated": 38.5,
             "unallocated": 10 * MIB},
            Cause.TOO_LITTLE,
            id="two processes",
        ),
        pytest.param(
            # What the driver does not tell under WSL is written as 2^64 bytes.
            new("2.00 GiB", "8.00 GiB", "0 bytes",
                "Including non-PyTorch memory, this process has 17179869184.00 GiB memory in use.", "14.00 GiB",
                "200.00 MiB"),
            {"asked": 2.0, "capacity": 8.0, "free": 0, "unallocated": 200 * MIB},
            Cause.TOO_LITTLE,
            id="WSL",
        ),
        pytest.param(
            "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of "
            "63.98 GiB of which 1.00 GiB is free. Of the allocated memory 60.00 GiB is allocated by PyTorch, with "
            "26.00 MiB allocated in private pools (e.g., CUDA Graphs), and 2.00 GiB is reserved by PyTorch but "
            "unallocated.",
            {"asked": 1.5, "capacity": 63.98, "free": 1.0, "allocated": 60.0, "unallocated": 2.0},
            Cause.IN_PIECES,
            id="ROCm with graphs",
        ),
        pytest.param(
            "(GPU 0; 1 GiB total) unrelated\nCUDA out of memory. Tried to allocate 512.00 MiB (GPU 1; 24.00 GiB total "
            "capacity; 5.00 GiB already allocated; 17.00 GiB free; 6.00 GiB allowed; 5.50 GiB reserved in total by "
            "PyTorch)",
            {"asked": 512 * MIB, "capacity": 24.0, "allocated": 5.0, "free": 17.0, "reserved": 5.5},
            Cause.REFUSED,
            id="a limit of the process",
        ),
    ],
)  # fmt: skip
def test_every_versions_message_is_read(text: str, amounts: dict[str, float], cause: Cause):
    findings = found(text)
    read = findings.report.amounts
    assert {quantity.value for quantity in read} == amounts.keys()
    for name, value in amounts.items():
        expected = value if isinstance(value, int) or value >= MIB else value * GIB
        amount = read[Quantity(name)]
        assert abs(amount.num_bytes - expected) <= max(1, amount.within)
    assert findings.cause is cause
    assert sentences(findings, ByteUnit.GB)


def test_colours_ranks_and_line_breaks_do_not_matter():
    plain = new("3.14 GiB", "31.75 GiB", "1.95 GiB", "", "28.28 GiB", "12.00 MiB")
    words = plain.split(" ")
    wrapped = "\n".join(
        f"[rank3]: \x1b[31m{' '.join(words[start : start + 4])}\x1b[0m" for start in range(0, len(words), 4)
    )
    assert read_report(wrapped).amounts == read_report(plain).amounts
    assert read_report(f"> {plain}\n> {plain}").failures == 2


def test_a_log_of_many_ranks_is_read_by_its_first():
    log = "\n".join(old(f"{number}.00 GiB", "31.75 GiB", "28.00 GiB", "0 bytes", "29.00 GiB") for number in (1, 2, 3))
    findings = found(log)
    assert findings.report.of(Quantity.ASKED) == GIB
    assert any("3 such messages" in each for each in sentences(findings, ByteUnit.GB))


def test_pytorchs_own_summary_is_read(monkeypatch: pytest.MonkeyPatch):
    """The table as the installed torch writes it, for figures of our own."""
    parts = ("all", "large_pool", "small_pool")
    kinds = ("allocated_bytes", "active_bytes", "requested_bytes", "reserved_bytes", "inactive_split_bytes",
             "allocation", "active", "segment", "inactive_split")  # fmt: skip
    stats = {f"{kind}.{part}.{what}": 0 for kind in kinds for part in parts for what in
             ("current", "peak", "allocated", "freed")}  # fmt: skip
    stats |= {f"{kind}.{what}": 0 for kind in ("oversize_allocations", "oversize_segments") for what in
              ("current", "peak", "allocated", "freed")}  # fmt: skip
    own = {"allocated_bytes.all.current": 13_762, "allocated_bytes.all.peak": 14_100,
           "reserved_bytes.all.current": 15_000, "reserved_bytes.all.peak": 15_002}  # fmt: skip
    stats |= {name: value * MIB for name, value in own.items()}
    monkeypatch.setattr(
        torch.cuda.memory, "memory_stats", lambda device=None: {**stats, "num_ooms": 0, "num_alloc_retries": 0}
    )
    monkeypatch.setattr(torch.cuda.memory, "_get_device_index", lambda device, optional=False: 0)
    monkeypatch.setattr(torch.cuda.memory, "is_initialized", lambda: True, raising=False)
    amounts = read_report(torch.cuda.memory_summary(0)).amounts
    assert {quantity.value: amount.num_bytes // MIB for quantity, amount in amounts.items()} == {
        "allocated": 13_762, "allocated_peak": 14_100, "reserved": 15_000, "reserved_peak": 15_002
    }  # fmt: skip


def test_an_old_summarys_mb_are_mib():
    """pytorch/pytorch#35901, torch 1.5."""
    table = """
        | Allocated memory      |    1062 MB |    4877 MB |   89299 MB |
        | GPU reserved memory   |   12420 MB |   12420 MB |   16924 MB |"""
    findings = found(table)
    assert findings.report.of(Quantity.ALLOCATED_PEAK) == 4877 * MIB
    assert findings.unallocated == (12_420 - 1062) * MIB
    assert findings.cause is Cause.UNKNOWN
    assert sentences(findings, ByteUnit.GB) == []


def test_deepspeeds_gb_are_gib_and_the_highest_line_counts():
    """runtime/utils.py, see_memory_usage, divides by 1024^3."""
    log = (
        "[2025-02-10 07:34:25,340] [INFO] [utils.py:782:see_memory_usage] MA 12.55 GB         Max_MA 12.55 GB         "
        "CA 12.71 GB         Max_CA 13 GB \nafter\n"
        "MA 18.0 GB         Max_MA 25.1 GB         CA 28.32 GB         Max_CA 28 GB"
    )
    report = read_report(log)
    assert gib(report.of(Quantity.ALLOCATED_PEAK)) == pytest.approx(25.1)
    assert gib(report.of(Quantity.RESERVED)) == pytest.approx(28.32)


def test_nvidia_smi_of_the_fullest_card():
    row = "| N/A   34C    P0    66W / 400W |  {used}MiB / 81920MiB |      0%      Default |\n"
    report = read_report(row.format(used=1234) + row.format(used="65071") + row.format(used=3))
    assert report.of(Quantity.PROCESS) == 65_071 * MIB
    assert report.of(Quantity.CAPACITY) == 81_920 * MIB


@pytest.mark.parametrize(
    "text", ["", "hello", "RESOURCE_EXHAUSTED: OOM when allocating tensor", "Killed", "CUDA out of memory.", "MA GB"]
)
def test_what_is_no_report_gets_one_sentence(text: str):
    with pytest.raises(UserError, match="No memory report is known"):
        read_report(text)


def test_an_estimate_is_no_measurement():
    with pytest.raises(UserError, match="not a measurement"):
        read_report(
            "Estimated memory needed for params, optim states and gradients for a:\n"
            "HW: Setup with 1 node, 8 GPUs per node.\n  per CPU  |  per GPU |   Options\n  70.00GB |   0.25GB | ..."
        )


@pytest.mark.parametrize("filler", ["1" * 300_000, "1," * 150_000, "| " * 150_000, "\n" * 300_000, "(GPU 0; " * 40_000])
def test_long_texts_are_read_at_once(filler: str):
    start = time.monotonic()
    findings = found(f"CUDA out of memory. Tried to allocate 1.00 GiB {filler}")
    assert findings.cause is Cause.UNKNOWN
    assert time.monotonic() - start < 2


@settings(max_examples=100)
@given(
    st.lists(st.sampled_from([*new("1.00 GiB", "2 GiB", "0 bytes", "", "1 GiB", "1 KiB").split(" "), "\n", "(", ";"]))
)
def test_pieces_of_messages_are_read_or_refused(words: list[str]):
    try:
        findings = found(" ".join(words))
    except UserError:
        return
    assert findings_text(findings, ByteUnit.GB)
    json.dumps(findings_report(findings), allow_nan=False)


@pytest.mark.parametrize(
    ("num_bytes", "written"),
    [(1, 2 * MIB), (MIB, 2 * MIB), (MIB + 1, 20 * MIB), (10 * MIB, 10 * MIB), (10 * MIB + 1, 12 * MIB), (GIB, GIB)],
)
def test_requests_are_rounded_as_pytorch_rounds_them(num_bytes: int, written: int):
    """torch, CUDACachingAllocator.cpp, get_allocation_size."""
    assert as_requested(num_bytes) == written


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    report, plan = tmp_path / "oom.txt", tmp_path / "scenario.json"
    report.write_text(old("3.14 GiB", "31.75 GiB", "28.28 GiB", "1.95 GiB", "28.28 GiB"))
    plan.write_text(
        json.dumps(
            {
                "model": {"n_params": 6_738_415_616},
                "hardware": {"gpu": "V100-32GB", "gpus": 8},
                "parallelism": {"engine": "deepspeed", "zero_stage": 2},
            }
        )
    )
    assert main(["oom", str(report), str(plan), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["cause"] == "too_little"
    assert data["asked_for"] == [{"name": "slice", "bytes": 4 * 842_301_952, "element_bytes": 4}]
    assert main(["oom", str(report)]) == 0
    assert "something must take less" in " ".join(capsys.readouterr().out.split())
    plan.write_text("nothing")
    assert main(["oom", str(plan)]) == 2
