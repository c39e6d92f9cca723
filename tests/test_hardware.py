"""The accelerator catalogue: every entry has its sources, and what was not measured is not flattered.

Run: pytest tests/test_hardware.py.
"""

import json
from importlib import resources
from typing import Any

import pytest

from memcore.errors import UserError
from memcore.hardware import RESERVE_PERCENT, Accelerator, accelerator, accelerators
from memcore.terms import EvidenceKind
from memcore.units import GIB, MIB

RAW: list[dict[str, Any]] = json.loads(
    resources.files("memcore").joinpath("data/accelerators.json").read_text(encoding="utf-8")
)
NAMES = list(accelerators())

# Measured cards with HBM that give less than 97%: the two of Blackwell Ultra and the Ascend keep some of their
# stacks back, the MI350X is one doubtful report (its note says so).
HBM_WITH_LESS = {"B300-288GB", "GB300-288GB", "MI350X-288GB", "Ascend-910B-64GB"}


def reserved_percent(card: Accelerator) -> float:
    return 100 * (1 - card.usable_bytes / card.nominal_bytes)


def is_gddr(card: Accelerator) -> bool:
    """Cards without HBM: the workstation, consumer and inference ones, all with GDDR6 or GDDR7."""
    return any(word in card.name for word in ("RTX", "A10-", "A10G", "A40", "A6000", "A5000", "T4", "L4"))


def test_there_are_at_least_30_with_names_of_their_own():
    assert len(NAMES) >= 30
    assert len(RAW) == len(NAMES)
    assert len({card.label for card in accelerators().values()}) == len(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_figure_has_its_source(name: str):
    card = accelerator(name)
    assert card.nominal_source
    assert card.usable_source
    assert card.link.name
    assert card.link.source
    assert card.link.bytes_per_s > 0
    for figure, source in (
        (card.peak_dense_bf16_flops_per_s, card.peak_source),
        (card.memory_bytes_per_s, card.memory_source),
        (card.runtime_outside_allocator_bytes, card.runtime_source),
        (card.runtime_alone_bytes, card.runtime_alone_source),
    ):
        assert (figure is None) == (source is None)
        assert figure is None or figure > 0


@pytest.mark.parametrize("name", NAMES)
def test_usable_memory_is_below_the_nominal(name: str):
    card = accelerator(name)
    assert card.nominal_bytes % MIB == 0
    assert 0 < card.usable_bytes < card.nominal_bytes


@pytest.mark.parametrize("entry", RAW, ids=lambda entry: entry["name"])
def test_measured_ones_say_so(entry: dict[str, Any]):
    card = accelerator(entry["name"])
    if entry["usable_bytes"] is None:
        assert card.usable_evidence is EvidenceKind.FORMULA
        assert "no public log" in card.usable_source
        assert card.usable_bytes == card.nominal_bytes * (100 - RESERVE_PERCENT) // 100 // MIB * MIB
    else:
        assert entry["usable_evidence"] == "measured"
        assert card.usable_evidence is EvidenceKind.MEASURED
        assert card.usable_bytes == entry["usable_bytes"]


def test_the_reserve_of_unmeasured_cards_covers_what_measured_ones_with_hbm_keep_back():
    hbm = [card for card in accelerators().values() if not is_gddr(card)]
    measured = [card for card in hbm if card.usable_evidence is EvidenceKind.MEASURED]
    assert len(measured) >= 20
    assert {card.name for card in measured if reserved_percent(card) > RESERVE_PERCENT} == HBM_WITH_LESS
    unmeasured = [card for card in accelerators().values() if card.usable_evidence is EvidenceKind.FORMULA]
    assert unmeasured
    assert all(card in hbm for card in unmeasured)
    for card in unmeasured:
        relatives = [
            other
            for other in measured
            if other.vendor == card.vendor and other.architecture.split()[0] == card.architecture.split()[0]
        ]
        assert relatives, card.name
        assert all(reserved_percent(other) <= RESERVE_PERCENT for other in relatives)


def test_known_cards():
    # 39.38 GiB of the 40 GB A100, 79.14 GiB of the 80 GB one, as programs print them.
    assert accelerator("A100-40GB").usable_bytes / GIB == pytest.approx(39.38, abs=0.01)
    assert accelerator("A100-80GB").usable_bytes / GIB == pytest.approx(79.14, abs=0.01)
    assert 79.1 <= round(accelerator("H100-80GB").usable_bytes / GIB, 2) <= 79.7
    assert accelerator("H100-80GB").peak_dense_bf16_flops_per_s == 989_400_000_000_000
    assert accelerator("A100-80GB").memory_bytes_per_s == 2_039_000_000_000


def test_nvlink_is_given_for_one_direction():
    # Vendor figures, both directions: 600, 900 and 1800 GB/s.
    one_way = {"A100-80GB": 300, "H100-80GB": 450, "B200-180GB": 900}
    assert {name: accelerator(name).link.bytes_per_s // 10**9 for name in one_way} == one_way


def test_cards_without_a_link_of_their_own_use_pcie():
    without = [entry for entry in RAW if entry["link"] is None]
    assert without
    gigabytes = {3: 15.75, 4: 31.5, 5: 63.0}
    for entry in without:
        link = accelerator(entry["name"]).link
        assert link.name == f"PCIe {entry['pcie']['generation']} x16"
        assert link.bytes_per_s == gigabytes[entry["pcie"]["generation"]] * 10**9
        assert link.source.startswith("PCI Express")


@pytest.mark.parametrize("entry", RAW, ids=lambda entry: entry["name"])
def test_pcie_rates_are_lanes_times_rate(entry: dict[str, Any]):
    pcie = entry["pcie"]
    transfers = {3: 8e9, 4: 16e9, 5: 32e9, 6: 64e9}[pcie["generation"]]
    assert pcie["bytes_per_s"] == pytest.approx(pcie["lanes"] * transfers * 128 / 130 / 8, rel=0.001)


def test_nccl_comes_on_top_of_one_gpus_context():
    """Logs of single GPUs have none: 544 MiB for a pair, 688 MiB for more (NVIDIA/nccl#964). A log of many has it."""
    card = accelerator("H100-80GB")
    alone = round(0.65 * GIB)
    assert [card.runtime(gpus).num_bytes - alone for gpus in (1, 2, 8)] == pytest.approx(
        [0, 544 * MIB, 688 * MIB], abs=1
    )
    a100 = accelerator("A100-80GB")
    assert a100.runtime(1).num_bytes == accelerator("A100-40GB").runtime(1).num_bytes
    assert a100.runtime(80).num_bytes == round(0.76 * GIB)
    assert accelerator("H200-141GB").runtime(8).evidence is EvidenceKind.FORMULA


@pytest.mark.parametrize(
    ("name", "num_bytes"),
    [("A100-80GB", 8_519_680), ("T4-16GB", 8_519_680), ("H100-80GB", 32 * MIB), ("MI300X-192GB", 0)],
)
def test_cublas_workspace(name: str, num_bytes: int):
    assert accelerator(name).cublas_workspace_bytes == num_bytes


def test_only_nvidia_has_a_compute_capability():
    for card in accelerators().values():
        assert (card.compute_capability is not None) == (card.vendor == "NVIDIA")


@pytest.mark.parametrize("name", ["accelerators.json", "catalogue.json", "inventories.json"])
def test_no_data_holds_an_address(name: str):
    text = resources.files("memcore").joinpath("data", name).read_text(encoding="utf-8")
    assert "http" not in text


def test_unknown_card_gives_the_nearest():
    with pytest.raises(UserError, match=r"hardware\.gpu is 'H100', which is not in the catalogue; the nearest are H1"):
        accelerator("H100")
    with pytest.raises(UserError, match="the nearest are"):
        accelerator("")
