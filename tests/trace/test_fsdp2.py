"""FSDP2 in the trace, against real runs, and over ranks and depths.

Run: pytest tests/trace/test_fsdp2.py. The real runs are of two and four CPU ranks over gloo (tests/data/fsdp2_cpu.json
says how they were measured); gloo's own staging is left out of both sides.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small_models import CONFIGS

from memcore.trace.profile import ActivationProfile, dump_profile, load_profile
from memcore.trace.request import Adapters, Request, Sharding, Step
from memcore.trace.sizes import sampled_sizes, tape_at
from memcore.trace.tracer import record, trace

pytestmark = pytest.mark.usefixtures("one_torch_thread")
REAL = json.loads((Path(__file__).parents[1] / "data" / "fsdp2_cpu.json").read_text(encoding="utf-8"))
# A checkpoint keeps the random generator's state of 5,056 bytes on the CPU, which on CUDA is on the host.
TOLERANCE = 0.0005


def described(run: dict[str, Any]) -> str:
    """A short name for a real run."""
    plain = ("ranks", "replicate", "weights", "compute", "reduce", "checkpointing", "optimizer", "tokens")
    words = [str(run[name]) for name in plain]
    words += ["resharded" if run["reshard_after_forward"] else "kept", "lora" if run["lora_rank"] else "full"]
    return "-".join([*words, *run["model"]])


def request_of(run: dict[str, Any]) -> Request:
    """What to trace for a real run."""
    return Request(
        config={**REAL["config"], **run["model"]},
        micro_batch=1,
        seq_len=run["tokens"],
        dtype=run["compute"],
        attention="flash",
        checkpointing=run["checkpointing"],
        loss="unfused",
        kernels="cpu",
        adapters=Adapters(rank=run["lora_rank"], targets=("all-linear",), dtype="fp32") if run["lora_rank"] else None,
        step=Step(
            name="adamw",
            implementation=run["optimizer"],
            momentum=False,
            dtype="fp32" if run["lora_rank"] else run["weights"],
        ),
        sharding=Sharding(
            shard=run["ranks"] // run["replicate"],
            replicate=run["replicate"],
            reshard_after_forward=run["reshard_after_forward"],
            param_dtype=run["weights"],
            reduce_dtype=run["reduce"],
        ),
    )


def within(low: int, real: int, high: int) -> bool:
    """Whether a real peak lies between two figures of the trace, which mostly are the same."""
    return low * (1 - TOLERANCE) <= real <= high * (1 + TOLERANCE)


@pytest.mark.parametrize("run", REAL["runs"], ids=described)
def test_every_phase_of_a_real_run(run: dict[str, Any]):
    profile = trace(request_of(run))
    # The loss is a moment of its own, which a run has in its forward and in its backward.
    loss, alive, grown = profile.num_layers, profile.totals, profile.with_gradients
    assert within(max(alive[:loss]), run["forward"], max(alive[: loss + 1]))
    assert within(max(grown[loss + 1 :]), run["backward"], max(grown[loss:]))
    assert max(grown) == pytest.approx(max(run["forward"], run["backward"]), rel=TOLERANCE)
    # Numbers in Python code become tensors of 8 bytes or less for a moment.
    assert profile.optimizer_step_bytes == pytest.approx(run["optimizer_step"], abs=16)


def sharded(model: str = "llama", layers: int = 10, **wanted: Any) -> Request:
    """FP32 shards of a small model among eight ranks, computed in BF16."""
    names = Sharding.__dataclass_fields__
    usual = {"shard": 8, "replicate": 1, "reshard_after_forward": True, "param_dtype": "fp32", "reduce_dtype": "fp32"}
    own = {name: wanted.pop(name) for name in names if name in wanted}
    config = {**CONFIGS[model], "num_hidden_layers": layers}
    if "layer_types" in config:
        config["layer_types"] = (config["layer_types"] * layers)[:layers]
    usual_request = {"seq_len": 48, "dtype": "bf16", "attention": "flash", "checkpointing": "none", "loss": "unfused"}
    return Request(config=config, micro_batch=1, sharding=Sharding(**{**usual, **own}), **{**usual_request, **wanted})


def assert_replayed(request: Request) -> ActivationProfile:
    """Few layers, laid out, are all layers traced, to the byte at every moment."""
    few, whole = trace(request), trace(replace(request, full_depth=True))
    assert replace(few, traced_layers=whole.traced_layers) == whole
    return few


@pytest.mark.parametrize("layers", [4, 8, 12])
def test_a_few_layers_replay_as_all_of_them(layers: int):
    assert assert_replayed(sharded(layers=layers)).traced_layers == 3


@pytest.mark.parametrize(
    "wanted",
    [
        {"reshard_after_forward": False},
        {"checkpointing": "full"},
        {"checkpointing": "segments(2)"},
        {"shard": 4, "replicate": 2, "param_dtype": "bf16"},
        {"cpu_offload": True},
        {"reshard_after_forward": False, "checkpointing": "full", "loss": "fused"},
        {"autocast": True},
        {"loss": "chunked"},
        {"reshard_exception": "last_block"},
        {"fsdp_units": "block_embed_head"},
        {"fsdp_units": "block_embed_head", "reshard_exception": "head", "checkpointing": "full"},
        {"fsdp_units": "block_embed_head", "reshard_exception": "last_block+head"},
        {"fsdp_units": "block_embed_head", "reshard_after_forward": False},
    ],
    ids=str,
)
def test_every_setting_replays(wanted: dict[str, Any]):
    assert_replayed(sharded(**wanted))


@pytest.mark.parametrize(("model", "traced"), [("gemma3_text", 4), ("deepseek_v3", 4), ("tied llama", 3)])
def test_layers_of_several_kinds_replay(model: str, traced: int):
    """DeepSeek-V3's dense layer beside those of experts: what a neighbour gathers is another size."""
    assert assert_replayed(sharded(model)).traced_layers == traced


def test_profiles_survive_their_data():
    profile = trace(sharded())
    assert profile.sharded
    assert load_profile(dump_profile(profile)) == profile


# --- what is gathered and reduced, by hand ----------------------------------------------------------------------------


def llama_sizes(words: int = 512, ranks: int = 1) -> tuple[int, int]:
    """Elements of one layer of the small Llama and of its root, rows padded to a multiple of the ranks."""
    hidden, inner, of_keys = 256, 704, 64

    def rows(number: int) -> int:
        return -(-number // ranks) * ranks

    norms = 2 * rows(hidden)
    attention = (2 * rows(hidden) + 2 * rows(of_keys)) * hidden
    layer = norms + attention + 2 * rows(inner) * hidden + rows(hidden) * inner
    return layer, 2 * rows(words) * hidden + rows(hidden)


@pytest.mark.parametrize("ranks", [8, 64, 1024])
def test_what_is_gathered_while_layers_run(ranks: int):
    """Of 8 tokens the copies out of a gather bind, not what layers compute.

    Forward: a layer's parameters, the flat gather they are copied out of, and the one of the layer before, which torch
    lets go of after the copy. Loss: the last layer's. Backward: no gather of the layer before; the next is prefetched.
    Only padding depends on the ranks: among 1,024 every row of a norm, and each of 64 rows of keys, is one of 1,024.
    """
    layer, root = llama_sizes(ranks=ranks)
    gathered = trace(sharded(shard=ranks, seq_len=8)).of("gathered")
    assert gathered[0] == 2 * (2 * root + 2 * layer)
    assert gathered[5] == 2 * (root + 3 * layer)
    assert gathered[10] == 2 * (root + layer)
    assert gathered[15] == 2 * (root + 2 * layer)


def test_shards_of_another_dtype_are_cast_before_they_are_gathered():
    """Of two ranks that is half a layer, beside the flat gather of the last layer that the backward begins with."""
    layer, root = llama_sizes()
    assert trace(sharded(shard=2, seq_len=8)).of("gathered")[10] == 2 * (root + layer + layer // 2)


def test_layers_that_stay_gathered_add_up():
    layer, root = llama_sizes()
    gathered = trace(sharded(reshard_after_forward=False)).of("gathered")
    assert [gathered[place] for place in (5, 10, 15)] == [2 * (root + n * layer) for n in (6 + 2, 10 + 1, 6)]


def test_one_rank_gathers_copies_of_its_own():
    layer, root = llama_sizes()
    assert trace(sharded(shard=1)).of("gathered")[5] == 2 * (root + layer)


def test_the_head_waits_for_the_embedding_and_both_are_reduced_last():
    """BF16 gradients and the FP32 buffer that they are copied into."""
    _layer, root = llama_sizes(words=32_000)
    assert trace(sharded("llama, 32000 words")).of("reduced")[-1] == (2 + 4) * root


def test_on_the_host_are_shards_and_their_gradients():
    """On the device remains what is gathered and reduced."""
    on_device, on_host = trace(sharded()), trace(sharded(cpu_offload=True))
    assert on_host.of("gathered")[5] == on_device.of("gathered")[5]
    assert max(on_device.with_gradients) - max(on_device.totals) > 0
    assert on_host.with_gradients == on_host.totals


def test_groups_that_hold_the_same_keep_what_they_reduced_in_another_dtype():
    """HSDP's FP32 buffers of BF16 shards stay until the end of the backward (torch 2.13, _fsdp_param_group.py,
    AllReduceState)."""
    layer, _root = llama_sizes()
    alone = trace(sharded(shard=4, param_dtype="bf16")).of("reduced")
    groups = trace(sharded(shard=4, replicate=2, param_dtype="bf16")).of("reduced")
    assert groups[-1] - alone[-1] == 4 * 10 * layer // 4


def test_a_few_sizes_give_all_others():
    """What is gathered and reduced does not depend on the batch; a size that was not traced is one that was."""
    request = sharded(layers=4)
    sampled = {
        size: record(replace(request, micro_batch=size[0], seq_len=size[1]))
        for size in sampled_sizes(request.micro_batch)
    }
    assert tape_at(sampled, (1, 331)) == record(replace(request, seq_len=331))
