"""What a step's graph still holds of the step before: hand arithmetic, and Python's own account of a graph.

Run: pytest tests/activations/test_held_over.py
"""

import weakref
from typing import Any

import pytest
import torch

from memcore.budget import Evidence, predict
from memcore.counting import count_config
from memcore.errors import UserError
from memcore.models import load_inventory
from memcore.scenario import Scenario, parse_scenario
from memcore.terms import Phase

LLAMA = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 512, "tie_word_embeddings": False,
}  # fmt: skip
QLORA = {
    "method": "qlora", "convention": "pure_bf16", "quantization": "nf4", "keeps_packed_inputs": True,
    "lora": {"targets": ["q_proj", "v_proj"]},
}  # fmt: skip


def scenario(recipe: dict[str, Any] | None = None, **workload: Any) -> Scenario:
    work = {"micro_batch": 2, "seq_len": 100, "last_loss_held": True, **workload}
    return parse_scenario({"model": {"config": LLAMA}, "recipe": {**QLORA, **(recipe or {})}, "workload": work})


@pytest.mark.parametrize("head", [False, True])
def test_each_layer_leaves_what_its_products_read(head: bool):
    """Attention and MLP read 256 values each, their last projections 256 and 704; the first layer's input wants no
    gradient and is not kept. 200 tokens of 2 bytes."""
    budget = predict(
        scenario({"quantize_lm_head": head}),
        Evidence(inventory=load_inventory(count_config({"config": LLAMA})["inventory"])),
    )
    (term,) = [term for term in budget.terms if term.name == "held_inputs"]
    assert term.largest == 200 * 2 * (4 * (256 + 256 + 256 + 704) - 256 + (256 if head else 0))
    phases = {moment.phase for index, moment in enumerate(budget.timeline) if term.at(index)}
    assert phases == {Phase.FORWARD, Phase.LOSS}


class _Kept(torch.autograd.Function):
    """One tensor as bitsandbytes kept it, one as autograd saves it."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        ctx.tensors = values * 2
        saved = values * 3
        ctx.save_for_backward(saved)
        _Kept.both = (weakref.ref(ctx.tensors.untyped_storage()), weakref.ref(saved.untyped_storage()))
        return values.sum()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        assert ctx.saved_tensors
        return gradients[0].expand(4)

    both: Any = None


def test_a_loss_that_is_held_keeps_attributes_alive_and_not_what_was_saved():
    loss = _Kept.apply(torch.ones(4, requires_grad=True))
    loss.backward()
    attribute, saved = _Kept.both
    assert attribute() is not None
    assert saved() is None
    del loss
    assert attribute() is None


@pytest.mark.parametrize(
    ("recipe", "workload", "sentence"),
    [
        ({"keeps_packed_inputs": False}, {}, "does nothing unless recipe.keeps_packed_inputs"),
        ({}, {"checkpointing": "full"}, "without checkpointing alone"),
    ],
)
def test_where_nothing_is_left_it_is_refused(recipe: dict[str, Any], workload: dict[str, Any], sentence: str):
    with pytest.raises(UserError, match=sentence) as refusal:
        scenario(recipe, **workload)
    assert refusal.value.field == "workload.last_loss_held"
