"""A small model's scenario, and measurements made up for tests that need no device."""

from typing import Any

from memcore.bench.case import Case, Part
from memcore.bench.measurement import DeviceFacts, Figures, Measurement, Seconds, Status

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
SCENARIO: dict[str, Any] = {"model": {"config": CONFIG}, "recipe": {"convention": "fp32"}}
CPU = DeviceFacts(kind="cpu", name="a CPU", driver="", total_bytes=2**33, torch="2.13.0", transformers="5.24.0")


def attention_case(**changes: Any) -> Case:
    fields = {"attention": "plain", "seq_len": 256, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32}
    return Case(part=Part.ATTENTION, device="cpu", dtype="fp32", **{**fields, **changes})


def layers_case(**changes: Any) -> Case:
    fields = {"attention": "plain", "seq_len": 128, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32}
    depth = changes.get("num_layers", 4)
    config = {**CONFIG, "num_hidden_layers": depth}
    return Case(part=Part.LAYERS, device="cpu", dtype="fp32", **{**fields, "config": config, **changes})


def projections_case(**changes: Any) -> Case:
    fields = {"seq_len": 1024, "num_layers": 4, "hidden_size": 64}
    return Case(part=Part.PROJECTIONS, device="cpu", dtype="fp32", **{**fields, **changes})


def measured(case: Case, peak_bytes: int = 1000, seconds: float = 0.5, **changes: Any) -> Measurement:
    time = Seconds(median=seconds / 2, least=seconds / 2, most=seconds / 2, repeats=3)
    figures = Figures(
        peak_bytes=peak_bytes,
        with_gradients_bytes=2 * peak_bytes,
        reserved_bytes=None,
        kept_bytes=peak_bytes // 2,
        forward=time,
        backward=time,
        recompute=None,
        kernel="aten::_softmax",
        loss_difference=None,
        gradient_difference=1e-7,
        traced_bytes=peak_bytes,
        traced_with_gradients_bytes=2 * peak_bytes,
    )
    fields: dict[str, Any] = {"status": Status.DONE, "device": CPU, "measured_at": "2026-01-02T03:04:05Z"}
    return Measurement(case=case, figures=figures, **{**fields, **changes})
