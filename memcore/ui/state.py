"""What a session remembers: the scenario, and the widgets that edit it.

Streamlit drops the value of a widget that a page did not draw, so :func:`keep_alive` takes each value up
again at the top of every run. Widgets hold what the sidebar can edit; the rest of a scenario that came
by link or file stays in it untouched.
"""

import json
from collections.abc import Mapping
from typing import Any, cast

import streamlit as st

from memcore.engine_options import ENGINE_OPTIONS, EngineName
from memcore.errors import UserError
from memcore.i18n import LANGUAGES, use_language
from memcore.i18n import gettext as _
from memcore.link import read_link, write_link
from memcore.optimizers import OPTIMIZERS, OptimizerName
from memcore.scenario import (
    DdpConfig,
    Device,
    Lora,
    Method,
    Quantization,
    Scenario,
    Workload,
    ZeroConfig,
    decode_json,
    parse_scenario,
    scenario_data,
)
from memcore.terms import EvidenceKind
from memcore.ui.fsdp import fsdp_config, fsdp_values
from memcore.ui.loss_settings import chosen_loss, loss_values
from memcore.units import ByteUnit

DEFAULT_SCENARIO: dict[str, Any] = {
    "model": {"name": "meta-llama/Llama-3.1-8B"},
    "hardware": {"gpu": "H100-80GB", "gpus": 8},
    "parallelism": {"engine": "deepspeed", "zero_stage": 2},
}
CATALOGUE, COUNT, CONFIG = "catalogue", "count", "config"
# The engine's own choice, as a value that a select box can hold.
ENGINE_DEFAULT = "default"
# Kinds of checkpointing that take a number of layers.
COUNTED_CHECKPOINTING = ("segments", "every_nth", "first")
# Kinds that recompute whole layers, which torch's reentrant checkpoint can do too.
REENTRANT_CHECKPOINTING = ("full", *COUNTED_CHECKPOINTING)

_SCENARIO, _NOTICES = "scenario", "notices"
# Home's views, and the one that is open.
VIEW = "w_view"
ANSWER, PUBLISHED, OWN = "answer", "published", "own"
UNIT, LANGUAGE, EVIDENCE = "w_unit", "w_language", "w_evidence"
# Engines of which groups of ranks that hold the same can be chosen.
_REPLICAS = (EngineName.FSDP1, EngineName.FSDP2)
EVIDENCES = (EvidenceKind.FORMULA.value, EvidenceKind.TRACE.value)


def widget_values(scenario: Scenario) -> dict[str, Any]:
    """The value of every widget of the sidebar for a scenario."""
    model, hardware, parallelism = scenario.model, scenario.hardware, scenario.parallelism
    recipe, offload, zero = scenario.recipe, scenario.offload, scenario.zero_config
    lora, optimizer = recipe.lora or Lora(), recipe.optimizer
    config = scenario.engine_config
    source = CATALOGUE if model.name is not None else COUNT if model.n_params is not None else CONFIG
    return {
        "w_source": source,
        "w_name": model.name or DEFAULT_SCENARIO["model"]["name"],
        "w_count": f"{model.n_params:,}" if model.n_params is not None else "7b",
        "w_config": json.dumps(model.config, indent=1) if model.config is not None else "",
        "w_code": model.code,
        "w_gpu": hardware.gpu,
        "w_gpus": hardware.gpus,
        # 8 stands for the most, so that it still does when the number of GPUs is changed.
        "w_node": 8 if hardware.gpus_per_node == min(8, hardware.gpus) else hardware.gpus_per_node,
        "w_engine": parallelism.engine.value,
        "w_stage": parallelism.stage,
        "w_replicate": parallelism.dp_replicate if parallelism.engine in _REPLICAS else 1,
        **fsdp_values(scenario),
        "w_bucket_view": isinstance(config, DdpConfig) and config.gradient_as_bucket_view,
        "w_bucket": zero.reduce_bucket_size,
        "w_overlap": bool(zero.overlap_comm),
        "w_hpz": zero.zero_hpz_partition_size,
        "w_method": recipe.method.value,
        "w_convention": recipe.convention.value,
        "w_quantization": (recipe.quantization or Quantization.NF4_DOUBLE_QUANT).value,
        "w_rank": lora.rank,
        "w_targets": ", ".join(lora.targets),
        "w_optimizer": optimizer.name.value,
        "w_8bit": optimizer.bits == 8,
        "w_paged": optimizer.paged,
        "w_momentum": optimizer.momentum,
        "w_in_backward": optimizer.in_backward,
        "w_implementation": optimizer.implementation or ENGINE_DEFAULT,
        "w_offload_optimizer": offload.optimizer.value,
        "w_offload_parameters": offload.parameters.value,
        "w_offload_activations": offload.activations is Device.CPU,
        **_workload_values(scenario.workload),
    }


def _workload_values(workload: Workload) -> dict[str, Any]:
    kind, _bracket, rest = workload.checkpointing.rstrip(")").partition("(")
    return {
        "w_micro": workload.micro_batch,
        "w_seq": workload.seq_len,
        "w_accum": workload.grad_accum,
        "w_attention": workload.attention,
        "w_checkpointing": kind,
        "w_k": int(rest) if kind in COUNTED_CHECKPOINTING else 2,
        "w_saved": rest.split(",") if kind == "save" else ["attention", "mm"],
        "w_reentrant": workload.reentrant,
        **loss_values(workload),
        "w_fused": list(workload.fused_kernels),
        "w_compile": workload.compile,
    }


def scenario_from(values: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, Any]:
    """Scenario data from the widgets' values over `base`, whose fields that no widget edits are kept.

    Widgets that do not apply (a stage without DeepSpeed, a rank without adapters) are left out. Raises
    UserError where a text widget cannot be read.
    """
    engine = EngineName(values["w_engine"])
    gpus = 1 if engine is EngineName.SINGLE else values["w_gpus"]
    return {
        **{key: value for key, value in base.items() if key != "engine_config"},
        "model": _with_experts(_model(values), base.get("model", {})),
        "hardware": {
            **base.get("hardware", {}),
            "gpu": values["w_gpu"],
            "gpus": gpus,
            "gpus_per_node": min(values["w_node"], gpus),
        },
        "parallelism": _parallelism(values, engine),
        "recipe": _recipe(values, engine, base.get("recipe", {})),
        "offload": _offload(values, engine),
        "workload": {**base.get("workload", {}), **_workload(values)},
        **_engine_config(values, engine, base.get("engine_config", {})),
    }


def _model(values: Mapping[str, Any]) -> dict[str, Any]:
    if values["w_source"] == COUNT:
        return {"n_params": values["w_count"]}
    code = {} if values["w_code"] == "transformers" else {"code": values["w_code"]}
    return {**_model_with_shapes(values), **code}


def _model_with_shapes(values: Mapping[str, Any]) -> dict[str, Any]:
    if values["w_source"] == CATALOGUE:
        return {"name": values["w_name"]}
    if not values["w_config"].strip():
        raise UserError(_("No config is given yet: upload a config.json, or paste its text."), "model.config")
    try:
        return {"config": decode_json(values["w_config"], infinity=True)}
    except UserError as error:
        raise UserError(str(error), "model.config") from None


def _with_experts(model: dict[str, Any], base: Mapping[str, Any]) -> dict[str, Any]:
    """The same model keeps what was said of its experts."""
    same = {key: value for key, value in base.items() if key != "experts"} == model
    return {**model, "experts": base["experts"]} if same and "experts" in base else model


def _parallelism(values: Mapping[str, Any], engine: EngineName) -> dict[str, Any]:
    chosen: dict[str, Any] = {"engine": engine.value}
    if ENGINE_OPTIONS[engine].stages:
        chosen["zero_stage"] = values["w_stage"]
    if engine in _REPLICAS:
        chosen["dp_replicate"] = values["w_replicate"]
    return chosen


def _recipe(values: Mapping[str, Any], engine: EngineName, base: Mapping[str, Any]) -> dict[str, Any]:
    method = Method(values["w_method"])
    optimizer: dict[str, Any] = {"name": values["w_optimizer"]}
    switches = [("w_8bit", "bits", 8), ("w_paged", "paged", True), ("w_momentum", "momentum", True)]
    if engine is EngineName.SINGLE:
        switches.append(("w_in_backward", "in_backward", True))
    optimizer |= {field: value for key, field, value in switches if values[key]}
    if values["w_implementation"] != ENGINE_DEFAULT and OPTIMIZERS[OptimizerName(values["w_optimizer"])].in_torch:
        optimizer["implementation"] = values["w_implementation"]
    recipe = {key: value for key, value in base.items() if key not in ("lora", "quantization")}
    recipe |= {"method": method.value, "convention": values["w_convention"], "optimizer": optimizer}
    if method is not Method.FULL:
        targets = [target.strip() for target in values["w_targets"].split(",") if target.strip()]
        recipe["lora"] = {**base.get("lora", {}), "rank": values["w_rank"], "targets": targets}
    if method is Method.QLORA:
        recipe["quantization"] = values["w_quantization"]
    if method is not Method.QLORA or values["w_quantization"] != base.get("quantization"):
        # Of another packing, they say nothing of this one.
        own = ("quant_group_size", "quantize_lm_head", "keeps_packed_inputs", "fp32_norms")
        recipe = {key: value for key, value in recipe.items() if key not in own}
    return recipe


def _workload(values: Mapping[str, Any]) -> dict[str, Any]:
    kind = values["w_checkpointing"]
    return {
        "micro_batch": values["w_micro"],
        "seq_len": values["w_seq"],
        "grad_accum": values["w_accum"],
        "attention": values["w_attention"],
        "checkpointing": _checkpointing(values),
        "reentrant": values["w_reentrant"] and kind in REENTRANT_CHECKPOINTING,
        **chosen_loss(values),
        "fused_kernels": values["w_fused"],
        "compile": values["w_compile"],
    }


def _checkpointing(values: Mapping[str, Any]) -> str:
    kind: str = values["w_checkpointing"]
    if kind in COUNTED_CHECKPOINTING:
        return f"{kind}({values['w_k']})"
    # With nothing saved, every layer is recomputed as a whole.
    if kind == "save":
        return f"save({','.join(values['w_saved'])})" if values["w_saved"] else "full"
    return kind


def _offload(values: Mapping[str, Any], engine: EngineName) -> dict[str, Any]:
    if engine is EngineName.SINGLE and values["w_source"] != COUNT:
        return {"activations": "cpu" if values["w_offload_activations"] else "none"}
    if not ENGINE_OPTIONS[engine].offloads:
        return {}
    return {"optimizer": values["w_offload_optimizer"], "parameters": values["w_offload_parameters"]}


def _engine_config(values: Mapping[str, Any], engine: EngineName, base: Mapping[str, Any]) -> dict[str, Any]:
    if engine in (EngineName.FSDP1, EngineName.FSDP2):
        own = fsdp_config(values, engine, base)
        return {"engine_config": own} if own else {}
    if engine is EngineName.DDP and values["w_bucket_view"]:
        return {"engine_config": {"gradient_as_bucket_view": True}}
    if not ENGINE_OPTIONS[engine].stages:
        return {}
    stage = values["w_stage"]
    zero = {key: value for key, value in base.get("zero_optimization", {}).items() if key != "stage"}
    own = {"reduce_bucket_size": values["w_bucket"]}
    if stage in (1, 2):
        own["overlap_comm"] = values["w_overlap"]
    if stage == 3:
        own["zero_hpz_partition_size"] = values["w_hpz"]
    else:
        zero.pop("zero_hpz_partition_size", None)
    defaults = ZeroConfig()
    changed = {key: value for key, value in own.items() if value != (getattr(defaults, key) or False)}
    kept = {key: value for key, value in zero.items() if key not in own}
    return {"engine_config": {"zero_optimization": kept | changed}} if kept | changed else {}


def start() -> list[str]:
    """Ready the session for a run: the language and unit, the scenario of the link it came by, live widgets.

    Returns sentences to show once: what was ignored in the link.
    """
    state = st.session_state
    if _SCENARIO not in state:
        state[_NOTICES] = _begin()
    keep_alive()
    use_language(state[LANGUAGE])
    notices: list[str] = state.pop(_NOTICES, [])
    return notices


def _begin() -> list[str]:
    state, query = st.session_state, st.query_params
    state.setdefault(LANGUAGE, query.get("lang") if query.get("lang") in LANGUAGES else "en")
    state.setdefault(UNIT, query.get("unit") if query.get("unit") in set(ByteUnit) else ByteUnit.GB.value)
    state.setdefault(EVIDENCE, query.get("evidence") if query.get("evidence") in EVIDENCES else EVIDENCES[0])
    use_language(state[LANGUAGE])
    link = query.get("s")
    read = read_link(link) if link else None
    adopt(read.scenario if read and read.scenario else parse_scenario(DEFAULT_SCENARIO))
    return list(read.ignored) if read else []


def keep_alive() -> None:
    """Take up every widget's value again, before any widget is drawn."""
    state = st.session_state
    state.update({key: state[key] for key in list(state) if isinstance(key, str) and key.startswith("w_")})


def adopt(scenario: Scenario) -> None:
    """Make a scenario the session's own and set every widget to it. For callbacks and the first run."""
    st.session_state[_SCENARIO] = scenario
    st.session_state.update(widget_values(scenario))


def scenario() -> Scenario:
    """The last good scenario."""
    kept: Scenario = st.session_state[_SCENARIO]
    return kept


def edited() -> Scenario:
    """The scenario as the widgets now have it. Raises UserError; then the last good one stays."""
    base = scenario_data(scenario())
    return parse_scenario(scenario_from(cast(Mapping[str, Any], st.session_state), base))


def show_answer() -> None:
    """Have home show the scenario's own answer. For callbacks."""
    st.session_state[VIEW] = ANSWER


def keep(good: Scenario) -> None:
    """Remember a scenario that was checked and budgeted."""
    st.session_state[_SCENARIO] = good


def put_into_url() -> None:
    """Put the last good scenario, and how it is shown, into the URL."""
    try:
        link = write_link(scenario())
    except UserError:
        link = ""
    chosen = st.session_state
    query = {"s": link, "unit": chosen[UNIT], "lang": chosen[LANGUAGE], "evidence": chosen[EVIDENCE]}
    usual = ("", ByteUnit.GB.value, "en", EVIDENCES[0])
    wanted = {key: value for key, value in query.items() if value not in usual}
    if st.query_params.to_dict() != wanted:
        st.query_params.from_dict(wanted)


def traced() -> bool:
    """Whether activations and loss are to be traced from the real model."""
    return bool(st.session_state[EVIDENCE] == EvidenceKind.TRACE.value)


def unit() -> ByteUnit:
    """The unit that figures are shown in."""
    return ByteUnit(st.session_state[UNIT])
