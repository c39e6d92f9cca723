"""What a step's graph still holds of the step before.

The backward frees what autograd saved, but not what a function keeps as an attribute of its own: that lives as long as
the graph does, which a loop's ``loss`` holds until the next loss is there. Of 4-bit products such an attribute is their
input (bitsandbytes before 0.43.2, autograd/_functions.py, MatMul4Bit: ``ctx.tensors = (A, B)``).
"""

from collections.abc import Iterator

from memcore.inventory import Block, Inventory, Role, Tensor, TensorKind
from memcore.scenario import Scenario
from memcore.states import ModelStates
from memcore.terms import Category, Formula, Phase, Term, Timeline, in_phases, product

_SOURCE = "bitsandbytes 0.43.1, autograd/_functions.py, MatMul4Bit; litgpt 0.3, finetune/lora.py, fit: loss"
# The last projection of an attention, which reads what the heads give.
_OUT = ("o_proj", "out_proj", "c_proj", "dense", "proj")


def held_over(
    scenario: Scenario, states: ModelStates, inventory: Inventory | None, timeline: Timeline
) -> list[Term]:  # fmt: skip
    """The inputs of the last step's 4-bit products, through this step's forward and loss. Bytes: T w (sum of widths).

    Known deviation: the first layer's joint input, which wants no gradient, is not kept."""
    work = scenario.workload
    if not work.last_loss_held or inventory is None:
        return []
    tokens, width = work.micro_batch * work.seq_len, states.precision.convention.compute_dtype.size
    hidden = inventory.shapes.hidden_size
    widths = sum(sum(_read(block, hidden)) for block in inventory.layers) - hidden
    if scenario.recipe.quantize_lm_head:
        widths += hidden
    return [
        Term(
            name="held_inputs",
            category=Category.ACTIVATIONS,
            bytes_at=in_phases(timeline, tokens * width * widths, Phase.FORWARD, Phase.LOSS),
            formula=Formula(symbols=r"T\,w \sum_i h_i", numbers=product(tokens, width, widths)),
            source=_SOURCE,
        )
    ]


def _read(block: Block, hidden: int) -> Iterator[int]:
    """The width of each tensor that a layer's linear weights read: of attention and MLP, the input and what their last
    projections read."""
    for role in (Role.ATTENTION, Role.MLP):
        linear = [t for t in block.tensors if t.role is role and t.kind in (TensorKind.LINEAR, TensorKind.CONV1D)]
        last = [t for t in linear if (t.module in _OUT if role is Role.ATTENTION else _in_out(t)[1] == hidden)]
        if linear:
            yield hidden
            yield from {_in_out(tensor)[0] for tensor in last}


def _in_out(tensor: Tensor) -> tuple[int, int]:
    rows, columns = tensor.shape
    return (columns, rows) if tensor.kind is TensorKind.LINEAR else (rows, columns)
