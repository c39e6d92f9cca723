"""Activations over sequence length, depth and segment length: the curves of the activation explorer.

All from the closed forms of :mod:`memcore.activations`, for the scenario's own layers and micro-batch.
"""

from dataclasses import dataclass, replace

from memcore.activations import Activations, LayerForm, SegmentLaw, model_activations, segment_law
from memcore.activations.loss import loss_bytes
from memcore.budget import Budget, predict
from memcore.recipes import ConventionName, DType
from memcore.scenario import Loss, Scenario, parse_scenario, scenario_data

_IN_ONE_DTYPE = {
    DType.FP32: ConventionName.FP32,
    DType.BF16: ConventionName.PURE_BF16,
    DType.FP16: ConventionName.PURE_FP16,
}
ATTENTIONS = ("flash", "memory_efficient", "eager")
SEQUENCES = tuple(2**power for power in range(9, 18))


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """Bytes over a size. `attention` and `checkpointing` say what they are for."""

    attention: str
    checkpointing: str
    points: tuple[tuple[int, int], ...]


def with_workload(scenario: Scenario, **changes: object) -> Scenario:
    """The scenario with other fields of its workload."""
    data = scenario_data(scenario)
    data["workload"] = {**data.get("workload", {}), **changes}
    return parse_scenario(data)


def without_autocast(budget: Budget) -> Budget:
    """The same run with weights in the dtype of its computation, where autocast leaves it without closed forms: the
    layers and what they keep are the same, but for autocast's casts."""
    recipe = budget.scenario.recipe
    if recipe.convention is not ConventionName.AMP_AUTOCAST:
        return budget
    data, dtype = scenario_data(budget.scenario), recipe.computed_dtype
    kept = {name: value for name, value in data["recipe"].items() if not name.endswith("_dtype")}
    data["recipe"] = {**kept, "convention": _IN_ONE_DTYPE[dtype].value}
    return predict(parse_scenario(data), replace(budget.evidence, profile=None, plan=None, reservation=None))


def peak_activations(activations: Activations) -> int:
    """The most that layers keep, recompute and need at any moment of the backward, the loss left out."""
    layers = range(len(activations.forms))
    kept = 0
    best = 0
    for index in layers:
        linear, scores = activations.kept_by(index)
        kept += linear + scores
        again = sum(activations.recomputed_at(index))
        extra = activations.forms[index].backward_extra(activations.tokens, activations.seq_len)
        best = max(best, kept + again + extra)
    return best


def activations_at_most(budget: Budget, **changes: object) -> int:
    """Peak activations of all layers with other fields of the workload; 0 where there is no closed form."""
    found = _activations(budget, **changes)
    return 0 if found is None else peak_activations(found)


def _activations(budget: Budget, **changes: object) -> Activations | None:
    return model_activations(with_workload(budget.scenario, **changes), budget.states, budget.inventory)


def sequence_curves(budget: Budget) -> list[Curve]:
    """Activations of all layers over the sequence length: each attention, without checkpointing and with all of it."""
    curves = []
    for attention in ATTENTIONS:
        for kind in ("none", "full"):
            points = []
            for seq_len in SEQUENCES:
                found = _activations(budget, attention=attention, checkpointing=kind, seq_len=seq_len)
                if found is not None:
                    points.append((seq_len, peak_activations(found)))
            curves.append(Curve(attention=attention, checkpointing=kind, points=tuple(points)))
    return [curve for curve in curves if curve.points]


def takeover(form: LayerForm) -> int | None:
    """The sequence length from which plain attention's scores take more than the rest of the layer."""
    return round(form.per_token / form.per_pair) if form.per_pair else None


def depth_curves(budget: Budget) -> list[Curve]:
    """Activations over the number of layers: none, full, and segments of the k that is best at each depth."""
    found = _activations(budget, checkpointing="none")
    if found is None:
        return []
    attention = budget.scenario.workload.attention
    depths = tuple(2**power for power in range(9))
    return [
        Curve(
            attention=attention,
            checkpointing=kind,
            points=tuple((depth, _at_depth(found, kind, depth)) for depth in depths),
        )
        for kind in ("none", "full", "segments")
    ]


def _at_depth(found: Activations, kind: str, depth: int) -> int:
    """Activations of `depth` layers like the model's most common one."""
    form = typical_layer(found)
    layer = form.total(found.tokens, found.seq_len)
    kept = form.input_bytes * found.tokens
    if kind == "none":
        return layer * depth
    if kind == "full":
        return kept * depth + layer
    return min(segment_law(layer, kept, depth).peaks)


def typical_layer(found: Activations) -> LayerForm:
    """The form that most layers have."""
    return max(set(found.forms), key=found.forms.count)


@dataclass(frozen=True, kw_only=True, slots=True)
class Segments:
    """The law of segments for the scenario's layer, and for one that keeps only about its input (textbook)."""

    layer_bytes: int
    input_bytes: int
    num_layers: int
    law: SegmentLaw
    textbook_layer: SegmentLaw


def segments(budget: Budget) -> Segments | None:
    """Peak activations over the segment length; None where the model has no closed form."""
    found = _activations(budget, checkpointing="none")
    if found is None:
        return None
    form = typical_layer(found)
    layer, kept = form.total(found.tokens, found.seq_len), form.input_bytes * found.tokens
    depth = len(found.forms)
    return Segments(
        layer_bytes=layer,
        input_bytes=kept,
        num_layers=depth,
        law=segment_law(layer, kept, depth),
        textbook_layer=segment_law(kept, kept, depth),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerRow:
    """One thing that a layer keeps: bytes per token, and in all for the scenario's micro-batch."""

    name: str
    per_token: float
    num_bytes: int


def layer_rows(budget: Budget) -> list[LayerRow]:
    """What the model's most common layer keeps without checkpointing, largest first."""
    found = _activations(budget, checkpointing="none")
    if found is None:
        return []
    rows = [
        LayerRow(
            name=kept.name,
            per_token=kept.per_token + kept.per_pair * found.seq_len,
            num_bytes=kept.num_bytes(found.tokens, found.seq_len),
        )
        for kept in typical_layer(found).kept
    ]
    return sorted(rows, key=lambda row: -row.num_bytes)


def loss_rows(budget: Budget) -> list[tuple[str, int]]:
    """Bytes of logits and loss for each implementation of the loss: the scenario's own as it is, others as usual."""
    if budget.inventory is None:
        return []
    shapes, width = budget.inventory.shapes, budget.states.precision.convention.compute_dtype.size
    workload, full = budget.scenario.workload, budget.states.trained == budget.states.n_params

    usual = {"loss_chunks": None, "logits_upcast": None, "shifted_copy": False}

    def size(loss: Loss) -> int:
        each = workload if loss is workload.loss else workload.model_copy(update={**usual, "loss": loss})
        return loss_bytes(
            each, shapes.vocab_size, shapes.hidden_size, width, trains_head=full, softcap=shapes.final_softcap
        )[0]

    return [(loss.value, size(loss)) for loss in Loss]


def layer_of(budget: Budget, attention: str) -> LayerForm | None:
    """The model's most common layer under an attention, without checkpointing."""
    found = _activations(budget, attention=attention, checkpointing="none")
    return None if found is None else typical_layer(found)
