"""The answer as data. Run: pytest tests/test_report.py"""

import csv
import io
import json

import pytest

from memcore.budget import Budget, Evidence, predict
from memcore.engine_options import EngineName
from memcore.model_report import (
    block_kinds,
    inventory_report,
    model_report,
    model_summary,
    parameters_by_part,
)
from memcore.models import catalogue, catalogue_inventory
from memcore.report import budget_report, budget_rows
from memcore.scenario import parse_scenario

EXAMPLE = {
    "model": {"n_params": 7_000_000_000},
    "hardware": {"gpu": "A100-80GB", "gpus": 8},
    "parallelism": {"engine": "deepspeed", "zero_stage": 1, "dp": 8},
    "recipe": {"method": "full", "convention": "zero_paper"},
    "workload": {"micro_batch": 1, "seq_len": 4096},
}
LLAMA = {"model": {"name": "meta-llama/Llama-3.1-8B"}}


def on_gpus(engine: str, gpus: int, **parallelism: object) -> dict[str, object]:
    return LLAMA | {"hardware": {"gpus": gpus}, "parallelism": {"engine": engine, **parallelism}}


SCENARIOS = {
    "seven billion, ZeRO-1": EXAMPLE,
    "single": LLAMA,
    "ddp": on_gpus("ddp", 4),
    "fsdp1": on_gpus("fsdp1", 8),
    "hybrid FSDP2": on_gpus("fsdp2", 16, dp_shard=8, dp_replicate=2),
    **{f"ZeRO-{stage}": on_gpus("deepspeed", 8, zero_stage=stage) for stage in range(4)},
    "QLoRA": LLAMA | {"recipe": {"method": "qlora"}},
    "paged 8-bit": LLAMA | {"recipe": {"optimizer": {"name": "adamw", "bits": 8, "paged": True}}},
    "offloaded": on_gpus("deepspeed", 8, zero_stage=3) | {"offload": {"optimizer": "cpu", "parameters": "nvme"}},
    "accumulating": on_gpus("ddp", 2) | {"workload": {"grad_accum": 4}},
}


@pytest.fixture(params=SCENARIOS.values(), ids=SCENARIOS)
def budget(request: pytest.FixtureRequest) -> Budget:
    return predict(parse_scenario(request.param))


def test_terms_add_up_to_the_peak_and_to_each_phase(budget: Budget) -> None:
    report = budget_report(budget)
    assert sum(term["bytes"] for term in report["terms"]) == report["peak_bytes"] == max(report["by_phase"].values())
    assert report["by_phase"][report["binding_phase"]] == report["peak_bytes"]
    for phase, peak in report["by_phase"].items():
        assert sum(term["by_phase"][phase] for term in report["terms"]) == peak


def test_the_ladder_and_the_states_add_up(budget: Budget) -> None:
    report = budget_report(budget)
    ladder, static = report["ladder"], report["static"]
    assert ladder["allocated_bytes"] == report["peak_bytes"] <= ladder["reserved_bytes"]
    assert ladder["device_bytes"] == ladder["reserved_bytes"] + ladder["runtime_bytes"]
    assert static["total_bytes"] == static["weights_bytes"] + static["gradients_bytes"] + static["optimizer_bytes"]


def test_the_report_is_strict_json_and_its_scenario_asks_the_same_again(budget: Budget) -> None:
    report = json.loads(json.dumps(budget_report(budget), allow_nan=False))
    assert report == budget_report(budget)
    assert parse_scenario(report["scenario"]) == budget.scenario


def test_every_figure_has_evidence_and_source(budget: Budget) -> None:
    report = budget_report(budget)
    for term in report["terms"]:
        assert term["evidence"] in {"formula", "trace", "measured"}
        assert term["source"]
        assert term["formula"]["numbers"]
        assert term["bytes"] <= term["largest_bytes"]
    assert report["ladder"]["usable_source"]
    assert report["ladder"]["runtime_source"]
    assert report["communication"]["link"]["source"]


def test_rows_make_a_csv_whose_columns_add_up(budget: Budget) -> None:
    rows, report = budget_rows(budget), budget_report(budget)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    read = list(csv.DictReader(io.StringIO(text.getvalue())))
    assert sum(int(row["bytes"]) for row in read) == report["peak_bytes"]
    for phase, peak in report["by_phase"].items():
        assert sum(int(row[f"{phase}_bytes"]) for row in read) == peak
    assert [row["name"] for row in read] == [term["name"] for term in report["terms"]]
    assert not any(cell.startswith(("=", "+", "-", "@")) for row in read for cell in row.values())


def test_seven_billion_at_zero_1_is_the_papers_38_5_gb() -> None:
    report = budget_report(predict(parse_scenario(EXAMPLE)))
    assert report["static"] == {
        "weights_bytes": 14_000_000_000,
        "gradients_bytes": 14_000_000_000,
        "optimizer_bytes": 10_500_000_000,
        "total_bytes": 38_500_000_000,
    }
    assert report["verdict"] == "fits"
    # A bare count leaves the activations out, as no published run's prediction does.
    assert (report["error_band"], report["error_band_percent"], report["error_band_runs"]) == ("assumed", 20, 0)
    assert "activations" in report["not_counted"]
    assert report["parameters"]["by_role"] is None
    assert report["communication"]["volume_in_parameters"] == 2
    assert report["defaults_filled"] is None


def test_parameters_come_with_their_roles_and_largest_parts() -> None:
    parameters = budget_report(predict(parse_scenario(LLAMA)))["parameters"]
    assert parameters["total"] == parameters["trained"] == sum(parameters["by_role"].values()) == 8_030_261_248
    assert parameters["largest_tensor"]["parameters"] == 128_256 * 4096
    assert parameters["largest_layer"] == {"name": "model.layers.0", "parameters": 218_112_000}
    assert parameters["tied"] is False


def test_experts_that_a_token_does_not_use_are_not_active() -> None:
    scenario = {"model": {"name": "mistralai/Mixtral-8x7B-v0.1"}, "recipe": {"method": "lora"}}
    parameters = budget_report(predict(parse_scenario(scenario)))["parameters"]
    assert parameters["active"] == 12_879_925_248
    assert parameters["trained"] < parameters["active"] < parameters["total"]


def test_what_was_found_out_about_a_config_is_in_the_report() -> None:
    scenario = parse_scenario({"model": {"config": {"model_type": "llama"}}})
    evidence = Evidence(
        inventory=catalogue_inventory("meta-llama/Llama-2-7b-hf"),
        config_defaults={"head_dim": 128},
        quantised_as="gptq",
    )
    report = budget_report(predict(scenario, evidence))
    assert report["defaults_filled"] == {"head_dim": 128}
    assert report["quantised_as"] == "gptq"


def test_paged_states_and_offload_are_on_the_host() -> None:
    def host(case: str) -> dict[str, int]:
        report: dict[str, int] = budget_report(predict(parse_scenario(SCENARIOS[case])))["host_bytes_per_node"]
        return report

    assert host("paged 8-bit")["unified"] > 0
    assert host("offloaded")["cpu"] > host("offloaded")["nvme"] > 0
    assert set(host("single").values()) == {0}


@pytest.mark.parametrize("name", catalogue())
def test_every_catalogue_model_reports_counts_that_agree(name: str) -> None:
    report = json.loads(json.dumps(model_report(name), allow_nan=False))
    inventory = report["inventory"]
    if inventory is None:
        assert report["total"] == report["published_total"]
        assert not report["cross_checked"]
        return
    blocks = inventory["blocks"]
    assert report["total"] == inventory["total"] == sum(block["parameters_each"] * block["count"] for block in blocks)
    assert sum(inventory["by_part"].values()) == sum(inventory["by_role"].values()) == inventory["total"]
    assert sum(block["count"] for block in blocks if block["decoder_layer"]) == inventory["layers"] == report["layers"]
    assert inventory["bf16_bytes"] == 2 * inventory["total"]


def test_blocks_that_are_alike_are_reported_once() -> None:
    inventory = catalogue_inventory("deepseek-ai/DeepSeek-V3")
    assert inventory is not None
    layers = [block for block in block_kinds(inventory) if block["decoder_layer"]]
    assert [block["numbers"] for block in layers] == [[0, 1, 2], list(range(3, 61))]
    assert "experts" not in layers[0]["by_role"]
    assert "experts" in layers[1]["by_role"]


def test_a_multimodal_model_is_counted_by_part() -> None:
    inventory = catalogue_inventory("google/gemma-3-4b-pt")
    assert inventory is not None
    assert parameters_by_part(inventory) == {"text": 3_880_263_168, "vision": 416_866_032, "projector": 2_950_272}
    assert inventory_report(inventory)["tied"]


def test_a_model_without_a_published_count_is_not_cross_checked() -> None:
    checked = {name: model_summary(model)["cross_checked"] for name, model in catalogue().items()}
    assert checked["meta-llama/Llama-2-7b-hf"]
    assert not checked["bigcode/starcoder2-7b"]
    assert not checked["ZeRO paper 7B"]


def test_every_engine_is_among_the_scenarios() -> None:
    """llm.c aside, whose vocabulary no model of the catalogue has: see tests/test_llm_c.py."""
    found = {parse_scenario(data).parallelism.engine for data in SCENARIOS.values()}
    assert found == set(EngineName) - {EngineName.LLM_C}
