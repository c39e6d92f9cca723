"""One colour for each thing that is drawn, the same on every page (Okabe and Ito's palette, safe for
colour-blind readers)."""

from memcore.accuracy.scored import Figure
from memcore.budget import Verdict
from memcore.one_step import StepPart
from memcore.terms import Category

CATEGORY_COLOURS = {
    Category.WEIGHTS: "#0072B2",
    Category.GRADIENTS: "#E69F00",
    Category.OPTIMIZER: "#009E73",
    Category.COMMUNICATION: "#CC79A7",
    Category.ACTIVATIONS: "#56B4E9",
    Category.LOSS: "#D55E00",
    Category.WORKSPACE: "#8C8C8C",
    Category.RUNTIME: "#BDBDBD",
}
STEP_COLOURS = {
    StepPart.WEIGHTS: "#0072B2",
    StepPart.OPTIMIZER: "#009E73",
    StepPart.GRADIENTS: "#E69F00",
    StepPart.GATHERED: "#CC79A7",
    StepPart.BUCKETS: "#F0E442",
    StepPart.TRANSIENTS: "#D55E00",
    # What is not the engine's is drawn beside it, muted.
    StepPart.ACTIVATIONS: "rgba(136, 136, 136, 0.35)",
}
STAGE_COLOURS = ("#D55E00", "#E69F00", "#56B4E9", "#0072B2")
TERM_COLOURS = ("#CC79A7", "#E69F00", "#009E73", "#56B4E9", "#D55E00", "#F0E442", "#8C8C8C")
ATTENTION_COLOURS = {"flash": "#0072B2", "memory_efficient": "#009E73", "eager": "#D55E00"}
MEASURED_ATTENTION_COLOURS = {"plain": "#D55E00", "flash": "#0072B2", "memory_efficient": "#009E73"}
# Variants of one measured chart, in order.
VARIANT_COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7")
# What was measured of a run; None where that is not known.
FIGURE_COLOURS = {
    Figure.TENSORS: "#0072B2",
    Figure.CARD: "#D55E00",
    Figure.ACTIVATIONS: "#009E73",
    None: "#8C8C8C",
}
# Lines and texts over the plot must show on a light and on a dark background.
GREY = "#888888"
VERDICT_ICONS = {
    Verdict.FITS: ":material/check_circle:",
    Verdict.UNCERTAIN: ":material/help:",
    Verdict.DOES_NOT_FIT: ":material/cancel:",
}


def shaded(colour: str, shade: int) -> str:
    """A colour, nearer to white with each shade: several of a kind in one picture."""
    parts = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return "#" + "".join(f"{round(255 - (255 - part) / (1 + 0.5 * shade)):02X}" for part in parts)
