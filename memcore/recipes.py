"""What one parameter costs, by named convention: the dtypes of weights, gradients, master copy and states.

A convention is a citation and a set of dtypes, never a hidden constant; 14, 16, 18 and 20 bytes per
parameter are all true of some program.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from memcore.errors import UserError
from memcore.i18n import gettext as _
from memcore.i18n import mark


class DType(StrEnum):
    """Storage types of a parameter's values."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"

    @property
    def size(self) -> int:
        """Bytes per value."""
        return 4 if self is DType.FP32 else 2


class ConventionName(StrEnum):
    """The named conventions."""

    ZERO_PAPER = "zero_paper"
    DEEPSPEED_FP32_GRAD = "deepspeed_fp32_grad"
    DEEPSPEED_ESTIMATOR = "deepspeed_estimator"
    MEGATRON = "megatron"
    FSDP2_MIXED = "fsdp2_mixed"
    AMP_AUTOCAST = "amp_autocast"
    PURE_BF16 = "pure_bf16"
    PURE_FP16 = "pure_fp16"
    FP32 = "fp32"


@dataclass(frozen=True, kw_only=True, slots=True)
class Convention:
    """The dtypes that a program keeps for one trained parameter.

    `master_dtype` None: no separate copy for the update. `accumulate_dtype`: a second gradient in that
    dtype beside the one in `grad_dtype`, which is itself kept up to ZeRO stage `low_gradient_until`
    and beyond it exists only for a moment. `lowest_stage`: below it the program has no such form.
    """

    label: str
    param_dtype: DType
    compute_dtype: DType
    grad_dtype: DType
    reduce_dtype: DType
    master_dtype: DType | None
    state_dtype: DType
    citation: str
    accumulate_dtype: DType | None = None
    low_gradient_until: int = 3
    lowest_stage: int = 0

    def check_stage(self, stage: int) -> None:
        """Raise UserError where the cited program has no such form at this ZeRO stage."""
        if stage < self.lowest_stage:
            message = _(
                "recipe.convention is {label}, which has no form below ZeRO stage {lowest}; the stage is {stage}."
            )
            raise UserError(
                message.format(label=self.label, lowest=self.lowest_stage, stage=stage), "recipe.convention"
            )

    def bytes_per_parameter(self, num_moments: int = 2) -> int:
        """Bytes of one undivided trained parameter with an optimizer that keeps `num_moments` values."""
        master = self.master_dtype.size if self.master_dtype else 0
        accumulate = self.accumulate_dtype.size if self.accumulate_dtype else 0
        gradient = self.grad_dtype.size if self.low_gradient_until >= self.lowest_stage else 0
        return self.param_dtype.size + gradient + accumulate + master + num_moments * self.state_dtype.size


def _mixed(label: str, citation: str, **differences: Any) -> Convention:
    """BF16 weights and gradients, FP32 master copy and states, but for the differences."""
    usual: dict[str, Any] = {
        "param_dtype": DType.BF16,
        "compute_dtype": DType.BF16,
        "grad_dtype": DType.BF16,
        "reduce_dtype": DType.BF16,
        "master_dtype": DType.FP32,
        "state_dtype": DType.FP32,
    }
    return Convention(label=label, citation=citation, **usual | differences)


def _pure(dtype: DType, label: str, citation: str) -> Convention:
    """Everything in one dtype, without a master copy."""
    names = ("param_dtype", "compute_dtype", "grad_dtype", "reduce_dtype", "state_dtype")
    return _mixed(label, citation, master_dtype=None, **dict.fromkeys(names, dtype))


_FP32_EVERYWHERE_BUT_COMPUTING: dict[str, Any] = {
    "param_dtype": DType.FP32,
    "grad_dtype": DType.FP32,
    "reduce_dtype": DType.FP32,
    "master_dtype": None,
}
_TORCH_STATES = "torch 2.13, optim/adam.py, Adam._init_group: states take the parameter's dtype"

CONVENTIONS = {
    ConventionName.ZERO_PAPER: _mixed("ZeRO paper", "arXiv 1910.02054, section 3.1: 2 + 2 + K bytes, K = 12 for Adam"),
    ConventionName.DEEPSPEED_FP32_GRAD: _mixed(
        "DeepSpeed BF16, FP32 gradient accumulation",
        "deepspeed 0.19.8, runtime/bf16_optimizer.py, _setup_for_real_optimizer, clear_lp_grads",
        reduce_dtype=DType.FP32,
        accumulate_dtype=DType.FP32,
        # Stage 1 keeps the 16-bit gradients (they are zeroed, not freed); later stages add them into
        # the FP32 partition as they come.
        low_gradient_until=1,
        lowest_stage=1,
    ),
    ConventionName.DEEPSPEED_ESTIMATOR: _mixed(
        "DeepSpeed's estimator",
        "deepspeed 0.19.8, runtime/zero/stage_1_and_2.py, estimate_zero2_model_states_mem_needs: 2 + 18/N; "
        "stage3.py, estimate_zero3_model_states_mem_needs: 18/N + 4 bytes x largest layer",
        accumulate_dtype=DType.FP32,
        low_gradient_until=2,
        lowest_stage=2,
    ),
    ConventionName.MEGATRON: _mixed(
        "Megatron, FP32 main gradients",
        "Megatron-LM, docs, distributed optimizer: 6 + 12/DP bytes with BF16 parameters and FP32 gradients",
        grad_dtype=DType.FP32,
        reduce_dtype=DType.FP32,
    ),
    ConventionName.FSDP2_MIXED: _mixed(
        "FSDP2 mixed precision",
        "torch 2.13, distributed/fsdp/_fully_shard/_fsdp_api.py, MixedPrecisionPolicy",
        **_FP32_EVERYWHERE_BUT_COMPUTING,
    ),
    ConventionName.AMP_AUTOCAST: _mixed(
        "AMP autocast",
        "torch 2.13, amp/autocast_mode.py: FP32 parameters and gradients, 16-bit casts while computing",
        **_FP32_EVERYWHERE_BUT_COMPUTING,
    ),
    ConventionName.PURE_BF16: _pure(DType.BF16, "pure BF16", _TORCH_STATES),
    ConventionName.PURE_FP16: _pure(DType.FP16, "pure FP16", _TORCH_STATES),
    ConventionName.FP32: _pure(DType.FP32, "FP32", _TORCH_STATES),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherTool:
    """What another tool answers for N data-parallel ranks, as a function of the stage.

    `per_parameter(stage, ranks)`: bytes per parameter, None where the tool has no such stage.
    `fixed_bytes(stage, ranks)`: what it adds whatever the model's size. `per_largest_layer(stage)`: bytes for each
    parameter of the largest module that owns some itself, whole on each rank.
    """

    label: str
    per_parameter: Callable[[int, int], float | None]
    why: str
    source: str
    fixed_bytes: Callable[[int, int], int] = lambda stage, ranks: 0
    per_largest_layer: Callable[[int], int] = lambda stage: 0

    def bytes_per_gpu(self, n_params: int, stage: int, ranks: int, largest_layer: int = 0) -> float | None:
        """The tool's answer for a model of `n_params` parameters; None where it has no such stage. `largest_layer`:
        parameters of the largest module, 0 where it is not known; then the answer is without it."""
        each = self.per_parameter(stage, ranks)
        if each is None:
            return None
        return each * n_params + self.fixed_bytes(stage, ranks) + self.per_largest_layer(stage) * largest_layer


def _by_stage(*formulas: Callable[[int], float] | None) -> Callable[[int, int], float | None]:
    def answer(stage: int, ranks: int) -> float | None:
        formula = formulas[stage]
        return None if formula is None else formula(ranks)

    return answer


def _eleuther_buffers(stage: int, ranks: int) -> int:
    """One all-gather bucket of 5e8 16-bit values from stage 1 on; at stage 3 also 1e9 live parameters."""
    if ranks == 1:
        return 0
    return (0, 1_000_000_000, 1_000_000_000, 3_000_000_000)[stage]


# Without offload: 2 Psi + 18 Psi / N at stage 2, 18 Psi / N + 4 x largest layer at stage 3.
DEEPSPEED_ESTIMATOR = OtherTool(
    label="DeepSpeed's estimator",
    per_parameter=_by_stage(None, None, lambda n: 2 + 18 / n, lambda n: 18 / n),
    per_largest_layer=lambda stage: 4 if stage == 3 else 0,
    why=mark("16-bit + FP32 gradients; at stage 3 four bytes per parameter of the largest layer"),
    source="deepspeed 0.19.8, runtime/zero/stage_1_and_2.py, estimate_zero2_model_states_mem_needs; stage3.py, "
    "estimate_zero3_model_states_mem_needs",
)

OTHER_TOOLS = (
    OtherTool(
        label="ZeRO paper",
        per_parameter=_by_stage(lambda n: 16, lambda n: 4 + 12 / n, lambda n: 2 + 14 / n, lambda n: 16 / n),
        why="2 + 2 + 12",
        source="arXiv 1910.02054, figure 1",
    ),
    DEEPSPEED_ESTIMATOR,
    OtherTool(
        label="DeepSpeed's documentation",
        per_parameter=_by_stage(None, None, lambda n: 4 + 16 / n, lambda n: 18 / n),
        why="4 + 16/N",
        source="DeepSpeed documentation, memory requirements",
    ),
    OtherTool(
        label="Megatron distributed optimizer",
        per_parameter=_by_stage(lambda n: 18, lambda n: 6 + 12 / n, None, None),
        why=mark("FP32 gradients: 6 + 12/DP"),
        source="Megatron-LM, docs, distributed optimizer",
    ),
    OtherTool(
        label="llm-analysis",
        per_parameter=_by_stage(lambda n: 18, lambda n: 6 + 12 / n, lambda n: 2 + 16 / n, lambda n: 18 / n),
        why=mark("FP32 gradients"),
        source="llm-analysis, llm_analysis/analysis.py, get_memory_optimizer_state_and_gradient_per_layer",
    ),
    OtherTool(
        label="EleutherAI calc_transformer_mem",
        per_parameter=_by_stage(lambda n: 18, lambda n: 6 + 12 / n, lambda n: 2 + 16 / n, lambda n: 18 / n),
        fixed_bytes=_eleuther_buffers,
        why=mark("FP32 gradients, one all-gather bucket, max_live_parameters counted as resident"),
        source="EleutherAI/cookbook, calc/calc_transformer_mem.py, calc_mem",
    ),
    OtherTool(
        label="PyTorch FSDP2, FP32 shards",
        per_parameter=_by_stage(lambda n: 16, None, None, lambda n: 16 / n),
        why="4 + 4 + 8",
        source="torch 2.13, distributed/fsdp/_fully_shard/_fsdp_api.py, MixedPrecisionPolicy",
    ),
)
