"""Weights, gradients and optimizer states of a scenario, undivided: what there is to share out.

Symbols: Psi parameters, Psi_t trained ones, r LoRA rank. All sizes are bytes over the whole model.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from memcore.adapters import lora_tensors, saved_modules
from memcore.engine_options import EngineName
from memcore.inventory import Inventory, Tensor, TensorKind
from memcore.optimizers import OPTIMIZERS, bytes_8bit, paged_bytes
from memcore.packing import packed_bytes, packed_tensors, packing_of
from memcore.recipes import CONVENTIONS, Convention, DType
from memcore.scenario import Lora, Method, Recipe, Scenario
from memcore.terms import Category, Formula, product
from memcore.units import ceil_div

# The ZeRO stage from which a kind of state is divided among the ranks (arXiv 1910.02054, section 5).
OPTIMIZER_STAGE, GRADIENT_STAGE, WEIGHT_STAGE = 1, 2, 3
NEVER = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """One kind of state. `elements` values take `total_bytes` over all ranks.

    It is divided from ZeRO stage `divided_from` on, and exists only for a moment from stage
    `fleeting_from` on. `paged_bytes` of it live in unified memory, outside PyTorch's allocator.
    """

    name: str
    category: Category
    elements: int
    total_bytes: int
    divided_from: int
    formula: Formula
    source: str
    fleeting_from: int = NEVER
    paged_bytes: int = 0

    @property
    def element_bytes(self) -> int | None:
        """Bytes per value where that is a whole number for all of them, else None."""
        return self.total_bytes // self.elements if self.elements and self.total_bytes % self.elements == 0 else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """The dtypes in force, and the convention that they come from, by name."""

    label: str
    citation: str
    convention: Convention


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelStates:
    """All states of a scenario. `trained` values are updated, of `n_params` in the base model.

    `precision` is the base model's, `trained_as` the dtypes of what is trained (the adapters may differ).
    """

    precision: Precision
    trained_as: Convention
    n_params: int
    trained: int
    states: tuple[State, ...]

    def of(self, *categories: Category) -> tuple[State, ...]:
        """The states of those categories."""
        return tuple(state for state in self.states if state.category in categories)

    def total_bytes(self, *categories: Category) -> int:
        """Undivided bytes of those categories."""
        return sum(state.total_bytes for state in self.of(*categories))

    @property
    def bytes_per_trained(self) -> float:
        """What one trained parameter costs, undivided: its weight, gradients and optimizer states. A frozen base is no
        part of it."""
        states = self.total_bytes(Category.GRADIENTS, Category.OPTIMIZER)
        return self.trained_as.param_dtype.size + states / self.trained


def precision_of(recipe: Recipe) -> Precision:
    """The convention with the recipe's explicit dtypes put in; any of them makes it "custom, from ..."."""
    convention = CONVENTIONS[recipe.convention]
    given = {
        name: value
        for name in ("param_dtype", "compute_dtype", "grad_dtype", "reduce_dtype", "state_dtype")
        if (value := getattr(recipe, name)) is not None and value is not getattr(convention, name)
    }
    custom = replace(convention, **given)
    if recipe.master_dtype is not None:
        master = None if recipe.master_dtype == "none" else DType(recipe.master_dtype)
        custom = replace(custom, master_dtype=master)
    if custom == convention:
        return Precision(label=convention.label, citation=convention.citation, convention=convention)
    label = f"custom, from {convention.label}"
    return Precision(label=label, citation=convention.citation, convention=replace(custom, label=label))


def model_states(scenario: Scenario, n_params: int, inventory: Inventory | None) -> ModelStates:
    """Every state of the scenario. `inventory` is None for a bare count (then only full training is asked for)."""
    recipe = scenario.recipe
    precision = precision_of(recipe)
    if recipe.method is Method.FULL:
        trained = tuple(inventory.tensors()) if inventory else ()
        states = _trained_states(scenario, precision.convention, trained, n_params, "weights")
        return ModelStates(
            precision=precision,
            trained_as=precision.convention,
            n_params=n_params,
            trained=n_params,
            states=states,
        )
    assert inventory is not None, "a scenario with adapters is refused without shapes"
    lora = recipe.lora or Lora()
    adapters = (*lora_tensors(inventory, lora), *saved_modules(inventory, lora))
    trained_count = sum(tensor.numel for tensor in adapters)
    convention = _adapter_convention(scenario, precision.convention, lora)
    states = (
        *_frozen_states(recipe, precision.convention, inventory),
        *_trained_states(scenario, convention, adapters, trained_count, "adapter_weights"),
    )
    return ModelStates(
        precision=precision, trained_as=convention, n_params=n_params, trained=trained_count, states=states
    )


def _adapter_convention(scenario: Scenario, convention: Convention, lora: Lora) -> Convention:
    """DeepSpeed casts adapters like all parameters and keeps a master; elsewhere peft's dtype rules
    (peft 0.21, tuners_utils.py, cast_adapter_dtype: FP32 by default) and there is no master."""
    if scenario.parallelism.engine is EngineName.DEEPSPEED:
        return convention
    dtype = lora.adapter_dtype
    return replace(
        convention,
        param_dtype=dtype,
        grad_dtype=dtype,
        master_dtype=None,
        state_dtype=dtype,
        accumulate_dtype=None,
    )


def _frozen_states(recipe: Recipe, convention: Convention, inventory: Inventory) -> tuple[State, ...]:
    packing = packing_of(recipe)
    if packing is None:
        count = inventory.n_params
        return (_weights("frozen_weights", count, convention.param_dtype, convention.citation),)
    packed = packed_tensors(inventory, packing)
    parts = [packed_bytes(tensor, packing) for tensor in packed]
    count, values = sum(tensor.numel for tensor in packed), sum(part.values for part in parts)
    scales = sum(part.scales for part in parts)
    zeros = values - ceil_div(count, 2)
    return (
        State(
            name="quantised_weights",
            category=Category.WEIGHTS,
            elements=count,
            total_bytes=values,
            divided_from=WEIGHT_STAGE,
            formula=Formula(
                symbols=r"\Psi_q / 2 + Z" if zeros else r"\Psi_q / 2",
                numbers=f"⌈{count:,} / 2⌉" + (f" + {zeros:,}" if zeros else ""),
            ),
            source=packing.source,
        ),
        State(
            name="quantisation_scales",
            category=Category.WEIGHTS,
            elements=0,
            total_bytes=scales,
            divided_from=NEVER,
            formula=Formula(symbols="Q", numbers=f"{scales:,}"),
            source=packing.source,
        ),
        *_unpacked_states(recipe, convention, inventory, inventory.n_params - count),
    )


def _unpacked_states(
    recipe: Recipe, convention: Convention, inventory: Inventory, count: int
) -> Sequence[State]:  # fmt: skip
    """What a 4-bit base leaves as it is, its norms apart where they are in FP32."""
    source = "transformers 5.24, integrations/bitsandbytes.py, replace_with_bnb_linear: what is not packed"
    norms = sum(t.numel for t in inventory.tensors() if t.kind is TensorKind.NORM) if recipe.fp32_norms else 0
    rest = _weights("frozen_weights", count - norms, _sixteen_bit(convention), source, r"\Psi_r")
    if not norms:
        return (rest,)
    in_fp32 = "peft 0.21, utils/other.py, prepare_model_for_kbit_training"
    return rest, _weights("fp32_norms", norms, DType.FP32, in_fp32, r"\Psi_n")


def _sixteen_bit(convention: Convention) -> DType:
    """What a 4-bit base keeps unquantised is loaded in the dtype of the computation."""
    return convention.compute_dtype if convention.compute_dtype is not DType.FP32 else convention.param_dtype


def _weights(name: str, count: int, dtype: DType, source: str, symbol: str = r"\Psi") -> State:
    return _values(name, Category.WEIGHTS, count, dtype, WEIGHT_STAGE, source, symbol)


def _values(
    name: str, category: Category, count: int, dtype: DType, divided_from: int, source: str, symbol: str
) -> State:  # fmt: skip
    return State(
        name=name,
        category=category,
        elements=count,
        total_bytes=dtype.size * count,
        divided_from=divided_from,
        formula=Formula(symbols=rf"{dtype.size}\,{symbol}", numbers=product(dtype.size, count)),
        source=source,
    )


def _trained_states(
    scenario: Scenario, convention: Convention, tensors: Sequence[Tensor], count: int, weights: str
) -> tuple[State, ...]:  # fmt: skip
    symbol = r"\Psi" if weights == "weights" else r"\Psi_t"

    def values(name: str, category: Category, dtype: DType, divided_from: int) -> State:
        return _values(name, category, count, dtype, divided_from, convention.citation, symbol)

    states = [values(weights, Category.WEIGHTS, convention.param_dtype, WEIGHT_STAGE)]
    gradients = values("gradients", Category.GRADIENTS, convention.grad_dtype, GRADIENT_STAGE)
    if convention.accumulate_dtype is not None:
        states.append(replace(gradients, fleeting_from=convention.low_gradient_until + 1))
        states.append(values("fp32_gradients", Category.GRADIENTS, convention.accumulate_dtype, GRADIENT_STAGE))
    else:
        states.append(gradients)
    if convention.master_dtype is not None:
        states.append(values("master_weights", Category.OPTIMIZER, convention.master_dtype, OPTIMIZER_STAGE))
    states.extend(_optimizer_states(scenario, convention, tensors, count, symbol))
    return tuple(states)


def _optimizer_states(
    scenario: Scenario, convention: Convention, tensors: Sequence[Tensor], count: int, symbol: str
) -> list[State]:  # fmt: skip
    optimizer = scenario.recipe.optimizer
    rule = OPTIMIZERS[optimizer.name]
    # DeepSpeed's stages and FSDP1 hand the optimizer slices of flat tensors, never whole ones.
    parallelism = scenario.parallelism
    flat = parallelism.engine in (EngineName.DEEPSPEED, EngineName.FSDP1) and parallelism.stage > 0
    if optimizer.name == "sgd" and not optimizer.momentum:
        return []
    # bitsandbytes' paged optimizers keep FP32 states, whatever the parameter's dtype.
    dtype = DType.FP32 if optimizer.paged else convention.state_dtype
    states = []
    for moment in rule.moments(tensors, count, flat):
        own = symbol if moment.elements == count else rf"\Psi_{{{moment.name[0]}}}"
        state = _values(
            moment.name,
            Category.OPTIMIZER,
            moment.elements,
            dtype,
            OPTIMIZER_STAGE,
            rule.source,
            own,
        )
        if optimizer.bits == 8:
            state = _in_8bit(state, tensors, flat)
        if optimizer.paged:
            state = replace(state, paged_bytes=paged_bytes(tensors, moment.elements, flat, optimizer.bits))
        states.append(state)
    return states


def _in_8bit(state: State, tensors: Sequence[Tensor], flat: bool) -> State:
    total = bytes_8bit(tensors, state.elements, flat)
    return replace(
        state,
        total_bytes=total,
        formula=Formula(
            symbols=r"\Psi + 4\,\Psi / 256 + \mathrm{FP32\ rest}",
            numbers=f"{state.elements:,} + {total - state.elements:,}",
        ),
        source="bitsandbytes 0.50, optim/optimizer.py, Optimizer2State.init_state: blocks of 256, small ones FP32",
    )
