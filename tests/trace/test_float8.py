"""Products in float8 in a trace, beside torchao's own: peaks that the same trace finds with torchao 0.17.0 (torch 2.13)
in place of the stand-ins, by its convert_to_float8_training with the head left out.

Run: pytest tests/trace/test_float8.py -s (prints the figures).
"""

from typing import Any

import pytest
from small_models import CONFIGS, GPT
from test_fsdp2_form import by_moment

from memcore.budget import predict
from memcore.errors import UserError
from memcore.scenario import parse_scenario
from memcore.trace.request import Request, Sharding
from memcore.trace.tracer import trace

pytestmark = [pytest.mark.usefixtures("one_torch_thread"), pytest.mark.filterwarnings("ignore")]


def figures(**changes: Any) -> tuple[int, int]:
    """The peak of a small llama's step, and the sum over the fullest instants of its moments."""
    given: dict[str, Any] = {
        "config": CONFIGS["llama"], "micro_batch": 2, "seq_len": 128, "dtype": "bf16", "attention": "flash",
        "checkpointing": "full", "loss": "unfused", "float8": "tensorwise",
    }  # fmt: skip
    profile = trace(Request(**given | changes))
    return max(profile.with_gradients), sum(profile.with_gradients)


def sharding(**changes: Any) -> Sharding:
    given: dict[str, Any] = {"shard": 4, "replicate": 1, "reshard_after_forward": True}
    return Sharding(**given, param_dtype="fp32", reduce_dtype="fp32", **changes)


SELECTIVE = "save(mm_alternate,attention)"


@pytest.mark.parametrize(
    ("changes", "of_torchao"),
    [
        ({"checkpointing": "none"}, (14_017_048, 97_989_768)),
        ({"float8": "rowwise"}, (9_902_088, 45_662_248)),
        ({"float8": "rowwise_with_gw_hp", "checkpointing": SELECTIVE}, (9_667_080, 60_090_408)),
        ({"sharding": sharding(gathers_float8=True)}, (11_781_280, 71_114_392)),
        (
            {"sharding": sharding(gathers_float8=True), "compiled": True, "checkpointing": SELECTIVE},
            (10_000_592, 67_959_388),
        ),
    ],
)  # fmt: skip
def test_torchaos_own_code_takes_the_same(changes: dict[str, Any], of_torchao: tuple[int, int]):
    found = figures(**changes)
    print(changes, found)
    assert found == of_torchao


def test_what_is_kept_is_in_16_bits():
    """Uncompiled, float8 keeps what BF16 keeps, to the byte, and makes casts on top."""

    def saved(**changes: Any) -> list[int]:
        given: dict[str, Any] = {"config": CONFIGS["llama"], "micro_batch": 2, "seq_len": 128, "dtype": "bf16"}
        request = Request(**given, attention="flash", checkpointing="none", loss="unfused", **changes)
        return list(trace(request).of("saved"))

    plain, float8 = saved(), saved(float8="tensorwise")
    assert float8[CONFIGS["llama"]["num_hidden_layers"]] == plain[CONFIGS["llama"]["num_hidden_layers"]]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (GPT, "no linear module"),  # Conv1D, which torchao leaves as they are
        ({**CONFIGS["llama"], "intermediate_size": 712}, "256 by 712 is no multiple of 16"),
    ],
)
def test_what_float8_products_cannot_take(config: dict[str, Any], words: str):
    with pytest.raises(UserError, match=words):
        figures(config=config)


def test_the_closed_form_of_gathers_in_float8():
    """A layer of Llama-3.1-8B has 218,103,808 values in linear modules, each gathered in one byte in place of two:
    0.2 GiB less at the loss, as published (torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, table 3: 61.8 in
    place of 62.0 GiB)."""

    def at_loss(fp8: str | None, *, gathers: bool = False) -> int:
        given: dict[str, Any] = {"model": {"name": "meta-llama/Llama-3.1-8B"}, "hardware": {"gpus": 128}}
        recipe = {"convention": "fsdp2_mixed", "fp8": fp8}
        given |= {"engine_config": {"enable_fsdp_float8_all_gather": gathers}}
        budget = predict(parse_scenario({**given, "parallelism": {"engine": "fsdp2"}, "recipe": recipe}))
        return by_moment(budget, "gathered_parameters")["loss"]

    assert at_loss(None) - at_loss("tensorwise") == 0
    assert at_loss(None) - at_loss("tensorwise", gathers=True) == 218_103_808
