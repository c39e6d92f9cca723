"""A scenario's own layer, made small enough for the device at hand, with every reduction said."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd
from typing import Any

from memcore.budget import Evidence, inventory_for
from memcore.configs import SHAPE_NAMES
from memcore.errors import UserError
from memcore.i18n import gettext as _
from memcore.inventory import Inventory, Shapes
from memcore.models import catalogue_model
from memcore.scenario import Scenario
from memcore.states import precision_of

_KV_HEADS = SHAPE_NAMES["num_kv_heads"][0]
_EXPERTS_INNER = ("moe_intermediate_size", "shared_expert_intermediate_size")
_DROPOUT = (
    "attention_dropout", "attn_pdrop", "attention_probs_dropout_prob",
    "hidden_dropout", "hidden_dropout_prob", "resid_pdrop", "residual_dropout", "embd_pdrop", "embedding_dropout",
)  # fmt: skip
_TOKEN_IDS = ("pad_token_id", "bos_token_id", "eos_token_id")
FEW_WORDS = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """What a kind of device is given: parameters of one layer; elements of plain attention's scores; tokens in a
    sequence of whole layers; width of a projection; and the dtype that replaces 16 bit, where it is slow or less
    exact there."""

    layer_params: int
    score_elements: int
    most_tokens: int
    projection_width: int
    dtype: str | None


# The CPU's are for two cores and a minute and a half. In 16 bit its kernels make copies of their own, as the
# processor's instructions ask, which belong to no model.
ROOMS = {
    "cpu": Room(layer_params=5_000_000, score_elements=2**26, most_tokens=2048, projection_width=256, dtype="fp32"),
    "accelerator": Room(
        layer_params=1_000_000_000, score_elements=2**32, most_tokens=16_384, projection_width=1024, dtype=None
    ),
}


def room(device: str) -> Room:
    """What a device is given."""
    return ROOMS["cpu" if device == "cpu" else "accelerator"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Slice:
    """What is measured of a scenario's model: `shapes` of its own layer and those that run, `num_layers` of the
    whole model, `dtype` that runs and the one asked for."""

    device: str
    shapes: Shapes
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    divisor: int
    dtype: str
    scenario_dtype: str
    has_dropout: bool
    base_config: Mapping[str, Any]

    def config(self, num_layers: int, longest: int, vocabulary: int = FEW_WORDS) -> dict[str, Any]:
        """The config.json of `num_layers` layers of this slice, for sequences of up to `longest` tokens."""
        return {**_reduced(self, num_layers, longest), "vocab_size": vocabulary}

    def reductions(self) -> list[str]:
        """What differs from the scenario's own layer, as sentences; sizes that a sweep varies are not among them."""
        return [*self.width_reductions(), _("The layers alone run: no head, no loss, and an embedding of a few words.")]

    def width_reductions(self) -> list[str]:
        """What differs within a layer."""
        shapes, found = self.shapes, []
        if self.divisor > 1:
            sentence = _(
                "Width: a hidden size of {hidden:,} instead of {whole:,}, {heads} of {all_heads} heads of {size}, and "
                "the MLP in proportion."
            )
            numbers = {"hidden": self.hidden_size, "whole": shapes.hidden_size, "size": shapes.head_dim}
            found.append(sentence.format(**numbers, heads=self.num_heads, all_heads=shapes.num_heads))
        if self.dtype != self.scenario_dtype:
            sentence = _("{dtype} instead of {asked}: a CPU's 16-bit kernels make copies that belong to no model.")
            found.append(sentence.format(dtype=self.dtype.upper(), asked=self.scenario_dtype.upper()))
        if self.has_dropout:
            found.append(_("Dropout is off, so that the variants' results can be compared."))
        return found


def make_slice(
    scenario: Scenario, evidence: Evidence, device: str, dtype: str | None = None, limits: Room | None = None
) -> Slice:
    """The scenario's layer, no larger than the device has room for, or `limits` if given. Raises UserError for what
    has no layers."""
    inventory = inventory_for(scenario.model, evidence)
    config = _config(scenario)
    if scenario.model.code != "transformers":
        raise UserError(_("Transformers' code alone is run here."), "model.code")
    if inventory is None or config is None:
        raise UserError(_("A parameter count has no layers to measure: choose a model with a config."), "model")
    shapes, limits = inventory.shapes, limits or room(device)
    if not shapes.num_heads or not shapes.head_dim:
        raise UserError(_("The model has no attention heads to measure."), "model")
    asked = precision_of(scenario.recipe).convention.compute_dtype.value
    divisor = _divisor(inventory, limits.layer_params)
    heads = shapes.num_heads // divisor
    return Slice(
        device=device,
        shapes=shapes,
        hidden_size=shapes.hidden_size // divisor,
        num_heads=heads,
        num_kv_heads=_kv_heads(heads, shapes.num_kv_heads // divisor),
        divisor=divisor,
        dtype=dtype or limits.dtype or asked,
        scenario_dtype=asked,
        has_dropout=bool(shapes.hidden_dropout or shapes.attention_dropout),
        base_config=config,
    )


def _config(scenario: Scenario) -> Mapping[str, Any] | None:
    model = scenario.model
    config = catalogue_model(model.name).config if model.name is not None else model.config
    text = None if config is None else config.get("text_config")
    return text if isinstance(text, Mapping) else config


def _divisor(inventory: Inventory, most_params: int) -> int:
    """The smallest divisor of the width with which a layer has room; the largest that there is, if none has."""
    shapes = inventory.shapes
    sizes = sorted(block.numel for block in inventory.layers)
    params = sizes[len(sizes) // 2]
    common = gcd(shapes.hidden_size, shapes.num_heads)
    divisors = [number for number in range(1, common + 1) if common % number == 0]
    return next((number for number in divisors if params / number**2 <= most_params), divisors[-1])


def _kv_heads(heads: int, wanted: int) -> int:
    """The largest number of key and value heads, up to the one wanted, that divides the heads; at least one."""
    return next((number for number in range(max(wanted, 1), 1, -1) if heads % number == 0), 1)


def _reduced(part: Slice, num_layers: int, longest: int) -> dict[str, Any]:
    config = {name: value for name, value in part.base_config.items() if name not in ("architectures", "vision_config")}
    shapes = part.shapes
    _set(config, SHAPE_NAMES["hidden_size"], part.hidden_size)
    _set(config, SHAPE_NAMES["num_heads"], part.num_heads)
    if shapes.num_kv_heads != shapes.num_heads or config.get(_KV_HEADS) is not None:
        config[_KV_HEADS] = part.num_kv_heads
    inner = SHAPE_NAMES["intermediate_size"]
    given = [name for name in inner if config.get(name) is not None]
    if given or shapes.intermediate_size != 4 * shapes.hidden_size:
        _set(config, given or inner, shapes.intermediate_size // part.divisor)
    for name in _EXPERTS_INNER:
        if config.get(name):
            config[name] = config[name] // part.divisor
    for name, value in config.items():
        if isinstance(value, list) and len(value) == shapes.num_layers:
            config[name] = value[:num_layers]
    _set(config, SHAPE_NAMES["num_layers"], num_layers)
    if shapes.max_positions < longest:
        _set(config, SHAPE_NAMES["max_positions"], longest)
    config.update(dict.fromkeys((name for name in _DROPOUT if config.get(name) or part.has_dropout), 0.0))
    config.update(dict.fromkeys(_TOKEN_IDS, 0))
    if "first_k_dense_replace" in config:
        config["first_k_dense_replace"] = 0
    return config


def _set(config: dict[str, Any], names: Any, value: int) -> None:
    """Set a size under the name that the config has for it, else under the usual one."""
    config[next((name for name in names if name in config), names[0])] = value
