"""What FSDP2 gathers, and gradients on their way to their slices, moment by moment.

Source: torch 2.13, distributed/fsdp/_fully_shard: _fsdp_param_group.py (unshard, wait_for_unshard, reshard,
post_backward) and _fsdp_collectives.py (foreach_all_gather, foreach_all_gather_copy_out, foreach_reduce). A unit is a
decoder layer; embedding, final norm and head are the root's, gathered for the whole of forward and backward, or units
of their own: then the head is gathered at the loss, the embedding before the first layer and after its backward.

Held against the trace of the same code (memcore.trace.sharding), which equals real runs. Activations and a layer's own
gradients are counted whole beside one another, though the first go as the others come: too much by one layer's
gradients at most. What a rank makes of its slices to send them is left out: 1/N of a layer, before its gradients.

Symbols, in bytes: P_i the parameters of layer i while it computes, A_i the flat result of the gather that they are
copied out of; P_R and A_R the root's, with the embedding's where that is a unit; P_H the head's. G_i whole gradients;
B_i the buffer that they are reduced in; H those of what follows the layers, which wait for the embedding's; S_i slices
that groups of ranks reduced in another dtype than that of the gradients, S_R the root's gradients' own.
"""

from collections.abc import Callable
from dataclasses import dataclass

from memcore.engines.base import Inputs
from memcore.engines.fsdp2_units import Units
from memcore.terms import Category, Formula, Moment, Phase, Term

# Bytes by symbol, which add up.
Parts = dict[str, int]
_SOURCE = "torch 2.13, distributed/fsdp/_fully_shard/_fsdp_collectives.py"


def moving(inputs: Inputs, units: Units) -> list[Term]:
    """The terms of what is gathered and what is reduced."""
    step = _Step(inputs=inputs, units=units)
    return [
        part_term("gathered_parameters", inputs, step.gathered, f"{_SOURCE}, foreach_all_gather_copy_out"),
        part_term("reduced_gradients", inputs, step.reduced, f"{_SOURCE}, foreach_reduce"),
    ]


def part_term(name: str, inputs: Inputs, parts: Callable[[Moment], Parts], source: str) -> Term:
    """A term that is the sum of parts, with the parts of its fullest moment as its formula."""
    moments = [parts(moment) for moment in inputs.timeline]
    fullest = {symbol: size for symbol, size in max(moments, key=_total).items() if size} or {"0": 0}
    return Term(
        name=name,
        category=Category.COMMUNICATION,
        bytes_at=tuple(map(_total, moments)),
        formula=Formula(symbols=" + ".join(fullest), numbers=" + ".join(f"{size:,}" for size in fullest.values())),
        source=source,
    )


def _total(parts: Parts) -> int:
    return sum(parts.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class _Step:
    """One step of these units."""

    inputs: Inputs
    units: Units

    def gathered(self, moment: Moment) -> Parts:
        """Parameters put together from all ranks."""
        if moment.phase is Phase.LOSS:
            return self._at_loss()
        if isinstance(moment.segment, int):
            return self._in_layer(moment.phase, moment.segment)
        return {"P_R": self.units.first.gathered} if moment.segment == "reduce" and self._buffer_binds else {}

    def _in_layer(self, phase: Phase, place: int) -> Parts:
        """In the forward the gather before is let go of once a layer is copied out of its own; in the backward the next
        is gathered ahead. One rank gathers nothing, but copies its own."""
        layers, units = self.units.layers, self.units
        kept = {"P_R": self._root, **self._parameters(place)}
        if self.inputs.ranks == 1:
            return kept
        if phase is Phase.FORWARD:
            before = layers[place - 1] if place else units.first
            return {**kept, "A_i": layers[place].gathered, "A_{i-1}": before.gathered}
        ahead, kind = (layers[place - 1], "block") if place else (units.embedding, "embedding")
        return {**kept, "A_{i-1}": ahead.gathered} if self._reshards(kind) else kept

    @property
    def _root(self) -> int:
        """What is gathered for the whole of forward and backward: the root's, and an embedding that stays so."""
        embedding = 0 if self._reshards("embedding") else self.units.embedding.gathered
        return self.units.root.gathered + embedding

    def _parameters(self, place: int) -> Parts:
        layers = self.units.layers
        if self._reshards("block"):
            return {"P_i": layers[place].gathered}
        return {r"\sum P_i": sum(layer.gathered for layer in layers[: place + 1])}

    def _at_loss(self) -> Parts:
        """The head, where it stays; and the last layer, where it does or where the root's backward, which begins with
        the loss's, gathers it ahead."""
        layers, root = self.units.layers, {"P_R": self._root}
        head = 0 if self._reshards("head") else self.units.head.gathered
        if not self._reshards("block"):
            return {**root, "P_H": head, **self._parameters(len(layers) - 1)}
        if not self._reshards("last_block"):
            return {**root, "P_H": head, "P_i": layers[-1].gathered}
        ahead = layers[-1].gathered if self.units.root.gathered and self.inputs.ranks > 1 else 0
        return {**root, "P_H": head, "A_i": ahead}

    def reduced(self, moment: Moment) -> Parts:
        """Whole gradients, and the buffer that those of the layer above, or last the root's, are reduced in."""
        layers, first, place = self.units.layers, self.units.first, moment.segment
        if moment.phase is not Phase.BACKWARD:
            return {}
        if isinstance(place, int):
            above = layers[place + 1] if place + 1 < len(layers) else self.units.head
            own = {"H": self.units.head_gradients, "G_i": layers[place].gradients, "B_{i+1}": above.reduced}
            return {**own, r"\sum S_i": self._held_apart[place]}
        # The root's slices are among the gradients of this moment, but take the place of the whole ones.
        whole = max(0, first.gradients - self._root_slices)
        buffer = {"B_0": layers[0].reduced} if self._buffer_binds else {"B_R": first.reduced}
        return {"G_R - S_R": whole, **buffer, r"\sum S_i": self._held_apart[0] + self._apart(layers[0].reduced)}

    def _reshards(self, unit: str) -> bool:
        return self.inputs.scenario.fsdp2_config.reshards(unit)

    @property
    def _buffer_binds(self) -> bool:
        """Whether the first layer's buffer and the root's parameters, let go of before the root's gradients are
        reduced, are more than the buffer for that."""
        first = self.units.first
        return first.gathered + self.units.layers[0].reduced > first.reduced

    @property
    def _root_slices(self) -> int:
        inputs = self.inputs
        if inputs.accumulates or inputs.scenario.fsdp2_config.cpu_offload:
            return 0
        return self.units.first.shard * inputs.states.trained_as.grad_dtype.size

    @property
    def _held_apart(self) -> tuple[int, ...]:
        head = self._apart(self.units.head.reduced)
        return tuple(head + each for each in self.units.after(lambda layer: self._apart(layer.reduced)))

    def _apart(self, buffer_bytes: int) -> int:
        """The slice of a buffer, where groups of ranks reduce it in another dtype: it is kept until the backward ends
        (_fsdp_param_group.py, AllReduceState)."""
        same = self.inputs.states.precision.convention.reduce_dtype is self.inputs.states.trained_as.param_dtype
        groups = self.inputs.scenario.parallelism.dp_replicate
        return 0 if same or groups == 1 else buffer_bytes // self.inputs.ranks
