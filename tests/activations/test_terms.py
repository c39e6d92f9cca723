"""Activations as terms over the moments of a step, and whole budgets against published A100 runs.

Run: pytest tests/activations/test_terms.py.
"""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from published import published_inventory, published_scenario

from memcore.activations import Kept, LayerForm, model_activations
from memcore.budget import Budget, Evidence, Missing, predict
from memcore.inventory import Role
from memcore.models import catalogue, catalogue_inventory
from memcore.scenario import parse_scenario
from memcore.terms import Phase

LLAMA = "meta-llama/Llama-3.1-8B"
WITH_SHAPES = [name for name, model in catalogue().items() if model.config is not None]
# One of each architecture: dense, grouped, experts, sinks, soft caps, latent attention, GPT-2's, joint projections.
MODELS = [
    LLAMA, "openai-community/gpt2", "openai/gpt-oss-20b", "google/gemma-2-9b", "mistralai/Mixtral-8x7B-v0.1",
    "deepseek-ai/DeepSeek-V2-Lite", "Qwen/Qwen3-0.6B", "EleutherAI/gpt-j-6b", "microsoft/Phi-3-mini-4k-instruct",
]  # fmt: skip
BF16 = {"convention": "pure_bf16"}
KINDS = ["none", "full", "attention", "segments(2)", "segments(5)", "every_nth(2)", "first(3)"]
ATTENTIONS = ["flash", "memory_efficient", "eager"]


def budget_of(model: str = LLAMA, recipe: dict[str, Any] | None = None, **workload: Any) -> Budget:
    return predict(parse_scenario({"model": {"name": model}, "recipe": recipe or BF16, "workload": workload}))


def at(budget: Budget, phase: Phase, *names: str) -> list[int]:
    """The named terms' sums at the phase's moments, in order; without names all activations."""
    return [
        sum(t.at(i) for t in budget.terms if (t.name in names if names else t.category.value == "activations"))
        for i, moment in enumerate(budget.timeline)
        if moment.phase is phase and isinstance(moment.segment, int | None)
    ]


KEPT = ("saved_activations", "attention_scores")
AGAIN = ("recomputed_activations", "recomputed_scores")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model", MODELS)
def test_kept_activations_grow_with_the_forward_and_shrink_with_the_backward(model: str, kind: str):
    budget = budget_of(model, attention="eager", seq_len=512, checkpointing=kind)
    forward, loss, backward = (at(budget, phase, *KEPT) for phase in (Phase.FORWARD, Phase.LOSS, Phase.BACKWARD))
    assert all(earlier <= later for earlier, later in pairwise(forward))
    assert loss == [forward[-1]]
    # The backward of layer i finds what layers 0 to i kept.
    assert backward == forward[::-1]
    for phase in (Phase.INIT, Phase.OPTIMIZER, Phase.IDLE):
        assert set(at(budget, phase)) == {0}
    assert sum(at(budget, Phase.FORWARD, *AGAIN)) == 0
    assert (sum(at(budget, Phase.BACKWARD, *AGAIN)) > 0) == (kind != "none")


@pytest.mark.parametrize("phase", [Phase.INIT, Phase.OPTIMIZER, Phase.IDLE])
def test_between_steps_no_logits_are_left(phase: Phase):
    assert set(at(budget_of(logits_retained=True), phase, "logits_loss", "final_norm")) == {0}


@settings(max_examples=25)
@given(
    model=st.sampled_from(MODELS),
    kind=st.sampled_from([kind for kind in KINDS if kind != "attention"]),
    batch=st.integers(1, 8),
    seq_len=st.integers(128, 16_384),
)
def test_flash_is_never_above_memory_efficient_nor_that_above_plain(model: str, kind: str, batch: int, seq_len: int):
    """From 128 tokens on: below, scores can be smaller than the joint projection that values, a view, keep alive.

    Recomputing the attention is left out: without its scores plain attention keeps no log-sum-exp either.
    """
    budgets = [
        budget_of(model, attention=attention, checkpointing=kind, micro_batch=batch, seq_len=seq_len)
        for attention in ATTENTIONS
    ]
    for lower, higher in pairwise(budgets):
        assert all(a <= b for a, b in zip(lower.totals, higher.totals, strict=True))


@given(
    model=st.sampled_from(MODELS),
    attention=st.sampled_from(ATTENTIONS),
    batch=st.integers(1, 8),
    seq_len=st.integers(1, 16_384),
)
def test_checkpointing_never_adds_to_what_is_kept(model: str, attention: str, batch: int, seq_len: int):
    def kept(kind: str) -> int:
        budget = budget_of(model, attention=attention, checkpointing=kind, micro_batch=batch, seq_len=seq_len)
        return at(budget, Phase.LOSS, *KEPT)[0]

    everything = kept("none")
    for kind in KINDS:
        assert kept(kind) <= everything
    assert kept("full") <= kept("first(3)") <= kept("none")
    assert kept("segments(2)") <= kept("full")


@pytest.mark.parametrize("model", MODELS)
def test_full_checkpointing_lowers_the_peak_of_activations(model: str):
    for attention in ATTENTIONS:
        none, full = (budget_of(model, attention=attention, checkpointing=kind) for kind in ("none", "full"))
        assert max(at(full, Phase.BACKWARD)) < max(at(none, Phase.BACKWARD))
        assert full.peak_bytes <= none.peak_bytes


@given(
    model=st.sampled_from(MODELS),
    kind=st.sampled_from(KINDS),
    attention=st.sampled_from(ATTENTIONS),
    loss=st.sampled_from(["unfused", "chunked", "fused"]),
    method=st.sampled_from(["full", "lora", "qlora"]),
    batch=st.integers(1, 16),
    seq_len=st.integers(1, 8192),
    more=st.integers(1, 4096),
)
def test_memory_never_falls_with_the_length_or_the_batch(
    model: str, kind: str, attention: str, loss: str, method: str, batch: int, seq_len: int, more: int
):  # fmt: skip
    def answer(batch: int, seq_len: int) -> Budget:
        workload = {"checkpointing": kind, "attention": attention, "loss": loss}
        return budget_of(model, {"method": method}, micro_batch=batch, seq_len=seq_len, **workload)

    base = answer(batch, seq_len)
    for larger in (answer(batch, seq_len + more), answer(batch + 1, seq_len)):
        assert all(few <= many for few, many in zip(base.totals, larger.totals, strict=True))


def test_activations_are_linear_in_the_batch():
    one, four = (budget_of(attention="eager", seq_len=1024, micro_batch=batch) for batch in (1, 4))
    assert [4 * size for size in at(one, Phase.BACKWARD)] == at(four, Phase.BACKWARD)


def test_accumulation_changes_no_activation():
    once, often = (budget_of(grad_accum=steps) for steps in (1, 16))
    assert at(once, Phase.BACKWARD) == at(often, Phase.BACKWARD)


def test_data_parallel_ranks_change_no_activation():
    data = {"model": {"name": LLAMA}, "hardware": {"gpus": 8}, "parallelism": {"zero_stage": 3}}
    assert at(predict(parse_scenario(data)), Phase.BACKWARD) == at(budget_of(), Phase.BACKWARD)


def test_adapters_keep_less_than_full_training_of_the_same_layers():
    """The frozen projections keep no input, the norms no normalised value; adapters on two modules add little."""
    lora = {"method": "lora", "lora": {"rank": 8, "targets": ["q_proj", "v_proj"]}}
    assert at(budget_of(recipe=lora), Phase.LOSS)[0] < at(budget_of(), Phase.LOSS)[0]


def test_a_bare_count_has_no_activations_and_says_so():
    budget = predict(parse_scenario({"model": {"n_params": 7_000_000_000}}))
    assert sum(at(budget, Phase.BACKWARD)) == 0
    assert Missing.ACTIVATIONS in budget.missing


@pytest.mark.parametrize("name", WITH_SHAPES)
def test_every_catalogue_model_has_a_form(name: str):
    """Every layer, whatever its kind, for training of all and of adapters; the largest layer is the likeliest."""
    inventory = catalogue_inventory(name)
    assert inventory is not None
    # Adapters beside experts have no form: those are traced.
    experts = any(tensor.role is Role.EXPERTS for tensor in inventory.tensors())
    for recipe in (BF16,) if experts else (BF16, {"method": "lora"}):
        scenario = parse_scenario({"model": {"name": name}, "recipe": recipe})
        budget = predict(scenario)
        assert budget.inventory is not None
        found = model_activations(scenario, budget.states, budget.inventory)
        assert found is not None
        assert len(found.forms) == len(budget.inventory.layers) == budget.inventory.shapes.num_layers
        assert Missing.ACTIVATIONS not in budget.missing
        hidden = budget.inventory.shapes.hidden_size
        for form in found.forms:
            assert form.input_bytes == 2 * hidden
            # A layer keeps more than its input, and less than a hundred 16-bit tensors of the hidden size.
            assert form.input_bytes < form.per_token < 100 * form.input_bytes


def test_rounding_is_of_whole_layers():
    kept = Kept(name="half", per_token=0.5, per_pair=0.25)
    assert kept.num_bytes(tokens=3, seq_len=3) == round(1.5 + 2.25)
    assert LayerForm(kept=(kept,), input_bytes=1, forward_extra=kept, backward_extras=(kept,)).total(4, 2) == 4


# --- published runs (tracing_facts.md, fact 17) ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(measured_runs: dict[str, Any]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = measured_runs["runs"]
    return found


def predicted(run: dict[str, Any], recipe: dict[str, Any], loss: str) -> Budget:
    """The run's own config, recipe and workload; its loss is one of ours."""
    inventory = published_inventory(run)
    assert inventory.n_params == run["model"]["n_params"]
    return predict(published_scenario(run, recipe, loss=loss), Evidence(inventory=inventory))


@pytest.mark.parametrize(
    ("name", "loss"),
    [
        # A fused cross-entropy over whole FP32 logits is the nearest to "unfused"; the step binds anyway.
        ("fms-a_liger-Meta-Llama-3-8B-foak-fast-kernels-full-g1-b4", "unfused"),
        ("fms-a_liger-Meta-Llama-3-8B-foak-fast-kernels-liger-full-g1-b4", "fused"),
        ("fms-a_liger-Meta-Llama-3-8B-foak-fast-kernels-liger-full-g1-b8", "fused"),
    ],
)
def test_llama_3_8b_full_bf16_on_an_a100(runs: dict[str, dict[str, Any]], name: str, loss: str):
    """80.318e9 bytes: the foreach step, 10 bytes per parameter, binds whatever the batch."""
    run = runs[name]
    assert run["measured"]["bytes"] == pytest.approx(80.318e9, rel=1e-4)
    budget = predicted(run, {}, loss)
    assert budget.peak_bytes == pytest.approx(run["measured"]["bytes"], rel=0.01)
    assert budget.binding_phase is Phase.OPTIMIZER


@pytest.mark.parametrize(
    ("name", "measured"),
    [
        ("fms-a_granite-PowerLM-3b-none-lora-g1-b4", 20.170e9),
        ("fms-a_granite-PowerLM-3b-none-lora-g1-b8", 33.153e9),
    ],
)
def test_powerlm_3b_lora_on_an_a100(runs: dict[str, dict[str, Any]], name: str, measured: float):
    """Rank 16 on q, k, v and o, FP32 adapters, transformers 4.45. Its loss made the logits' FP32 copy and then a
    shifted contiguous one of it, dropped before the backward: at its peak 12 bytes per logit, as today's."""
    run = runs[name]
    assert run["measured"]["bytes"] == pytest.approx(measured, rel=1e-4)
    lora = {"rank": run["recipe"]["lora"]["rank"], "targets": run["recipe"]["lora"]["targets"]}
    budget = predicted(run, {"method": "lora", "lora": {**lora, "adapter_dtype": "fp32"}}, "unfused")
    assert budget.states.trained == run["recipe"]["lora"]["trainable_params"]
    assert budget.peak_bytes == pytest.approx(run["measured"]["bytes"], rel=0.01)
    assert budget.binding_phase is Phase.LOSS
