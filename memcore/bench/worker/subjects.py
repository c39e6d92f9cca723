"""What runs in a measurement: the attention alone, a model's layers, or a stack of projections.

Worker processes only: imports torch and transformers.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from copy import deepcopy
from itertools import groupby
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from memcore.activations.recompute import checkpointing
from memcore.bench.case import ATTENTIONS, Case, Part
from memcore.bench.worker import attention
from memcore.bench.worker.device import Clock
from memcore.loading import build_model, load_config
from memcore.trace import kernels
from memcore.trace.building import DTYPES, IMPLEMENTATIONS
from memcore.trace.plan import make_plan, thin_out
from memcore.trace.units import Unit

_SEED = 20


class Recompute:
    """The time of forwards that run again within a backward. Off until the backward begins."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._spans: list[tuple[Any, Any]] = []
        self._depth = 0
        self.on = False

    def reset(self) -> None:
        """Forget what was timed, and wait for the next backward."""
        self._spans.clear()
        self.on = False

    def begin(self) -> None:
        """A forward begins; one within another counts with it."""
        if self.on:
            if not self._depth:
                self._begun = self._clock.now()
            self._depth += 1

    def end(self) -> None:
        """It ends, or is left as soon as what the backward needs is there."""
        if self.on and self._depth:
            self._depth -= 1
            if not self._depth:
                self._spans.append((self._begun, self._clock.now()))

    def seconds(self) -> float | None:
        """All of them together; None where nothing ran again."""
        return sum(self._clock.seconds(*span) for span in self._spans) if self._spans else None

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, timed where it runs again."""

        def run(*args: Any, **kwargs: Any) -> Any:
            self.begin()
            try:
                return function(*args, **kwargs)
            finally:
                self.end()

        return run


class Subject:
    """A forward whose backward is measured. `leaves` receive gradients; `parameters` are those of them that are
    weights. `target` is the gradient of the output: the loss is the sum of their products."""

    def __init__(self, case: Case, recompute: Recompute) -> None:
        self.case = case
        self.recompute = recompute
        self.dtype = DTYPES[case.dtype]
        self.leaves: list[torch.Tensor] = []
        self.parameters: list[torch.Tensor] = []
        self.target: torch.Tensor | None = None

    def forward(self) -> torch.Tensor:
        """The output of one forward."""
        raise NotImplementedError

    def gradient(self, output: torch.Tensor) -> torch.Tensor:
        """The gradient that arrives at the output."""
        if self.target is None:
            self.target = _random(output.shape, self)
        return self.target

    @contextmanager
    def running(self) -> Iterator[None]:
        """What must hold while it runs."""
        with attention.only(self.case.attention):
            yield


def _random(shape: Sequence[int], subject: Subject, *, trained: bool = False) -> torch.Tensor:
    """Random values, the same on every device."""
    values = torch.randn(tuple(shape), dtype=torch.float32)
    return values.to(subject.case.device, subject.dtype).requires_grad_(trained)


class AttentionAlone(Subject):
    """Attention on given queries, keys and values: what it takes beyond these is its own."""

    def __init__(self, case: Case, recompute: Recompute) -> None:
        super().__init__(case, recompute)
        heads = (case.num_heads, case.num_kv_heads, case.num_kv_heads)
        shapes = [(case.micro_batch, number, case.seq_len, case.head_dim) for number in heads]
        self.leaves = [_random(shape, self, trained=True) for shape in shapes]

    def forward(self) -> torch.Tensor:
        """Causal attention, keys and values shared among heads as the model does."""
        query, key, value = self.leaves
        grouped = self.case.num_heads != self.case.num_kv_heads
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)


class Projections(Subject):
    """A stack of square linear layers without a bias, in segments that are recomputed."""

    def __init__(self, case: Case, recompute: Recompute) -> None:
        super().__init__(case, recompute)
        size = case.hidden_size
        self._input = _random((case.micro_batch, case.seq_len, size), self, trained=True)
        layers = [nn.Linear(size, size, bias=False) for _ in range(case.num_layers)]
        layers = [layer.to(case.device, self.dtype) for layer in layers]
        groups = checkpointing(case.checkpointing, len(layers)).groups
        self._units = [
            _unit([layers[index] for index in unit], recompute, again=group is not None)
            for group, unit in groupby(range(len(layers)), key=groups.__getitem__)
        ]
        self.parameters = [layer.weight for layer in layers]
        self.leaves = [self._input, *self.parameters]

    def forward(self) -> torch.Tensor:
        """All layers, each group of them through a checkpoint where it is recomputed."""
        hidden = self._input
        for unit in self._units:
            hidden = unit(hidden)
        return hidden

    @contextmanager
    def running(self) -> Iterator[None]:
        """There is no attention here to choose."""
        yield


def _unit(layers: Sequence[nn.Module], recompute: Recompute, *, again: bool, saved: Sequence[str] = ()) -> Unit:
    """Layers as a trace runs them, timed where they are run again."""
    for layer in layers if again else ():
        layer.register_forward_pre_hook(lambda *_: recompute.begin())
        layer.register_forward_hook(lambda *_: recompute.end(), always_call=True)
    return Unit(layers, lambda _moment: None, recompute=again, reentrant=False, saved=saved)


class Layers(Subject):
    """A model's own decoder, from token ids to its last hidden states, as a trace runs it."""

    def __init__(self, case: Case, recompute: Recompute) -> None:
        super().__init__(case, recompute)
        assert case.config is not None, "layers are those of a config"
        kernels.register()
        # transformers writes into what it is given, and the case's key depends on it.
        config = load_config(deepcopy(dict(case.config)))
        config._attn_implementation = IMPLEMENTATIONS[ATTENTIONS[case.attention]]  # noqa: SLF001  as a trace tells it
        config.use_cache = False
        with kernels.flash_taken(config) if case.attention == "flash" else nullcontext():
            model: Any = build_model(config, device="cpu", dtype=self.dtype).train()
        plan = make_plan(model, case.checkpointing, full_depth=True)
        self._attention_again = plan.attention_only

        def unit(_place: int, layers: list[nn.Module], again: bool) -> nn.Module:
            return _unit(layers, recompute, again=again, saved=plan.saved_operations)

        thin_out(model, plan, unit)
        self._decoder = model.to(case.device).get_decoder()
        self._tokens = torch.randint(0, config.get_text_config().vocab_size, (case.micro_batch, case.seq_len))
        self._tokens = self._tokens.to(case.device)
        self.parameters = [each for each in self._decoder.parameters() if each.requires_grad]
        self.leaves = self.parameters

    def forward(self) -> torch.Tensor:
        """The last hidden states."""
        hidden: torch.Tensor = self._decoder(input_ids=self._tokens, use_cache=False)[0]
        return hidden

    def gradient(self, output: torch.Tensor) -> torch.Tensor:
        """A copy: a loss would make it during the step, and a trace counts it."""
        return torch.empty_like(output).copy_(super().gradient(output))

    @contextmanager
    def running(self) -> Iterator[None]:
        """The kernel, and where only the attention is recomputed, that."""
        with ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            stack.enter_context(attention.only(self.case.attention))
            if self._attention_again:
                stack.enter_context(kernels.recomputed_attention(self.recompute.timed))
            yield


_SUBJECTS = {Part.ATTENTION: AttentionAlone, Part.LAYERS: Layers, Part.PROJECTIONS: Projections}


def make_subject(case: Case, recompute: Recompute) -> Subject:
    """What the case names, with weights and inputs that depend on its sizes alone: variants start alike."""
    assert case.attention in ATTENTIONS
    torch.manual_seed(_SEED)
    return _SUBJECTS[case.part](case, recompute)
