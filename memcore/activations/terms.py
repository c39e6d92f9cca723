"""The closed forms as terms over the moments of a step."""

from collections.abc import Sequence
from dataclasses import dataclass

from memcore.activations.held import is_used
from memcore.activations.layer import LayerForm, Traits, layer_form, norm_bytes
from memcore.activations.llm_c import llm_c_terms
from memcore.activations.loss import held_width, loss_bytes, product_formula
from memcore.activations.recompute import Checkpointing, checkpointing
from memcore.engine_options import EngineName
from memcore.inventory import Inventory, Role, Tensor
from memcore.recipes import ConventionName, DType
from memcore.scenario import Device, Lora, Method, Scenario
from memcore.states import ModelStates, precision_of
from memcore.terms import Category, Formula, Moment, Phase, Term, Timeline, during, in_phases

_HUGGING_FACE = "transformers 5.24, the model's own modeling file, tensors saved for the backward"


@dataclass(frozen=True, kw_only=True, slots=True)
class Activations:
    """A model's activations in closed form: one form for each layer, and the workload they are for."""

    forms: tuple[LayerForm, ...]
    recompute: Checkpointing
    tokens: int
    seq_len: int

    def kept_by(self, index: int) -> tuple[int, int]:
        """Bytes that layer `index` holds from its forward to its backward: without scores, and the scores."""
        form, group = self.forms[index], self.recompute.groups[index]
        if group is not None:
            return (form.input_bytes * self.tokens if group == index else 0), 0
        scores = form.scores(self.tokens, self.seq_len)
        total = form.total(self.tokens, self.seq_len) - scores
        return total, 0 if self.recompute.attention_only else scores

    def recomputed_at(self, index: int) -> tuple[int, int]:
        """Bytes that the backward of layer `index` finds made again: its group up to it, or its scores."""
        group = self.recompute.groups[index]
        if group is None:
            form = self.forms[index]
            return 0, form.scores(self.tokens, self.seq_len) if self.recompute.attention_only else 0
        again = [self.forms[i] for i in range(group, index + 1)]
        scores = sum(form.scores(self.tokens, self.seq_len) for form in again)
        return sum(form.total(self.tokens, self.seq_len) for form in again) - scores, scores


def model_activations(scenario: Scenario, states: ModelStates, inventory: Inventory | None) -> Activations | None:
    """The closed form for a scenario; None without shapes, where a layer is not of a known make, and for an
    architecture whose closed form has not been held against its trace."""
    work = scenario.workload
    if inventory is None or not has_form(inventory, scenario) or scenario.parallelism.engine is EngineName.LLM_C:
        return None
    forms = layer_forms(scenario, states, inventory)
    if forms is None:
        return None
    return Activations(
        forms=forms,
        recompute=checkpointing(work.checkpointing, len(forms)),
        tokens=work.micro_batch * work.seq_len,
        seq_len=work.seq_len,
    )


def has_form(inventory: Inventory, scenario: Scenario) -> bool:
    """Whether the closed form stands for the model's architecture and for the recipe; what else there is is traced.

    It does not know which results are saved by operation, what autocast copies, what fused, float8 or compiled kernels
    keep, keys and values in the model's output, experts that run one after the other, and code other than
    transformers'; of adapters it knows those in FP32 on the modules of a dense model that computes in 16 bit, without
    dropout.
    """
    if scenario.parallelism.engine is EngineName.LLM_C:
        return True
    recipe, work = scenario.recipe, scenario.workload
    convention = precision_of(recipe).convention
    sixteen_bit = convention.compute_dtype.size < DType.FP32.size
    if scenario.model.experts == "separate" or work.use_cache:
        return False
    if work.checkpointing.startswith("save(") or not is_used(inventory.model_class, work.attention):
        return False
    if scenario.offload.activations is not Device.NONE or recipe.fp8 is not None:
        return False
    if work.fused_kernels or work.compile or work.loss_compiled or scenario.model.code != "transformers":
        return False
    if recipe.convention is ConventionName.AMP_AUTOCAST and sixteen_bit:
        return False
    if scenario.fsdp1_config.autocast:
        return False
    if recipe.method is Method.FULL:
        return True
    lora = recipe.lora or Lora()
    fp32 = lora.adapter_dtype is DType.FP32 and scenario.parallelism.engine is not EngineName.DEEPSPEED
    experts = any(tensor.role is Role.EXPERTS for tensor in inventory.tensors())
    if any(adapted.tensor.role is Role.HEAD for adapted in inventory.lora_modules(lora.targets)):
        return False
    plain = not (lora.dropout or lora.autocast or lora.modules_to_save or recipe.keeps_packed_inputs)
    return sixteen_bit and fp32 and plain and not experts


def layer_forms(scenario: Scenario, states: ModelStates, inventory: Inventory) -> tuple[LayerForm, ...] | None:
    """The closed form of each decoder layer; None where one of them is not of a known make."""
    traits = _traits(scenario, states)
    forms: dict[tuple[Tensor, ...], LayerForm | None] = {}
    for block in inventory.layers:
        if block.tensors not in forms:
            forms[block.tensors] = layer_form(block, inventory.shapes, traits, inventory.model_class)
    chosen = tuple(form for block in inventory.layers if (form := forms[block.tensors]) is not None)
    return chosen if chosen and len(chosen) == len(inventory.layers) else None


def _traits(scenario: Scenario, states: ModelStates) -> Traits:
    recipe, attention = scenario.recipe, scenario.workload.attention
    width = states.precision.convention.compute_dtype.size
    if recipe.method is Method.FULL:
        return Traits(width=width, attention=attention)
    lora = recipe.lora or Lora()
    return Traits(
        width=width,
        attention=attention,
        adapted=frozenset(lora.targets),
        adapter_bytes=states.trained_as.param_dtype.size,
        rank=lora.rank,
    )


def activation_terms(
    scenario: Scenario, states: ModelStates, inventory: Inventory | None, timeline: Timeline
) -> list[Term]:
    """Terms for what layers keep, recompute and need for a moment, and for the loss. Empty without a form."""
    if scenario.parallelism.engine is EngineName.LLM_C:
        return [] if inventory is None else llm_c_terms(scenario, inventory)
    activations = model_activations(scenario, states, inventory)
    if activations is None or inventory is None:
        return []
    layers = _layer_terms(activations, timeline, _second_gradient(states, inventory))
    return [*layers, *loss_terms(scenario, states, inventory, timeline)]


def _second_gradient(states: ModelStates, inventory: Inventory) -> int:
    """Bytes of a tied embedding's own gradient, which is made at the end of the backward to be added to the head's."""
    if not inventory.tied or states.trained != states.n_params:
        return 0
    embedding = max((t.numel for t in inventory.tensors() if t.role is Role.EMBEDDING), default=0)
    return states.precision.convention.compute_dtype.size * embedding


def _layer_terms(activations: Activations, timeline: Timeline, at_the_end: int) -> list[Term]:
    """`at_the_end`: bytes that come at the end of the backward, when nothing of the layers is left."""
    kept = [activations.kept_by(index) for index in range(len(activations.forms))]
    stored = [_stored(kept, moment) for moment in timeline]
    again = [_made_again(activations, moment) for moment in timeline]
    extras = [_extra(activations, moment) for moment in timeline]
    last = max(index for index, moment in enumerate(timeline) if moment.phase is Phase.BACKWARD and moment.segment == 0)
    extras[last] = max(extras[last], at_the_end - sum(stored[last]) - sum(again[last]))
    rows: tuple[tuple[str, list[int], str, list[int]], ...] = (
        ("saved_activations", [linear for linear, _scores in stored], r"\sum_i T\,a_i", [each for each, _ in kept]),
        ("attention_scores", [scores for _linear, scores in stored], r"\sum_i b\,s^2\,c_i", [each for _, each in kept]),
        ("recomputed_activations", [linear for linear, _scores in again], r"T\,a_{group}", []),
        ("recomputed_scores", [scores for _linear, scores in again], r"b\,s^2\,c_{group}", []),
        ("layer_temporaries", extras, r"T\,w\,(h + 2 f)", []),
    )
    return [
        Term(
            name=name,
            category=Category.ACTIVATIONS,
            bytes_at=tuple(bytes_at),
            formula=_sum_formula(symbols, shares, max(bytes_at)),
            source=_HUGGING_FACE,
        )
        for name, bytes_at, symbols, shares in rows
    ]


def _stored(kept: Sequence[tuple[int, int]], moment: Moment) -> tuple[int, int]:
    """Kept by the layers whose forward is at its end or done, and whose backward is not done; scores apart."""
    done = moment.segment + 1 if isinstance(moment.segment, int) else 0
    layers = len(kept) if moment.phase is Phase.LOSS else done
    return sum(linear for linear, _scores in kept[:layers]), sum(scores for _linear, scores in kept[:layers])


def _made_again(activations: Activations, moment: Moment) -> tuple[int, int]:
    if moment.phase is Phase.BACKWARD and isinstance(moment.segment, int):
        return activations.recomputed_at(moment.segment)
    return 0, 0


def _extra(activations: Activations, moment: Moment) -> int:
    if not isinstance(moment.segment, int):
        return 0
    form = activations.forms[moment.segment]
    if moment.phase is Phase.BACKWARD:
        return form.backward_extra(activations.tokens, activations.seq_len)
    return form.forward_extra.num_bytes(activations.tokens, activations.seq_len)


def _sum_formula(symbols: str, shares: Sequence[int], largest: int) -> Formula:
    """Equal layers as one product each: ``32 × 545,259,520``."""
    if sum(shares) != largest:
        return Formula(symbols=symbols, numbers=f"{largest:,}")
    counts: dict[int, int] = {}
    for share in shares:
        counts[share] = counts.get(share, 0) + 1
    return Formula(
        symbols=symbols, numbers=" + ".join(f"{count:,} × {share:,}" for share, count in counts.items() if share) or "0"
    )


def loss_terms(
    scenario: Scenario, states: ModelStates, inventory: Inventory, timeline: Timeline
) -> list[Term]:  # fmt: skip
    """Terms for the logits and what the loss makes of them. Empty for a model without a vocabulary."""
    shapes, width = inventory.shapes, states.precision.convention.compute_dtype.size
    if not shapes.vocab_size:
        return []
    work = scenario.workload
    tokens = work.micro_batch * work.seq_len
    full = states.trained == states.n_params
    num_bytes, formula, source = loss_bytes(
        work, shapes.vocab_size, shapes.hidden_size, width, trains_head=full, softcap=shapes.final_softcap
    )
    norm = tokens * shapes.hidden_size * (norm_bytes(shapes.norm, full, width) + width)
    held = held_width(work, width) * tokens * shapes.vocab_size

    def at(moment: Moment) -> int:
        if moment.phase is Phase.LOSS:
            return num_bytes
        return held if moment.phase is Phase.BACKWARD and moment.segment != "reduce" else 0

    return [
        Term(name="logits_loss", category=Category.LOSS, bytes_at=during(timeline, at), formula=formula, source=source),
        Term(
            name="final_norm",
            category=Category.ACTIVATIONS,
            bytes_at=in_phases(timeline, norm, Phase.LOSS),
            formula=product_formula(
                r"T\,h\,(n + w)", tokens, shapes.hidden_size, norm // (tokens * shapes.hidden_size)
            ),
            source=_HUGGING_FACE,
        ),
    ]
