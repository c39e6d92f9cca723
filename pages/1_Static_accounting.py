"""Static accounting: where the bytes per parameter go."""

from memcore.ui.frame import page
from memcore.ui.static_accounting import render

page("static", render)
