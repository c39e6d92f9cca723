"""Keys and values that a model hands out, by hand; and which dtype a packed module's results have.

Run: pytest tests/trace/test_cache.py
"""

from typing import Any

import bitsandbytes
import pytest
import torch
from small_models import traced
from torch import nn

from memcore.trace.packing import PackedIntegers, PackedLinear
from memcore.trace.request import Adapters

BIGCODE: dict[str, Any] = {
    "model_type": "gpt_bigcode", "n_embd": 256, "n_layer": 6, "n_head": 8, "n_inner": 1024, "vocab_size": 512,
    "n_positions": 1024, "multi_query": True, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
}  # fmt: skip
ADAPTERS = Adapters(rank=4, targets=("c_attn",), dtype="fp32", quantization="nf4")
WANTED: dict[str, Any] = {
    "dtype": "bf16", "stored": "bf16", "autocast": True, "adapters": ADAPTERS, "checkpointing": "full",
    "reentrant": True, "kernels": "cuda", "micro_batch": 2, "seq_len": 100,
}  # fmt: skip


@pytest.mark.parametrize("autocast", [True, False])
def test_every_layers_joint_projection_is_alive_until_the_loss_is_known(autocast: bool):
    """Keys and values of one head of 32 are views of what is 256 + 2 x 32 wide. Under autocast the norm before it gives
    FP32, and bitsandbytes gives back what it was given."""
    wanted = {**WANTED, "autocast": autocast, "adapters": ADAPTERS if autocast else None}
    more, less = (traced(BIGCODE, **wanted, use_cache=kept).totals for kept in (True, False))
    each = (4 if autocast else 2) * 2 * 100 * (256 + 2 * 32)
    last = BIGCODE["n_layer"] - 1
    # The fullest instant of the last layer's forward may be before its own projection or after it.
    assert more[last] - less[last] in (last * each, (last + 1) * each)
    assert more[last + 2 :] == less[last + 2 :]


def test_the_replay_of_few_layers_is_that_of_all():
    replayed, full = (traced(BIGCODE, **WANTED, use_cache=True, full_depth=deep) for deep in (False, True))
    assert (replayed.traced_layers, full.traced_layers) == (3, 6)
    assert replayed.totals == full.totals


@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
def test_a_packed_modules_result_is_of_its_inputs_dtype_as_bitsandbytes_has_it(given: torch.dtype):
    real = bitsandbytes.nn.Linear4bit(64, 64, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4").to("cpu")
    values = torch.ones((2, 64), dtype=given)
    plain = nn.Linear(64, 64, bias=False)
    assert PackedLinear(plain, torch.bfloat16)(values).dtype is real(values).dtype is given
    # AutoGPTQ leaves it in FP16.
    assert PackedIntegers(plain, torch.float16)(values).dtype is torch.float16
