"""The five questions that the product exists to answer, each with its scenario and an answer worked out from it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from memcore.budget import Budget, predict
from memcore.explore import activations_at_most
from memcore.i18n import gettext as _
from memcore.i18n import mark
from memcore.scenario import Scenario, parse_scenario
from memcore.terms import Category
from memcore.units import ByteUnit, format_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """`title` in the user's words, the scenario that it is about, the page that shows it, and the answer."""

    title: str
    data: Mapping[str, Any]
    page: str
    answer: Callable[[Budget, ByteUnit], str]

    @property
    def scenario(self) -> Scenario:
        """The question's scenario."""
        return parse_scenario(self.data)

    def answered(self, unit: ByteUnit) -> str:
        """The answer in the current language, from the scenario's own budget."""
        return self.answer(predict(self.scenario), unit)


_SEVEN_B = {"n_params": 7_000_000_000}


def _eight(stage: int, gpu: str) -> dict[str, Any]:
    return {
        "model": _SEVEN_B,
        "hardware": {"gpu": gpu, "gpus": 8},
        "parallelism": {"engine": "deepspeed", "zero_stage": stage},
    }


def _one_parameter(budget: Budget, _unit: ByteUnit) -> str:
    states, count = budget.states, budget.states.n_params
    text = _(
        "Weights {weights} + gradients {gradients} + optimizer {optimizer} (master, momentum, variance: 4 each) "
        "= {total} bytes."
    )
    parts = [states.total_bytes(c) // count for c in (Category.WEIGHTS, Category.GRADIENTS, Category.OPTIMIZER)]
    return text.format(weights=parts[0], gradients=parts[1], optimizer=parts[2], total=sum(parts))


def _one_card(budget: Budget, unit: ByteUnit) -> str:
    text = _("No: the states alone take {total}, and the card can give {usable}, before any activation.")
    total, usable = budget.static.total_bytes, budget.ladder.usable
    return text.format(total=format_bytes(total, unit), usable=format_bytes(usable, unit))


def _stage_one(budget: Budget, unit: ByteUnit) -> str:
    text = _(
        "{weights} + {gradients} + {optimizer} = {total} per GPU for the states. On a 40 GB card that is tight: at the "
        "end of the backward all gradients are alive together, with the bucket and this rank's slice {peak}, and "
        "{left} is left for everything else; the optimizer step itself is lower."
    )
    static = budget.static
    sizes = {
        "weights": static.weights_bytes,
        "gradients": static.gradients_bytes,
        "optimizer": static.optimizer_bytes,
        "total": static.total_bytes,
        "peak": budget.peak_bytes,
        "left": budget.ladder.headroom,
    }
    return text.format(**{name: format_bytes(size, unit) for name, size in sizes.items()})


def _stage_three(budget: Budget, unit: ByteUnit) -> str:
    text = _(
        "{total} per GPU is the floor. The real peak is higher, because whole layers are gathered while they compute "
        "and gradients pass through a bucket; the price is {moved} sent by each GPU in every step."
    )
    moved = budget.communication.bytes_per_gpu
    return text.format(total=format_bytes(budget.static.total_bytes, unit), moved=format_bytes(moved, unit))


def _activations(budget: Budget, unit: ByteUnit) -> str:
    text = _(
        "Plain attention keeps a score for every pair of tokens: with them all layers' activations take {plain} at "
        "{tokens:,} tokens, quadratic in the length. FlashAttention-2 keeps no scores: without them {flash} are left, "
        "linear. Checkpointing keeps each layer's input "
        "and recomputes the rest: {full}; with sqrt(L) segments it would be O(sqrt(L)) where a layer keeps about its "
        "input."
    )
    sizes = {
        name: activations_at_most(budget, attention=attention, checkpointing=kind)
        for name, attention, kind in (("plain", "eager", "none"), ("flash", "flash", "none"), ("full", "flash", "full"))
    }
    shown = {name: format_bytes(size, unit) for name, size in sizes.items()}
    return text.format(tokens=budget.scenario.workload.seq_len, **shown)


EIGHT_SMALL_CARDS = Question(
    title=mark("What does ZeRO-1 leave per GPU for 7B on eight GPUs?"),
    data=_eight(1, "A100-40GB"),
    page="zero",
    answer=_stage_one,
)
QUESTIONS = (
    Question(
        title=mark("What does one parameter cost in BF16 mixed precision with AdamW?"),
        data={"model": _SEVEN_B, "hardware": {"gpu": "A100-80GB"}},
        page="static",
        answer=_one_parameter,
    ),
    Question(
        title=mark("Can one 80 GB card hold the training state of a 7B model?"),
        data={"model": _SEVEN_B, "hardware": {"gpu": "A100-80GB"}},
        page="home",
        answer=_one_card,
    ),
    EIGHT_SMALL_CARDS,
    Question(
        title=mark("And ZeRO-3: why is the real peak above its floor?"),
        data=_eight(3, "A100-80GB"),
        page="buffers",
        answer=_stage_three,
    ),
    Question(
        title=mark("And the activations: what do flash attention and checkpointing save?"),
        data={
            "model": {"name": "meta-llama/Llama-3.1-8B"},
            "hardware": {"gpu": "H100-80GB", "gpus": 8},
            "parallelism": {"engine": "deepspeed", "zero_stage": 3},
            "workload": {"seq_len": 8192},
        },
        page="activations",
        answer=_activations,
    ),
)
