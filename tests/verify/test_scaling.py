"""A scenario made small enough to run here. Run: pytest tests/verify/test_scaling.py"""

from collections.abc import Iterator
from typing import Any

import pytest

from memcore.budget import FORMULAS
from memcore.errors import UserError
from memcore.jobs import LightLane
from memcore.models import load_inventory
from memcore.scenario import parse_scenario
from memcore.verify.scaling import Scaled, crowding, scale

LLAMA = "meta-llama/Llama-3.1-8B"


@pytest.fixture(scope="module")
def light() -> Iterator[LightLane]:
    lane = LightLane()
    yield lane
    lane.close()


def scaled(light: LightLane, ranks: int = 2, model: str = LLAMA, **parts: Any) -> Scaled:
    scenario = parse_scenario({"model": {"name": model}, "hardware": {"gpus": 64}, **parts})
    return scale(scenario, FORMULAS, light.ask, ranks=ranks, device="cpu")


def zero(**settings: int) -> dict[str, Any]:
    return {
        "parallelism": {"engine": "deepspeed", "zero_stage": 3},
        "engine_config": {"zero_optimization": settings},
    }


class TestDeepSpeed:
    def test_settings_stand_to_the_model_as_before(self, light: LightLane):
        found = scaled(light, **zero(reduce_bucket_size=803_026_124, stage3_max_live_parameters=0)).case.scenario
        small = load_inventory(light.ask("count_config", {"config": dict(found.model.config or {})})["inventory"])
        # A tenth of 8,030,261,248 parameters.
        assert found.zero_config.reduce_bucket_size == pytest.approx(small.n_params / 10, abs=1)
        assert found.zero_config.stage3_max_live_parameters == 0

    def test_the_persistence_threshold_goes_by_the_width(self, light: LightLane):
        # Hugging Face's "auto" is 10 times the hidden size; so it is in the small model.
        found = scaled(light, **zero(stage3_param_persistence_threshold=10 * 4096)).case.scenario
        assert found.zero_config.stage3_param_persistence_threshold == 10 * (found.model.config or {})["hidden_size"]

    def test_stage_ranks_and_recipe_are_kept(self, light: LightLane):
        recipe = {"convention": "deepspeed_fp32_grad", "optimizer": {"name": "adamw", "implementation": "foreach"}}
        found = scaled(light, ranks=4, recipe=recipe, **zero()).case
        assert found.ranks == 4
        assert found.scenario.parallelism.zero_stage == 3
        assert found.scenario.recipe.convention == "deepspeed_fp32_grad"
        assert found.scenario.recipe.optimizer.implementation == "foreach"


class TestWhatIsSaid:
    def test_every_reduction_is_a_sentence(self, light: LightLane):
        workload = {"checkpointing": "segments(4)", "grad_accum": 16}
        said = " ".join(scaled(light, workload=workload, **zero()).reductions)
        for part in ("hidden size", "parameters in 8 layers", "2 ranks instead of 64", "settings in elements",
                     "Every layer is recomputed", "2 micro-steps instead of 16"):  # fmt: skip
            assert part in said

    def test_dtypes_that_the_engine_has_not_are_replaced(self, light: LightLane):
        found = scaled(light, parallelism={"engine": "fsdp2"}, recipe={"convention": "megatron"})
        assert found.case.scenario.recipe.convention == "fsdp2_mixed"
        assert any("FSDP2 mixed precision" in sentence for sentence in found.reductions)

    def test_hsdp_stays_hsdp_where_there_are_ranks_for_it(self, light: LightLane):
        parallelism = {"engine": "fsdp2", "dp_shard": 8, "dp_replicate": 8}
        found = scaled(light, ranks=4, parallelism=parallelism).case.scenario.parallelism
        assert (found.dp_shard, found.dp_replicate) == (2, 2)


class TestRefused:
    @pytest.mark.parametrize(
        ("parts", "sentence"),
        [
            ({"recipe": {"method": "lora"}}, "Adapters are not run"),
            ({"recipe": {"optimizer": {"name": "adafactor"}}}, "No real run here"),
            ({"recipe": {"optimizer": {"name": "adamw", "bits": 8}}}, "No real run here"),
        ],
    )
    def test_recipes_that_no_run_shows(self, light: LightLane, parts: dict[str, Any], sentence: str):
        with pytest.raises(UserError, match=sentence):
            scaled(light, **parts)

    def test_offloading_to_the_cpu_on_the_cpu(self, light: LightLane):
        with pytest.raises(UserError, match="shows nothing"):
            scaled(light, offload={"optimizer": "cpu"}, **zero())

    def test_fsdp2s_own_offload_too(self, light: LightLane):
        config = {"cpu_offload": True}
        with pytest.raises(UserError, match="shows nothing"):
            scaled(light, parallelism={"engine": "fsdp2"}, engine_config=config)

    @pytest.mark.parametrize("ranks", [0, 9])
    def test_ranks(self, light: LightLane, ranks: int):
        with pytest.raises(UserError, match="from 1 to 8"):
            scaled(light, ranks=ranks, parallelism={"engine": "ddp"})

    def test_a_bare_count(self, light: LightLane):
        scenario = parse_scenario({"model": {"n_params": "7B"}})
        with pytest.raises(UserError, match="choose a model with a config"):
            scale(scenario, FORMULAS, light.ask, ranks=1, device="cpu")


def test_fewer_cores_than_ranks_are_said(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    assert crowding(2) == ""
    assert crowding(4) == "4 ranks share 2 cores: the run takes longer, its memory is the same."
