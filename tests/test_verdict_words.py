"""The verdict in words and its figures, and what is said beside it. Run: pytest tests/test_verdict_words.py"""

import re
from dataclasses import replace
from typing import Any

import pytest

from memcore.allocator import Reservation
from memcore.budget import Budget, Evidence, Verdict, judge, predict
from memcore.notices import NoticeKind, notices
from memcore.scenario import parse_scenario
from memcore.units import ByteUnit
from memcore.verdict_words import (
    headline,
    host_sentence,
    ladder_figures,
    verdict_sentence,
    verdict_word,
    what_a_trace_adds,
)

GB, BYTES = ByteUnit.GB, 10**9
LLAMA = {
    "model": {"name": "meta-llama/Llama-3.1-8B"},
    "hardware": {"gpu": "H100-80GB", "gpus": 8},
    "parallelism": {"engine": "deepspeed", "zero_stage": 2},
}
# Of the catalogue's models, one with a table of 2,048 positions, and one with rotary embeddings for 4,096.
LEARNED, ROTARY = "GPT-3 175B", "meta-llama/Llama-2-7b-hf"


def budget_of(data: dict[str, Any]) -> Budget:
    return predict(parse_scenario({"recipe": {"convention": "engine"}, **data}))


def traced(reserved: int, *, overfull: bool = False, usable: int | None = None) -> Budget:
    """The default scenario's budget as if a trace had said what the allocator reserves."""
    budget = budget_of(LLAMA)
    ladder = replace(
        budget.ladder,
        reserved=reserved,
        reservation=Reservation(reserved=reserved, allocated=reserved, overfull=overfull),
        usable=usable or budget.ladder.usable,
    )
    return replace(budget, ladder=ladder, verdict=judge(ladder, budget.band.percent))


def kinds(budget: Budget) -> list[NoticeKind]:
    return [notice.kind for notice in notices(budget, GB)]


def sizes(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"(\d+(?:\.\d+)?) GB", text)]


class TestFigures:
    def test_headroom_is_what_the_verdict_compares_and_the_figures_add_up(self):
        """One definition: what is needed and what is left are the card's usable memory, with a cache or without."""
        for budget in (budget_of(LLAMA), traced(75 * BYTES)):
            figures = {label: sizes(figure)[0] for label, figure, _help in ladder_figures(budget.ladder, GB)}
            usable = budget.ladder.usable / BYTES
            assert figures["Needed, at least"] + figures["Headroom"] == pytest.approx(usable, abs=0.011)
            assert sizes(headline(budget, GB))[0] == figures["Needed, at least"]

    def test_a_trace_adds_what_nvidia_smi_shows_and_its_cache(self):
        """75 GB reserved, and CUDA context and NCCL beside it."""
        budget = traced(75 * BYTES)
        shown = 75 + budget.ladder.runtime.largest / BYTES
        (device,) = [figure for label, figure, _help in ladder_figures(budget.ladder, GB) if "nvidia-smi" in label]
        assert sizes(device) == pytest.approx([shown], abs=0.006)
        needed, _usable, *_others, said, cached = sizes(verdict_sentence(budget, GB))
        assert said == pytest.approx(shown, abs=0.006)
        assert said - cached == pytest.approx(needed, abs=0.011)

    def test_without_a_trace_no_figure_is_shown_twice_and_it_says_what_one_adds(self):
        budget = budget_of(LLAMA)
        figures = [figure for _label, figure, _help in ladder_figures(budget.ladder, GB)]
        assert len(set(figures)) == len(figures) == 3
        assert "nvidia-smi" in what_a_trace_adds(budget)
        assert "nvidia-smi" not in verdict_sentence(budget, GB)
        # A bare count cannot be traced.
        assert what_a_trace_adds(budget_of({"model": {"n_params": 10**9}})) == ""

    def test_a_card_that_ends_before_shows_nothing(self):
        budget = traced(90 * BYTES, overfull=True, usable=50 * BYTES)
        assert budget.verdict is not Verdict.FITS
        assert "nvidia-smi" not in verdict_sentence(budget, GB)
        assert len(ladder_figures(budget.ladder, GB)) == 3


class TestHeadline:
    @pytest.mark.parametrize(
        ("gpus", "words"), [(8, "Fits"), (3, "Tight"), (2, "Probably does not fit"), (1, "Does not fit")]
    )
    def test_on_which_side_of_the_card_the_figure_is(self, gpus: int, words: str):
        """Llama-3.1-8B at stage 3: 16 bytes for each parameter among so many GPUs, and about 36 GB beside them."""
        data = {"hardware": {"gpu": "H100-80GB", "gpus": gpus}}
        engine = {"parallelism": {"engine": "deepspeed", "zero_stage": 3}} if gpus > 1 else {"parallelism": {}}
        budget = budget_of({**LLAMA, **data, **engine})
        assert headline(budget, GB).startswith(f"{words}:")
        assert (budget.ladder.needed > budget.ladder.usable) == ("not fit" in words)
        assert verdict_word(budget.verdict, budget.ladder.needed, budget.ladder.usable) == words


class TestHost:
    def test_what_is_offloaded_is_said_per_node(self):
        """Stage 3, optimizer on the CPU: 12 bytes for each of 8.03 billion parameters among 16 GPUs, 8 of them in a
        node, and what DeepSpeed keeps of gradients there."""
        offloaded = {
            **LLAMA,
            "hardware": {"gpu": "H100-80GB", "gpus": 16, "gpus_per_node": 8},
            "parallelism": {"engine": "deepspeed", "zero_stage": 3},
            "offload": {"optimizer": "cpu"},
        }
        budget = budget_of(offloaded)
        (said,) = sizes(host_sentence(budget, GB))
        assert said == pytest.approx(budget.host.cpu_bytes / BYTES, abs=0.006)
        assert said >= 12 * 8.03 / 2
        assert host_sentence(budget_of(LLAMA), GB) == ""


class TestNotices:
    def test_a_sequence_beyond_a_table_of_positions_cannot_run(self):
        budget = budget_of({"model": {"name": LEARNED}, "workload": {"seq_len": 2049}})
        (notice,) = [notice for notice in notices(budget, GB) if notice.stops]
        assert "2,049" in notice.text
        assert "2,048" in notice.text
        inside = budget_of({"model": {"name": LEARNED}, "workload": {"seq_len": 2048}})
        assert not any(notice.stops for notice in notices(inside, GB))

    def test_rotary_embeddings_go_on_with_a_warning(self):
        budget = budget_of({"model": {"name": ROTARY}, "workload": {"seq_len": 4097}})
        assert kinds(budget) == [NoticeKind.BEYOND_POSITIONS]
        assert kinds(budget_of({"model": {"name": ROTARY}, "workload": {"seq_len": 4096}})) == []

    def test_what_is_not_traced_says_why_but_where_it_cannot_run_anyway(self):
        budget = budget_of(LLAMA)
        assert kinds(replace(budget, evidence=Evidence(untraced="Because."))) == [NoticeKind.NOT_TRACED]
        table = budget_of({"model": {"name": LEARNED}, "workload": {"seq_len": 4096}})
        assert kinds(replace(table, evidence=Evidence(untraced="Because.")))[0] is NoticeKind.CANNOT_RUN
        assert NoticeKind.NOT_TRACED not in kinds(replace(table, evidence=Evidence(untraced="Because.")))

    def test_pieces_that_do_not_fit_are_said_where_their_sum_does(self):
        assert NoticeKind.FRAGMENTS in kinds(traced(83 * BYTES, overfull=True))
        assert NoticeKind.FRAGMENTS not in kinds(traced(75 * BYTES))
        assert NoticeKind.FRAGMENTS not in kinds(traced(83 * BYTES, overfull=True, usable=50 * BYTES))

    def test_a_start_that_takes_more_than_the_step(self):
        """70 billion weights of 4 bytes, whole, before FSDP2 divides them."""
        recipe = {"convention": "fsdp2_mixed"}
        model, hardware = {"name": "meta-llama/Llama-3.1-70B"}, {"gpu": "H100-80GB", "gpus": 64}
        budget = budget_of(
            {"model": model, "hardware": hardware, "recipe": recipe, "parallelism": {"engine": "fsdp2"}}
        )  # fmt: skip
        (notice,) = notices(budget, GB)
        assert notice.kind is NoticeKind.START
        assert sizes(notice.text)[0] >= 4 * 70.55

    @pytest.mark.parametrize(("attention", "saves"), [("flash", False), ("memory_efficient", False), ("eager", True)])
    def test_recomputing_scores_that_are_not_kept_saves_nothing(self, attention: str, saves: bool):
        """FlashAttention keeps no scores (arXiv 2205.14135, section 3.1): with it, and without, the bytes are equal."""

        def with_kind(kind: str) -> Budget:
            return budget_of({**LLAMA, "workload": {"attention": attention, "checkpointing": kind}})

        assert (with_kind("attention").peak_bytes < with_kind("none").peak_bytes) is saves
        assert (NoticeKind.SAVES_NOTHING in kinds(with_kind("attention"))) is not saves
        assert NoticeKind.SAVES_NOTHING not in kinds(with_kind("full"))
