"""Activation explorer: what flash attention and checkpointing save."""

from memcore.ui.activation_explorer import render
from memcore.ui.frame import page

page("activations", render)
