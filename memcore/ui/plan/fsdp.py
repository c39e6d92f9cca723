"""FSDP's settings in the sidebar, the older one's and FSDP2's."""

from typing import Any

import streamlit as st

from memcore.engine_options import EngineName
from memcore.i18n import gettext as _
from memcore.i18n import mark
from memcore.scenario import Fsdp1Config, Fsdp2Config, Method, Scenario
from memcore.ui.plan.field import PlanField
from memcore.ui.plan.number import number
from memcore.ui.plan.values import Values, adapts, engine_in


def fsdp_values(scenario: Scenario) -> dict[str, Any]:
    """The value of every widget for a scenario."""
    fsdp1, fsdp2 = scenario.fsdp1_config, scenario.fsdp2_config
    of_fsdp1 = scenario.parallelism.engine is EngineName.FSDP1
    return {
        "w_reshard": (fsdp1 if of_fsdp1 else fsdp2).reshard_after_forward,
        "w_reshard_exception": fsdp2.reshard_exception,
        "w_fsdp_units": fsdp2.fsdp_units,
        "w_fsdp_offload": scenario.shards_on_host,
        "w_fsdp_adapters": fsdp1.adapters or "apart",
        "w_no_sync": fsdp1.no_sync,
        "w_around": fsdp1.checkpoint_around_units,
    }


def fsdp_config(values: Values, engine: EngineName) -> dict[str, Any]:
    """The engine's own settings, those at their defaults left out.

    What does nothing beside the rest of the widgets (adapters without adapters) is left out.
    """
    own = {"reshard_after_forward": values["w_reshard"], "cpu_offload": values["w_fsdp_offload"]}
    if engine is EngineName.FSDP2:
        exception = values["w_reshard_exception"] if values["w_reshard"] else None
        own |= {"reshard_exception": exception, "fsdp_units": values["w_fsdp_units"]}
        return {} if own.items() <= Fsdp2Config().model_dump().items() else own
    full = values["w_method"] == Method.FULL
    own |= {
        "adapters": None if full or values["w_fsdp_adapters"] == "apart" else values["w_fsdp_adapters"],
        "no_sync": values["w_no_sync"] and values["w_accum"] > 1 and not values["w_fsdp_offload"],
        "checkpoint_around_units": values["w_around"] and values["w_checkpointing"] not in ("none", "attention"),
    }
    defaults = Fsdp1Config()
    return {name: value for name, value in own.items() if value != getattr(defaults, name)}


def draw_fsdp(engine: EngineName) -> None:
    """The widgets of one of the two."""
    if engine is EngineName.FSDP2:
        _fsdp2_units()
    else:
        st.toggle("reshard_after_forward", key="w_reshard", help="FULL_SHARD")
    st.toggle(
        "offload_policy" if engine is EngineName.FSDP2 else "cpu_offload",
        key="w_fsdp_offload",
        help=_("CPUOffloadPolicy: shards, their gradients and the optimizer's states are kept on the host.")
        if engine is EngineName.FSDP2
        else _("CPUOffload: shards, their gradients and the optimizer's states are kept on the host."),
    )
    number(
        _("Replicas (HSDP)"), most=1_000_000, key="w_replicate",
        help=_("Groups that hold the same; the GPUs of one group divide the states.")
        if engine is EngineName.FSDP2
        else _("Groups that hold the same; the GPUs of one group divide the states. As many as GPUs: NO_SHARD."),
    )  # fmt: skip
    if engine is EngineName.FSDP2:
        return
    chosen = st.session_state
    if chosen["w_method"] != Method.FULL:
        kinds = {
            "apart": _("units of their own"),
            "inside": _("in their layer's unit"),
            "ignored": _("whole on every rank"),
        }
        st.selectbox(_("Adapters"), list(kinds), key="w_fsdp_adapters", format_func=kinds.__getitem__)
    if chosen["w_accum"] > 1:
        st.toggle("no_sync", key="w_no_sync", help=_("Of several micro-steps the last alone reduces gradients."))
    if chosen["w_checkpointing"] not in ("none", "attention"):
        st.toggle(
            _("Checkpoint around units"), key="w_around",
            help=_("Under Hugging Face's Trainer before transformers 5: a layer is gathered again to be recomputed."),
        )  # fmt: skip


def _fsdp2_units() -> None:
    """What is gathered together, and what of it stays so after its forward."""
    units = {
        "block_root": _("layers; all else in the root"),
        "block_embed_head": _("layers, embedding, norm with head"),
    }
    st.selectbox(_("FSDP units"), list(units), key="w_fsdp_units", format_func=units.__getitem__)
    st.toggle("reshard_after_forward", key="w_reshard")
    if st.session_state["w_reshard"]:
        kept = {"last_block": _("the last layer"), "head": _("the head"), "last_block+head": _("last layer and head")}
        st.selectbox(
            _("Not resharded"), [None, *kept], key="w_reshard_exception",
            format_func=lambda name: kept.get(name, _("nothing")),
            help=_("torchtitan keeps its last unit gathered from the forward to the backward, which follows at once."),
        )  # fmt: skip


def _is_fsdp1(values: Values) -> bool:
    return engine_in(values) is EngineName.FSDP1


def _gathers(values: Values) -> bool:
    """Not NO_SHARD, whose ranks hold everything whole."""
    return bool(values["w_replicate"] < values["w_gpus"])


def _prefetches(_values: Values) -> dict[str, str]:
    return {"pre": "BACKWARD_PRE", "post": "BACKWARD_POST", "none": _("none")}


FSDP1_FIELDS = (
    PlanField(
        part=Fsdp1Config,
        name="backward_prefetch",
        label="backward_prefetch",
        help=mark(
            "When the next unit's weights are gathered in the backward: before a unit's gradients are computed, after "
            "them, or only when they are needed."
        ),
        allowed=_is_fsdp1,
        shown=_gathers,
        choices=_prefetches,
    ),
    PlanField(
        part=Fsdp1Config,
        name="forward_prefetch",
        label="forward_prefetch",
        help=mark("The next unit's weights are gathered before a unit's forward runs: two units are whole at once."),
        allowed=_is_fsdp1,
        shown=_gathers,
    ),
    PlanField(
        part=Fsdp1Config,
        name="use_orig_params",
        label="use_orig_params",
        help=mark("Parameters stay tensors of their own, views of their unit's flat one; frozen and trained can mix."),
        allowed=_is_fsdp1,
    ),
    PlanField(
        part=Fsdp1Config,
        name="autocast",
        label=mark("Autocast around the forward"),
        help=mark("torch.autocast beside FSDP's own mixed precision, as accelerate has it."),
        allowed=lambda values: _is_fsdp1(values) and not adapts(values),
    ),
)
