"""Products in float8 in the sidebar, and FSDP2's gathers of their weights."""

from memcore.engine_options import EngineName
from memcore.hardware import accelerator
from memcore.i18n import gettext as _
from memcore.i18n import mark
from memcore.recipes import ConventionName, DType
from memcore.scenario import FP8_CAPABILITY, FP8_MULTIPLE, FP8_RECIPES, Fsdp2Config, Recipe
from memcore.ui.plan.dtypes import dtype_in_force
from memcore.ui.plan.field import PlanField
from memcore.ui.plan.values import USUAL, Values, adapts, engine_in, has_shapes

_ENGINES = (EngineName.SINGLE, EngineName.DDP, EngineName.FSDP2)


def _can_multiply(values: Values) -> bool:
    """Where float8 is predicted: see memcore.scenario.kernel_checks, check_fp8."""
    engine = engine_in(values)
    predicted = engine in _ENGINES and not (engine is EngineName.FSDP2 and values["w_fsdp_offload"])
    plain = has_shapes(values) and not adapts(values) and values["w_code"] == "transformers"
    in_bf16 = dtype_in_force(values, "compute_dtype") is DType.BF16
    autocast = values["w_convention"] == ConventionName.AMP_AUTOCAST
    whole = values["w_micro"] * values["w_seq"] % FP8_MULTIPLE == 0 and values["w_model_experts"] != "separate"
    capability = accelerator(values["w_gpu"]).compute_capability
    able = capability is not None and float(capability) >= FP8_CAPABILITY
    return predicted and plain and in_bf16 and not autocast and whole and able


def _can_gather(values: Values) -> bool:
    several = values["w_replicate"] < values["w_gpus"]
    asked = values["w_recipe_fp8"] == FP8_RECIPES[0] and _can_multiply(values)
    return bool(engine_in(values) is EngineName.FSDP2 and several and asked)


FLOAT8_FIELDS = (
    PlanField(
        part=Recipe,
        name="fp8",
        label=mark("Products in float8"),
        help=mark("torchao's Float8Linear in place of linear modules, the head aside, by its recipes."),
        allowed=_can_multiply,
        choices=lambda _values: {USUAL: _("no"), **{name: name for name in FP8_RECIPES}},
    ),
    PlanField(
        part=Fsdp2Config,
        name="enable_fsdp_float8_all_gather",
        label="enable_fsdp_float8_all_gather",
        help=mark("torchao's: the weights of such modules are gathered in float8."),
        allowed=_can_gather,
    ),
)
