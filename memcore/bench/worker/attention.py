"""Which attention is let run, and which one did.

Worker processes only: imports torch and transformers.
"""

from collections.abc import Iterator, Set
from contextlib import contextmanager

from torch.nn.attention import SDPBackend, sdpa_kernel

from memcore.bench.words import no_kernel

_BACKENDS = {
    "plain": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "memory_efficient": SDPBackend.EFFICIENT_ATTENTION,
}
# The operations of each fused kernel (torch 2.13, aten/src/ATen/native/native_functions.yaml), with which a
# profile shows that it ran. On a CPU there is no memory-efficient one.
_OPERATIONS = {
    "flash": (
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_fused_attention_overrideable",
    ),
    "memory_efficient": ("aten::_scaled_dot_product_efficient_attention",),
}
_PLAIN = ("aten::_scaled_dot_product_attention_math", "aten::_softmax", "aten::softmax")
# What torch says where none of the kernels that are let run can.
_NO_KERNEL = ("no available kernel", "no viable backend")


class UnavailableError(Exception):
    """The device or the dtype has no such kernel; the text is a sentence that says why."""


@contextmanager
def only(attention: str) -> Iterator[None]:
    """Let torch's attention run this kernel and no other. Raises UnavailableError where there is none."""
    try:
        with sdpa_kernel(_BACKENDS[attention]):
            yield
    except RuntimeError as error:
        if any(text in str(error).lower() for text in _NO_KERNEL):
            raise UnavailableError(no_kernel(attention)) from error
        raise


def kernel_that_ran(attention: str, operations: Set[str]) -> str:
    """The operation that did the attention. Raises UnavailableError where it is another than was asked for."""
    fused = {name: [op for op in known if op in operations] for name, known in _OPERATIONS.items()}
    if attention == "plain":
        found = [op for op in _PLAIN if op in operations]
        if found and not any(fused.values()):
            return found[0]
    elif fused[attention]:
        return fused[attention][0]
    raise UnavailableError(no_kernel(attention))
