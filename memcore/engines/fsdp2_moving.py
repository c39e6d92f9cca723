"""What FSDP2 gathers, and gradients on their way to their slices, moment by moment.

Source: torch 2.13, distributed/fsdp/_fully_shard: _fsdp_param_group.py (unshard, wait_for_unshard, reshard,
post_backward) and _fsdp_collectives.py (foreach_all_gather, foreach_all_gather_copy_out, foreach_reduce). A unit is a
decoder layer; embedding, final norm and head are the root's, gathered for the whole of forward and backward.

Held against the trace of the same code (memcore.trace.sharding), which equals real runs. Activations and a layer's own
gradients are counted whole beside one another, though the first go as the others come: too much by one layer's
gradients at most. What a rank makes of its slices to send them is left out: 1/N of a layer, before its gradients.

Symbols, in bytes: P_i the parameters of layer i while it computes, A_i the flat result of the gather that they are
copied out of; P_R and A_R the root's. G_i whole gradients; B_i the buffer
that they are reduced in; H those of what follows the layers, which wait for the embedding's; S_i slices that groups of
ranks reduced in another dtype than that of the gradients, S_R the root's gradients' own.
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
        _term("gathered_parameters", inputs, step.gathered, "foreach_all_gather_copy_out"),
        _term("reduced_gradients", inputs, step.reduced, "foreach_reduce"),
    ]


def _term(name: str, inputs: Inputs, parts: Callable[[Moment], Parts], function: str) -> Term:
    moments = [parts(moment) for moment in inputs.timeline]
    fullest = {symbol: size for symbol, size in max(moments, key=_total).items() if size} or {"0": 0}
    return Term(
        name=name,
        category=Category.COMMUNICATION,
        bytes_at=tuple(map(_total, moments)),
        formula=Formula(symbols=" + ".join(fullest), numbers=" + ".join(f"{size:,}" for size in fullest.values())),
        source=f"{_SOURCE}, {function}",
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
        return {"P_R": self.units.root.gathered} if moment.segment == "reduce" and self._buffer_binds else {}

    def _in_layer(self, phase: Phase, place: int) -> Parts:
        """In the forward the gather before is let go of once a layer is copied out of its own; in the backward the next
        is gathered ahead. One rank gathers nothing, but copies its own."""
        layers, root = self.units.layers, self.units.root
        kept = {"P_R": root.gathered, **self._parameters(place)}
        if self.inputs.ranks == 1:
            return kept
        if phase is Phase.FORWARD:
            before = layers[place - 1] if place else root
            return {**kept, "A_i": layers[place].gathered, "A_{i-1}": before.gathered}
        if not self._reshards or not place:
            return kept
        return {**kept, "A_{i-1}": layers[place - 1].gathered}

    def _parameters(self, place: int) -> Parts:
        layers = self.units.layers
        if self._reshards:
            return {"P_i": layers[place].gathered}
        return {r"\sum P_i": sum(layer.gathered for layer in layers[: place + 1])}

    def _at_loss(self) -> Parts:
        """The last layer, which the backward gathers first."""
        layers, root = self.units.layers, {"P_R": self.units.root.gathered}
        if not self._reshards:
            return {**root, **self._parameters(len(layers) - 1)}
        return root if self.inputs.ranks == 1 else {**root, "A_i": layers[-1].gathered}

    def reduced(self, moment: Moment) -> Parts:
        """Whole gradients, and the buffer that those of the layer above, or last the root's, are reduced in."""
        layers, root, place = self.units.layers, self.units.root, moment.segment
        if moment.phase is not Phase.BACKWARD:
            return {}
        if isinstance(place, int):
            above = layers[place + 1].reduced if place + 1 < len(layers) else 0
            own = {"H": self.units.head_gradients, "G_i": layers[place].gradients, "B_{i+1}": above}
            return {**own, r"\sum S_i": self._held_apart[place]}
        # The root's slices are among the gradients of this moment, but take the place of the whole ones.
        whole = max(0, root.gradients - self._root_slices)
        buffer = {"B_0": layers[0].reduced} if self._buffer_binds else {"B_R": root.reduced}
        return {"G_R - S_R": whole, **buffer, r"\sum S_i": self._held_apart[0] + self._apart(layers[0].reduced)}

    @property
    def _reshards(self) -> bool:
        return self.inputs.scenario.fsdp2_config.reshard_after_forward

    @property
    def _buffer_binds(self) -> bool:
        """Whether the first layer's buffer and the root's parameters, let go of before the root's gradients are
        reduced, are more than the buffer for that."""
        root = self.units.root
        return root.gathered + self.units.layers[0].reduced > root.reduced

    @property
    def _root_slices(self) -> int:
        inputs = self.inputs
        if inputs.accumulates or inputs.scenario.fsdp2_config.cpu_offload:
            return 0
        return self.units.root.shard * inputs.states.trained_as.grad_dtype.size

    @property
    def _held_apart(self) -> tuple[int, ...]:
        return self.units.after(lambda layer: self._apart(layer.reduced))

    def _apart(self, buffer_bytes: int) -> int:
        """The slice of a buffer, where groups of ranks reduce it in another dtype: it is kept until the backward ends
        (_fsdp_param_group.py, AllReduceState)."""
        same = self.inputs.states.precision.convention.reduce_dtype is self.inputs.states.trained_as.param_dtype
        groups = self.inputs.scenario.parallelism.dp_replicate
        return 0 if same or groups == 1 else buffer_bytes // self.inputs.ranks
