"""The CPU's meter against what torch is known to allocate. Run: pytest tests/verify/test_meter.py

Each test runs its lines in a process of its own, which the meter was loaded into before all else.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from memcore.errors import UserError
from memcore.verify.worker.meter import build_meter

ROOT = Path(__file__).resolve().parents[2]
HEAD = """
import json, torch
from memcore.verify.worker.meter import CpuMeter
torch.set_num_threads(1)
meter = CpuMeter()
meter.reset()
before = meter.read()
def show(**found): print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_meter(tmp_path_factory.mktemp("meter"))


def run(library: Path, lines: str) -> dict[str, int]:
    done = subprocess.run(
        [sys.executable, "-c", HEAD + lines],
        env={**os.environ, "LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=True, cwd=ROOT,
    )  # fmt: skip
    found: dict[str, int] = json.loads(done.stdout)
    return found


def test_tensors_count_to_the_byte_and_the_peak_is_kept(library: Path):
    found = run(
        library,
        """
tensor = torch.empty(1000, 1001)
now = meter.read().tensors - before.tensors
del tensor
after = meter.read()
show(now=now, after=after.tensors - before.tensors, most=after.most_tensors - before.tensors)
""",
    )
    assert found == {"now": 4_004_000, "after": 0, "most": 4_004_000}


def test_a_storage_that_is_resized_counts_as_what_it_is(library: Path):
    found = run(
        library,
        """
tensor = torch.empty(1000)
tensor.untyped_storage().resize_(0)
none = meter.read().tensors - before.tensors
tensor.untyped_storage().resize_(2000)
show(none=none, again=meter.read().tensors - before.tensors)
""",
    )
    assert found == {"none": 0, "again": 2000}


def test_a_backward_takes_the_gradient_and_nothing_stays(library: Path):
    found = run(
        library,
        """
torch.backends.mkldnn.enabled = False
weight = torch.ones(256, 256, requires_grad=True)
meter.reset()
start = meter.read().tensors
(weight * 2).sum().backward()
most = meter.read().most_tensors - start
show(grown=meter.read().tensors - start, most=most)
""",
    )
    assert found["grown"] == 4 * 256 * 256
    # The product and its sum (4 bytes) in the forward; in the backward the gradient beside an expanded scalar.
    assert 4 * 256 * 256 <= found["most"] <= 4 * 256 * 256 + 64


def test_what_is_made_within_a_collective_is_the_backends(library: Path):
    found = run(
        library,
        """
class Module:
    @staticmethod
    def all_reduce(async_op=False): return torch.empty(500)
meter.mark_collectives(Module)
kept = Module.all_reduce()
reading = meter.read()
show(tensors=reading.tensors - before.tensors, staging=reading.staging)
""",
    )
    assert found == {"tensors": 0, "staging": 2000}


def test_every_collective_of_torch_is_marked(library: Path):
    found = run(
        library,
        """
import torch.distributed as dist
from torch.distributed import distributed_c10d
meter.mark_collectives(dist, distributed_c10d)
names = ("all_gather_single", "reduce_scatter_single", "all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce",
         "broadcast", "reduce", "all_gather", "reduce_scatter", "barrier", "all_to_all_single")
modules = (dist, distributed_c10d)
show(**{name: int(all(hasattr(getattr(module, name), "__wrapped__") for module in modules)) for name in names})
""",
    )
    assert set(found.values()) == {1}


def test_plain_memory_is_no_tensor(library: Path):
    found = run(
        library,
        """
block = bytearray(10_000_000)
reading = meter.read()
show(tensors=reading.tensors - before.tensors, other=reading.other - before.other)
""",
    )
    assert found["tensors"] == 0
    assert found["other"] == pytest.approx(10_000_000, rel=0.02)


def test_many_blocks_and_threads_lose_nothing(library: Path):
    found = run(
        library,
        """
import threading
def work():
    for round in range(20):
        kept = [torch.empty(64 + index % 7) for index in range(300)]
        del kept[::2]
threads = [threading.Thread(target=work) for _ in range(4)]
[each.start() for each in threads]; [each.join() for each in threads]
del threads
show(left=meter.read().tensors - before.tensors)
""",
    )
    assert found == {"left": 0}


def test_without_a_compiler_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(UserError, match="C compiler"):
        build_meter(tmp_path / "new")


def test_it_is_built_once(library: Path):
    made = library.stat().st_mtime_ns
    assert build_meter(library.parent) == library
    assert library.stat().st_mtime_ns == made
