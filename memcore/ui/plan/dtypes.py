"""Explicit dtypes in the sidebar: each wins over the convention's own."""

from collections.abc import Callable, Mapping

from memcore.engine_options import EngineName
from memcore.i18n import gettext as _
from memcore.i18n import mark
from memcore.recipes import CONVENTIONS, DType
from memcore.scenario import Recipe
from memcore.ui.plan.field import PlanField, always
from memcore.ui.plan.values import USUAL, Values, adapts, convention_in, engine_in


def dtype_in_force(values: Values, name: str) -> DType | None:
    """What the recipe's field of this name comes to: the explicit dtype, or the convention's."""
    chosen = values[f"w_recipe_{name}"]
    if chosen == USUAL:
        own: DType | None = getattr(CONVENTIONS[convention_in(values)], name)
        return own
    return None if chosen == "none" else DType(chosen)


def _choices(name: str) -> Callable[[Values], Mapping[str, str]]:
    def choices(values: Values) -> dict[str, str]:
        own: DType | None = getattr(CONVENTIONS[convention_in(values)], name)
        usual = _("as the convention: {dtype}").format(dtype=_label(own))
        absent = {"none": _label(None)} if name == "master_dtype" else {}
        return {USUAL: usual, **{dtype.value: _label(dtype) for dtype in DType}, **absent}

    return choices


def _label(dtype: DType | None) -> str:
    return _("no copy") if dtype is None else dtype.value.upper()


def _trains_in_them(values: Values) -> bool:
    """Adapters have a dtype of their own, but with DeepSpeed, which casts them like all parameters."""
    return not adapts(values) or engine_in(values) is EngineName.DEEPSPEED


def _field(name: str, label: str, about: str, shown: Callable[[Values], bool] = always) -> PlanField:
    return PlanField(part=Recipe, name=name, label=label, help=about, shown=shown, choices=_choices(name))


DTYPE_FIELDS = (
    _field("param_dtype", mark("Weights in"), mark("The dtype that weights are stored in.")),
    _field("compute_dtype", mark("Computed in"), mark("The dtype of matrix products, and of what is kept for them.")),
    _field("grad_dtype", mark("Gradients in"), mark("The dtype that gradients are kept in."), _trains_in_them),
    _field(
        "reduce_dtype",
        mark("Reduced in"),
        mark("The dtype that gradients are summed over the GPUs in."),
        lambda values: engine_in(values) is not EngineName.SINGLE,
    ),
    _field(
        "master_dtype",
        mark("Master copy in"),
        mark("The dtype of the copy of the weights that the optimizer updates."),
        _trains_in_them,
    ),
    _field("state_dtype", mark("Optimizer states in"), mark("The dtype of momentum and variance."), _trains_in_them),
)
