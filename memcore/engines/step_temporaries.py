"""What an optimizer's update makes for a moment beside its states, where its kernels make anything.

8-bit and paged optimizers, Lion's and DeepSpeed's own kernels update in place. Symbols: v_t this rank's values of
tensor t, k_t a matrix's shorter side, S the values of all.
"""

from collections.abc import Sequence
from itertools import pairwise

from memcore.engine_options import EngineName
from memcore.engines.base import Inputs, is_update, whole_tensors
from memcore.optimizers import OptimizerName, is_hidden_matrix
from memcore.terms import Category, Formula, Term, during, product

# Their parameters are whole tensors, handed to the optimizer as they are.
_WHOLE = (EngineName.SINGLE, EngineName.DDP)
# Values that the update of one matrix makes, for each of its own.
MADE_FOR_ONE = {
    **{(name, "foreach"): 1 for name in (OptimizerName.ADAM, OptimizerName.ADAMW, OptimizerName.ADAFACTOR)},
    **{(name, "for_loop"): 2 for name in (OptimizerName.ADAM, OptimizerName.ADAMW)},
    (OptimizerName.ADAFACTOR, "for_loop"): 1,
}


def step_temporary(inputs: Inputs, values: int, state_bytes: int, in_a_row: Sequence[int]) -> list[Term]:
    """What the update makes for a moment, in the states' dtype, by optimizer and implementation.

    Adam and AdamW. foreach: the square root of all variances at once. for_loop: two of a tensor's variance (the
    root, and the quotient), beside the quotient of the tensor before it, which its name still holds. fused: nothing.
    `values` trained values per rank, `in_a_row` those of each tensor in order. Measured with torch 2.13: 4.0 and 0
    bytes per FP32 value; for_loop 8.0 per value of one tensor, 12.0 where two of a size follow one another.
    """
    name = inputs.scenario.recipe.optimizer.name
    if name is OptimizerName.ADAFACTOR:
        return _adafactor(inputs, values, state_bytes, in_a_row)
    if name is OptimizerName.MUON:
        return _muon(inputs, state_bytes)
    if name not in (OptimizerName.ADAM, OptimizerName.ADAMW):
        return []
    size, term, function, symbols = {
        "foreach": (values, "foreach_temporary", "_multi_tensor_adam: torch._foreach_sqrt", "S"),
        "for_loop": (
            max(2 * each + before for before, each in pairwise((0, *in_a_row))),
            "for_loop_temporary",
            "_single_tensor_adam: exp_avg_sq.sqrt() / bias_correction2_sqrt",
            r"\max(2 v_t + v_{t-1})",
        ),
    }.get(inputs.implementation, (0, "", "", ""))
    if not size:
        return []
    formula = _times(state_bytes, size, symbols)
    return [_update(inputs, size * state_bytes, formula, f"torch 2.13, optim/adam.py, {function}", name=term)]


def _adafactor(inputs: Inputs, values: int, state_bytes: int, in_a_row: Sequence[int]) -> list[Term]:
    """for_loop, torch's own choice: a tensor's update, beside that of the tensor before it, whose name still holds it;
    a vector's, as flat slices are, has its squared gradient too. foreach: all updates at once. Measured with torch
    2.13: 2.0 values for each of two matrices of a size, 2.0 and 3.0 for one vector and two of a size."""
    file = "torch 2.13, optim/_adafactor.py"
    if inputs.implementation == "foreach":
        return [
            _update(inputs, state_bytes * values, _times(state_bytes, values, "S"), f"{file}, _multi_tensor_adafactor")
        ]
    tensors = [] if inputs.stage else whole_tensors(inputs)
    matrices = [len(tensor.shape) > 1 for tensor in tensors] or [not inputs.stage] * len(in_a_row)
    pairs = zip(matrices, pairwise((0, *in_a_row)), strict=True)
    most, symbols = max(
        (each + before, r"\max(v_t + v_{t-1})") if matrix else (2 * each + before, r"\max(2 v_t + v_{t-1})")
        for matrix, (before, each) in pairs
    )
    formula = _times(state_bytes, most, symbols)
    return [_update(inputs, state_bytes * most, formula, f"{file}, _single_tensor_adafactor")]


def _muon(inputs: Inputs, state_bytes: int) -> list[Term]:
    """torch's Muon: a matrix's update, and in BF16 its orthogonalised form before and after an iteration with two
    square products between. Then AdamW's foreach step on what is left, as far as that is more."""
    if inputs.scenario.parallelism.engine not in _WHOLE:
        return []
    hidden = [tensor for tensor in whole_tensors(inputs) if is_hidden_matrix(tensor)]
    rest = inputs.states.trained - sum(tensor.numel for tensor in hidden)
    found = [(state_bytes * rest, _times(state_bytes, rest, "S"), "adam.py, _multi_tensor_adam")]
    for tensor in hidden:
        side, width = min(tensor.shape), state_bytes + 4
        numbers = f"{product(width, tensor.numel)} + {product(4, side, side)}"
        formula = Formula(symbols=rf"\max({width}\,v_t + 4 k_t^2)", numbers=numbers)
        found.append((width * tensor.numel + 4 * side**2, formula, "_muon.py, _zeropower_via_newtonschulz"))
    most, formula, function = max(found, key=lambda each: each[0])
    return [_update(inputs, most, formula, f"torch 2.13, optim/{function}")]


def _times(width: int, values: int, symbols: str) -> Formula:
    return Formula(symbols=rf"{width}\,{symbols}", numbers=product(width, values))


def _update(inputs: Inputs, size: int, formula: Formula, source: str, name: str = "update_temporary") -> Term:
    return Term(
        name=name,
        category=Category.OPTIMIZER,
        bytes_at=during(inputs.timeline, lambda m: size if is_update(m) else 0),
        formula=formula,
        source=source,
    )
