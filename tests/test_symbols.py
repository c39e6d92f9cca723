"""The formulas' symbols: each has one meaning, and says what its numbers say. Run: pytest tests/test_symbols.py"""

import re
from contextlib import suppress
from functools import cache
from typing import Any

import pytest

from memcore.budget import Budget, predict
from memcore.errors import UserError
from memcore.explain import explain_term
from memcore.scenario import parse_scenario
from memcore.symbols import MEANINGS, legend, symbols_of
from memcore.terms import EvidenceKind, Formula, Term
from memcore.trace.terms import _NAMES
from memcore.units import ByteUnit
from memcore.verdict_words import explain_ladder

LLAMA = {"name": "meta-llama/Llama-3.1-8B"}
LLAMA_PARAMS = 8_030_261_248
ENGINES: list[dict[str, Any]] = [
    {"engine": "single"},
    *({"engine": name} for name in ("ddp", "fsdp1", "fsdp2")),
    *({"engine": "deepspeed", "zero_stage": stage} for stage in range(4)),
]
# What brings other terms in, engine by engine where it is taken.
PARTS: list[dict[str, Any]] = [
    {},
    {"model": {"n_params": 7 * 10**9}},
    {"recipe": {"optimizer": {"name": "adafactor"}}},
    {"recipe": {"optimizer": {"name": "adamw", "implementation": "for_loop"}}},
    {"recipe": {"method": "qlora", "lora": {}, "quantization": "nf4_double_quant"}},
    {"recipe": {"convention": "megatron"}},
    {"workload": {"attention": "eager", "checkpointing": "full", "loss": "fused"}},
    {"workload": {"grad_accum": 2, "loss": "chunked"}},
]


@cache
def budgets() -> tuple[Budget, ...]:
    found = []
    for engine in ENGINES:
        gpus = 1 if engine["engine"] == "single" else 8
        for part in PARTS:
            data = {"model": LLAMA, "hardware": {"gpu": "H100-80GB", "gpus": gpus}, "parallelism": engine}
            # Not every engine takes every part: adapters and Adafactor are some's alone.
            with suppress(UserError):
                found.append(predict(parse_scenario({**data, **part})))
    assert len(found) > 50
    return tuple(found)


def formulas() -> dict[str, Term]:
    """A term of each formula."""
    found: dict[str, Term] = {}
    for budget in budgets():
        for term in (*budget.terms, budget.ladder.runtime, *([budget.start] if budget.start else [])):
            found.setdefault(term.formula.symbols, term)
    return found


def test_every_symbol_has_a_meaning():
    for symbols, term in formulas().items():
        unknown = [symbol for symbol in symbols_of(symbols) if symbol not in MEANINGS]
        assert not unknown, (term.name, symbols)
        # LaTeX has no second index of one symbol.
        assert not re.search(r"_(?:\{[^{}]*\}|[A-Za-z])_", symbols), symbols
    for _name, _category, symbols in _NAMES.values():
        assert all(symbol in MEANINGS for symbol in symbols_of(symbols))


def test_symbols_by_hand():
    assert symbols_of(r"2\,\sum_t \lceil n_t / N \rceil\,m_t") == ["n_t", "N", "m_t"]
    assert symbols_of(r"P_R + P_i + A_i + A_{i-1}") == ["P_R", "P_i", "A_i"]
    assert symbols_of(r"\Psi + 4\,\Psi / 256 + \mathrm{FP32\ rest}") == [r"\Psi"]
    assert legend(r"8\,\min(\psi_{max}, S)")[0] == (r"\psi_{max}", "parameters of the largest tensor")


def test_what_is_written_as_a_share_of_all_parameters_is_one():
    """Llama-3.1-8B on 8 GPUs: a slice that is larger than Psi / N, since it keeps whole tensors, has its own symbol."""
    checked = 0
    for budget in budgets():
        if budget.states.n_params != LLAMA_PARAMS:
            continue
        for term in budget.terms:
            written = re.fullmatch(r"(\d+)\\,\\Psi( / N)?", term.formula.symbols)
            if written and term.name not in ("gradients", "reduce_flatten", "reduce_bucket"):
                ranks = budget.scenario.parallelism.dp if written[2] else 1
                assert term.largest == int(written[1]) * -(-LLAMA_PARAMS // ranks), term.name
                checked += 1
    assert checked > 100


def test_a_slice_of_whole_tensors_is_not_called_a_share():
    (budget,) = [each for each in budgets() if each.scenario == _stage_2()]
    terms = {term.name: term for term in budget.terms}
    assert symbols_of(terms["gradient_slice"].formula.symbols) == ["S_g"]
    assert symbols_of(terms["step_gradient_copies"].formula.symbols) == ["S"]
    assert terms["gradient_slice"].largest > 2 * LLAMA_PARAMS / 8


def _stage_2() -> Any:
    return parse_scenario(
        {
            "model": LLAMA,
            "hardware": {"gpu": "H100-80GB", "gpus": 8},
            "parallelism": {"engine": "deepspeed", "zero_stage": 2},
        }
    )


def test_what_is_opened_says_the_share_that_is_shown():
    """FSDP2 has two layers gathered at once in the backward, less at the loss, where the peak is."""
    budget = next(each for each in budgets() if each.scenario.parallelism.engine.value == "fsdp2")
    ((term, share),) = [(term, share) for term, share in budget.at_peak() if term.name == "gathered_parameters"]
    assert 0 < share < term.largest
    explained = explain_term(term, ByteUnit.GB, share)
    assert explained.at_peak == f"{share / 1e9:.2f} GB"
    assert explained.result == f"{term.largest / 1e9:.2f} GB"
    weights = next(term for term in budget.terms if term.name == "weights")
    assert explain_term(weights, ByteUnit.GB, weights.largest).at_peak == ""


def test_what_was_counted_is_not_shown_as_a_formula_of_itself():
    traced = Term(
        name="saved_activations",
        category=_NAMES["saved"][1],
        bytes_at=12_345,
        formula=Formula(symbols="A_{saved}", numbers="1 × 2"),
        source="",
        evidence=EvidenceKind.TRACE,
    )
    explained = explain_term(traced, ByteUnit.GB)
    assert explained.how
    assert explained.legend == []
    assert explained.numbers == "12,345"


@pytest.mark.parametrize("symbol", MEANINGS)
def test_every_meaning_is_in_words(symbol: str):
    assert re.fullmatch(r"[a-zA-Z0-9 ,'()-]+", MEANINGS[symbol])


def test_what_lies_between_tensors_and_the_card_is_opened_too():
    budget = predict(_stage_2())
    needed, outside, usable = explain_ladder(budget, ByteUnit.GB)
    first, second = (int(number.replace(",", "")) for number in needed.numbers.split(" + "))
    assert first + second == budget.ladder.needed
    assert outside.source == budget.ladder.runtime.source
    assert usable.source == budget.device.usable_source
