"""Activations and loss in closed form."""

from memcore.activations.held_over import held_over
from memcore.activations.layer import Kept, LayerForm, Traits, layer_form
from memcore.activations.recompute import SegmentLaw, checkpointing, segment_law
from memcore.activations.terms import Activations, activation_terms, has_form, model_activations

__all__ = [
    "Activations",
    "Kept",
    "LayerForm",
    "SegmentLaw",
    "Traits",
    "activation_terms",
    "checkpointing",
    "has_form",
    "held_over",
    "layer_form",
    "model_activations",
    "segment_law",
]
