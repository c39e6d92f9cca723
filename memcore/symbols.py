"""What the symbols of the formulas mean, in words: one meaning each, whichever module writes them."""

import re

from memcore.i18n import gettext as _
from memcore.i18n import mark

# By symbol without braces; a neighbour's or a layer's own index is i.
MEANINGS = {
    r"\Psi": mark("all parameters"),
    r"\Psi_t": mark("trained parameters"),
    r"\Psi_q": mark("parameters packed in 4 bits"),
    r"\Psi_r": mark("parameters left unpacked"),
    r"\Psi_n": mark("parameters of the norms"),
    r"\Psi_v": mark("values of the variance"),
    r"\Psi_m": mark("values of the momentum"),
    r"\Psi_f": mark("rows and columns of the factored variance"),
    r"\Psi_gathered": mark("parameters gathered at once"),
    r"\Psi_together": mark("parameters that arrive together"),
    r"\Psi_small": mark("parameters below the threshold"),
    r"\Psi_bucket": mark("gradients in the bucket"),
    r"\psi_max": mark("parameters of the largest tensor"),
    r"\psi_layer": mark("parameters of the largest layer"),
    "N": mark("ranks that share"),
    "N_h": mark("ranks that share a second copy (hpZ)"),
    "S": mark("values of this rank's share, padding included"),
    "S_g": mark("gradients that this rank's slice keeps"),
    "B": mark("elements of the bucket"),
    "F": mark("elements flattened at once"),
    "M": mark("elements of a sub-group"),
    "U": mark("bytes paged out to the host"),
    "K": mark("optimizer bytes per parameter"),
    "Z": mark("bytes of the zero points"),
    "Q": mark("bytes of the scales"),
    "O": mark("bytes per parameter of the step's temporaries"),
    "w": mark("bytes of a computed value"),
    "g": mark("bytes of a gradient"),
    "T": mark("tokens of a micro-batch"),
    "b": mark("sequences of a micro-batch"),
    "s": mark("tokens of a sequence"),
    "h": mark("hidden size"),
    "h_i": mark("width of input i"),
    "f": mark("width of the MLP's inside"),
    "n": mark("bytes that the norm keeps of a value"),
    "V": mark("words of the vocabulary"),
    "a_i": mark("bytes that layer i keeps of a token"),
    "a_group": mark("bytes that the layers run again keep of a token"),
    "c_i": mark("bytes that layer i keeps of a pair of tokens"),
    "c_group": mark("bytes that the layers run again keep of a pair of tokens"),
    "n_t": mark("rows of tensor t"),
    "m_t": mark("values of a row"),
    "v_t": mark("this rank's values of tensor t"),
    "k_t": mark("the shorter side of matrix t"),
    "A_chunk": mark("bytes of a chunk's logits and gradients"),
    "A_saved": mark("bytes saved for the backward"),
    "A_again": mark("bytes made again in the backward"),
    "A_moment": mark("bytes of a moment"),
    "A_loss": mark("bytes of logits and loss"),
    "W_cast": mark("bytes of 16-bit copies"),
    "O_moment": mark("bytes that the step makes for a moment"),
    "P_gathered": mark("bytes of gathered parameters"),
    "G_reduced": mark("bytes of gradients on their way"),
    "P_i": mark("bytes of a layer's gathered parameters"),
    "P_R": mark("bytes of the root's gathered parameters"),
    "P_H": mark("bytes of the head's gathered parameters"),
    "A_i": mark("bytes that a layer's parameters arrive in"),
    "M_i": mark("bytes of a layer's slice in the computation's dtype"),
    "G_i": mark("bytes of a layer's whole gradients"),
    "G_R": mark("bytes of the root's whole gradients"),
    "F_i": mark("bytes of a layer's flat gradient"),
    "B_i": mark("bytes that a layer's gradients are reduced in"),
    "B_R": mark("bytes that the root's gradients are reduced in"),
    "S_i": mark("bytes of a layer's reduced slice"),
    "S_R": mark("bytes of the root's reduced slice"),
    "H": mark("bytes of gradients that wait for the embedding's"),
    "W": mark("bytes of a thread's workspace"),
    "C": mark("bytes outside the allocator"),
    "R": mark("bytes that the allocator holds in whole segments"),
}
_COMMANDS = re.compile(r"\\(?:sum(?:_[a-z])?|times|min|max|lceil|rceil|,)|\\mathrm\{[^}]*\}")
_SYMBOL = re.compile(r"(?:\\[Pp]si|[A-Za-z])(?:_(?:\{[^{}]*\}|[A-Za-z]))?")
_NEIGHBOUR = re.compile(r"(?<=_[it])[-+]1$")


def symbols_of(formula: str) -> list[str]:
    """The symbols of a formula in LaTeX, each once, in order, without braces; a neighbour's is the one of index i."""
    found = (match.group().replace("{", "").replace("}", "") for match in _SYMBOL.finditer(_COMMANDS.sub(" ", formula)))
    return list(dict.fromkeys(_NEIGHBOUR.sub("", symbol).replace("_0", "_i") for symbol in found))


def legend(formula: str) -> list[tuple[str, str]]:
    """Each symbol of the formula, in LaTeX, and what it means."""
    return [(_latex(symbol), _(MEANINGS[symbol])) for symbol in symbols_of(formula)]


def _latex(symbol: str) -> str:
    name, _underscore, index = symbol.partition("_")
    return rf"{name}_{{{index}}}" if index else name
