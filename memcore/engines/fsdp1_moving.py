"""What FSDP1 gathers, and gradients on their way to their slices, moment by moment.

Source: torch 2.13, distributed/fsdp/_runtime_utils.py (_unshard, _pre_backward_hook, _post_backward_hook,
_reduce_grad) and _flat_param.py (_use_low_precision_shard, _alloc_padded_unsharded_flat_param). A unit is a decoder
layer; embedding, final norm and head are the root's, gathered for the whole of forward and backward.

Held against the trace of the same code (memcore.trace.flat_sharding). Activations and a unit's own gradients are
counted whole beside one another, as for FSDP2.

Symbols, in bytes: P_i the flat parameter of layer i while it computes, M_i a rank's slice of it cast to the
computation's dtype, where that is not the slices' own; P_R the root's. G_i whole gradients of layer i's parameters, F_i
the flat one that they are put together in, B_i that in the dtype in which it is reduced; H gradients of what follows
the layers, which wait for the embedding's.
"""

from dataclasses import dataclass

from memcore.engines.base import Inputs
from memcore.engines.fsdp2_moving import Parts, part_term
from memcore.engines.fsdp2_units import Unit, Units
from memcore.scenario import Method, Scenario
from memcore.terms import Moment, Phase, Term

_SOURCE = "torch 2.13, distributed/fsdp"


def moving(inputs: Inputs, units: Units) -> list[Term]:
    """The terms of what is gathered and what is reduced."""
    step = _Step(inputs=inputs, units=units)
    return [
        part_term("gathered_parameters", inputs, step.gathered, f"{_SOURCE}/_flat_param.py, unshard"),
        part_term("reduced_gradients", inputs, step.reduced, f"{_SOURCE}/_runtime_utils.py, _reduce_grad"),
    ]


def prefetches(scenario: Scenario) -> bool:
    """Whether the next unit is there while a unit's gradients are computed. Where a reentrant checkpoint around units
    makes their forward again, none is waited for yet when the one before looks ahead."""
    config, work = scenario.fsdp1_config, scenario.workload
    again = config.checkpoint_around_units and work.reentrant
    return config.backward_prefetch == "pre" and not again


@dataclass(frozen=True, kw_only=True, slots=True)
class _Step:
    """One step of these units."""

    inputs: Inputs
    units: Units

    def gathered(self, moment: Moment) -> Parts:
        """Flat parameters put together from all ranks."""
        layers, root, config = self.units.layers, self.units.root, self.inputs.scenario.fsdp1_config
        if moment.phase is Phase.LOSS or not isinstance(moment.segment, int):
            in_step = moment.phase is Phase.LOSS or moment.segment == "reduce"
            kept = {} if config.reshard_after_forward or moment.segment == "reduce" else self._all_of(len(layers))
            return {"P_R": root.gathered, **kept} if in_step else {}
        place, whole = moment.segment, {"P_R": root.gathered}
        if not config.reshard_after_forward:
            return {**whole, **self._all_of(place + 1)}
        ahead = moment.phase is Phase.BACKWARD and place and prefetches(self.inputs.scenario)
        own = {**whole, "P_i": layers[place].gathered}
        return {**own, "P_{i-1}": layers[place - 1].gathered} if ahead else {**own, "M_i": self._cast(layers[place])}

    def _all_of(self, count: int) -> Parts:
        return {r"\sum P_i": sum(layer.gathered for layer in self.units.layers[:count])}

    def _cast(self, unit: Unit) -> int:
        """A rank's slice in the computation's dtype, until the unit is gathered."""
        states, full = self.inputs.states, self.inputs.scenario.recipe.method is Method.FULL
        stored = (states.trained_as if full else states.precision.convention).param_dtype
        same = stored is states.precision.convention.compute_dtype
        return 0 if same else unit.gathered // self.inputs.ranks

    def reduced(self, moment: Moment) -> Parts:
        """A unit's gradients, put together, then in the dtype in which they are reduced."""
        if moment.phase is not Phase.BACKWARD:
            return {}
        if isinstance(moment.segment, int):
            return {"H": self.units.head_gradients, **self._put_together(self.units.layers[moment.segment])}
        return self._put_together(self.units.root)

    def _put_together(self, unit: Unit) -> Parts:
        convention = self.inputs.states.precision.convention
        apart = unit.reduced if convention.reduce_dtype is not convention.compute_dtype else 0
        # The second comes when the unit's parameters, of the same size, are let go of: all but the root's.
        beside = unit.gradients if unit is not self.units.root else 0
        if apart > unit.gradients + beside:
            return {"F_i": unit.gradients, "B_i": apart - beside}
        return {"G_i": unit.gradients, "F_i": unit.gradients}
