"""Scenarios made by hypothesis: every engine, stage, method, optimizer, offload and kind of model, valid as made."""

from typing import Any

from hypothesis import strategies as st

from memcore.engine_options import ENGINE_OPTIONS, EngineName
from memcore.hardware import accelerators
from memcore.models import catalogue
from memcore.optimizers import OPTIMIZERS, OptimizerName
from memcore.recipes import CONVENTIONS, ConventionName, DType
from memcore.scenario import Device, Method, Quantization, Scenario, parse_scenario

TINY_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
}
TINY_LLAMA_PARAMS = 202_048

_FSDP = (EngineName.FSDP1, EngineName.FSDP2)
_DTYPE_FIELDS = ("param_dtype", "compute_dtype", "grad_dtype", "reduce_dtype", "master_dtype", "state_dtype")
_WITH_SHAPES = [name for name, model in catalogue().items() if model.config is not None]


def _models(needs_shapes: bool, configs: bool) -> st.SearchStrategy[dict[str, Any]]:
    names = st.sampled_from(_WITH_SHAPES if needs_shapes else list(catalogue()))
    kinds: list[st.SearchStrategy[dict[str, Any]]] = [st.fixed_dictionaries({"name": names})]
    if configs:
        sizes = st.integers(1, 4096)
        kinds.append(st.builds(lambda size: {"config": {**TINY_LLAMA, "intermediate_size": size}}, sizes))
    if not needs_shapes:
        kinds.append(st.fixed_dictionaries({"n_params": st.integers(1, 10**15)}))
    return st.one_of(kinds)


@st.composite
def _hardware(draw: st.DrawFn, engine: EngineName) -> dict[str, Any]:
    per_node = 1 if engine is EngineName.SINGLE else draw(st.sampled_from([1, 2, 3, 4, 6, 8, 16]))
    fewest = 2 if engine is EngineName.FSDP1 and per_node == 1 else 1
    nodes = 1 if engine is EngineName.SINGLE else draw(st.integers(fewest, 128))
    gpu = draw(st.sampled_from(list(accelerators())))
    return {"gpu": gpu, "gpus": per_node * nodes, "gpus_per_node": per_node}


@st.composite
def _engine_config(draw: st.DrawFn, stage: int, gpus: int) -> dict[str, Any]:
    sizes = st.integers(1, 10**12)
    zero = draw(
        st.fixed_dictionaries(
            {},
            optional={
                "stage": st.just(stage),
                "reduce_bucket_size": sizes,
                "contiguous_gradients": st.booleans(),
                "overlap_comm": st.booleans(),
                "sub_group_size": sizes,
                "stage3_prefetch_bucket_size": sizes,
                "stage3_max_live_parameters": sizes,
            },
        )
    )
    if stage == 3 and draw(st.booleans()):
        zero["zero_hpz_partition_size"] = draw(st.sampled_from([d for d in range(1, 17) if gpus % d == 0]))
    return {"zero_optimization": zero}


@st.composite
def _optimizer(draw: st.DrawFn, names: list[OptimizerName], may_be_8bit: bool) -> dict[str, Any]:
    name = draw(st.sampled_from(names))
    rule = OPTIMIZERS[name]
    optimizer: dict[str, Any] = {"name": name.value}
    if rule.has_8bit:
        optimizer["bits"] = draw(st.sampled_from([8, 32] if may_be_8bit else [32]))
        optimizer["paged"] = draw(st.booleans())
    if name is OptimizerName.SGD:
        optimizer["momentum"] = draw(st.booleans())
    if rule.in_torch and optimizer.get("bits") != 8 and not optimizer.get("paged"):
        kinds = [None, "foreach", *(["fused"] if rule.has_fused else []), "for_loop"]
        optimizer["implementation"] = draw(st.sampled_from(kinds))
    return optimizer


@st.composite
def _recipe(draw: st.DrawFn, engine: EngineName, stage: int, offloaded: bool) -> dict[str, Any]:
    method = draw(st.sampled_from(Method))
    names = [name for name, rule in OPTIMIZERS.items() if engine not in _FSDP or not rule.needs_whole_tensors]
    conventions = [name for name in ConventionName if CONVENTIONS[name].lowest_stage <= stage]
    recipe: dict[str, Any] = {
        "method": method.value,
        "convention": draw(st.sampled_from(conventions)).value,
        "optimizer": draw(_optimizer(names, not offloaded)),
        **draw(st.fixed_dictionaries({}, optional={field: st.sampled_from(DType) for field in _DTYPE_FIELDS})),
    }
    if method is not Method.FULL:
        recipe["lora"] = {
            "rank": draw(st.integers(1, 65_536)),
            "targets": draw(st.lists(st.from_regex(r"[a-z][a-z_-]{0,20}", fullmatch=True), min_size=1, max_size=5)),
            "adapter_dtype": draw(st.sampled_from(DType)).value,
        }
    if method is Method.QLORA:
        kinds = [kind for kind in Quantization if stage < 3 or kind is not Quantization.GPTQ_INT4]
        recipe["quantization"] = draw(st.sampled_from(kinds)).value
    return recipe


@st.composite
def _offload(draw: st.DrawFn, engine: EngineName, stage: int) -> dict[str, Any]:
    if not ENGINE_OPTIONS[engine].offloads:
        return {}
    devices = [Device.NONE, Device.CPU, Device.NVME]
    optimizer = draw(st.sampled_from(devices[: 1 if stage < 1 else 2 if stage < 3 else 3]))
    parameters = draw(st.sampled_from(devices[: 1 if stage < 3 else 3]))
    return {"optimizer": optimizer.value, "parameters": parameters.value}


@st.composite
def scenarios(draw: st.DrawFn, *, configs: bool = True) -> Scenario:
    """Any scenario that is accepted. Without `configs` none that needs a worker to be answered.

    LoRA's targets are made up, so that not each of them names a module of its model.
    """
    engine = draw(st.sampled_from([each for each in EngineName if each is not EngineName.LLM_C]))  # GPT-2 alone
    options = ENGINE_OPTIONS[engine]
    hardware = draw(_hardware(engine))
    parallelism: dict[str, Any] = {"engine": engine.value}
    if options.stages:
        parallelism["zero_stage"] = draw(st.sampled_from(options.stages))
    if engine is EngineName.FSDP2:
        gpus = hardware["gpus"]
        parallelism["dp_replicate"] = draw(st.sampled_from([d for d in range(1, 9) if gpus % d == 0]))
    stage = parallelism.get("zero_stage", options.fixed_stage)
    offload = draw(_offload(engine, stage))
    recipe = draw(_recipe(engine, stage, offload.get("optimizer", "none") != "none"))
    needs_shapes = recipe["method"] != "full" or OPTIMIZERS[OptimizerName(recipe["optimizer"]["name"])].needs_shapes
    data = {
        "model": draw(_models(needs_shapes, configs)),
        "hardware": hardware,
        "parallelism": parallelism,
        "recipe": recipe,
        "offload": offload,
        "workload": draw(
            st.fixed_dictionaries(
                {},
                optional={
                    "micro_batch": st.integers(1, 1024),
                    "seq_len": st.integers(1, 10**6),
                    "grad_accum": st.integers(1, 10**6),
                    "attention": st.sampled_from(["flash", "eager", "memory_efficient"]),
                    "checkpointing": st.sampled_from(["none", "full", "attention", "segments(4)", "first(3)"]),
                    "loss": st.sampled_from(["unfused", "chunked_ce", "chunked", "fused_ce", "fused"]),
                },
            )
        ),
    }
    if options.stages and draw(st.booleans()):
        data["engine_config"] = draw(_engine_config(stage, hardware["gpus"]))
    if engine in _FSDP:
        on_gpu = recipe["optimizer"].get("bits") == 8 or recipe["optimizer"].get("paged")
        offload = False if on_gpu else draw(st.booleans())
        data["engine_config"] = {"reshard_after_forward": draw(st.booleans()), "cpu_offload": offload}
    return parse_scenario(data)
