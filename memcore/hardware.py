"""Accelerators: memory, peak rate and links, each with its source. The data is in data/accelerators.json."""

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources

from memcore.lookup import find
from memcore.terms import EvidenceKind
from memcore.units import MIB

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Accelerator:
    """One accelerator as PyTorch sees one device. Memory in bytes, bandwidths in bytes per second."""

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
    note: str | None

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
