"""A run's prediction beside what was measured, and the summary. Run: pytest tests/score/test_scoring.py"""

from collections.abc import Iterator
from typing import Any

import pytest
from counted import ask
from made_up_run import KINDS, N_PARAMS, made_up

from memcore.errors import UserError
from memcore.score import Score, Status, read_runs, score_run, summarise
from memcore.score.report import score_csv, score_report, score_text
from memcore.score.summary import figures, percentile, rows_of
from memcore.terms import EvidenceKind
from memcore.units import ByteUnit


def leaves(part: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The path of each field, those of parts with fields of their own included."""
    for name, value in part.items():
        yield (*path, name)
        if isinstance(value, dict):
            yield from leaves(value, (*path, name))


def score(**changes: Any) -> Score:
    return score_run(made_up(**changes), 1, ask)


class TestOne:
    def test_states_by_hand(self):
        """Weights, gradients and two moments in BF16: 8 bytes each parameter, in the terms at the peak."""
        found = score()
        assert found.status is Status.PREDICTED, found.reason
        assert found.evidence is EvidenceKind.FORMULA
        assert found.budget is not None
        assert found.predicted_bytes == found.budget.peak_bytes
        terms = score_report([found])["runs"][0]["terms"]
        assert sum(term["bytes"] for term in terms) == found.predicted_bytes
        assert sum(term["bytes"] for term in terms if term["name"] in ("momentum", "variance")) == 4 * N_PARAMS
        assert sum(term["bytes"] for term in terms if term["name"] in ("weights", "gradients")) >= 2 * N_PARAMS

    def test_the_figure_is_the_like_of_what_was_measured(self):
        budget = score().budget
        assert budget is not None
        ladder = budget.ladder
        expected = {
            "allocated": ladder.allocated,
            "active": ladder.allocated,
            "unknown": ladder.allocated,
            "reserved": ladder.reserved,
            "nvidia_smi": ladder.device,
        }
        found = {metric: score(measured__metric=metric).predicted_bytes for metric in expected}
        assert found == expected
        assert ladder.allocated < ladder.reserved < ladder.device

    def test_an_error_is_in_per_cent_of_what_was_measured(self):
        predicted = score().predicted_bytes
        assert predicted is not None
        assert score(measured__bytes=predicted * 2).error_pct == pytest.approx(-50)
        assert score(measured__bytes=predicted).error_pct == 0

    def test_parallelism_out_of_scope_is_apart_from_what_is_not_predicted(self):
        beyond = score(parallelism__tp=2, hardware__gpus=2)
        assert (beyond.status, beyond.gaps) == (Status.OUT_OF_SCOPE, ())
        assert "tp = 2" in beyond.reason

    def test_one_sentence_names_all_that_cannot_be_expressed(self):
        found = score(workload__fused_kernels=["rope", "layernorm", "bias_gelu"], parallelism__vpp=2)
        assert found.status is Status.NOT_PREDICTED
        assert "parallelism.vpp = 2; workload.fused_kernels = layernorm, bias_gelu." in found.reason

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"parallelism__engine": "no-such"}, "parallelism.engine = no-such"),
            ({"model__config": {"model_type": "no_such"}}, "no_such"),
            ({"model__config": {}}, "model_type"),
            ({"model__config": {"model_type": "llama", "hidden_size": 0}}, ""),
            ({"model__n_params_config": 2 * N_PARAMS}, f"builds {N_PARAMS:,} parameters"),
            ({"hardware__gpu": "no-such"}, "hardware.gpu"),
            ({"workload__seq_len": 10**12}, "workload.seq_len"),
        ],
    )
    def test_what_no_scenario_takes_is_said(self, changes: dict[str, Any], words: str):
        found = score(**changes)
        assert found.status is Status.NOT_PREDICTED
        assert words in found.reason

    def test_a_model_without_a_closed_form_needs_its_trace(self):
        found = score(kind="lora", recipe__lora={**made_up("lora")["recipe"]["lora"], "dropout": 0.1})
        assert found.status is Status.NOT_PREDICTED
        assert "Nothing is traced here." in found.reason

    def test_adapters_of_another_number_are_noted(self):
        """A and B of rank 4 on q (64 to 64) and v (64 to 32), in 2 layers: 2 x 4 x (128 + 96)."""
        lora = made_up("lora")["recipe"]["lora"]
        assert score(kind="lora", recipe__lora={**lora, "trainable_params": 1792}).notes == ()
        assert "1,792" in score(kind="lora", recipe__lora={**lora, "trainable_params": 1}).notes[0]


class TestMalformed:
    @pytest.mark.parametrize(
        ("data", "name", "words"),
        [
            (None, "#7", "allowed"),
            ([], "#7", "allowed"),
            ({}, "#7", "id is missing"),
            ({**made_up(), "extra": 1}, "made-up", "extra is not a field of a run"),
            ({**made_up(), "workload": None}, "made-up", "workload"),
            ({k: v for k, v in made_up().items() if k != "recipe"}, "made-up", "recipe is missing"),
            (made_up(measured__bytes=0), "made-up", "measured.bytes"),
            (made_up(measured__metric="felt"), "made-up", "measured.metric"),
            (made_up(parallelism__tp="2"), "made-up", "parallelism.tp"),
            (made_up(hardware__gpus=3), "made-up", "hardware.gpus is 3"),
            (made_up(software__date="2024"), "made-up", "allowed is a month such as 2024-12"),
            (made_up(software__date=None), "made-up", "software.date"),
            (made_up(software__transformers=4.48), "made-up", "software.transformers"),
        ],
    )
    def test_a_record_that_cannot_be_read(self, data: object, name: str, words: str):
        found = score_run(data, 7, ask)
        assert (found.run_id, found.status) == (name, Status.MALFORMED)
        assert words in found.reason

    @pytest.mark.parametrize(
        ("kind", "field"), [(kind, ".".join(path)) for kind in KINDS for path in leaves(made_up(kind))]
    )
    def test_no_value_of_a_field_stops_the_scoring(self, kind: str, field: str):
        """A record is predicted, or said not to be: the next one is scored either way."""
        for value in (None, "", "x", "4.x", "fp32", -1, 0, 3, 2**70, 1.5, float("inf"), True, [], ["x"], {}, {"a": 1}):
            assert score_run(made_up(kind, **{field.replace(".", "__"): value}), 1, ask).status in set(Status)

    @pytest.mark.parametrize("text", ["", "no json", "{}", '{"runs": 3}', "7", "null", "[NaN]"])
    def test_a_file_without_runs(self, text: str):
        with pytest.raises(UserError):
            read_runs(text)

    def test_a_list_of_records_is_a_file_too(self):
        assert read_runs("[{}]") == read_runs('{"schema_version": 1, "runs": [{}]}') == [{}]


class TestSummary:
    @pytest.mark.parametrize(
        ("values", "share", "expected"),
        [
            ([], 0.5, None),
            ([3.0], 0.9, 3.0),
            ([4.0, 1.0, 3.0, 2.0], 0.5, 2.5),
            ([float(value) for value in range(11)], 0.9, 9.0),
            ([0.0, 10.0], 0.9, 9.0),
        ],
    )
    def test_percentiles_by_hand(self, values: list[float], share: float, expected: float | None):
        assert percentile(values, share) == (None if expected is None else pytest.approx(expected))

    def with_error(self, error_pct: float, **changes: Any) -> Score:
        """A score of that error, to the nearest byte."""
        predicted = score(**changes).predicted_bytes
        assert predicted is not None
        return score(measured__bytes=round(predicted / (1 + error_pct / 100)), **changes)

    def test_medians_by_hand(self):
        """Errors of -10, 2 and 5 per cent: 5 in the middle without signs, 2 with; the 90th at 5 + 0.8 x 5."""
        scores = [self.with_error(error) for error in (-10.0, 2.0, 5.0)]
        others = [score(parallelism__vpp=2), score(parallelism__tp=2, hardware__gpus=2)]
        found = figures(rows_of([*scores, *others]))
        assert (found.n, found.predicted) == (4, 3)
        assert found.median_abs_pct == pytest.approx(5, abs=0.01)
        assert found.p90_abs_pct == pytest.approx(9, abs=0.01)
        assert found.median_signed_pct == pytest.approx(2, abs=0.01)

    def test_no_regime_counts_for_its_number_of_runs(self):
        """Two regimes with medians of 4 and 10 per cent: 7, however many runs each has."""
        scores = [self.with_error(error) for error in (4.0, 4.0, 4.0)]
        scores.append(self.with_error(10.0, regime="ddp"))
        found = summarise(scores)
        assert found["gold"]["macro_median_abs_pct"] == pytest.approx(7, abs=0.01)
        assert found["gold"]["median_abs_pct"] == pytest.approx(4, abs=0.01)
        assert found["regimes"]["ddp"]["allocated"]["median_abs_pct"] == pytest.approx(10, abs=0.01)
        assert found["regimes"]["ddp"]["reserved"]["n"] == 0

    def test_metrics_are_never_averaged_together(self):
        scores = [score(), score(measured__metric="active", gold=False)]
        scores += [score(measured__metric=metric, gold=False) for metric in ("reserved", "nvidia_smi", "unknown")]
        found = summarise([*scores, score_run({}, 6, ask)])
        counts = {name: found[name]["n"] for name in ("gold", "allocated", "reserved", "other")}
        assert counts == {"gold": 1, "allocated": 2, "reserved": 1, "other": 2}
        assert found["reserved_fsdp2"]["n"] == 0
        assert found["records"] == {"predicted": 5, "not_predicted": 0, "out_of_scope": 0, "malformed": 1}

    def test_fsdp2s_reserved_memory_is_a_line_of_its_own_too(self):
        reserved = {"measured__metric": "reserved", "gold": False}
        found = summarise([score(**reserved), score(kind="fsdp2", **reserved), score(kind="fsdp2", gold=False)])
        assert (found["reserved"]["n"], found["reserved_fsdp2"]["n"]) == (2, 1)

    def test_reasons_say_how_many_runs_they_alone_hold_back(self):
        found = summarise([score(parallelism__vpp=2), score(parallelism__vpp=2, workload__loss="classification")])
        assert found["not_predicted"] == {
            "parallelism.vpp": {"records": 2, "alone": 1},
            "workload.loss": {"records": 1, "alone": 0},
        }


class TestOutput:
    scores = (score(), score(parallelism__vpp=2), score(parallelism__tp=2, hardware__gpus=2), score_run({}, 4, ask))

    def test_json_ends_with_the_summary(self):
        report = score_report(self.scores)
        assert list(report)[-1] == "summary"
        assert [run["status"] for run in report["runs"]] == [
            "predicted", "not_predicted", "out_of_scope", "malformed",
        ]  # fmt: skip

    def test_csv_has_a_row_for_each_and_no_formula(self):
        rows = score_csv([*self.scores, score_run({"id": "=1+1"}, 5, ask)]).splitlines()
        assert len(rows) == 6
        assert rows[-1].startswith("'=1+1,malformed")

    @pytest.mark.parametrize("by", [None, "regime", "family", "source"])
    def test_text_fits_a_terminal(self, by: str | None):
        text = score_text(self.scores, ByteUnit.GB, by)
        assert max(map(len, text.splitlines())) <= 100
        assert ("\n\nrun" in "\n\n" + text) or by
        assert "parallelism.vpp" in text
        assert "#4: id is missing." in text
        assert "Out of scope" in text

    def test_nothing_of_a_file_is_a_terminals_command(self):
        text = score_text([score(workload__loss="\x1b[2J"), score_run({"id": "\x1b]0;"}, 2, ask)], ByteUnit.GB, None)
        assert "\x1b" not in text
