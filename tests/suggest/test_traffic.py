"""What a step waits for, sends and starts, by hand and beside the paper's volumes.

Run: pytest tests/suggest/test_traffic.py
"""

from typing import Any

import pytest

from memcore.budget import predict
from memcore.models import catalogue_inventory
from memcore.scenario import parse_scenario
from memcore.suggest.grid import inputs_of
from memcore.suggest.traffic import Traffic, traffic

LLAMA = "meta-llama/Llama-3.1-8B"
PSI, LAYER, TABLE = 8_030_261_248, 218_112_000, 128_256 * 4096
RANKS = 8
WHOLE = 10**11
ALL = {"stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": WHOLE, "stage3_param_persistence_threshold": 0}


def of(stage: int | str, zero: dict[str, Any] | None = None, gpus: int = RANKS, **parts: Any) -> Traffic:
    parallelism = {"engine": "fsdp2"} if stage == "fsdp2" else {"engine": "deepspeed", "zero_stage": stage}
    if zero:
        parts["engine_config"] = {"zero_optimization": zero}
    scenario = {"model": {"name": LLAMA}, "hardware": {"gpus": gpus}, "parallelism": parallelism, **parts}
    return traffic(inputs_of(predict(parse_scenario(scenario))))


def sent(elements: int, element_bytes: int = 2) -> int:
    return elements * element_bytes * (RANKS - 1) // RANKS


def test_stages_send_what_the_paper_says():
    """arXiv 1910.02054, section 7: 2 Psi up to stage 2, 3 Psi at stage 3; from stage 2 on each micro-step reduces."""
    assert of(1).sent_bytes == of(2).sent_bytes == 2 * sent(PSI)
    none_kept = of(3, {"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0})
    assert none_kept.sent_bytes == pytest.approx(3 * sent(PSI), rel=1e-3)
    assert of(2, workload={"grad_accum": 4}).sent_bytes == 5 * sent(PSI)
    assert of(1, workload={"grad_accum": 4}).sent_bytes == 2 * sent(PSI)


def test_nothing_is_sent_by_one_gpu():
    for stage in (1, 2, 3, "fsdp2"):
        found = of(stage, gpus=1)
        assert found == Traffic(updates=found.updates)


def test_weights_that_stay_from_forward_to_backward_are_gathered_once():
    """And one by one where nothing is prefetched: 291 tensors, each awaited; then the gradients' buckets."""
    kept = of(3, ALL | {"reduce_bucket_size": WHOLE})
    inventory = catalogue_inventory(LLAMA)
    assert inventory is not None
    assert kept.sent_bytes == 2 * sent(PSI)
    assert kept.exposed_bytes == 2 * sent(PSI)
    assert kept.launches == len(list(inventory.tensors())) + 1 == 292


def test_full_checkpointing_gathers_a_third_time_unless_kept():
    zero = {"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}
    layers = 32 * LAYER
    more = of(3, zero, workload={"checkpointing": "full"}).sent_bytes - of(3, zero).sent_bytes
    # Each layer's last tensor is the first of its own backward, and is not let go between.
    assert more == pytest.approx(sent(layers), rel=0.3)
    assert more <= sent(layers)


def test_prefetching_hides_all_but_what_comes_first():
    """The first module's weight, the embedding table, and the last gradients to come, the table's."""
    found = of(3, {"stage3_param_persistence_threshold": 0})
    assert found.exposed_bytes == 2 * sent(TABLE)
    assert of(3, {"overlap_comm": False}).exposed_bytes == pytest.approx(of(3).sent_bytes, rel=1e-3)


def test_buckets_by_hand():
    """The head (525 M) is too large for any bucket with something in it; a layer's gradients come as down, up, gate
    (58.7 M each), o, v, k, q; the table is reduced last, beside nothing."""
    per_layer = of(2, {"overlap_comm": True, "reduce_bucket_size": LAYER})
    # Head and final norm apart, 32 layers that straddle the buckets, the table.
    assert 33 <= per_layer.launches - 1 <= 40
    one_by_one = of(2, {"overlap_comm": True, "reduce_bucket_size": 1})
    assert one_by_one.launches == 291 + 1
    together = of(2, {"overlap_comm": True, "reduce_bucket_size": WHOLE})
    assert together.launches == 1 + 1
    gathered_after = sent(PSI)
    assert per_layer.exposed_bytes - gathered_after == sent(TABLE)
    assert together.exposed_bytes - gathered_after == sent(PSI)
    assert of(2, {"reduce_bucket_size": LAYER}).exposed_bytes == of(2).sent_bytes


def test_small_parameters_kept_whole_save_collectives():
    """Where nothing is prefetched; else they come along with others."""
    alone = {"stage3_prefetch_bucket_size": 0}
    assert of(3, alone).launches < of(3, alone | {"stage3_param_persistence_threshold": 0}).launches


def test_sub_groups():
    """8.03e9 / 8 = 1.004e9 elements a rank: one group at the default 1e9 closes with the last tensor, the head."""
    assert of(3).updates == 1
    assert of(3, {"sub_group_size": 10**8}).updates == pytest.approx(10, abs=2)
    assert of(2, {"sub_group_size": 10**8}).updates == 1


def test_fsdp2_without_resharding_sends_a_third_less():
    """Three times the layers, against twice; root weights and gradients once each (torch 2.13, _fully_shard)."""
    root = PSI - 32 * LAYER
    resharded = of("fsdp2", recipe={"convention": "fsdp2_mixed"})
    kept = of("fsdp2", recipe={"convention": "fsdp2_mixed"}, engine_config={"reshard_after_forward": False})
    assert resharded.sent_bytes == sent(root + 2 * 32 * LAYER) + sent(PSI, 4)
    assert kept.sent_bytes == sent(root + 32 * LAYER) + sent(PSI, 4)
    assert (resharded.launches, kept.launches) == (33 + 32 + 33, 33 + 33)
    assert resharded.exposed_bytes == kept.exposed_bytes
