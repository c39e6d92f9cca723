"""The answer in words: labels, assumptions and how each figure comes about, from the budget's own numbers, in the
current language."""

from dataclasses import dataclass

from memcore.alive import AliveTable
from memcore.budget import Missing
from memcore.compare import PhasePair
from memcore.i18n import gettext as _
from memcore.i18n import mark, ngettext
from memcore.scenario import Method
from memcore.states import State
from memcore.symbols import legend
from memcore.terms import Category, EvidenceKind, Moment, Phase, Term
from memcore.trace.profile import ActivationProfile
from memcore.units import ByteUnit, format_bytes, format_percent
from memcore.zero import share, share_formula

CATEGORY_LABELS = {
    Category.WEIGHTS: mark("Weights"),
    Category.GRADIENTS: mark("Gradients"),
    Category.OPTIMIZER: mark("Optimizer"),
    Category.COMMUNICATION: mark("Communication"),
    Category.ACTIVATIONS: mark("Activations"),
    Category.LOSS: mark("Loss"),
    Category.WORKSPACE: mark("Workspace"),
    Category.RUNTIME: mark("Outside the allocator"),
}
PHASE_LABELS = {
    Phase.INIT: mark("after initialisation"),
    Phase.FORWARD: mark("forward"),
    Phase.LOSS: mark("loss"),
    Phase.BACKWARD: mark("backward"),
    Phase.OPTIMIZER: mark("optimizer step"),
    Phase.IDLE: mark("between steps"),
}
SEGMENT_LABELS = {"reduce": mark("reduce"), "norm": mark("norm"), "gradients": mark("gradients")}
NO_CLOSED_FORM = mark("No closed form stands for this model under this recipe: its activations are always traced.")
EVIDENCE_LABELS = {
    EvidenceKind.FORMULA: mark("formula"),
    EvidenceKind.TRACE: mark("trace"),
    EvidenceKind.MEASURED: mark("measured"),
}
METHOD_LABELS = {Method.FULL: mark("full training"), Method.LORA: "LoRA", Method.QLORA: "QLoRA"}
MISSING_LABELS = {
    Missing.ACTIVATIONS: mark("activations and loss"),
    Missing.GATHERED_LAYERS: mark("gathered layers"),
}

# What each term is: one entry for every name an engine or the states use; a test holds the two together.
TERM_LABELS = {
    "weights": mark("Weights"),
    "frozen_weights": mark("Frozen weights"),
    "fp32_norms": mark("Norms in FP32"),
    "quantised_weights": mark("4-bit weights"),
    "quantisation_scales": mark("Scales of the 4-bit weights"),
    "adapter_weights": mark("Adapter weights"),
    "secondary_weights": mark("Secondary weight copy (hpZ)"),
    "gradients": mark("Gradients"),
    "newest_slice": mark("The newest slice of gradients"),
    "unsharded_gradients": mark("Whole gradients that wait for the last micro-step"),
    "fp32_gradients": mark("FP32 gradients"),
    "gradient_slice": mark("This rank's gradient slice"),
    "accumulated_slice": mark("The slice accumulated so far"),
    "master_weights": mark("FP32 master weights"),
    "momentum": mark("Momentum"),
    "variance": mark("Variance"),
    "factored_variance": mark("Factored variance"),
    "foreach_temporary": mark("Temporary of the foreach step"),
    "for_loop_temporary": mark("Temporaries of the for-loop step"),
    "update_temporary": mark("Temporaries of the update"),
    "step_gradient_copies": mark("Gradient copies for the step"),
    "slice_padding": mark("Padding of the slices"),
    "reduce_bucket": mark("Reduce bucket"),
    "ddp_buckets": mark("DDP gradient buckets"),
    "gathered_parameters": mark("Gathered parameters"),
    "persistent_parameters": mark("Parameters that are never divided"),
    "gather_copies": mark("Buffer that parameters arrive in together"),
    "newest_gradient": mark("The newest whole gradient"),
    "reduce_flatten": mark("Copy of the bucket while it is reduced"),
    "norm_copy": mark("FP64 copy for the gradients' norm"),
    "reduced_gradients": mark("Whole gradients of one layer"),
    "saved_activations": mark("Saved activations"),
    "attention_scores": mark("Attention scores"),
    "recomputed_activations": mark("Recomputed activations"),
    "recomputed_scores": mark("Recomputed attention scores"),
    "layer_temporaries": mark("Temporaries of one layer"),
    "weight_casts": mark("16-bit copies of weights"),
    "final_norm": mark("Final norm"),
    "held_inputs": mark("Inputs of the last step's 4-bit products"),
    "logits_loss": mark("Logits and loss"),
    "cublas_workspace": mark("cuBLAS workspace"),
    "runtime": mark("CUDA context and NCCL"),
}


# What a layer keeps, by the names of memcore.activations.layer.
KEPT_LABELS = {
    "norms": mark("Norms"),
    "head_norms": mark("Norms of queries and keys"),
    "linear_inputs": mark("Inputs of attention and MLP"),
    "attention": mark("Queries, keys, values and their result"),
    "attention_scores": mark("Attention scores"),
    "log_sum_exp": mark("Log-sum-exp of the attention kernel"),
    "dropout_masks": mark("Dropout masks"),
    "mlp": mark("Inside of the MLP"),
    "experts": mark("Inside of the experts"),
    "router": mark("Router"),
    "adapters": mark("Inputs of the adapters"),
}
ATTENTION_LABELS = {"flash": mark("flash"), "memory_efficient": mark("memory-efficient"), "eager": mark("plain")}
OPERATION_LABELS = {
    "attention": mark("attention"),
    "mm": mark("matrix products"),
    "mm_alternate": mark("every second matrix product"),
    "bmm": mark("batched products"),
    "grouped_mm": mark("experts' products"),
}
LOSS_LABELS = {
    "unfused": mark("unfused"),
    "chunked_ce": mark("cross entropy in chunks"),
    "chunked": mark("head and cross entropy in chunks"),
    "fused_ce": mark("fused cross entropy, gradient in place"),
    "fused": mark("fused with the head"),
}
UPCAST_LABELS = {
    "model": mark("in the model's forward"),
    "loss": mark("in the loss"),
    "none": mark("nowhere"),
}
FUSED_LABELS = {
    "rmsnorm": mark("RMSNorm"),
    "rope": mark("rotary embeddings"),
    "swiglu": mark("SwiGLU"),
    "lora": mark("adapters of the attention"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """How a figure comes about: formula in LaTeX, the user's numbers in it, the result, the source.

    `how`: a sentence in the formula's place, where the figure was counted or measured. `at_peak`: what of the result
    there is at the peak, where that is less.
    """

    label: str
    symbols: str
    numbers: str
    result: str
    evidence: str
    source: str
    how: str = ""
    at_peak: str = ""

    @property
    def legend(self) -> list[tuple[str, str]]:
        """What the symbols mean."""
        return [] if self.how else legend(self.symbols)


def term_label(name: str) -> str:
    """A term's name in the current language."""
    return _(TERM_LABELS[name])


def moment_label(moment: Moment) -> str:
    """A moment of a step, such as ``backward[3]``: the layer, or what the phase then does, in brackets."""
    phase, segment = _(PHASE_LABELS[moment.phase]), moment.segment
    if segment is None:
        return phase
    return f"{phase}[{_(SEGMENT_LABELS[segment]) if isinstance(segment, str) else segment}]"


def explain_term(term: Term, unit: ByteUnit, at_peak: int | None = None) -> Explanation:
    """How the term's largest value comes about; `at_peak`: its share of the peak, which may be less."""
    traced = term.evidence is EvidenceKind.TRACE
    return Explanation(
        label=term_label(term.name),
        symbols=term.formula.symbols,
        numbers=f"{term.largest:,}" if traced else term.formula.numbers,
        result=format_bytes(term.largest, unit),
        evidence=_(EVIDENCE_LABELS[term.evidence]),
        source=term.source,
        how=_("Counted in the trace: the most of it that was alive at one moment.") if traced else "",
        at_peak="" if at_peak in (None, term.largest) else format_bytes(at_peak or 0, unit),
    )


def explain_share(state: State, stage: int, ranks: int, unit: ByteUnit) -> Explanation:
    """How one GPU's share of a state comes about; stage 0 or one rank is the whole of it."""
    formula = share_formula(state, stage, ranks)
    return Explanation(
        label=term_label(state.name),
        symbols=formula.symbols,
        numbers=formula.numbers,
        result=format_bytes(share(state, stage, ranks), unit),
        evidence=_(EVIDENCE_LABELS[EvidenceKind.FORMULA]),
        source=state.source,
    )


def about_trace(profile: ActivationProfile) -> str:
    """What a trace ran: layers, library versions, and whose kernels' habits."""
    about = _("{traced} of {layers} layers ran, the rest were repeated; {versions}; {kernels} kernels.")
    return about.format(
        traced=profile.traced_layers, layers=profile.num_layers, versions=profile.versions, kernels=profile.kernels
    )


def difference(pair: PhasePair) -> str:
    """How far the closed form is off the trace, and the term that accounts for most of it."""
    percent = format_percent(pair.difference_percent)
    return percent if pair.mostly is None else f"{percent} ({term_label(pair.mostly[0])})"


def alive_rows(table: AliveTable, unit: ByteUnit) -> list[tuple[str, str, str]]:
    """Module, size, and what it is kept as; what is left out as one row."""
    rows = [(alive.module, format_bytes(alive.num_bytes, unit), term_label(alive.term)) for alive in table.rows]
    if table.num_others:
        others = ngettext("{count} other", "{count} others", table.num_others).format(count=table.num_others)
        rows.append((others, format_bytes(table.others_bytes, unit), "-"))
    return rows
