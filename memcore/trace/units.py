"""Decoder layers as a trace runs them: marked where their forward and backward begin, and recomputed as asked.

Worker processes only: imports torch.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

if TYPE_CHECKING:
    from memcore.trace.compiling import Compiler

_aten: Any = torch.ops.aten
_MM = _aten.mm.default
# The operations of each group of memcore.activations.recompute.SAVED_OPERATIONS, but mm_alternate: see there.
OPERATIONS: dict[str, tuple[Any, ...]] = {
    "attention": (
        _aten._scaled_dot_product_flash_attention_for_cpu.default,  # noqa: SLF001  the kernels' names in torch
        _aten._scaled_dot_product_flash_attention.default,  # noqa: SLF001
        _aten._scaled_dot_product_efficient_attention.default,  # noqa: SLF001
        _aten._scaled_dot_product_cudnn_attention.default,  # noqa: SLF001
    ),
    "mm": (_MM, _aten.addmm.default),
    "bmm": (_aten.bmm.default, _aten.baddbmm.default),
    "grouped_mm": (_aten._grouped_mm.default,),  # noqa: SLF001
}


def recomputed(
    run: Callable[..., Any],
    hidden: torch.Tensor,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    *,
    reentrant: bool = False,
    saved: Sequence[str] = (),
) -> Any:
    """What `run(hidden, *args, **kwargs)` gives, run again in the backward. `saved`: groups of operations whose
    results are kept from the forward all the same."""
    # As transformers does: a reentrant checkpoint takes no keywords.
    function = partial(run, **kwargs)
    if saved:
        contexts = partial(_selective_contexts, saved)
        return checkpoint(function, hidden, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)
    return checkpoint(function, hidden, *args, use_reentrant=reentrant, preserve_rng_state=False)


def _checkpointed(
    run: Callable[..., Any], saved: Sequence[str], hidden: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    return recomputed(run, hidden, args, kwargs, saved=saved)


def _selective_contexts(saved: Sequence[str]) -> Any:
    """The contexts of one forward and of its repetition, in which the operations of the groups keep their results.

    "mm_alternate": the first, third, fifth matrix product of those recomputed together, counted anew in the
    repetition. Source: torchtitan, distributed/activation_checkpoint.py, _get_custom_policy (commit b00e484e).
    """
    operations = {operation for group in saved for operation in OPERATIONS.get(group, ())}
    contexts: Callable[[Any], Any] = create_selective_checkpoint_contexts
    if "mm_alternate" not in saved:
        return contexts(list(operations))
    counts = {False: 0, True: 0}

    def policy(context: Any, operation: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        keep = operation in operations
        if operation is _MM:
            counts[context.is_recompute] += 1
            keep = counts[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return contexts(policy)


class Unit(nn.Module):
    """Layers that are recomputed together, or one that is not, in place of one entry of the model's list.

    `tag` is called with "forward", "backward" and "between" (after the forward) as the step comes to them.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        tag: Callable[[str], None],
        *,
        recompute: bool,
        reentrant: bool,
        saved: Sequence[str],
        compiler: "Compiler | None" = None,
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self._tag = tag
        self._recompute = recompute
        self._reentrant = reentrant
        self._saved = tuple(saved)
        if compiler is not None:
            self._compile(compiler)

    def _compile(self, compiler: "Compiler") -> None:
        """Compile the layers, each with its checkpoint inside, as torchtitan does; layers that are recomputed together
        have theirs around them. What a module's hooks do stays outside."""
        inside = self._recompute and len(self.layers) == 1
        for layer in self.layers:
            own = layer.forward
            layer.forward = compiler.compiled(partial(_checkpointed, own, self._saved) if inside else own)
        self._recompute = self._recompute and not inside

    def __getattr__(self, name: str) -> Any:
        """What the model asks of a layer itself, such as its kind of attention."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.layers[0], name)

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the layers, through a checkpoint where they are recomputed."""
        self._tag("forward")
        if self._recompute and torch.is_grad_enabled():
            result = recomputed(self._run, hidden, args, kwargs, reentrant=self._reentrant, saved=self._saved)
        else:
            result = self._run(hidden, *args, **kwargs)
        first = result[0] if isinstance(result, tuple) else result
        # On the node, not the tensor: a tensor's hook would keep the tensor alive.
        if first.grad_fn is not None:
            first.grad_fn.register_prehook(lambda _gradients: self._tag("backward"))
        self._tag("between")
        return result

    def before_forward(self) -> None:
        """The unit's forward begins with what comes next."""
        self._tag("forward")

    def before_backward(self, begin: Callable[..., None], *args: Any) -> None:
        """The unit's backward begins with what `begin` does."""
        self._tag("backward")
        begin(*args)

    def _run(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result: Any = hidden
        for layer in self.layers:
            result = layer(result[0] if isinstance(result, tuple) else result, *args, **kwargs)
        return result
