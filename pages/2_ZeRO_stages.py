"""ZeRO stages: what each stage buys at N GPUs."""

from memcore.ui.frame import page
from memcore.ui.zero_stages import render

page("zero", render)
