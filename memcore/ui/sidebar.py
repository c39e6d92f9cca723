"""The shared plan in the sidebar: one widget for each field, and its error beside it."""

import json

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from memcore.configs import normalise_config
from memcore.engine_options import ENGINE_OPTIONS, EngineName
from memcore.errors import UserError
from memcore.explain import (
    ATTENTION_LABELS,
    EVIDENCE_LABELS,
    FUSED_LABELS,
    METHOD_LABELS,
    OPERATION_LABELS,
)
from memcore.hardware import accelerators
from memcore.i18n import LANGUAGES
from memcore.i18n import gettext as _
from memcore.models import catalogue, catalogue_inventory
from memcore.optimizers import OPTIMIZERS, OptimizerName
from memcore.recipes import CONVENTIONS, ConventionName
from memcore.scenario import Device, Method, Quantization, decode_json
from memcore.settings import settings
from memcore.terms import EvidenceKind
from memcore.ui import state
from memcore.ui.fsdp import fsdp_widgets
from memcore.ui.loss_settings import draw_loss
from memcore.ui.state import CATALOGUE, CONFIG, COUNT, ENGINE_DEFAULT
from memcore.ui.work import fetch
from memcore.units import ByteUnit, format_count


class Sidebar:
    """Draws the widgets, and keeps a place under each section for what is wrong there."""

    def __init__(self) -> None:
        self._places: dict[str, DeltaGenerator] = {}

    def draw(self) -> None:
        """All sections, in the sidebar."""
        with st.sidebar:
            _view()
            for name, title, draw, is_open in (
                ("model", _("Model"), _model, True),
                ("hardware", _("Hardware"), _hardware, True),
                ("parallelism", _("Engine"), _parallelism, True),
                ("recipe", _("Recipe"), _recipe, False),
                ("offload", _("Offload"), _offload, False),
                ("workload", _("Workload"), _workload, True),
            ):
                if name != "offload" or ENGINE_OPTIONS[_engine()].offloads:
                    with st.expander(title, expanded=is_open):
                        draw()
                self._places[name] = st.empty()

    def show(self, error: UserError) -> None:
        """The sentence beside the section whose field it names."""
        section = error.field.split(".")[0]
        if section not in self._places:
            section = "parallelism" if section == "engine_config" else "model"
        self._places[section].error(str(error), icon=":material/error:")


def _engine() -> EngineName:
    return EngineName(st.session_state["w_engine"])


def _view() -> None:
    left, right = st.columns(2)
    left.segmented_control(_("Unit"), [unit.value for unit in ByteUnit], key=state.UNIT, required=True)
    right.segmented_control(
        _("Language"), list(LANGUAGES), key=state.LANGUAGE, required=True, format_func=LANGUAGES.__getitem__
    )
    kinds = {kind: _(EVIDENCE_LABELS[EvidenceKind(kind)]) for kind in state.EVIDENCES}
    st.segmented_control(
        _("Activations from"),
        list(kinds),
        key=state.EVIDENCE,
        required=True,
        format_func=kinds.__getitem__,
        help=_("formula: closed form, at once. trace: the real model's code on fake tensors, in about a second."),
    )


def _model() -> None:
    sources = {CATALOGUE: _("Catalogue"), COUNT: _("Count"), CONFIG: _("Config")}
    st.segmented_control(
        _("Given as"), list(sources), key="w_source", required=True, format_func=sources.__getitem__, width="stretch"
    )
    source = st.session_state["w_source"]
    if source == CATALOGUE:
        st.selectbox(_("Model"), list(catalogue()), key="w_name")
        _about_model(st.session_state["w_name"])
    elif source == COUNT:
        st.text_input(_("Parameters"), key="w_count", max_chars=40, help=_("For example 7b, 7e9 or 6,738,415,616."))
        st.caption(_("A count has no shapes: activations, loss and gathered layers are not estimated from it."))
    else:
        _config()
    if source != COUNT:
        codes = ["transformers", "litgpt"]
        st.selectbox(_("Model code"), codes, key="w_code", help=_("Whose code computes it: they keep other tensors."))


def _about_model(name: str) -> None:
    """The count, and in the help where it and the config come from."""
    model, inventory = catalogue()[name], catalogue_inventory(name)
    parts = []
    if inventory is not None:
        parts.append(_("{count} parameters").format(count=f"{inventory.n_params:,}"))
        if inventory.n_active != inventory.n_params:
            parts.append(_("{count} active per token").format(count=format_count(inventory.n_active)))
    parts.append(_("cross-checked") if model.cross_checked else _("not cross-checked"))
    sources = [_("Config: {source}").format(source=model.config_source)]
    if model.n_params_source:
        sources.append(_("Count: {source}").format(source=model.n_params_source))
    st.caption(" · ".join(parts), help="  \n".join(sources))


def _config() -> None:
    st.file_uploader(
        _("Upload config.json"), type=["json"], key="upload", on_change=_take_upload, max_upload_size=1,
        label_visibility="collapsed",
    )  # fmt: skip
    if settings().may_look_up:
        st.text_input(_("or fetch by hub id"), key="hub_id", placeholder="owner/name", max_chars=200, on_change=_fetch)
    st.text_area(_("or paste its text"), key="w_config", height=160, max_chars=settings().max_upload_chars)
    if failure := st.session_state.pop("config_failure", None):
        st.error(failure, icon=":material/error:")
    if unused := _unused_keys(st.session_state["w_config"]):
        st.caption(_("Not used: {keys}.").format(keys=", ".join(unused)))


def _take_upload() -> None:
    uploaded = st.session_state.get("upload")
    if uploaded is not None:
        text = uploaded.getvalue()[: settings().max_upload_chars + 1]
        st.session_state["w_config"] = text.decode("utf-8-sig", "replace")


def _fetch() -> None:
    try:
        if hub_id := st.session_state.get("hub_id", "").strip():
            st.session_state["w_config"] = json.dumps(fetch(hub_id), indent=1)
    except UserError as error:
        st.session_state["config_failure"] = str(error)


def _unused_keys(text: str) -> list[str]:
    """Keys of the pasted config that decide nothing here, so that leaving them out is said."""
    try:
        config = decode_json(text, infinity=True)
    except UserError:
        return []
    if not isinstance(config, dict):
        return []
    return sorted(str(key)[:60] for key in config.keys() - normalise_config(config).keys())[:20]


def _hardware() -> None:
    labels = {name: device.label for name, device in accelerators().items()}
    st.selectbox(_("Accelerator"), list(labels), key="w_gpu", format_func=labels.__getitem__)
    single = _engine() is EngineName.SINGLE
    left, right = st.columns(2)
    left.number_input(_("GPUs"), min_value=1, max_value=1_000_000, step=1, key="w_gpus", disabled=single)
    right.number_input(_("per node"), min_value=1, max_value=1_000_000, step=1, key="w_node", disabled=single)


def _parallelism() -> None:
    engines = {name.value: options.label for name, options in ENGINE_OPTIONS.items()}
    engines[EngineName.SINGLE.value] = _("single GPU")
    st.selectbox(_("Engine"), list(engines), key="w_engine", format_func=engines.__getitem__)
    engine = _engine()
    if stages := ENGINE_OPTIONS[engine].stages:
        st.segmented_control(_("ZeRO stage"), list(stages), key="w_stage", required=True)
        _deepspeed(st.session_state["w_stage"])
    if engine is EngineName.DDP:
        st.toggle("gradient_as_bucket_view", key="w_bucket_view")
    if engine in (EngineName.FSDP1, EngineName.FSDP2):
        fsdp_widgets(engine)


def _deepspeed(stage: int) -> None:
    st.number_input(
        "reduce_bucket_size",
        min_value=1,
        max_value=10**12,
        step=10_000_000,
        key="w_bucket",
        help=_("In elements, not bytes."),
    )
    if stage in (1, 2):
        st.toggle("overlap_comm", key="w_overlap")
    if stage == 3:
        st.number_input("zero_hpz_partition_size", min_value=1, max_value=1_000_000, step=1, key="w_hpz")


def _recipe() -> None:
    methods = {method.value: _(label) for method, label in METHOD_LABELS.items()}
    st.segmented_control(_("Method"), list(methods), key="w_method", required=True, format_func=methods.__getitem__)
    _adapters(Method(st.session_state["w_method"]))
    conventions = {name.value: CONVENTIONS[name].label for name in ConventionName}
    st.selectbox(
        _("Convention"), list(conventions), key="w_convention", format_func=conventions.__getitem__,
        help=_("The dtypes of weights, gradients, master copy and states; the Static accounting page compares them."),
    )  # fmt: skip
    names = {name.value: rule.label for name, rule in OPTIMIZERS.items()}
    st.selectbox(_("Optimizer"), list(names), key="w_optimizer", format_func=names.__getitem__)
    _optimizer(OptimizerName(st.session_state["w_optimizer"]))


def _adapters(method: Method) -> None:
    if method is Method.FULL:
        return
    st.number_input(_("LoRA rank"), min_value=1, max_value=65_536, step=8, key="w_rank")
    st.text_input(
        _("Target modules"), key="w_targets", max_chars=400, help=_("Comma-separated, or all-linear: all but the head.")
    )
    if method is Method.QLORA:
        kinds = {
            Quantization.NF4.value: _("NF4"),
            Quantization.NF4_DOUBLE_QUANT.value: _("NF4, double quantisation"),
            Quantization.GPTQ_INT4.value: _("GPTQ"),
        }
        st.selectbox(_("Base weights in 4 bits"), list(kinds), key="w_quantization", format_func=kinds.__getitem__)


def _optimizer(name: OptimizerName) -> None:
    rule = OPTIMIZERS[name]
    if rule.has_8bit or st.session_state["w_8bit"] or st.session_state["w_paged"]:
        left, right = st.columns(2)
        left.toggle(_("8-bit"), key="w_8bit")
        right.toggle(_("paged"), key="w_paged")
    if name is OptimizerName.SGD or st.session_state["w_momentum"]:
        st.toggle(_("momentum"), key="w_momentum")
    if _engine() is EngineName.SINGLE:
        st.toggle(
            _("Step in the backward"),
            key="w_in_backward",
            help=_("Each parameter is stepped as soon as its gradient is there, which is freed then."),
        )
    if rule.in_torch:
        choices = [ENGINE_DEFAULT, "foreach", "fused", "for_loop"]
        labels = {ENGINE_DEFAULT: _("the engine's default")}
        st.selectbox(
            _("Implementation"), choices, key="w_implementation", format_func=lambda choice: labels.get(choice, choice)
        )


def _offload() -> None:
    devices = {
        Device.NONE.value: _("stay on the GPU"),
        Device.CPU.value: _("to host memory"),
        Device.NVME.value: "NVMe",
    }
    st.selectbox(_("Optimizer states"), list(devices), key="w_offload_optimizer", format_func=devices.__getitem__)
    st.selectbox(_("Weights"), list(devices), key="w_offload_parameters", format_func=devices.__getitem__)


def _workload() -> None:
    left, right = st.columns(2)
    left.number_input(_("Micro-batch"), min_value=1, max_value=100_000_000, step=1, key="w_micro")
    right.number_input(_("Tokens"), min_value=1, max_value=100_000_000, step=1024, key="w_seq", help=_("Per sequence."))
    attentions = {name: _(label) for name, label in ATTENTION_LABELS.items()}
    st.selectbox(_("Attention"), list(attentions), key="w_attention", format_func=attentions.__getitem__)
    kinds = {
        "none": _("none"),
        "full": _("full: every layer"),
        "segments": _("segments of k layers"),
        "every_nth": _("every n-th layer"),
        "first": _("the first n layers"),
        "attention": _("attention scores only"),
        "save": _("by operation: all but what is saved"),
    }
    st.selectbox(_("Checkpointing"), list(kinds), key="w_checkpointing", format_func=kinds.__getitem__)
    if st.session_state["w_checkpointing"] in state.COUNTED_CHECKPOINTING:
        st.number_input(_("Layers (k or n)"), min_value=1, max_value=9999, step=1, key="w_k")
    if st.session_state["w_checkpointing"] == "save":
        operations = {name: _(label) for name, label in OPERATION_LABELS.items()}
        st.multiselect(_("Saved"), list(operations), key="w_saved", format_func=operations.__getitem__)
    if st.session_state["w_checkpointing"] in state.REENTRANT_CHECKPOINTING:
        st.checkbox(_("Reentrant"), key="w_reentrant", help=_("torch's older checkpoint: use_reentrant=True."))
    if _engine() is EngineName.SINGLE and st.session_state["w_source"] != COUNT:
        about = _("torchtune's OffloadActivations: what autograd saves waits in host memory for the backward.")
        st.toggle(_("Saved activations to host memory"), key="w_offload_activations", help=about)
    draw_loss()
    kernels = {name: _(label) for name, label in FUSED_LABELS.items()}
    st.multiselect(
        _("Fused kernels"),
        list(kernels),
        key="w_fused",
        format_func=kernels.__getitem__,
        help=_("Of a kernel library, such as Liger or Unsloth: they keep less, and write gradients in place."),
    )
    st.toggle("torch.compile", key="w_compile", help=_("Each decoder layer is compiled by itself, as torchtitan does."))
    st.number_input(
        _("Gradient accumulation steps"),
        min_value=1,
        max_value=100_000_000,
        step=1,
        key="w_accum",
        help=_("Above 1, gradients stay alive from one micro-step to the next."),
    )
