"""Accelerators: memory, peak rate and links, each with its source. The data is in data/accelerators.json."""

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources

from memcore.lookup import find
from memcore.terms import EvidenceKind
from memcore.units import GIB, MIB

# Where no public log shows what a program can use, this share of the nominal memory is set aside. All such
# cards have HBM, whose ECC takes none of it (GDDR6 loses 1/16 to ECC). The measured cards with HBM lie at or
# below it but four, among them no relative of those cards: B300, GB300, MI350X, Ascend 910B (a test says so).
RESERVE_PERCENT = 3

# An InfiniBand NDR port, 400 Gbit/s, is what reference designs give each GPU (NVIDIA DGX H100 datasheet,
# 2023: eight single-port ConnectX-7 for eight GPUs). Used for links between nodes.
NETWORK_BYTES_PER_S = 50_000_000_000
NETWORK_SOURCE = "400 Gbit/s per GPU (NVIDIA DGX H100 datasheet, 2023)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """A link between the GPUs of a node, one direction. `bytes_per_s` is per GPU."""

    name: str
    bytes_per_s: int
    source: str


# CUDA context, and NCCL buffers, where no public log of a device gives them: between 0.3 and 1.5 GiB in the logs of
# other devices.
RUNTIME_BYTES = GIB
# What one NCCL communicator of two ranks, and of more, takes outside PyTorch's allocator after an all-reduce. It grows
# with channels, not with ranks (NVIDIA/nccl#986), and with each communicator.
NCCL_PAIR_BYTES, NCCL_BYTES = 544 * MIB, 688 * MIB
NCCL_SOURCE = "a communicator on 4 A100 with NVLink (NVIDIA/nccl#964): 544 MiB of two ranks, 688 MiB of more"


@dataclass(frozen=True, kw_only=True, slots=True)
class Runtime:
    """What a process takes on a device outside PyTorch's allocator, in bytes."""

    num_bytes: int
    source: str
    evidence: EvidenceKind


@dataclass(frozen=True, kw_only=True, slots=True)
class Accelerator:
    """One accelerator as PyTorch sees one device. Memory in bytes, bandwidths in bytes per second.

    `runtime_outside_allocator_bytes` is from a log of a run on `runtime_gpus` GPUs, None where it does not say; the
    `runtime_alone` figure is of one GPU, where that log is of several.
    """

    name: str
    label: str
    vendor: str
    architecture: str
    compute_capability: str | None
    nominal_bytes: int
    nominal_source: str
    usable_bytes: int
    usable_evidence: EvidenceKind
    usable_source: str
    peak_dense_bf16_flops_per_s: int | None
    peak_source: str | None
    memory_bytes_per_s: int | None
    memory_source: str | None
    link: Link
    runtime_outside_allocator_bytes: int | None
    runtime_source: str | None
    runtime_gpus: int | None
    runtime_alone_bytes: int | None
    runtime_alone_source: str | None
    note: str | None

    def runtime(self, gpus: int) -> Runtime:
        """What a process of a run on so many GPUs takes outside the allocator: the CUDA context and, of several, NCCL's
        buffers."""
        measured, alone = self.runtime_outside_allocator_bytes, self.runtime_alone_bytes
        if measured is None or self.runtime_source is None:
            source = "assumed: 0.3 to 1.5 GiB in public logs of other devices"
            return Runtime(num_bytes=RUNTIME_BYTES, source=source, evidence=EvidenceKind.FORMULA)
        if gpus == 1 and alone is not None and self.runtime_alone_source is not None:
            return Runtime(num_bytes=alone, source=self.runtime_alone_source, evidence=EvidenceKind.MEASURED)
        if gpus == 1 or (self.runtime_gpus or 1) > 1 or self.vendor != "NVIDIA":
            return Runtime(num_bytes=measured, source=self.runtime_source, evidence=EvidenceKind.MEASURED)
        nccl = NCCL_PAIR_BYTES if gpus == 2 else NCCL_BYTES
        source = f"{self.runtime_source}; and {NCCL_SOURCE}"
        return Runtime(num_bytes=measured + nccl, source=source, evidence=EvidenceKind.MEASURED)

    @property
    def cublas_workspace_bytes(self) -> int:
        """What cuBLAS takes from PyTorch's allocator on first use, per handle and stream.

        8,519,680 bytes (4096 KiB x 2 + 128 KiB, ``:4096:2:16:8``), 32 MiB on compute capability 9.0;
        none outside CUDA. Source: PyTorch 2.13, aten/src/ATen/cuda/CublasHandlePool.cpp,
        parseChosenWorkspaceSize.
        """
        if self.compute_capability is None:
            return 0
        return 32 * MIB if float(self.compute_capability) >= 9.0 else 8_519_680


def _usable(entry: dict[str, object]) -> dict[str, object]:
    nominal = int(str(entry["nominal_bytes"]))
    if entry["usable_bytes"] is not None:
        return {"usable_bytes": entry["usable_bytes"], "usable_evidence": EvidenceKind.MEASURED}
    usable = nominal * (100 - RESERVE_PERCENT) // 100 // MIB * MIB
    source = f"nominal memory less {RESERVE_PERCENT}%: no public log of this card was found"
    return {"usable_bytes": usable, "usable_evidence": EvidenceKind.FORMULA, "usable_source": source}


def _link(entry: dict[str, object]) -> Link:
    own = entry["link"]
    if isinstance(own, dict):
        return Link(**own)
    pcie = entry["pcie"]
    assert isinstance(pcie, dict)
    return Link(
        name=f"PCIe {pcie['generation']} x{pcie['lanes']}",
        bytes_per_s=pcie["bytes_per_s"],
        source="PCI Express base specification: lanes x rate x 128/130 encoding, one direction",
    )


@cache
def accelerators() -> dict[str, Accelerator]:
    """All accelerators by name, in the catalogue's order."""
    text = resources.files("memcore").joinpath("data/accelerators.json").read_text(encoding="utf-8")
    dropped = {"pcie", "link"}
    return {
        entry["name"]: Accelerator(
            **{key: value for key, value in (entry | _usable(entry)).items() if key not in dropped},
            link=_link(entry),
        )
        for entry in json.loads(text)
    }


def accelerator(name: str) -> Accelerator:
    """The accelerator of that name. Raises UserError with the nearest names for an unknown one."""
    return find(accelerators(), name, "hardware.gpu")
