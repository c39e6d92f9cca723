"""A value as another program calls it is refused with what to write here.

Run: pytest tests/test_synonyms.py
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from memcore.cli import EXIT_BAD_INPUT, main
from memcore.errors import UserError
from memcore.lookup import find
from memcore.scenario import parse_scenario
from memcore.scenario.synonyms import SYNONYMS, hint
from memcore.score.gaps import ATTENTIONS, OPTIMIZERS
from memcore.score.losses import LOSSES

LLAMA = {"name": "meta-llama/Llama-3.1-8B"}


def refused(field: str, value: object) -> str:
    part, name, *below = field.split(".")
    sentence = refusal({"model": LLAMA, part: {name: {below[0]: value} if below else value}})
    assert sentence
    return sentence


def refusal(data: dict[str, Any]) -> str:
    """Why a scenario is refused; empty where it is not."""
    try:
        parse_scenario(data)
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("field", "value", "written"),
    [
        ("workload.loss", "liger", "write fused."),
        ("workload.attention", "sdpa", "write flash."),
        ("workload.checkpointing", "selective", "write attention (its scores) or save(attention,mm)"),
        ("recipe.convention", "bf16", "write pure_bf16"),
        ("recipe.convention", "Mixed-Precision", "amp_autocast"),
        ("recipe.param_dtype", "bfloat16", "write bf16."),
        ("recipe.optimizer", "adamw_8bit", "with recipe.optimizer.bits 8."),
        ("parallelism.engine", "fsdp", "write fsdp2, or fsdp1"),
        ("offload.optimizer", "disk", "write nvme."),
        ("workload.fused_kernels", ["liger"], "write rmsnorm, rope, swiglu."),
        ("workload.loss", "unfsed", "The nearest is unfused."),
        ("recipe.convention", "zero_papper", "The nearest is zero_paper."),
    ],
)
def test_what_was_meant_is_said(field: str, value: object, written: str):
    assert written in refused(field, value)


@pytest.mark.parametrize("value", ["{x}", "nothing like it", "", "%s", 3, None])
def test_where_nothing_is_near_nothing_is_made_up(value: object):
    sentence = refused("workload.loss", value)
    assert sentence.endswith("or fused.")


@pytest.mark.parametrize("field", SYNONYMS)
def test_what_is_to_be_written_is_read(field: str):
    """Each first word of what a hint says is a value of the field, and none of the synonyms is."""
    part, name, *below = field.split(".")
    for word, written in SYNONYMS[field].items():
        assert re.sub(r"\W", "_", word) == word.lower()
        value: Any = re.match(r"[\w()]+(,mm\))?", written)[0]  # type: ignore[index]
        value = [value] if field == "workload.fused_kernels" else value
        data = {"model": LLAMA, "recipe": {"method": "qlora"} if field == "recipe.quantization" else {}}
        data[part] = {**data.get(part, {}), name: {below[0]: value} if below else value}  # type: ignore[dict-item]
        # What else it needs (a stage) is another matter.
        assert "allowed" not in refusal(data)
        assert hint(field, word)


def test_published_runs_are_read_as_the_hints_say():
    """A record's own names, where a scenario has others."""
    for field, read in (("workload.loss", LOSSES), ("workload.attention", ATTENTIONS)):
        for name, value in read.items():
            if name != value:
                assert SYNONYMS[field][name] == value
    for name, fields in OPTIMIZERS.items():
        if fields != {"name": name}:
            assert SYNONYMS["recipe.optimizer.name"][name].startswith(fields["name"])


def test_a_catalogues_name_in_other_letters_is_nearest():
    with pytest.raises(UserError, match="the nearest are A100-80GB"):
        find({"H100-80GB": 1, "A100-80GB": 2}, "a100-80gb", "hardware.gpu")


def test_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "scenario.json"
    path.write_text(json.dumps({"model": LLAMA, "workload": {"loss": "liger"}}), encoding="utf-8")
    assert main(["predict", str(path)]) == EXIT_BAD_INPUT
    assert "For liger, write fused." in capsys.readouterr().err
