"""What FSDP1 gathers, and gradients on their way to their slices, moment by moment.

Source: torch 2.13, distributed/fsdp/_runtime_utils.py (_unshard, _pre_backward_hook, _post_backward_hook,
_reduce_grad) and _flat_param.py (_use_low_precision_shard, _alloc_padded_unsharded_flat_param). A unit is a decoder
layer; embedding, final norm and head are the root's, gathered for the whole of forward and backward.

A rank that divides its states with no other (NO_SHARD) gathers nothing: a unit computes with its own flat parameter, or
with a copy of it in the computation's dtype, let go of after its forward whatever the settings say (post_reshard). Its
flat gradient is reduced where it is, and stays (_reduce_grad_no_shard).

Held against the trace of the same code (memcore.trace.flat_sharding). Activations and a unit's own gradients are
counted whole beside one another, as for FSDP2.

Symbols, in bytes: P_i the flat parameter of layer i while it computes, M_i a rank's slice of it cast to the
computation's dtype, where that is not the slices' own; P_R the root's. G_i whole gradients of layer i's parameters, F_i
the flat one that they are put together in, B_i that in the dtype in which it is reduced, S_i the rank's slice of it; H
gradients of what follows the layers, which wait for the embedding's.
"""

from dataclasses import dataclass

from memcore.engines.base import Inputs
from memcore.engines.fsdp2_moving import Parts, part_term
from memcore.engines.fsdp2_units import Unit, Units, units_of
from memcore.inventory import Inventory
from memcore.scenario import Method, Scenario
from memcore.terms import Moment, Phase, Term

_SOURCE = "torch 2.13, distributed/fsdp"


def flat_units(inputs: Inputs, inventory: Inventory) -> Units:
    """The units of a model. One rank's weights compute where they are, unless they are cast or fetched from the host;
    a flat gradient is as long as the flat parameter, of frozen weights too."""
    in_place = inputs.ranks == 1 and not inputs.scenario.shards_on_host
    flat = inputs.scenario.fsdp1_config.adapters == "inside"
    return units_of(inputs, inventory, flat_gradients=flat, in_place=in_place)


def reshards(scenario: Scenario) -> bool:
    """Whether a unit is let go of after its forward."""
    return scenario.fsdp1_config.reshard_after_forward or scenario.parallelism.dp_shard == 1


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


def begun_at_loss(inputs: Inputs, units: Units) -> Parts:
    """What the backward begins with, at the moment of the loss, by the trace's terms: the layer that is gathered first,
    and the head's gradients."""
    scenario = inputs.scenario
    first = reshards(scenario) and prefetches(scenario)
    fetched = units.layers[-1].gathered if first and units.layers else 0
    return {"gathered_parameters": fetched, "logits_loss": units.head_gradients}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Step:
    """One step of these units."""

    inputs: Inputs
    units: Units

    def gathered(self, moment: Moment) -> Parts:
        """Flat parameters put together from all ranks. The root's are let go of before its gradients are reduced."""
        layers, config, root = self.units.layers, self.inputs.scenario.fsdp1_config, {"P_R": self.units.root.gathered}
        at_loss = moment.phase is Phase.LOSS
        if not at_loss and not isinstance(moment.segment, int):
            return {}
        place = moment.segment if isinstance(moment.segment, int) else len(layers)
        following = layers[place + 1].gathered if config.forward_prefetch and place + 1 < len(layers) else 0
        if not reshards(self.inputs.scenario):
            early = 1 if following and moment.phase is Phase.FORWARD else 0
            count = min(place + 1 + early, len(layers))
            return {**root, r"\sum P_i": sum(layer.gathered for layer in layers[:count])}
        own = {} if at_loss else {"P_i": layers[place].gathered}
        if moment.phase is Phase.FORWARD:
            return {**root, **own, "P_{i+1}": following, "M_i": self._cast(layers[place])}
        ahead = place and prefetches(self.inputs.scenario)
        return {**root, **own, **({"P_{i-1}": layers[place - 1].gathered} if ahead else {})}

    def _cast(self, unit: Unit) -> int:
        """A rank's slice in the computation's dtype, until the unit is gathered."""
        states, full = self.inputs.states, self.inputs.scenario.recipe.method is Method.FULL
        stored = (states.trained_as if full else states.precision.convention).param_dtype
        same = stored is states.precision.convention.compute_dtype
        return 0 if same or self.inputs.ranks == 1 else unit.gathered // self.inputs.ranks

    def reduced(self, moment: Moment) -> Parts:
        """A unit's gradients, put together, then in the dtype in which they are reduced, with the new slice."""
        if moment.phase is not Phase.BACKWARD:
            return {}
        if isinstance(moment.segment, int):
            unit, beside = self.units.layers[moment.segment], {"H": self.units.head_gradients}
        else:
            unit, beside = self.units.root, Parts()
        # Until they are put together the unit's parameters are there, of the same size as its gradients.
        together = {"G_i": unit.gradients, "F_i": 0 if self._added_as_it_is else unit.gradients}
        sent = {"F_i": unit.gradients, **self._sent(unit)}
        if isinstance(moment.segment, int):
            sent["-P_i"] = -unit.gathered
        else:
            together["P_R"] = unit.gathered
        return {**beside, **(together if sum(together.values()) >= sum(sent.values()) else sent)}

    def _sent(self, unit: Unit) -> Parts:
        """What a unit's gradients are reduced in, where that has another dtype, and this rank's slice of it."""
        states = self.inputs.states
        reduce, computed = states.precision.convention.reduce_dtype, states.precision.convention.compute_dtype
        if self.inputs.ranks == 1:
            return self._reduced_in_place(unit)
        buffer = {} if reduce is computed else {"B_i": unit.reduced}
        # Of several micro-steps a term of its own (memcore.engines.fsdp1).
        slices = 0 if self.inputs.accumulates else unit.shard * states.trained_as.grad_dtype.size
        if reduce is not states.trained_as.grad_dtype:
            slices += unit.reduced // self.inputs.ranks
        return {**buffer, "S_i": slices}

    @property
    def _added_as_it_is(self) -> bool:
        """Whether a rank's own flat gradient is the newest slice, a term of its own (memcore.engines.fsdp1)."""
        dtypes, own = self.inputs.states.precision.convention, self.inputs.states.trained_as.grad_dtype
        same = dtypes.compute_dtype is dtypes.reduce_dtype is own
        return same and self.inputs.accumulates and self.inputs.ranks == 1

    def _reduced_in_place(self, unit: Unit) -> Parts:
        """Without sharding: each cast is beside what it is of. Of several micro-steps the last cast is a term of its
        own (memcore.engines.fsdp1), and what is reduced is their sum."""
        dtypes, trained_as = self.inputs.states.precision.convention, self.inputs.states.trained_as
        again = dtypes.reduce_dtype is not trained_as.grad_dtype
        if self.inputs.accumulates:
            return {"B_i": unit.reduced if again else 0}
        buffer = 0 if dtypes.reduce_dtype is dtypes.compute_dtype else unit.reduced
        return {"B_i": buffer, "S_i": unit.shard * trained_as.grad_dtype.size if again else 0}
