"""The answer's own consistency: sums, monotonicity, purity, formulas that can be worked out again, the verdict.

Run: pytest tests/test_budget.py.
"""

import math
import os
import re
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise, product
from typing import Any, NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st
from worker import ask

from memcore.budget import (
    FORMULAS,
    Budget,
    Missing,
    Verdict,
    evidence_for,
    judge,
    predict,
)
from memcore.errors import UserError
from memcore.hardware import RUNTIME_BYTES, accelerators
from memcore.ladder import SEGMENT_BYTES, Ladder
from memcore.models import catalogue, catalogue_inventory, dump_inventory
from memcore.recipes import ConventionName
from memcore.scenario import parse_scenario
from memcore.terms import Category, EvidenceKind, Formula, Phase, Term
from memcore.units import GIB
from memcore.zero import account, share, share_formula

LLAMA = "meta-llama/Llama-3.1-8B"
# One of each architecture, dense and with experts, tied and untied, with and without shapes.
MODELS = [LLAMA, "openai-community/gpt2", "openai/gpt-oss-20b", "google/gemma-3-4b-pt", "ZeRO paper 7.5B"]


@st.composite
def questions(draw: st.DrawFn, *, full_only: bool = False) -> dict[str, Any]:
    """The data of a scenario that is likely, but not certain, to be valid."""
    gpus = draw(st.sampled_from([1, 2, 3, 5, 7, 8, 16, 40, 256]))
    engine = draw(st.sampled_from(["single"] if gpus == 1 else ["ddp", "fsdp2", "deepspeed"]))
    parallelism: dict[str, Any] = {"engine": engine}
    data: dict[str, Any] = {
        "model": draw(
            st.sampled_from([{"name": name} for name in MODELS])
            | st.integers(1, 10**13).map(lambda count: {"n_params": count})
        ),
        "hardware": {"gpu": draw(st.sampled_from(list(accelerators()))), "gpus": gpus},
        "parallelism": parallelism,
        "recipe": {
            "method": "full" if full_only else draw(st.sampled_from(["full", "full", "lora", "qlora"])),
            "convention": draw(st.sampled_from(list(ConventionName))),
            "optimizer": draw(
                st.sampled_from(
                    [
                        "adamw", "adam", "lion", "adafactor", "muon", "sgd",
                        {"name": "sgd", "momentum": True}, {"bits": 8}, {"paged": True}, {"bits": 8, "paged": True},
                        {"implementation": "foreach"}, {"implementation": "fused"},
                    ]
                )
            ),
        },
        "workload": {"grad_accum": draw(st.sampled_from([1, 4]))},
    }  # fmt: skip
    if engine == "deepspeed":
        parallelism["zero_stage"] = draw(st.integers(0, 3))
        data["engine_config"] = {
            "zero_optimization": {
                "overlap_comm": draw(st.booleans()),
                "reduce_bucket_size": draw(st.sampled_from([1, 10**6, 5 * 10**8])),
                "sub_group_size": draw(st.sampled_from([1, 10**6, 10**9])),
            }
        }
        data["offload"] = draw(st.sampled_from([{}, {}, {"optimizer": "cpu"}, {"parameters": "cpu"}]))
    if engine == "fsdp2" and gpus % 2 == 0:
        parallelism["dp_replicate"] = draw(st.sampled_from([1, 2]))
    if engine == "fsdp2":
        data["engine_config"] = {"reshard_after_forward": draw(st.booleans()), "cpu_offload": draw(st.booleans())}
    return data


def answer(data: Mapping[str, Any]) -> Budget | None:
    """The budget, or None where the combination is refused."""
    try:
        return predict(parse_scenario(data))
    except UserError:
        return None


# --- arithmetic in formulas -------------------------------------------------------------------------------------

_TOKEN = re.compile(r"\s*([0-9][0-9,]*(?:\.[0-9]+)?|[-+×/()⌈⌉])")


def work_out(numbers: str) -> Fraction:
    """The value of a formula's arithmetic: + - × / and parentheses; ⌈ ⌉ rounds up."""
    tokens: list[str] = []
    position = 0
    while position < len(numbers):
        match = _TOKEN.match(numbers, position)
        assert match is not None, f"not arithmetic: {numbers!r}"
        tokens.append(match[1])
        position = match.end()
    value, rest = _sum(tokens)
    assert not rest, f"left over: {rest}"
    return value


def _sum(tokens: list[str]) -> tuple[Fraction, list[str]]:
    value, tokens = _product(tokens)
    while tokens and tokens[0] in "+-":
        sign = 1 if tokens[0] == "+" else -1
        term, tokens = _product(tokens[1:])
        value += sign * term
    return value, tokens


def _product(tokens: list[str]) -> tuple[Fraction, list[str]]:
    value, tokens = _atom(tokens)
    while tokens and tokens[0] in "×/":
        operator = tokens[0]
        factor, tokens = _atom(tokens[1:])
        value = value * factor if operator == "×" else value / factor
    return value, tokens


def _atom(tokens: list[str]) -> tuple[Fraction, list[str]]:
    first, rest = tokens[0], tokens[1:]
    if first in "(⌈":
        value, rest = _sum(rest)
        assert rest[0] == {"(": ")", "⌈": "⌉"}[first]
        return (value if first == "(" else Fraction(math.ceil(value))), rest[1:]
    return Fraction(first.replace(",", "")), rest


@pytest.mark.parametrize(
    ("numbers", "value"),
    [
        ("16", 16),
        ("2 × 7,000,000,000", 14 * 10**9),
        ("4 × ⌈10 / 4⌉", 12),
        ("⌈(7 / 2 + 1) / 2⌉", 3),
        ("2 × (3 × 5 + 4) - 1", 37),
        ("1 - 2 - 3", -4),
    ],
)
def test_the_evaluator_itself(numbers: str, value: int):
    assert work_out(numbers) == value


# --- properties of every answer -----------------------------------------------------------------------------------


@given(questions())
def test_terms_sum_to_the_totals_and_peaks(data: dict[str, Any]):
    budget = answer(data)
    if budget is None:
        return
    for index, total in enumerate(budget.totals):
        assert sum(term.at(index) for term in budget.terms) == total
        assert sum(budget.by_category(index).values()) == total
    assert budget.peak_bytes == max(budget.totals)
    assert sum(num for _term, num in budget.at_peak()) == budget.peak_bytes
    peaks = budget.phase_peaks()
    assert set(peaks) == set(Phase)
    for phase, index in peaks.items():
        assert budget.timeline[index].phase is phase
        in_phase = [t for moment, t in zip(budget.timeline, budget.totals, strict=True) if moment.phase is phase]
        assert budget.totals[index] == max(in_phase)
    assert max(budget.totals[index] for index in peaks.values()) == budget.peak_bytes
    assert budget.totals[peaks[budget.binding_phase]] == budget.peak_bytes


@given(questions())
def test_bytes_are_whole_numbers_and_not_negative(data: dict[str, Any]):
    budget = answer(data)
    if budget is None:
        return
    for term in budget.terms:
        values = (term.bytes_at,) if isinstance(term.bytes_at, int) else term.bytes_at
        assert isinstance(term.bytes_at, int) or len(values) == len(budget.timeline)
        assert all(type(value) is int and value >= 0 for value in values)
        assert term.largest > 0
        assert term.source
        assert term.formula.symbols
        assert not re.search(r"https?:", term.source)
    static, host, ladder = budget.static, budget.host, budget.ladder
    for value in (
        static.weights_bytes, static.gradients_bytes, static.optimizer_bytes, host.cpu_bytes, host.nvme_bytes,
        host.unified_bytes, ladder.allocated, ladder.reserved, ladder.device, ladder.usable,
    ):  # fmt: skip
        assert type(value) is int
        assert value >= 0
    names = [term.name for term in budget.terms]
    assert len(set(names)) == len(names)
    assert ladder.allocated == budget.peak_bytes <= ladder.reserved <= ladder.device


@given(questions())
def test_every_formula_gives_its_term(data: dict[str, Any]):
    budget = answer(data)
    if budget is None:
        return
    for term in (*budget.terms, budget.ladder.runtime):
        assert work_out(term.formula.numbers) == term.largest, term.name
    for state in budget.states.states:
        assert work_out(state.formula.numbers) == state.total_bytes, state.name
        for stage, ranks in product(range(4), (1, 2, 7, 64)):
            shared = share_formula(state, stage, ranks)
            assert work_out(shared.numbers) == share(state, stage, ranks), state.name


@given(questions())
def test_the_same_question_has_the_same_answer(data: dict[str, Any]):
    first = answer(data)
    second = answer(data)
    assert (first is None) == (second is None)
    if first is not None:
        assert second is not None
        assert (first.totals, first.terms, first.static) == (second.totals, second.terms, second.static)


@given(data=questions(full_only=True), ranks=st.sampled_from([1, 2, 3, 7, 8, 64, 1000, 10**6]))
def test_states_never_rise_with_the_stage(data: dict[str, Any], ranks: int):
    budget = answer(data)
    if budget is None:
        return
    totals = [account(budget.states.states, stage, ranks).total_bytes for stage in range(4)]
    # Rounding up to whole values can add less than one value (4 bytes) to each state that is divided.
    slack = 4 * len(budget.states.states) if ranks > 1 else 0
    assert all(later <= earlier + slack for earlier, later in pairwise(totals))


@given(data=questions(full_only=True), stage=st.integers(0, 3), ranks=st.integers(1, 4096), more=st.integers(1, 4096))
def test_states_never_rise_with_the_ranks(data: dict[str, Any], stage: int, ranks: int, more: int):
    budget = answer(data)
    if budget is None:
        return
    few, many = (account(budget.states.states, stage, n).total_bytes for n in (ranks, ranks + more))
    assert many <= few  # the ceiling of a quotient falls with its divisor


@given(questions(full_only=True))
def test_the_scenarios_own_states_never_rise_with_the_world(data: dict[str, Any]):
    budget = answer(data)
    if budget is None or budget.scenario.parallelism.engine == "single":
        return
    gpus = budget.scenario.hardware.gpus
    doubled = answer({**data, "hardware": {**data["hardware"], "gpus": 2 * gpus, "gpus_per_node": 1}})
    assert doubled is not None
    assert doubled.static.total_bytes <= budget.static.total_bytes


@given(questions())
def test_the_floor_is_below_the_peak_unless_something_is_offloaded(data: dict[str, Any]):
    budget = answer(data)
    if budget is None or data.get("offload") or budget.host.unified_bytes:
        return
    kept = budget.static.weights_bytes + budget.static.optimizer_bytes
    assert kept <= budget.peak_bytes
    assert min(budget.totals) >= kept


def test_predict_is_pure(monkeypatch: pytest.MonkeyPatch):
    scenarios = [
        parse_scenario({"model": {"name": LLAMA}, "hardware": {"gpus": 8}, "parallelism": {"zero_stage": stage}})
        for stage in range(4)
    ]
    before = [predict(scenario) for scenario in scenarios]  # loads the catalogues

    def forbidden(*_args: object, **_kwargs: object) -> NoReturn:
        raise AssertionError("predict touched the world outside")

    with monkeypatch.context() as patch:
        for module, names in (
            (time, ("time", "monotonic", "perf_counter", "time_ns", "monotonic_ns", "perf_counter_ns", "process_time")),
            (subprocess, ("Popen", "run")),
            (os, ("system", "getenv", "listdir", "stat", "open", "urandom", "fork")),
        ):
            for name in names:
                patch.setattr(module, name, forbidden)
        patch.setattr("builtins.open", forbidden)
        patch.setattr(os, "environ", Untouchable())
        after = [predict(scenario) for scenario in scenarios]
    assert [budget.totals for budget in after] == [budget.totals for budget in before]
    assert [budget.terms for budget in after] == [budget.terms for budget in before]


class Untouchable(Mapping[str, str]):
    """An environment that must not be read."""

    def __getitem__(self, key: str) -> str:
        raise AssertionError(f"{key} was read from the environment")

    def __iter__(self) -> Iterator[str]:
        raise AssertionError("the environment was listed")

    def __len__(self) -> int:
        raise AssertionError("the environment was measured")


# --- evidence -------------------------------------------------------------------------------------------------


def test_a_config_needs_its_count_first():
    scenario = parse_scenario({"model": {"config": {"model_type": "llama"}}})
    with pytest.raises(UserError, match="have not been counted yet"):
        predict(scenario)


def test_evidence_is_fetched_for_configs_alone():
    def ask(task: str, payload: dict[str, Any]) -> Mapping[str, Any]:
        assert task == "count_config"
        assert payload["config"]["model_type"] == "llama"
        inventory = catalogue_inventory(LLAMA)
        assert inventory is not None
        return {"inventory": dump_inventory(inventory), "defaults": {"vocab_size": 32000}, "quantised_as": None}

    def never(task: str, payload: dict[str, Any]) -> NoReturn:
        raise AssertionError(f"asked for {task} of {payload}")

    recipe = {"convention": "pure_bf16"}  # that of one GPU, autocast, has no closed form
    assert evidence_for(parse_scenario({"model": {"name": LLAMA}, "recipe": recipe}), never) == FORMULAS
    scenario = parse_scenario({"model": {"config": {"model_type": "llama"}}, "recipe": recipe})
    evidence = evidence_for(scenario, ask)
    assert evidence.config_defaults == {"vocab_size": 32000}
    by_name = predict(parse_scenario({"model": {"name": LLAMA}, "recipe": recipe}))
    assert predict(scenario, evidence).totals == by_name.totals


def test_what_is_missing_is_said():
    bare = {"model": {"n_params": "7b"}, "hardware": {"gpus": 8}, "parallelism": {"zero_stage": 3}}
    budget = answer(bare)
    assert budget is not None
    assert {Missing.ACTIVATIONS, Missing.GATHERED_LAYERS} <= set(budget.missing)
    shaped = answer({**bare, "model": {"name": LLAMA}})
    assert shaped is not None
    assert Missing.GATHERED_LAYERS not in shaped.missing


# --- the verdict ----------------------------------------------------------------------------------------------


def ladder(allocated: int, reserved: int, runtime: int, usable: int) -> Ladder:
    term = Term(
        name="runtime",
        category=Category.RUNTIME,
        bytes_at=runtime,
        formula=Formula(symbols="", numbers=""),
        source="",
    )
    return Ladder(allocated=allocated, reserved=reserved, runtime=term, usable=usable)


@pytest.mark.parametrize(
    ("usable", "verdict"),
    [
        # 100 allocated, 105 reserved, 5 outside the allocator: 110 on the device, 10% of 105 (10) on either side.
        (120, Verdict.FITS),
        (119, Verdict.UNCERTAIN),
        (110, Verdict.UNCERTAIN),
        (100, Verdict.UNCERTAIN),
        (99, Verdict.DOES_NOT_FIT),
    ],
)
def test_verdict_at_the_edges_of_the_band(usable: int, verdict: Verdict):
    assert judge(ladder(100, 105, 5, usable), 10) is verdict


@pytest.mark.parametrize(("usable", "verdict"), [(110, Verdict.FITS), (109, Verdict.DOES_NOT_FIT)])
def test_without_a_band_nothing_is_uncertain(usable: int, verdict: Verdict):
    assert judge(ladder(100, 105, 5, usable), 0) is verdict


@given(questions())
def test_the_budgets_verdict_is_that_of_its_ladder(data: dict[str, Any]):
    budget = answer(data)
    if budget is None:
        return
    band = budget.band.percent
    assert budget.verdict is judge(budget.ladder, band)
    order = [Verdict.DOES_NOT_FIT, Verdict.UNCERTAIN, Verdict.FITS]
    larger = replace(budget.ladder, usable=budget.ladder.usable + budget.peak_bytes // 20)
    assert order.index(judge(larger, band)) >= order.index(budget.verdict)


def test_the_ladder_by_hand():
    budget = answer({"model": {"n_params": 1_000_000}, "hardware": {"gpu": "A100-80GB"}})
    assert budget is not None
    # Each term's segment is rounded up to 2 MiB; states of 2, 4, 4 and 4 MB; gradients, temporary, cuBLAS.
    rounded = sum(-(-term.at(budget.peak_index) // SEGMENT_BYTES) * SEGMENT_BYTES for term in budget.terms)
    assert budget.ladder.reserved == rounded
    assert budget.ladder.runtime.evidence is EvidenceKind.MEASURED
    assert budget.ladder.device == rounded + int(0.49 * GIB)  # one A100: TianheWu/CoSeR#10


def test_an_unmeasured_runtime_is_assumed_and_says_so():
    budget = answer({"model": {"n_params": 1000}, "hardware": {"gpu": "H200-141GB"}})
    assert budget is not None
    assert budget.ladder.runtime.largest == RUNTIME_BYTES
    assert budget.ladder.runtime.evidence is EvidenceKind.FORMULA
    assert budget.ladder.runtime.source.startswith("assumed")


# --- the whole catalogue ------------------------------------------------------------------------------------------

ENGINES = [
    {"engine": "single"},
    {"engine": "ddp"},
    {"engine": "fsdp2"},
    {"engine": "fsdp2", "dp_replicate": 2},
    *({"engine": "deepspeed", "zero_stage": stage} for stage in range(4)),
]


@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
@pytest.mark.parametrize("parallelism", ENGINES, ids=lambda value: "-".join(str(part) for part in value.values()))
def test_every_catalogue_model_is_predicted(parallelism: dict[str, Any], method: str):
    predicted = 0
    for name, model in catalogue().items():
        if model.config is None and method != "full":
            continue
        gpus = 1 if parallelism["engine"] == "single" else 16
        data = {"model": {"name": name}, "hardware": {"gpus": gpus}, "parallelism": parallelism}
        budget = predict(parse_scenario({**data, "recipe": {"method": method}}))
        assert budget.peak_bytes > 0
        assert budget.states.n_params == (budget.inventory.n_params if budget.inventory else model.n_params)
        predicted += 1
    assert predicted == (63 if method == "full" else 59)


def test_a_trace_that_shards_otherwise_is_left_out():
    """As when other settings are compared: its gathered layers are those of its own settings."""
    config = {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128,
    }  # fmt: skip
    data: dict[str, Any] = {
        "model": {"config": config},
        "hardware": {"gpus": 8},
        "parallelism": {"engine": "fsdp2"},
        "recipe": {"convention": "fsdp2_mixed"},
        "workload": {"seq_len": 64},
    }

    scenario = parse_scenario(data)
    evidence = evidence_for(scenario, ask, traced=True)
    other = parse_scenario({**data, "engine_config": {"reshard_after_forward": False}})
    assert predict(scenario, evidence).evidence.profile is not None
    closed = predict(other, evidence)
    assert closed.evidence.profile is None
    assert closed.totals == predict(other, replace(evidence, profile=None)).totals
