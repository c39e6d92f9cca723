"""Engine rules against figures measured on real engines, and against hand arithmetic from their source.

Run: pytest tests/test_engines.py. The measured figures are those of shared/reference/engine_facts.md: two CPU
ranks, a 33.6M-parameter Llama with tiny activations, bytes per parameter (B/param) on one rank. The model's exact
count, its shapes and its activations are not stated there: 33.6e6 is taken as a bare count (so nothing that is
gathered layer by layer is in the prediction) and 5% is allowed. The CUDA workspace is left out, as on a CPU.
"""

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memcore.budget import Budget, Evidence, predict
from memcore.inventory import Block, Inventory, Role, Shapes, Tensor, TensorKind
from memcore.models import catalogue_inventory
from memcore.scenario import parse_scenario
from memcore.terms import Category, Phase

TINY = 33_600_000
LLAMA = "meta-llama/Llama-3.1-8B"
LLAMA_PSI = 8_030_261_248


def deepspeed(stage: int, gpus: int = 2, model: Any = TINY, **parts: Any) -> Budget:
    zero = {"stage": stage, **parts.pop("zero", {})}
    scenario = {
        "model": {"name": model} if isinstance(model, str) else {"n_params": model},
        "hardware": {"gpus": gpus},
        "parallelism": {"engine": "deepspeed"},
        "engine_config": {"zero_optimization": zero},
        **parts,
    }
    return predict(parse_scenario(scenario))


def per_parameter(budget: Budget, phase: Phase) -> float:
    """The phase's peak in bytes per parameter, without the CUDA workspace."""
    index = budget.phase_peaks()[phase]
    terms = [term for term in budget.terms if term.category is not Category.WORKSPACE]
    return sum(term.at(index) for term in terms) / budget.states.n_params


def llama(*, vocabulary: int, hidden: int, inner: int, layers: int) -> Inventory:
    """A Llama's parameters, without grouped heads or tying."""

    def linear(name: str, role: Role, *shape: int) -> Tensor:
        return Tensor(name=f"{name}.weight", shape=shape, role=role, kind=TensorKind.LINEAR)

    def norm(name: str) -> Tensor:
        return Tensor(name=name, shape=(hidden,), role=Role.NORM, kind=TensorKind.NORM)

    table = Tensor(name="weight", shape=(vocabulary, hidden), role=Role.EMBEDDING, kind=TensorKind.EMBEDDING)
    layer = (
        *(linear(f"self_attn.{name}_proj", Role.ATTENTION, hidden, hidden) for name in "qkvo"),
        linear("mlp.gate_proj", Role.MLP, inner, hidden),
        linear("mlp.up_proj", Role.MLP, inner, hidden),
        linear("mlp.down_proj", Role.MLP, hidden, inner),
        norm("input_layernorm.weight"),
        norm("post_attention_layernorm.weight"),
    )
    blocks = (
        Block(name="model.embed_tokens", tensors=(table,)),
        *(Block(name=f"model.layers.{index}", tensors=layer, layer=index) for index in range(layers)),
        Block(name="model.norm", tensors=(norm("weight"),)),
        Block(name="lm_head", tensors=(replace(table, role=Role.HEAD, kind=TensorKind.LINEAR),)),
    )
    shapes = Shapes(
        hidden_size=hidden,
        num_layers=layers,
        num_heads=8,
        num_kv_heads=8,
        head_dim=hidden // 8,
        intermediate_size=inner,
        vocab_size=vocabulary,
    )
    return Inventory(model_class="LlamaForCausalLM", tied=False, shapes=shapes, blocks=blocks)


def named(budget: Budget, name: str) -> int:
    """The term's largest bytes, 0 where it is not there."""
    return sum(term.largest for term in budget.terms if term.name == name)


def at(budget: Budget, name: str, label: str) -> int:
    (index,) = [index for index, moment in enumerate(budget.timeline) if moment.label == label]
    return sum(term.at(index) for term in budget.terms if term.name == name)


class TestMeasuredOnTwoRanks:
    """B/param as measured; the optimizer is DeepSpeed's FusedAdam, its default, unless said otherwise."""

    @pytest.mark.parametrize(
        ("phase", "measured"), [(Phase.IDLE, 14.0), (Phase.BACKWARD, 18.0), (Phase.OPTIMIZER, 24.0)]
    )
    def test_zero_0(self, phase: Phase, measured: float):
        # The default bucket of 5e8 elements is larger than the model: all gradients are flattened at once.
        assert per_parameter(deepspeed(0), phase) == pytest.approx(measured, rel=0.05)

    @pytest.mark.parametrize(("overlap_comm", "measured"), [(False, 11.1), (True, 10.5)])
    def test_zero_1_backward_with_a_bucket_of_1e7(self, overlap_comm: bool, measured: float):
        zero = {"reduce_bucket_size": 10_000_000, "overlap_comm": overlap_comm}
        assert per_parameter(deepspeed(1, zero=zero), Phase.BACKWARD) == pytest.approx(measured, rel=0.05)

    def test_zero_2_step(self):
        assert per_parameter(deepspeed(2), Phase.OPTIMIZER) == pytest.approx(12.0, rel=0.05)

    def test_zero_3_step_with_a_sub_group_of_4e6(self):
        # A bucket of 1e6, as in the note's other ZeRO-3 runs.
        zero = {"sub_group_size": 4_000_000, "reduce_bucket_size": 1_000_000}
        assert per_parameter(deepspeed(3, zero=zero), Phase.OPTIMIZER) == pytest.approx(8.8, rel=0.01)

    @pytest.mark.parametrize(
        ("max_live", "max_reuse", "prefetch", "measured"),
        [
            (1e9, 1e9, 1e6, 2.05),
            (3e6, 1e9, 1e6, 2.05),
            (1e9, 3e6, 1e6, 2.05),
            (1e9, 0, 1e6, 2.05),
            (1e9, 1e9, 0, 2.05),
            (1e9, 3e6, 0, 0.30),
            (3e6, 3e6, 1e6, 0.30),
            (1.2e7, 0, 1e6, 0.77),
            (2.0e7, 0, 1e6, 1.29),
        ],
    )
    def test_zero_3_gathered_at_the_start_of_the_backward(
        self, max_live: float, max_reuse: float, prefetch: float, measured: float
    ):  # fmt: skip
        # The shapes are not stated: a Llama of 33.7M in 8 layers is taken. The whole model is 2.0, so that
        # 0.05 of each figure is not gathered weights; a prefetch bucket (0.06) is allowed for where its layers end.
        zero = {
            "stage": 3,
            "stage3_max_live_parameters": max_live,
            "stage3_max_reuse_distance": max_reuse,
            "stage3_prefetch_bucket_size": prefetch,
        }
        scenario = {
            "model": {"config": {"model_type": "llama"}},
            "hardware": {"gpus": 2},
            "engine_config": {"zero_optimization": zero},
        }
        inventory = llama(vocabulary=8192, hidden=512, inner=1376, layers=8)
        budget = predict(parse_scenario(scenario), Evidence(inventory=inventory))
        found = at(budget, "gathered_parameters", "loss") + named(budget, "persistent_parameters")
        assert found / inventory.n_params == pytest.approx(measured - 0.05, abs=0.06)

    def test_zero_3_bucket_moves_every_phase_by_its_bytes(self):
        small = deepspeed(3, zero={"reduce_bucket_size": 1_000_000})
        large = deepspeed(3, zero={"reduce_bucket_size": 10_000_000})
        for phase in Phase:
            # In the backward its contents exist a second time, interleaved by rank for the reduce-scatter.
            times = 2 if phase is Phase.BACKWARD else 1
            moved = per_parameter(large, phase) - per_parameter(small, phase)
            assert moved == pytest.approx(times * 9e6 * 2 / TINY)


class TestPublishedSingleGpu:
    """Pure BF16 full fine-tuning with foreach AdamW: peak 10.0 B/param, steady 6.0 (three models, three digits)."""

    @pytest.mark.parametrize("psi", [1_235_814_400, 3_212_749_824, 8_030_261_248])
    def test_pure_bf16_adamw(self, psi: int):
        budget = predict(parse_scenario({"model": {"n_params": psi}, "recipe": {"convention": "pure_bf16"}}))
        assert per_parameter(budget, Phase.OPTIMIZER) == 10.0
        assert per_parameter(budget, Phase.IDLE) == 6.0
        assert budget.binding_phase is Phase.OPTIMIZER

    def test_fused_makes_no_temporary(self):
        recipe = {"convention": "pure_bf16", "optimizer": {"name": "adamw", "implementation": "fused"}}
        budget = predict(parse_scenario({"model": {"n_params": 1000}, "recipe": recipe}))
        assert per_parameter(budget, Phase.OPTIMIZER) == 8.0


class TestDeepSpeed:
    """By hand from deepspeed 0.19.8's source; N ranks, Psi parameters."""

    @pytest.mark.parametrize(("copies", "overlap_comm"), [(1, None), (1, False), (2, True)])
    def test_overlap_comm_doubles_the_bucket_at_stages_1_and_2(self, copies: int, overlap_comm: bool | None):
        zero = {"reduce_bucket_size": 1000, "overlap_comm": overlap_comm}
        assert named(deepspeed(1, zero=zero), "reduce_bucket") == copies * 2000
        assert named(deepspeed(2, zero=zero), "reduce_bucket") == copies * 2000

    def test_overlap_comm_does_not_double_it_at_stage_3(self):
        zero = {"reduce_bucket_size": 1000, "overlap_comm": True}
        assert named(deepspeed(3, zero=zero), "reduce_bucket") == 2000

    def test_default_bucket_is_1_gb(self):
        assert [named(deepspeed(stage), "reduce_bucket") for stage in (1, 2, 3)] == [10**9] * 3

    def test_bucket_lives_in_the_backward_at_stage_2_and_always_at_stage_3(self):
        two, three = deepspeed(2), deepspeed(3)
        assert [at(two, "reduce_bucket", label) for label in ("init", "backward[0]", "optimizer", "idle")] == [
            0, 10**9, 0, 0,
        ]  # fmt: skip
        (term,) = [term for term in three.terms if term.name == "reduce_bucket"]
        assert {term.at(index) for index in range(len(three.timeline))} == {10**9}

    def test_zero_1_holds_all_gradients_before_they_are_reduced(self):
        budget = deepspeed(1, gpus=8, model=7_000_000_000)
        assert at(budget, "gradients", "backward[0]") == 14 * 10**9
        # What is in the first bucket has given up its own storage when the slice of 2 Psi / 8 comes.
        assert at(budget, "gradients", "backward[reduce]") == 13 * 10**9
        assert at(budget, "gradient_slice", "backward[reduce]") == 1_750_000_000
        assert at(budget, "gradients", "optimizer[gradients]") == 0

    @pytest.mark.parametrize("stage", [1, 2])
    def test_step_copies_are_gone_but_the_fp32_one_at_the_update(self, stage: int):
        budget = deepspeed(stage)
        half = TINY // 2
        assert at(budget, "gradient_slice", "optimizer[gradients]") == 2 * half
        assert at(budget, "step_gradient_copies", "optimizer[gradients]") == (2 + 4) * half
        assert at(budget, "gradient_slice", "optimizer") == 0
        assert at(budget, "step_gradient_copies", "optimizer") == 4 * half

    def test_foreach_comes_at_the_update_and_does_not_add_to_the_copies(self):
        # 2 + 6 resident; readying 1 + 1 + 2 = 4; updating 2 + 2 = 4: 12 B/param either way.
        recipe = {"optimizer": {"name": "adamw", "implementation": "foreach"}}
        budget = deepspeed(2, recipe=recipe)
        assert at(budget, "foreach_temporary", "optimizer[gradients]") == 0
        assert at(budget, "foreach_temporary", "optimizer") == 4 * TINY // 2
        assert per_parameter(budget, Phase.OPTIMIZER) == pytest.approx(12.0)

    def test_zero_0_with_foreach_peaks_at_the_copies(self):
        # Readying: 14 + 2 + 4 + 4 = 24; updating: 14 + 4 + 4 = 22.
        recipe = {"optimizer": {"name": "adamw", "implementation": "foreach"}}
        assert per_parameter(deepspeed(0, recipe=recipe), Phase.OPTIMIZER) == pytest.approx(24.0)

    def test_zero_3_step_takes_one_sub_group_at_a_time(self):
        budget = deepspeed(3, gpus=8, model=8_000_000_000, zero={"sub_group_size": 100_000_000})
        assert at(budget, "step_gradient_copies", "optimizer[gradients]") == (2 + 4) * 100_000_000
        assert at(budget, "step_gradient_copies", "optimizer") == 4 * 100_000_000

    def test_fp32_accumulation_at_stage_2_needs_no_copies_for_the_step(self):
        budget = deepspeed(2, recipe={"convention": "deepspeed_fp32_grad"})
        assert named(budget, "gradient_slice") == 4 * TINY // 2
        assert named(budget, "step_gradient_copies") == 0
        assert per_parameter(budget, Phase.OPTIMIZER) == pytest.approx(2 + 12 / 2 + 4 / 2)

    def test_fp32_accumulation_at_stage_1_keeps_whole_fp32_gradients(self):
        """Measured on two ranks: 12.0 between steps, 16.0 in the backward, 14.0 in the step."""
        budget = deepspeed(1, recipe={"convention": "deepspeed_fp32_grad"})
        assert per_parameter(budget, Phase.IDLE) == pytest.approx(2 + 4 + 12 / 2)
        assert per_parameter(budget, Phase.BACKWARD) == pytest.approx(12 + 2 + 2)
        assert per_parameter(budget, Phase.OPTIMIZER) == pytest.approx(12 + 2)

    def test_optimizer_offload_takes_states_and_gradients_off_the_gpu(self):
        budget = deepspeed(2, offload={"optimizer": "cpu"})
        assert per_parameter(budget, Phase.OPTIMIZER) == 2.0
        # The bucket, and its contents once more while they are reduced: all of these few parameters.
        assert per_parameter(budget, Phase.BACKWARD) == pytest.approx(2.0 + 10**9 / TINY + 2.0)

    def test_accumulation_keeps_gradients_through_the_forward(self):
        once, twice = deepspeed(2), deepspeed(2, workload={"grad_accum": 2})
        assert at(once, "gradient_slice", "forward[0]") == 0
        assert at(twice, "gradient_slice", "forward[0]") == 2 * TINY // 2

    def test_flat_groups_are_padded_to_two_elements_a_rank(self):
        # nccl_start_alignment_factor 2: 10 elements on 4 ranks become 16, 4 each instead of ceil(10 / 4) = 3.
        budget = deepspeed(1, gpus=4, model=10)
        assert named(budget, "slice_padding") == 1 * 12

    def test_stage_3_pads_each_tensor(self):
        inventory = catalogue_inventory("openai-community/gpt2")
        assert inventory is not None
        ranks = 7
        by_tensor = sum(math.ceil(tensor.numel / ranks) for tensor in inventory.tensors())
        budget = deepspeed(3, gpus=ranks, model="openai-community/gpt2")
        assert named(budget, "slice_padding") == 14 * (by_tensor - math.ceil(124_439_808 / ranks))

    def test_stage_3_gathers_a_whole_model_when_nothing_limits_the_prefetcher(self):
        budget = deepspeed(3, gpus=8, model=LLAMA, zero={"stage3_max_live_parameters": 10**12})
        norms = 65 * 4096  # under the persistence threshold of 1e5: never divided, so never gathered
        assert named(budget, "gathered_parameters") == 2 * (LLAMA_PSI - norms)
        assert named(budget, "persistent_parameters") == 2 * norms

    def test_stage_3_without_prefetch_gathers_the_largest_tensor(self):
        # The head stays from its forward to its backward; a layer before it is 2 x 525M elements from its own.
        zero = {"stage3_max_live_parameters": 0, "stage3_prefetch_bucket_size": 0}
        budget = deepspeed(3, gpus=8, model=LLAMA, zero=zero)
        assert named(budget, "gathered_parameters") == 2 * 128256 * 4096

    def test_stage_3_defaults_run_ahead_to_max_live_and_what_the_next_module_needs(self):
        gathered = named(deepspeed(3, gpus=8, model=LLAMA), "gathered_parameters")
        assert 2 * 10**9 <= gathered <= 2 * (10**9 + 5 * 10**7 + 128256 * 4096)


class TestDdpAndFsdp2:
    """torch 2.13."""

    def test_ddp_buckets_are_a_second_set_of_gradients(self):
        scenario = {"model": {"n_params": 1000}, "hardware": {"gpus": 8}, "recipe": {"convention": "amp_autocast"}}
        budget = predict(parse_scenario(scenario))
        assert budget.scenario.parallelism.engine == "ddp"
        assert named(budget, "ddp_buckets") == 4 * 1000
        (term,) = [term for term in budget.terms if term.name == "ddp_buckets"]
        assert isinstance(term.bytes_at, int)
        assert per_parameter(budget, Phase.BACKWARD) == 16 + 4

    def test_ddp_buckets_of_adapters_only(self):
        scenario = {"model": {"name": LLAMA}, "hardware": {"gpus": 8}, "recipe": {"method": "lora"}}
        assert named(predict(parse_scenario(scenario)), "ddp_buckets") == 4 * 41_943_040

    def test_fsdp2_gathers_units_beside_the_root(self):
        """The first layer is gathered while the root's own gather is still there; then three layers' worth, two where
        they compute in the backward. The head's gradients wait for the embedding's."""
        scenario = {
            "model": {"name": LLAMA},
            "hardware": {"gpus": 8},
            "parallelism": {"engine": "fsdp2"},
            "recipe": {"convention": "fsdp2_mixed"},
        }
        budget = predict(parse_scenario(scenario))
        layer, root = 218_112_000, 2 * 128256 * 4096 + 4096
        assert at(budget, "gathered_parameters", "forward[0]") == 2 * (2 * layer + 2 * root)
        assert at(budget, "gathered_parameters", "forward[1]") == 2 * (3 * layer + root)
        assert at(budget, "gathered_parameters", "backward[1]") == 2 * (2 * layer + root)
        assert at(budget, "reduced_gradients", "backward[1]") == (2 + 4) * layer + 2 * (128256 * 4096 + 4096)
        assert at(budget, "reduced_gradients", "backward[reduce]") == (2 + 4) * root - 4 * root // 8
        assert at(budget, "gradients", "optimizer") == 4 * math.ceil(LLAMA_PSI / 8)
        assert at(budget, "gradients", "forward[0]") == 0

    def test_layers_that_stay_gathered_cost_what_was_published(self):
        """torchtitan's Llama 3 8B on 8 GPUs: reshard_after_forward=False took 12.6 GiB more."""
        peaks = []
        for reshards in (True, False):
            data = {
                "model": {"name": LLAMA},
                "hardware": {"gpus": 8},
                "parallelism": {"engine": "fsdp2"},
                "engine_config": {"reshard_after_forward": reshards},
                "recipe": {"convention": "fsdp2_mixed"},
                "workload": {"seq_len": 8192, "checkpointing": "full"},
            }
            peaks.append(predict(parse_scenario(data)).peak_bytes)
        assert (peaks[1] - peaks[0]) / 2**30 == pytest.approx(12.6, abs=0.05)

    def test_gradients_as_views_of_ddps_buckets_are_not_there_twice(self):
        budgets = [
            predict(
                parse_scenario(
                    {
                        "model": {"name": LLAMA},
                        "hardware": {"gpus": 8},
                        "parallelism": {"engine": "ddp"},
                        "engine_config": {"gradient_as_bucket_view": view},
                        "recipe": {"convention": "pure_bf16"},
                    }
                )
            )
            for view in (False, True)
        ]
        assert [named(budget, "ddp_buckets") for budget in budgets] == [2 * LLAMA_PSI] * 2
        assert [named(budget, "gradients") for budget in budgets] == [2 * LLAMA_PSI, 0]

    def test_one_rank_gathers_nothing_but_fsdp2_copies_its_own(self):
        alone = {"engine": "deepspeed", "zero_stage": 3}
        budget = predict(parse_scenario({"model": {"name": LLAMA}, "parallelism": alone}))
        assert named(budget, "gathered_parameters") == 0
        budget = predict(parse_scenario({"model": {"name": LLAMA}, "parallelism": {"engine": "fsdp2"}}))
        assert named(budget, "gathered_parameters") == 2 * (218_112_000 + 2 * 128256 * 4096 + 4096)

    def test_fsdp2_shares_out_rows(self):
        """Adapters of rank 16 among 64 ranks: each A of 16 rows is one row of 4,096 on the first rank."""
        data = {
            "model": {"name": LLAMA},
            "hardware": {"gpus": 64},
            "parallelism": {"engine": "fsdp2"},
            "recipe": {"method": "lora", "lora": {"rank": 16, "targets": ["q_proj"]}},
        }
        budget = predict(parse_scenario(data))
        assert named(budget, "adapter_weights") == 4 * 32 * (4096 + 64 * 16)

    def test_fsdp2_on_the_host_leaves_the_gpu_what_moves(self):
        data = {
            "model": {"name": LLAMA},
            "hardware": {"gpus": 8},
            "parallelism": {"engine": "fsdp2"},
            "engine_config": {"cpu_offload": True},
            "recipe": {"convention": "fsdp2_mixed"},
        }
        budget = predict(parse_scenario(data))
        states = ("weights", "gradients", "momentum", "variance", "foreach_temporary")
        assert [named(budget, name) for name in states] == [0] * 5
        assert at(budget, "gathered_parameters", "backward[1]") == 2 * (2 * 218_112_000 + 2 * 128256 * 4096 + 4096)
        assert budget.host.cpu_bytes == 16 * LLAMA_PSI


class TestGradientsThroughTheBackward:
    """Whole gradients appear layer by layer, the last layer's first."""

    def test_llama_by_layer(self):
        budget = predict(parse_scenario({"model": {"name": LLAMA}, "recipe": {"convention": "pure_bf16"}}))
        embedding, layer = 128256 * 4096, 218_112_000
        after = embedding + 4096  # the head, as large as the embedding, and the final norm
        assert at(budget, "gradients", "backward[31]") == 2 * (after + layer)
        assert at(budget, "gradients", "backward[1]") == 2 * (after + 31 * layer)
        assert at(budget, "gradients", "backward[0]") == 2 * LLAMA_PSI
        assert at(budget, "gradients", "loss") == 0
        assert at(budget, "gradients", "optimizer") == 2 * LLAMA_PSI
        assert at(budget, "gradients", "idle") == 0

    def test_accumulated_gradients_are_all_there_from_the_forward_on(self):
        recipe = {"convention": "pure_bf16"}
        budget = predict(parse_scenario({"model": {"name": LLAMA}, "recipe": recipe, "workload": {"grad_accum": 2}}))
        assert at(budget, "gradients", "forward[0]") == 2 * LLAMA_PSI
        assert at(budget, "gradients", "backward[31]") == 2 * LLAMA_PSI


@given(stage=st.integers(0, 3), gpus=st.sampled_from([1, 2, 3, 5, 7, 8, 24, 56, 512]), psi=st.integers(1, 10**12))
def test_deepspeed_resident_states_are_the_theorys_and_padding(stage: int, gpus: int, psi: int):
    """Between steps there are weights and optimizer slices as in the paper, up to two values of padding each."""
    budget = deepspeed(stage, gpus=gpus, model=psi)
    idle = len(budget.timeline) - 1
    held = sum(t.at(idle) for t in budget.terms if t.category in (Category.WEIGHTS, Category.OPTIMIZER))
    theory = budget.static.weights_bytes + budget.static.optimizer_bytes
    assert theory <= held <= theory + 2 * 14
