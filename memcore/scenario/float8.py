"""Products in float8, by the names of torchao's recipes.

Linear modules but the head multiply in float8 (torchao's Float8Linear); what they keep, weights, gradients and results
are as without. A recipe says what shares a scale: a whole tensor, or a row, with the weight's gradient in float8 too or
left in 16 bits.
"""

from typing import Any

from memcore.i18n import gettext as _
from memcore.scenario.fields import refuse

# torchao 0.17, float8/config.py, Float8LinearRecipeName.
FP8_RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
# torchtitan, components/quantization/float8.py, Float8LinearConverter: SM89 or later.
FP8_CAPABILITY = 8.9
# What torch's float8 products ask of their sizes (torch 2.13, aten/src/ATen/native/cuda/ScaledBlas.cpp, _scaled_mm).
FP8_MULTIPLE = 16


def float8_recipe(given: Any) -> Any:
    """Refuse other libraries' recipes, and what torchao no longer has, by what they are."""
    if given is None or given in FP8_RECIPES:
        return given
    message = _(
        "{field} is {value}; allowed are torchao's {allowed}. Delayed scaling, which torchao no longer has, and "
        "Transformer Engine's recipes are not predicted."
    )
    raise refuse("recipe.fp8", message, value=repr(given)[:40], allowed=", ".join(FP8_RECIPES))
