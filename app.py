"""Home: the whole budget of one scenario, and does it fit. Start with ``streamlit run app.py``."""

from memcore.ui.frame import page
from memcore.ui.home import render

page("home", render)
