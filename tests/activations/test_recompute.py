"""Checkpointing: which layers a kind recomputes, the law of segments, and a real stack that keeps what it says.

Run: pytest tests/activations/test_recompute.py.
"""

from collections.abc import Callable, Iterator
from math import ceil, sqrt

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from memcore.activations import Activations, Kept, LayerForm, checkpointing, layer_form, segment_law
from memcore.activations.layer import Traits
from memcore.errors import UserError
from memcore.models import catalogue_inventory
from memcore.scenario import parse_scenario
from memcore.units import MIB

# A Llama-3.1-8B layer in BF16 at 8192 tokens, in MiB: what it keeps, and its input (worked_examples.md).
A, C = 1665, 64


class TestLawOfSegments:
    """worked_examples.md, "When does O(sqrt(L)) pay?"."""

    @pytest.mark.parametrize("layers", [1, 2, 32, 51, 52])
    def test_one_layer_a_segment_is_best_up_to_52(self, layers: int):
        law = segment_law(A, C, layers)
        assert law.peaks[0] == min(law.peaks)
        assert law.best == 1

    def test_two_are_best_from_there_to_156(self):
        # c ceil(L / k) + a k: an odd number of layers rounds up, so 53 still ties or loses by c at most.
        assert segment_law(A, C, 54).best == 2
        assert segment_law(A, C, 126).best == 2
        assert segment_law(A, C, 156).best == 2
        assert segment_law(A, C, 162).best == 3
        below = segment_law(A, C, 53)
        assert below.peaks[0] - below.peaks[1] <= C

    @pytest.mark.parametrize(("k", "units"), [(1, 152), (2, 115), (3, 120)])
    def test_405b_in_units_of_its_input(self, k: int, units: int):
        # 126 layers, a / c = 26.
        assert segment_law(26, 1, 126).peaks[k - 1] == units

    def test_the_continuous_optimum(self):
        assert segment_law(26, 1, 126).continuous == pytest.approx(sqrt(126 / 26))

    @pytest.mark.parametrize("layers", [1, 4, 9, 16, 100, 400])
    def test_the_textbook_holds_where_a_layer_keeps_its_input(self, layers: int):
        law = segment_law(C, C, layers)
        assert law.best == law.textbook == round(sqrt(layers))
        assert min(law.peaks) == 2 * C * round(sqrt(layers))

    def test_the_catalogues_layer_is_the_notes(self):
        inventory = catalogue_inventory("meta-llama/Llama-3.1-8B")
        assert inventory is not None
        form = layer_form(inventory.layers[0], inventory.shapes, Traits(width=2, attention="memory_efficient"))
        assert form is not None
        law = segment_law(form.total(8192, 8192), form.input_bytes * 8192, 52)
        assert law.best == 1
        assert law.peaks[0] / MIB == pytest.approx(C * 52 + A, abs=0.1)

    @given(layer=st.integers(1, 10**12), kept=st.integers(1, 10**12), layers=st.integers(1, 300))
    def test_it_equals_trying_every_k(self, layer: int, kept: int, layers: int):
        law = segment_law(layer, kept, layers)
        tried = {k: kept * -(-layers // k) + layer * k for k in range(1, layers + 1)}
        assert law.peaks == tuple(tried.values())
        assert tried[law.best] == min(tried.values())
        assert all(tried[k] > tried[law.best] for k in range(1, law.best))


class TestKinds:
    """Workload.checkpointing: which layers are recomputed, in which groups."""

    @pytest.mark.parametrize(
        ("kind", "groups"),
        [
            ("none", (None,) * 5),
            ("attention", (None,) * 5),
            ("full", (0, 1, 2, 3, 4)),
            ("segments(1)", (0, 1, 2, 3, 4)),
            ("segments(2)", (0, 0, 2, 2, 4)),
            ("segments(5)", (0,) * 5),
            ("every_nth(2)", (0, None, 2, None, 4)),
            ("every_nth(3)", (0, None, None, 3, None)),
            ("first(1)", (0, None, None, None, None)),
            ("first(3)", (0, 1, 2, None, None)),
            ("first(5)", (0, 1, 2, 3, 4)),
        ],
    )
    def test_groups_of_five_layers(self, kind: str, groups: tuple[int | None, ...]):
        found = checkpointing(kind, 5)
        assert found.groups == groups
        assert found.attention_only == (kind == "attention")

    @pytest.mark.parametrize("name", ["segments", "every_nth", "first"])
    def test_more_layers_than_there_are_is_refused(self, name: str):
        with pytest.raises(UserError, match=rf"^workload\.checkpointing is {name}\(6\), but the model has 5 layers\.$"):
            checkpointing(f"{name}(6)", 5)

    @pytest.mark.parametrize(
        "kind",
        [
            "segments(0)",
            "first(0)",
            "every_nth(-1)",
            "segments()",
            "segments(1.5)",
            "segments",
            "some",
            "",
            "save()",
            "save(mm",
            "save(all)",
        ],
    )
    def test_what_is_no_kind_is_refused_in_one_sentence(self, kind: str):
        with pytest.raises(UserError, match=r"^workload\.checkpointing is .*bmm and grouped_mm\."):
            parse_scenario({"model": {"n_params": 1}, "workload": {"checkpointing": kind}})

    @given(layers=st.integers(1, 200), k=st.integers(1, 200))
    def test_groups_are_the_papers(self, layers: int, k: int):
        k = min(k, layers)
        kept = {kind: checkpointing(f"{kind}({k})", layers).groups for kind in ("segments", "every_nth", "first")}
        assert len(set(kept["segments"])) == ceil(layers / k)
        assert sum(group is not None for group in kept["every_nth"]) == ceil(layers / k)
        assert sum(group is not None for group in kept["first"]) == k


def form(per_token: float, per_pair: float = 0.0) -> LayerForm:
    kept = (Kept(name="linear", per_token=per_token), Kept(name="scores", per_pair=per_pair))
    nothing = Kept(name="")
    return LayerForm(kept=kept, input_bytes=2, forward_extra=nothing, backward_extras=(nothing,))


class TestKeptAndMadeAgain:
    """By hand: three layers that keep 10, 20 and 30 bytes per token, scores of 1 per pair, inputs of 2."""

    FORMS = (form(10, 1), form(20, 1), form(30, 1))

    def activations(self, kind: str) -> Activations:
        # Two sequences of 4 tokens: 8 tokens, 32 pairs.
        return Activations(forms=self.FORMS, recompute=checkpointing(kind, 3), tokens=8, seq_len=4)

    @pytest.mark.parametrize(
        ("kind", "kept", "again"),
        [
            ("none", [(80, 32), (160, 32), (240, 32)], [(0, 0)] * 3),
            ("attention", [(80, 0), (160, 0), (240, 0)], [(0, 32)] * 3),
            ("full", [(16, 0)] * 3, [(80, 32), (160, 32), (240, 32)]),
            # The backward of layer 1 finds layers 0 and 1 made again; of layer 0, only itself.
            ("segments(2)", [(16, 0), (0, 0), (16, 0)], [(80, 32), (240, 64), (240, 32)]),
            ("segments(3)", [(16, 0), (0, 0), (0, 0)], [(80, 32), (240, 64), (480, 96)]),
            ("every_nth(2)", [(16, 0), (160, 32), (16, 0)], [(80, 32), (0, 0), (240, 32)]),
            ("first(1)", [(16, 0), (160, 32), (240, 32)], [(80, 32), (0, 0), (0, 0)]),
        ],
    )
    def test_by_hand(self, kind: str, kept: list[tuple[int, int]], again: list[tuple[int, int]]):
        found = self.activations(kind)
        assert [found.kept_by(i) for i in range(3)] == kept
        assert [found.recomputed_at(i) for i in range(3)] == again

    @pytest.mark.parametrize("kind", ["none", "attention", "full", "segments(1)", "every_nth(1)", "first(3)"])
    def test_kept_and_made_again_are_the_whole_layer(self, kind: str):
        """Where each layer is its own group: what it keeps and what is made again, less the input that was kept."""
        found = self.activations(kind)
        for index, each in enumerate(self.FORMS):
            inputs = 16 if found.recompute.groups[index] is not None else 0
            parts = sum(found.kept_by(index)) + sum(found.recomputed_at(index))
            assert parts - inputs == each.total(8, 4)


# --- a real stack ---------------------------------------------------------------------------------------------------

LAYERS, TOKENS, WIDTH = 6, 32, 64


class Layer(nn.Module):
    """A residual MLP of twice the width: keeps its input, its inner tensor and the GELU's result, 5 widths in all."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        down: torch.Tensor = self.down(nn.functional.gelu(self.up(states)))
        return states + down


def whole_layers(states: torch.Tensor, stack: list[Layer]) -> torch.Tensor:
    for layer in stack:
        states = layer(states)
    return states


def groups_of(groups: tuple[int | None, ...]) -> Iterator[tuple[bool, list[int]]]:
    """Consecutive layers of one group, and whether they are recomputed."""
    index = 0
    while index < len(groups):
        members = (
            [i for i in range(index, len(groups)) if groups[i] == groups[index]] if groups[index] is not None else []
        )
        yield bool(members), members or [index]
        index += len(members) or 1


def checkpointed(stack: list[Layer], kind: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """The stack under torch.utils.checkpoint, each group of the kind in one call of it."""

    def run(states: torch.Tensor) -> torch.Tensor:
        for again, members in groups_of(checkpointing(kind, LAYERS).groups):
            layers = [stack[i] for i in members]
            if again:
                states = checkpoint(whole_layers, states, layers, use_reentrant=False)
            else:
                states = whole_layers(states, layers)
        return states

    return run


def measured(stack: list[Layer], kind: str) -> tuple[float, torch.Tensor, int]:
    """Loss, first weight's gradient, and bytes that autograd holds after the forward, each storage once.

    Inside a checkpoint autograd saves nothing; the checkpoint's input is saved by a node of its own
    (torch 2.13, utils/checkpoint.py, _NoopSaveInputs), so that the same hooks see it.
    """
    parameters = {p.untyped_storage().data_ptr() for layer in stack for p in layer.parameters()}
    torch.manual_seed(1)
    states = torch.randn(TOKENS, WIDTH, requires_grad=True)
    held: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in parameters:
            held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = checkpointed(stack, kind)(states)
    found = sum(held.values())
    loss = out.sum()  # keeps nothing of its own
    loss.backward()
    gradient = stack[0].up.weight.grad
    assert gradient is not None
    stack[0].up.weight.grad = None
    return loss.item(), gradient, found


@pytest.mark.parametrize(
    "kind", ["none", "full", "segments(2)", "segments(3)", "segments(4)", "segments(6)", "every_nth(2)", "first(4)"]
)
def test_a_real_stack_keeps_what_the_form_says_and_its_loss_is_the_same(kind: str):
    torch.manual_seed(0)
    stack = [Layer() for _ in range(LAYERS)]
    plain_loss, plain_gradient, _plain = measured(stack, "none")
    loss, gradient, found = measured(stack, kind)
    assert loss == plain_loss
    assert torch.equal(gradient, plain_gradient)
    # Input, inner tensor and GELU's result in FP32: 1 + 2 + 2 widths.
    layer = LayerForm(
        kept=(Kept(name="all", per_token=4 * 5 * WIDTH),),
        input_bytes=4 * WIDTH,
        forward_extra=Kept(name=""),
        backward_extras=(Kept(name=""),),
    )
    activations = Activations(
        forms=(layer,) * LAYERS, recompute=checkpointing(kind, LAYERS), tokens=TOKENS, seq_len=TOKENS
    )
    assert found == sum(sum(activations.kept_by(index)) for index in range(LAYERS))
