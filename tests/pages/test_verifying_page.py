"""The proof by the real engine as users meet it. Run: pytest tests/pages/test_verifying_page.py

One proof is real; what the others measured is made up.
"""

import time
from collections.abc import Iterator
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest
from test_pages import TIMEOUT_S, charts, opened

from memcore.jobs import JobStatus, Progress
from memcore.link import write_link
from memcore.scenario import parse_scenario
from memcore.settings import settings
from memcore.ui import verifying
from memcore.ui.frame import PAGES
from memcore.ui.measuring import heavy_lane
from memcore.verify.case import RankFigures
from memcore.verify.proof import prove
from memcore.verify.running import Proven

TINY = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128,
}  # fmt: skip
PAGES_WITH_PROOF = [PAGES["zero"][0], PAGES["buffers"][0]]


@pytest.fixture(autouse=True)
def no_lane_stays() -> Iterator[None]:
    yield
    heavy_lane().close()
    heavy_lane.clear()
    settings.cache_clear()


class Ended:
    """A proof that has ended at once. `figures`: what each rank measured over what is predicted."""

    ratio = 1.0
    reason = ""

    def __init__(self, _lane: Any, cases: Any, evidence: Any, device: str) -> None:
        self.case, self.evidence, self.device = cases[0], evidence[0], device

    def cancel(self) -> None:
        pass

    def look(self) -> Progress:
        return Progress(
            place=0, estimate_s=0.0, num_steps=1, results=(), status=JobStatus.DONE, has_begun=True,
            waits_for_others=False, case_share=0.0, complaint="",
        )  # fmt: skip

    def proven(self) -> Proven:
        if self.reason:
            return Proven(proofs=(), reasons={self.case.name: self.reason})
        exact = prove(self.case, self.evidence, [made_up({})], self.device)
        peaks = {phase.name: round(phase.predicted * self.ratio) for phase in exact.phases}
        proof = prove(self.case, self.evidence, [made_up(peaks)] * self.case.ranks, self.device)
        return Proven(proofs=(proof,), reasons={})


def made_up(peaks: dict[str, int]) -> RankFigures:
    phases = ("forward", "backward", "optimizer", "idle")
    known = {**dict.fromkeys(phases, 1), **peaks}
    staging = dict.fromkeys(phases, 4096)
    return RankFigures(
        rank=0, init=1, first=known, peaks=known, spread_percent=0.0, staging=staging, other=10**8, held={}
    )


def page(file: str, engine: str = "deepspeed", **parallelism: Any) -> AppTest:
    stage = {"zero_stage": 3} if engine == "deepspeed" else {}
    scenario = {
        "model": {"name": "meta-llama/Llama-3.1-8B"},
        "hardware": {"gpus": 8},
        "parallelism": {"engine": engine, **stage, **parallelism},
    }
    return opened(file, s=write_link(parse_scenario(scenario)))


def press(at: AppTest) -> AppTest:
    return at.button(key="verify_start").click().run(timeout=TIMEOUT_S)


def said(at: AppTest) -> str:
    return "\n".join(each.value for each in at.markdown)


@pytest.mark.parametrize("file", PAGES_WITH_PROOF)
def test_a_proof_is_laid_out_with_its_reductions(file: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(verifying, "RunningProof", Ended)
    at = press(page(file))
    assert not at.exception
    assert "DeepSpeed ZeRO-3 on 2 ranks" in said(at)
    assert "within 0.00%" in said(at)
    assert "settings in elements are smaller" in said(at)
    table = next(each.value for each in at.dataframe if "measured" in each.value.columns)
    assert len(table) == 4


def test_the_error_is_that_of_the_figures(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(verifying, "RunningProof", Ended)
    monkeypatch.setattr(Ended, "ratio", 1.25)
    at = press(page(PAGES_WITH_PROOF[0]))
    assert "within 20.00%" in said(at)
    table = next(each.value for each in at.dataframe if "measured" in each.value.columns)
    assert set(table["difference"]) == {"-20.00%"}


def test_a_failure_is_one_sentence_and_another_try_takes_it_away(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(verifying, "RunningProof", Ended)
    monkeypatch.setattr(Ended, "reason", "Rank 1 ended with SIGKILL before this case was done.")
    at = press(page(PAGES_WITH_PROOF[0]))
    assert [each.value for each in at.warning if "SIGKILL" in each.value]
    monkeypatch.setattr(Ended, "reason", "")
    at = press(at)
    assert not [each.value for each in at.warning if "SIGKILL" in each.value]
    assert "within 0.00%" in said(at)


def test_another_engine_has_no_proof_yet(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(verifying, "RunningProof", Ended)
    at = press(page(PAGES_WITH_PROOF[1]))
    assert any("measured" in str(chart) for chart in charts(at))
    other = page(PAGES_WITH_PROOF[1], engine="ddp")
    assert any("Nothing of this engine was verified" in each.value for each in other.info)


def test_without_deepspeed_the_button_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(verifying, "find_spec", lambda name: None)
    at = page(PAGES_WITH_PROOF[0])
    assert at.button(key="verify_start").disabled
    assert any("pip install deepspeed" in each.value for each in at.info)
    # Other engines need no DeepSpeed.
    assert not page(PAGES_WITH_PROOF[0], engine="fsdp2").button(key="verify_start").disabled


def test_what_cannot_be_run_is_said_at_the_button():
    scenario = {"model": {"n_params": "7B"}, "hardware": {"gpus": 8}, "parallelism": {"engine": "ddp"}}
    at = press(opened(PAGES_WITH_PROOF[0], s=write_link(parse_scenario(scenario))))
    assert any("choose a model with a config" in each.value for each in at.warning)


def test_where_measuring_is_switched_off_there_is_no_button(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MEMCORE_MEASURING", "0")
    settings.cache_clear()
    at = page(PAGES_WITH_PROOF[0])
    assert not [each for each in at.button if each.key == "verify_start"]
    assert any("switched off" in each.value for each in at.info)


def test_a_real_proof_from_the_button_to_the_figures():
    scenario = {"model": {"config": TINY}, "hardware": {"gpus": 2}, "parallelism": {"engine": "ddp"}}
    at = press(opened(PAGES_WITH_PROOF[0], s=write_link(parse_scenario(scenario))))
    until = time.monotonic() + 120
    while "verify_cancel" in [each.key for each in at.button] and time.monotonic() < until:
        time.sleep(1)
        at = at.run(timeout=TIMEOUT_S)
    assert not at.exception
    assert "PyTorch DDP on 2 ranks" in said(at)
