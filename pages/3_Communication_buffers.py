"""Communication buffers: why the real peak is above the floor."""

from memcore.ui.communication_buffers import render
from memcore.ui.frame import page

page("buffers", render)
