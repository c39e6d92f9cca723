"""What one rank holds at the most while an engine is started, where the whole model is made on the GPU first.

That is what a plain ``from_config(...).to(device)`` does; a model on the meta device (FSDP2) or under ``zero.Init``
(ZeRO-3) is never whole on one GPU. Held against the starts of real runs, see tests/verify/test_matrix.py. Symbols: Psi
parameters of w bytes, N ranks that share, psi_layer those of the largest layer, K bytes of optimizer states and FP32
copies, O of the optimizer's temporaries, M elements of a sub-group, B of the bucket, g bytes of a gradient.
"""

from memcore.engine_options import EngineName
from memcore.engines.base import Inputs
from memcore.engines.deepspeed.stage_0 import has_fused_adam
from memcore.scenario import Device
from memcore.terms import Category, Formula, Term, product
from memcore.units import ceil_div
from memcore.zero import share

MASTER = "master_weights"


def start_peak(inputs: Inputs) -> Term | None:
    """The most while the engine is started; None for adapters, whose base is loaded in other ways, and for offload."""
    scenario, states = inputs.scenario, inputs.states
    offloads = {scenario.offload.optimizer, scenario.offload.parameters} != {Device.NONE}
    if states.trained != states.n_params or offloads or scenario.shards_on_host:
        return None
    num_bytes, formula, source = _of_engine(inputs)
    return Term(name="start_peak", category=Category.WEIGHTS, bytes_at=num_bytes, formula=formula, source=source)


def _of_engine(inputs: Inputs) -> tuple[int, Formula, str]:
    states = inputs.states
    weights = states.n_params * states.trained_as.param_dtype.size
    match inputs.scenario.parallelism.engine:
        case EngineName.DEEPSPEED:
            return _deepspeed(inputs, weights)
        case EngineName.FSDP1:
            return _fsdp1(inputs, weights)
        case EngineName.FSDP2:
            return _fsdp2(inputs, weights)
        case EngineName.DDP:
            buckets = states.n_params * states.trained_as.grad_dtype.size
            formula = Formula(symbols=r"w\,\Psi + g\,\Psi", numbers=f"{weights:,} + {buckets:,}")
            return weights + buckets, formula, "torch 2.13, torch/csrc/distributed/c10d/reducer.cpp"
    return weights, Formula(symbols=r"w\,\Psi", numbers=f"{weights:,}"), "the model itself"


def _fsdp1(inputs: Inputs, weights: int) -> tuple[int, Formula, str]:
    """Units are flattened one after the other, layers first and the root last: with the flat tensor are its parameters,
    and then its slice; where ranks divide nothing, the flat tensor stays as it is."""
    layers = [layer.numel for layer in inputs.inventory.layers] if inputs.inventory else []
    width, ranks = inputs.states.trained_as.param_dtype.size, inputs.ranks
    root = inputs.states.n_params - sum(layers)
    unit = max(layers, default=0)
    slices = [0 if ranks == 1 else ceil_div(values, ranks) for values in (unit, root)]
    first = weights + width * (unit + slices[0])
    last = width * (2 * root + slices[1] + ceil_div(sum(layers), ranks))
    symbols = r"w\,\Psi + w\,\psi_{layer}" + (r" + w\,\psi_{layer} / N" if ranks > 1 else "")
    formula = Formula(symbols=symbols, numbers=f"max({first:,}, {last:,})")
    return max(first, last), formula, "torch 2.13, distributed/fsdp/_flat_param.py, flatten_tensors_into_flat_param"


def _fsdp2(inputs: Inputs, weights: int) -> tuple[int, Formula, str]:
    """Layers are cut into shards one after the other, and each is let go of when the next one's are made."""
    layer = inputs.inventory.largest_layer.numel if inputs.inventory and inputs.inventory.layers else 0
    shard = inputs.states.trained_as.param_dtype.size * ceil_div(layer, inputs.ranks)
    formula = Formula(symbols=r"w\,\Psi + w\,\psi_{layer} / N", numbers=f"{weights:,} + {shard:,}")
    return weights + shard, formula, "torch 2.13, distributed/fsdp/_fully_shard/_fsdp_param.py, _init_sharded_param"


def _deepspeed(inputs: Inputs, weights: int) -> tuple[int, Formula, str]:
    masters = sum(share(each, inputs.stage, inputs.ranks) for each in inputs.states.states if each.name == MASTER)
    if inputs.stage == 3:
        return _stage_3(inputs, weights, masters)
    if inputs.stage == 0:
        return _stage_0(inputs)
    if inputs.stage == 1 and inputs.states.trained_as.accumulate_dtype is not None:
        gradients = inputs.states.trained_as.accumulate_dtype.size * inputs.states.trained
        formula = Formula(
            symbols=r"w\,\Psi + 4\,\Psi + 4\,\Psi / N", numbers=f"{weights:,} + {gradients:,} + {masters:,}"
        )
        return weights + gradients + masters, formula, "deepspeed 0.19.8, runtime/bf16_optimizer.py, __init__"
    flattened, cast = 2 * weights, weights + 2 * masters
    formula = Formula(symbols=r"\max(2 w\,\Psi, w\,\Psi + 8\,\Psi / N)", numbers=f"max({flattened:,}, {cast:,})")
    source = "deepspeed 0.19.8, runtime/zero/stage_1_and_2.py, __init__: flattens, then casts"
    return max(flattened, cast), formula, source


def _stage_0(inputs: Inputs) -> tuple[int, Formula, str]:
    """All states come at once, with gradients of zeros for a step that makes them."""
    trained, source = inputs.states.trained, "deepspeed 0.19.8, runtime/fp16"
    kept = sum(state.total_bytes for state in inputs.states.of(Category.WEIGHTS, Category.OPTIMIZER))
    if has_fused_adam(inputs):
        formula = Formula(symbols=r"(w + K + 4)\,\Psi", numbers=f"{kept:,} + {product(4, trained)}")
        return kept + 4 * trained, formula, f"{source}/fused_optimizer.py, initialize_optimizer_states"
    low = inputs.states.trained_as.grad_dtype.size
    moment = 4 if inputs.implementation == "foreach" else 0
    formula = Formula(symbols=r"(w + K + g + 4 + O)\,\Psi", numbers=f"{kept:,} + {product(low + 4 + moment, trained)}")
    return kept + (low + 4 + moment) * trained, formula, f"{source}/unfused_optimizer.py, initialize_optimizer_states"


def _stage_3(inputs: Inputs, weights: int, masters: int) -> tuple[int, Formula, str]:
    """Parameters are cut one after the other. Then come the FP32 copies, each sub-group's size again for a moment, and
    after that the slice of gradients and the bucket; with them, as measured, one whole parameter."""
    zero, dtypes, ranks = inputs.scenario.zero_config, inputs.states.trained_as, inputs.ranks
    kept = ceil_div(weights, ranks) + masters
    accumulated = (dtypes.accumulate_dtype or dtypes.grad_dtype).size * ceil_div(inputs.states.trained, ranks)
    largest = max((tensor.numel for tensor in inputs.inventory.tensors()), default=0) if inputs.inventory else 0
    buffers = accumulated + dtypes.grad_dtype.size * (zero.reduce_bucket_size + largest)
    again = min(masters, 4 * zero.sub_group_size)
    formula = Formula(
        symbols=r"\max(w\,\Psi, (w + 4)\,\Psi / N + \max(4 M, g\,\Psi / N + g\,B + g\,\psi_{max}))",
        numbers=f"max({weights:,}, {kept:,} + max({again:,}, {buffers:,}))",
    )
    source = "deepspeed 0.19.8, runtime/zero/stage3.py, __init__ and initialize_optimizer_states"
    return max(weights, kept + max(again, buffers)), formula, source
