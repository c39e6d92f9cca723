"""On how few GPUs a peak fits: the first of all numbers tried in their order. Run: pytest tests/test_fewest_gpus.py"""

from typing import Any

import pytest

from memcore.budget import Budget, Verdict, predict
from memcore.compare import stage_rows
from memcore.errors import UserError
from memcore.fewest_gpus import fewest_gpus, with_gpus
from memcore.scenario import parse_scenario

LLAMA = {"name": "meta-llama/Llama-3.1-8B"}
NUMBERS = [*range(1, 9), *range(16, 65, 8)]


def budget(model: Any = LLAMA, gpus: int = 8, gpu: str = "H100-80GB", **parts: Any) -> Budget:
    return predict(parse_scenario({"model": model, "hardware": {"gpu": gpu, "gpus": gpus}, **parts}))


def verdict_on(found: Budget, gpus: int) -> Verdict | None:
    try:
        return predict(with_gpus(found.scenario, gpus)).verdict
    except UserError:
        return None


def first_that_fits(found: Budget) -> int | None:
    return next((each for each in NUMBERS if verdict_on(found, each) is Verdict.FITS), None)


@pytest.mark.parametrize(
    "parallelism",
    [*({"engine": "deepspeed", "zero_stage": stage} for stage in (1, 2, 3)), {"engine": "fsdp2"}, {"engine": "fsdp1"}],
)
@pytest.mark.parametrize("gpus", [1, 8])
def test_it_is_the_first_number_whose_verdict_is_fits(parallelism: dict[str, Any], gpus: int):
    found = budget(gpus=gpus, parallelism=parallelism)
    assert fewest_gpus(found) == first_that_fits(found) is not None


def test_the_states_alone_fit_where_the_peak_does_not():
    """8,030,261,248 x 16 bytes are 64.2 GB on each of two H100s of 84.9; gathered layers and the rest take more."""
    found = budget(gpus=2, parallelism={"engine": "deepspeed", "zero_stage": 3})
    row = stage_rows(found)[3]
    assert row.smallest == 2
    assert found.verdict is not Verdict.FITS
    assert row.fewest == first_that_fits(found)
    assert row.fewest is not None
    assert row.fewest > 2


def test_where_one_gpu_is_all_there_is_the_verdict_decides():
    recipe = {"method": "qlora", "quantization": "nf4"}
    tight = budget(gpus=1, gpu="RTX4090-24GB", recipe=recipe, workload={"seq_len": 8192})
    assert tight.verdict is Verdict.DOES_NOT_FIT
    assert (stage_rows(tight)[0].smallest, stage_rows(tight)[0].fewest) == (1, None)
    roomy = budget(gpus=1, recipe=recipe, workload={"seq_len": 512})
    assert (roomy.verdict, stage_rows(roomy)[0].fewest) == (Verdict.FITS, 1)


def test_ddp_may_fit_one_gpu_and_no_more():
    """From two GPUs on each has NCCL's memory too, and nothing is divided: there is a size that one alone holds."""
    sizes = [
        budget({"n_params": count}, 2, parallelism={"engine": "ddp"}) for count in range(3 * 10**9, 4 * 10**9, 10**7)
    ]
    alone = [found for found in sizes if verdict_on(found, 1) is Verdict.FITS is not found.verdict]
    assert alone
    for found in alone:
        assert verdict_on(found, 64) is not Verdict.FITS
        assert fewest_gpus(found) == 1


def test_replicas_stay_as_many():
    found = budget(gpus=16, parallelism={"engine": "fsdp2", "dp_replicate": 2})
    fewest = fewest_gpus(found)
    assert fewest is not None
    assert fewest % 2 == 0
    parallelism = with_gpus(found.scenario, fewest).parallelism
    assert (parallelism.dp_replicate, parallelism.dp_shard) == (2, fewest // 2)
    alone = fewest_gpus(budget(gpus=8, parallelism={"engine": "fsdp2"}))
    assert alone is not None
    assert fewest >= alone


def test_whole_replicas_stay_whole():
    found = budget({"n_params": 10**9}, parallelism={"engine": "fsdp1", "dp_shard": 1, "dp_replicate": 8})
    assert with_gpus(found.scenario, 64).parallelism.dp_shard == 1
