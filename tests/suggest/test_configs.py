"""The files that a suggestion is given as: DeepSpeed's own classes take the one, torch runs the other.

Run: pytest tests/suggest/test_configs.py. DeepSpeed and FSDP2 run in processes of their own.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import pytest
from generated_scenarios import TINY_LLAMA
from hypothesis import given, settings
from hypothesis import strategies as st

from memcore.budget import Budget, Evidence, predict
from memcore.counting import count_config
from memcore.ds_config import read_ds_config
from memcore.engine_options import ENGINE_OPTIONS, EngineName
from memcore.errors import UserError
from memcore.models import catalogue, catalogue_inventory, load_inventory
from memcore.scenario import parse_scenario
from memcore.suggest import Goal, GoalKind, ds_config, file_of, fsdp2_code, suggest
from memcore.suggest.grid import settings_now

# A file sets what DeepSpeed's loop has; of another convention it says the nearest.
CONVENTIONS = ENGINE_OPTIONS[EngineName.DEEPSPEED].conventions
LLAMA, GPT2 = "meta-llama/Llama-3.1-8B", "openai-community/gpt2"


def of(scenario: dict[str, Any], evidence: Evidence | None = None) -> Budget:
    return predict(parse_scenario(scenario), evidence or Evidence())


def assert_same_figures(one: Budget, other: Budget) -> None:
    """The same bytes at every moment, term by term; how the recipe is named may differ."""
    assert one.totals == other.totals
    assert [(t.name, t.bytes_at) for t in one.terms] == [(t.name, t.bytes_at) for t in other.terms]
    assert one.verdict == other.verdict
    assert one.communication == other.communication


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_what_is_written_is_read_back_as_the_same_budget(data: st.DataObject):
    stage = data.draw(st.sampled_from([0, 1, 2, 3]))
    sizes = st.integers(1, 10**10)
    zero = {
        name: data.draw(sizes)
        for name in data.draw(
            st.sets(st.sampled_from(["reduce_bucket_size", "sub_group_size", "stage3_max_reuse_distance"]))
        )
    }
    zero |= {"contiguous_gradients": data.draw(st.booleans())}
    if data.draw(st.booleans()):
        zero["overlap_comm"] = data.draw(st.booleans())
    offload = {"optimizer": data.draw(st.sampled_from(["none", "cpu"])) if stage else "none"}
    if stage == 3:
        offload["parameters"] = data.draw(st.sampled_from(["none", "cpu", "nvme"]))
        zero["zero_hpz_partition_size"] = data.draw(st.sampled_from([1, 4]))
    try:
        budget = of(
            {
                "model": {"name": GPT2},
                "hardware": {"gpus": 8},
                "parallelism": {"engine": "deepspeed", "zero_stage": stage},
                "engine_config": {"zero_optimization": zero},
                "offload": offload,
                "recipe": {
                    "convention": data.draw(st.sampled_from(CONVENTIONS)).value,
                    "method": data.draw(st.sampled_from(["full", "lora"])),
                },
                "workload": {
                    "micro_batch": data.draw(st.sampled_from([1, 3])),
                    "grad_accum": data.draw(st.sampled_from([1, 8])),
                },
            }
        )
    except UserError:
        return
    reading = read_ds_config(json.dumps(ds_config(budget)), budget.scenario, budget.evidence)
    assert_same_figures(reading.budget, budget)
    assert reading.unknown == ()


@pytest.mark.parametrize("goal", GoalKind)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_suggestion_is_read_back_as_predicted(stage: int, goal: GoalKind):
    """Into the scenario as it was, and with what the user had set kept."""
    zero = {"contiguous_gradients": False, "sub_group_size": 50_000_000}
    before = of(
        {
            "model": {"name": LLAMA},
            "hardware": {"gpus": 8},
            "parallelism": {"zero_stage": stage},
            "engine_config": {"zero_optimization": zero},
        }
    )
    found = suggest(before, Goal(kind=goal, least_bucket=10**7))
    assert found is not None
    file = file_of(found.after)
    assert file is not None
    name, text = file
    assert name == "ds_config.json"
    reading = read_ds_config(text, before.scenario, before.evidence)
    assert_same_figures(reading.budget, found.after)
    assert reading.notes == ()
    written = json.loads(text)["zero_optimization"]
    assert not written["contiguous_gradients"]
    assert written.items() >= {c.setting: c.suggested for c in found.changes}.items()


_TAKEN = """
import json, sys
from deepspeed.runtime.config import DeepSpeedConfig
for text in json.load(sys.stdin):
    given = json.loads(text)
    config = DeepSpeedConfig(given)
    zero = config.zero_config
    wanted = given["zero_optimization"]
    aliases = {field.alias or name: name for name, field in type(zero).model_fields.items()}
    for key, value in wanted.items():
        if not isinstance(value, dict):
            assert getattr(zero, aliases[key]) == value, (key, getattr(zero, aliases[key]), value)
    assert config.train_batch_size == given["train_micro_batch_size_per_gpu"] * given["gradient_accumulation_steps"]
print("taken")
"""


def test_deepspeed_takes_every_file():
    """DeepSpeed 0.19.8's own config class, each value as written; it knows of one GPU here."""
    if find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    texts = []
    for stage in (1, 2, 3):
        for convention in ("zero_paper", "pure_bf16", "pure_fp16", "fp32", "amp_autocast", "deepspeed_fp32_grad"):
            for kind in GoalKind:
                budget = of(
                    {
                        "model": {"name": GPT2},
                        "hardware": {"gpus": 8},
                        "parallelism": {"zero_stage": stage},
                        "recipe": {"convention": convention},
                        "offload": {"optimizer": "cpu" if convention == "zero_paper" else "none"},
                        "workload": {"micro_batch": 2, "grad_accum": 3},
                    }
                )
                found = suggest(budget, Goal(kind=kind))
                texts.append(json.dumps(ds_config(found.after if found else budget)))
    command = [sys.executable, "-c", _TAKEN]
    done = subprocess.run(
        command, input=json.dumps(texts), text=True, capture_output=True, timeout=300, check=False,
        env=os.environ | {"DS_ACCELERATOR": "cpu"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip().endswith("taken")


_RUN = """
import json, sys
import torch
from torch.distributed.fsdp import FSDPModule
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM
given = json.load(sys.stdin)
torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=given["ranks"])
scope = {}
exec(compile(given["code"], "fsdp2.py", "exec"), scope)
fields = {key: value for key, value in given["config"].items() if key != "model_type"}
model = AutoModelForCausalLM.from_config(AutoConfig.for_model(given["config"]["model_type"], **fields))
model = scope["shard"](model, "cpu")
units = [module for module in model.modules() if isinstance(module, FSDPModule)]
loss = model(input_ids=torch.zeros(2, 8, dtype=torch.long), labels=torch.zeros(2, 8, dtype=torch.long)).loss
layers = [not any(hasattr(p, "to_local") for p in layer.parameters()) for layer in model.model.layers]
root = not hasattr(model.model.embed_tokens.weight, "to_local")
loss.backward()
values = list(model.parameters())
print(json.dumps({
    "units": len(units),
    "layers_stay": layers,
    "root_stays": root,
    "dtypes": sorted({str(p.dtype) for p in values}),
    "grad_dtypes": sorted({str(p.grad.dtype) for p in values}),
    "local": sum(p.to_local().numel() for p in values),
    "whole": sum(p.numel() for p in values),
    "mesh": list(values[0].device_mesh.shape),
    "policy": [str(units[0]._get_fsdp_state()._mp_policy.param_dtype),
               str(units[0]._get_fsdp_state()._mp_policy.reduce_dtype)],
}))
"""


def run_code(budget: Budget, ranks: int) -> dict[str, Any]:
    given = {"code": fsdp2_code(budget), "config": TINY_LLAMA, "ranks": ranks}
    command = [sys.executable, "-W", "ignore", "-c", _RUN]
    done = subprocess.run(command, input=json.dumps(given), text=True, capture_output=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def tiny() -> Evidence:
    counted = count_config({"config": TINY_LLAMA})
    return Evidence(inventory=load_inventory(counted["inventory"]))


@pytest.mark.parametrize(
    ("convention", "parallelism", "reshards"),
    [("fsdp2_mixed", {"dp_shard": 4}, True), ("pure_bf16", {"dp_shard": 2, "dp_replicate": 2}, False)],
)
def test_the_code_shards_a_real_model_and_trains_it_a_step(
    tiny: Evidence, convention: str, parallelism: dict[str, int], reshards: bool
):
    """On torch's fake process group: units, mesh, dtypes, what stays gathered, and a rank's share."""
    budget = of(
        {
            "model": {"config": TINY_LLAMA},
            "hardware": {"gpus": 4},
            "parallelism": {"engine": "fsdp2", **parallelism},
            "engine_config": {"reshard_after_forward": reshards},
            "recipe": {"convention": convention},
        },
        tiny,
    )
    found = run_code(budget, 4)
    layers = TINY_LLAMA["num_hidden_layers"]
    assert found["units"] == layers + 1
    assert found["layers_stay"] == [not reshards] * layers
    assert found["root_stays"]
    assert found["mesh"] == ([2, 2] if "dp_replicate" in parallelism else [4])
    dtypes = budget.states.precision.convention
    names = {"fp32": "torch.float32", "bf16": "torch.bfloat16"}
    assert found["dtypes"] == found["grad_dtypes"] == [names[dtypes.param_dtype]]
    assert found["policy"] == [names[dtypes.compute_dtype], names[dtypes.reduce_dtype]]
    shards = budget.scenario.parallelism.dp_shard
    assert found["local"] == found["whole"] / shards
    assert found["whole"] == budget.states.n_params


def test_the_code_makes_the_units_and_exceptions_that_were_predicted(tiny: Evidence):
    """Embedding, and final norm with head; what torch keeps whole after the forward is what is excepted."""
    config = {"fsdp_units": "block_embed_head", "reshard_exception": "last_block"}
    scenario = {"model": {"config": TINY_LLAMA}, "hardware": {"gpus": 4}, "engine_config": config}
    convention = {"recipe": {"convention": "fsdp2_mixed"}}
    found = run_code(of({**scenario, "parallelism": {"engine": "fsdp2"}, **convention}, tiny), 4)
    layers = TINY_LLAMA["num_hidden_layers"]
    assert found["units"] == layers + 4  # the norm and the head are each a module of their unit
    assert found["layers_stay"] == [*[False] * (layers - 1), True]
    assert not found["root_stays"]


def test_the_code_names_the_layers_of_every_model():
    """By the path that transformers gives them; nothing is written for adapters or a bare count."""
    scenario = {"hardware": {"gpus": 8}, "parallelism": {"engine": "fsdp2"}}
    for name in catalogue():
        inventory = catalogue_inventory(name)
        code = fsdp2_code(of({**scenario, "model": {"name": name}}))
        if inventory is None:
            assert code is None
            continue
        assert code is not None
        compile(code, name, "exec")
        path = code.partition("for layer in model.")[2].partition(":")[0]
        assert f"{path}.0" == inventory.layers[0].name
    assert fsdp2_code(of({**scenario, "model": {"name": LLAMA}, "recipe": {"method": "lora"}})) is None


def test_settings_are_written_out_even_at_their_defaults():
    budget = of({"model": {"name": GPT2}, "hardware": {"gpus": 8}, "parallelism": {"zero_stage": 3}})
    assert ds_config(budget)["zero_optimization"].items() >= settings_now(budget).items()
