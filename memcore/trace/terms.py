"""A trace's profile as terms over the moments of a step, in place of the closed forms."""

from collections.abc import Sequence
from dataclasses import replace

from memcore.engines.base import is_update
from memcore.terms import Category, EvidenceKind, Formula, Term, Timeline, during, product
from memcore.trace.profile import ActivationProfile
from memcore.trace.tape import CATEGORIES, GATHERED, REDUCED

_NAMES = {
    "saved": ("saved_activations", Category.ACTIVATIONS, r"A_{saved}"),
    "recomputed": ("recomputed_activations", Category.ACTIVATIONS, r"A_{again}"),
    "temporary": ("layer_temporaries", Category.ACTIVATIONS, r"A_{moment}"),
    "weight_casts": ("weight_casts", Category.ACTIVATIONS, r"W_{cast}"),
    "loss": ("logits_loss", Category.LOSS, r"A_{loss}"),
    GATHERED: ("gathered_parameters", Category.COMMUNICATION, r"P_{gathered}"),
    REDUCED: ("reduced_gradients", Category.COMMUNICATION, r"G_{reduced}"),
}
# What a trace says of an engine that shards, in place of the engine's own terms.
SHARDED_TERMS = tuple(_NAMES[category][0] for category in (GATHERED, REDUCED))


def profile_terms(profile: ActivationProfile, timeline: Timeline) -> list[Term]:
    """One term for each kind of storage that the trace saw."""
    return [_term(profile, category, timeline) for category in CATEGORIES]


def settle_states(
    terms: Sequence[Term],
    profile: ActivationProfile,
    timeline: Timeline,
    *,
    gradient_bytes: int | None,
    implementation: str,
) -> list[Term]:
    """An engine's terms where its optimizer steps on the model's own tensors: gradients as the trace saw them come
    into being, and what the optimizer's own step makes for a moment.

    `gradient_bytes`: those of one value of a gradient that grows through the backward; where that is None, or not the
    trace's, gradients are left as they are."""
    same = gradient_bytes == profile.trained_bytes
    settled = [_gradients(term, profile, timeline) if same and term.name == "gradients" else term for term in terms]
    if profile.optimizer_step_bytes is None:
        return settled
    name = f"{implementation}_temporary"
    others = [term for term in settled if term.name != name]
    return [*others, _transient(name, profile.optimizer_step_bytes, profile, timeline)]


def _gradients(term: Term, profile: ActivationProfile, timeline: Timeline) -> Term:
    """What is alive at a moment's fullest instant with gradients, less the activations of its fullest without."""
    assert not isinstance(term.bytes_at, int), "gradients grow through the backward"
    grown = [most - alive for most, alive in zip(profile.with_gradients, profile.totals, strict=True)]
    traced, covered = _over(grown, profile, timeline), len(profile.totals)
    at = tuple(traced[index] if 0 < index <= covered else each for index, each in enumerate(term.bytes_at))
    return replace(term, bytes_at=at, source=traced_source(profile), evidence=EvidenceKind.TRACE)


def _over(figures: Sequence[int], profile: ActivationProfile, timeline: Timeline) -> tuple[int, ...]:
    """A figure for each of the profile's moments, which follow the first of the step; nothing at the others."""
    return (0, *figures, *[0] * (len(timeline) - 1 - len(profile.totals)))


def _transient(name: str, num_bytes: int, profile: ActivationProfile, timeline: Timeline) -> Term:
    return Term(
        name=name,
        category=Category.OPTIMIZER,
        bytes_at=during(timeline, lambda moment: num_bytes if is_update(moment) else 0),
        formula=Formula(symbols=r"O_{moment}", numbers=product(num_bytes)),
        source=traced_source(profile),
        evidence=EvidenceKind.TRACE,
    )


def term_name(category: str) -> str:
    """The name of the term that a category of storage makes up."""
    return _NAMES[category][0]


def traced_source(profile: ActivationProfile) -> str:
    """Where a traced figure comes from."""
    return f"trace of the model's own code on fake tensors, {profile.kernels} kernels ({profile.versions})"


def _term(profile: ActivationProfile, category: str, timeline: Timeline) -> Term:
    name, kind, symbols = _NAMES[category]
    bytes_at = _over(profile.of(category), profile, timeline)
    return Term(
        name=name,
        category=kind,
        bytes_at=bytes_at,
        formula=Formula(symbols=symbols, numbers=f"{max(bytes_at):,}"),
        source=traced_source(profile),
        evidence=EvidenceKind.TRACE,
    )
