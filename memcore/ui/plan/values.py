"""What the sidebar's widgets say, by key."""

from collections.abc import Mapping
from typing import Any, cast

import streamlit as st

from memcore.engine_options import EngineName, own_convention
from memcore.models import catalogue_model
from memcore.recipes import ConventionName
from memcore.scenario import Method, Quantization

# What stands for a field that is left out, where the library or another field decides then.
USUAL = "usual"
# The ways to give a model.
CATALOGUE, COUNT, CONFIG = "catalogue", "count", "config"
Values = Mapping[str, Any]


def values_now() -> Values:
    """Those of the current session."""
    return cast(Values, st.session_state)


def engine_in(values: Values) -> EngineName:
    """The chosen engine."""
    return EngineName(values["w_engine"])


def has_shapes(values: Values) -> bool:
    """Whether more than a number of parameters is known of the model, as far as its widgets say."""
    if values["w_source"] == CATALOGUE:
        return catalogue_model(values["w_name"]).config is not None
    return bool(values["w_source"] != COUNT)


def adapts(values: Values) -> bool:
    """Whether adapters are trained."""
    return bool(values["w_method"] != Method.FULL)


def own_convention_in(values: Values) -> ConventionName:
    """The convention of the chosen engine."""
    fp8 = values["w_recipe_fp8"] != USUAL
    return own_convention(engine_in(values), adapts=adapts(values), bare=not has_shapes(values), fp8=fp8)


def convention_in(values: Values) -> ConventionName:
    """The convention that is chosen, or else the engine's own."""
    chosen = values["w_convention"]
    return own_convention_in(values) if chosen == USUAL else ConventionName(chosen)


def is_nf4(values: Values) -> bool:
    """Whether the base is packed by bitsandbytes."""
    return quantization_in(values) in (Quantization.NF4, Quantization.NF4_DOUBLE_QUANT)


def quantization_in(values: Values) -> Quantization | None:
    """How the base is packed, where it is."""
    return Quantization(values["w_quantization"]) if values["w_method"] == Method.QLORA else None
