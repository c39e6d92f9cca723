"""What a sweep found, from made-up figures whose law is known. Run: pytest tests/bench/test_findings.py"""

from dataclasses import replace

import pytest
from small_bench import attention_case, layers_case, measured, projections_case

from memcore.bench.case import Case
from memcore.bench.findings import findings
from memcore.bench.measurement import Measurement, Status
from memcore.bench.slices import Slice
from memcore.bench.sweeps import Sweep, SweepKind
from memcore.bench.words import case_label, found_here, outcome
from memcore.inventory import Shapes
from memcore.units import ByteUnit

LENGTHS = (256, 512, 1024, 2048, 4096)
PART = Slice(
    device="cpu",
    shapes=Shapes(hidden_size=128, num_layers=6, num_heads=4, num_kv_heads=2, head_dim=32),
    hidden_size=128,
    num_heads=4,
    num_kv_heads=2,
    divisor=1,
    dtype="fp32",
    scenario_dtype="fp32",
    has_dropout=False,
    base_config={},
)


def sweep(kind: SweepKind, *cases: Case) -> Sweep:
    return Sweep(kind=kind, part=PART, cases=cases)


def by_key(*found: Measurement) -> dict[str, Measurement]:
    return {each.case.key: each for each in found}


def test_exponents_are_fitted_by_attention_on_the_attention_alone():
    plain = [measured(attention_case(seq_len=s), 10 * s * s) for s in LENGTHS]
    flash = [measured(attention_case(seq_len=s, attention="flash"), 90 * s) for s in LENGTHS]
    layers = [measured(layers_case(seq_len=s), 5000 + 40 * s + s * s // 50) for s in LENGTHS]
    everything = [*plain, *flash, *layers]
    asked = sweep(SweepKind.SEQUENCE, *(each.case for each in everything))
    found = findings(asked, by_key(*everything))
    assert {name: law.exponent for name, law in found.exponents.items()} == pytest.approx({"plain": 2, "flash": 1})
    assert found.layers["plain"].takeover == pytest.approx(2000, rel=0.02)
    sentences = found_here(asked, found, ByteUnit.GB)
    assert sentences[0].startswith("Here plain attention's own bytes grow as the length to the power of 2.00")


def test_exponents_are_fitted_by_checkpointing_on_the_stack():
    depths = (4, 9, 16, 36, 64)
    none = [measured(projections_case(num_layers=L), 100 * L) for L in depths]
    root = [
        measured(projections_case(num_layers=L, checkpointing=f"segments({round(L**0.5)})"), round(200 * L**0.5))
        for L in depths
    ]
    asked = sweep(SweepKind.DEPTH, *(each.case for each in (*none, *root)))
    found = findings(asked, by_key(*none, *root))
    assert {name: law.exponent for name, law in found.exponents.items()} == pytest.approx({"none": 1, "segments": 0.5})


def test_the_best_segment_length_stands_beside_the_predicted_one():
    peaks = {1: 130, 2: 101, 3: 100, 4: 120}
    results = [measured(layers_case(checkpointing=f"segments({k})"), peak) for k, peak in peaks.items()]
    asked = sweep(SweepKind.SEGMENTS, *(each.case for each in results))
    found = findings(asked, by_key(*results), predicted_k=2).segments
    assert found is not None
    assert (found.best, found.predicted) == (3, 2)
    assert found.excess_percent == pytest.approx(1)


def test_the_frontier_is_what_no_other_beats_in_both():
    cost = {"none": (100, 1.0), "full": (30, 1.5), "segments(2)": (40, 1.6), "attention": (60, 1.2)}
    results = {kind: measured(layers_case(checkpointing=kind), *each) for kind, each in cost.items()}
    asked = sweep(SweepKind.FRONTIER, *(each.case for each in results.values()))
    found = findings(asked, by_key(*results.values()))
    assert [each.case.checkpointing for each in found.frontier] == ["full", "attention", "none"]
    (sentence, _trace) = found_here(asked, found, ByteUnit.GB)
    assert sentence.startswith("3 variants are on the frontier")
    assert "1.50 times" in sentence


def test_the_largest_difference_from_a_trace_is_reported():
    right = measured(layers_case(seq_len=128), 1000)
    wrong = measured(layers_case(seq_len=256), 1000)
    assert wrong.figures is not None
    wrong = replace(wrong, figures=replace(wrong.figures, traced_bytes=980))
    found = findings(sweep(SweepKind.FRONTIER, right.case, wrong.case), by_key(right, wrong))
    assert (found.trace_percent, found.trace_bytes) == (2.0, 20)


@pytest.mark.parametrize("kind", list(SweepKind))
def test_without_figures_nothing_is_claimed(kind: SweepKind):
    failed = [replace(measured(layers_case(seq_len=s)), status=Status.OUT_OF_MEMORY, figures=None) for s in LENGTHS]
    asked = sweep(kind, *(each.case for each in failed))
    for given in ({}, by_key(*failed)):
        assert found_here(asked, findings(asked, given), ByteUnit.GB) == []


def test_out_of_memory_says_where():
    case = attention_case(seq_len=32_768)
    failed = replace(measured(case), figures=None, status=Status.OUT_OF_MEMORY)
    assert outcome(failed) == "out of memory at 32,768 tokens, plain attention: that is the point"
    assert case_label(case) == "attention alone, plain, 32,768 tokens"
