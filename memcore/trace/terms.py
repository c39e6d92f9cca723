"""A trace's profile as terms over the moments of a step, in place of the closed forms."""

from memcore.terms import Category, EvidenceKind, Formula, Term, Timeline, by_layer
from memcore.trace.profile import CATEGORIES, ActivationProfile

_NAMES = {
    "saved": ("saved_activations", Category.ACTIVATIONS, r"A_{saved}"),
    "recomputed": ("recomputed_activations", Category.ACTIVATIONS, r"A_{again}"),
    "temporary": ("layer_temporaries", Category.ACTIVATIONS, r"A_{moment}"),
    "loss": ("logits_loss", Category.LOSS, r"A_{loss}"),
}


def profile_terms(profile: ActivationProfile, timeline: Timeline) -> list[Term]:
    """One term for each kind of storage that the trace saw."""
    return [_term(profile, category, timeline) for category in CATEGORIES]


def _term(profile: ActivationProfile, category: str, timeline: Timeline) -> Term:
    name, kind, symbols = _NAMES[category]
    forward = [moment.get(category, 0) for moment in profile.forward]
    backward = [moment.get(category, 0) for moment in profile.backward]
    bytes_at = by_layer(timeline, forward, profile.loss.get(category, 0), backward)
    return Term(
        name=name,
        category=kind,
        bytes_at=bytes_at,
        formula=Formula(symbols=symbols, numbers=f"{max(bytes_at):,}"),
        source=f"trace of the model's own code on fake tensors, {profile.kernels} kernels ({profile.versions})",
        evidence=EvidenceKind.TRACE,
    )
