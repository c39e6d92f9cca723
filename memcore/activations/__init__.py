"""Activations and loss in closed form."""

from memcore.activations.held import is_used
from memcore.activations.layer import Kept, LayerForm, Traits, layer_form
from memcore.activations.recompute import SegmentLaw, checkpointing, segment_law
from memcore.activations.terms import Activations, activation_terms, loss_terms, model_activations

__all__ = [
    "Activations",
    "Kept",
    "LayerForm",
    "SegmentLaw",
    "Traits",
    "activation_terms",
    "checkpointing",
    "is_used",
    "layer_form",
    "loss_terms",
    "model_activations",
    "segment_law",
]
