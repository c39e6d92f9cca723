"""Checkpointing: which layers are run again in the backward, and which segment length is best."""

from dataclasses import dataclass
from math import sqrt

from memcore.errors import UserError
from memcore.i18n import gettext as _
from memcore.units import ceil_div

# Groups of operations whose results selective checkpointing can keep, by the names that save(...) takes. mm_alternate
# is torchtitan's: the first, third, fifth matrix product of a layer, those that add a bias left out.
SAVED_OPERATIONS = ("attention", "mm", "mm_alternate", "bmm", "grouped_mm")


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpointing:
    """Which layers are recomputed: layers of one `group` are run again together, from its first layer's input.

    `groups[i]` is the first layer of layer i's group, or None where layer i keeps everything. `saved_operations`:
    the groups of operations whose results a recomputed layer keeps all the same.
    """

    groups: tuple[int | None, ...]
    attention_only: bool = False
    saved_operations: tuple[str, ...] = ()


def checkpointing(kind: str, num_layers: int) -> Checkpointing:
    """The layers that a kind of checkpointing recomputes: see Workload.checkpointing.

    Raises UserError where it names more layers than there are.
    """
    name, _bracket, rest = kind.rstrip(")").partition("(")
    if name == "save":
        return Checkpointing(groups=tuple(range(num_layers)), saved_operations=tuple(rest.split(",")))
    k = int(rest or 1)
    if k > num_layers:
        message = _("workload.checkpointing is {kind}, but the model has {layers} layers.")
        raise UserError(message.format(kind=kind, layers=num_layers), "workload.checkpointing")
    layers = range(num_layers)
    chosen: dict[str, tuple[int | None, ...]] = {
        "full": tuple(layers),
        "segments": tuple(i // k * k for i in layers),
        "every_nth": tuple(i if i % k == 0 else None for i in layers),
        "first": tuple(i if i < k else None for i in layers),
    }
    return Checkpointing(groups=chosen.get(name, (None,) * num_layers), attention_only=name == "attention")


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentLaw:
    """Peak activations for segments of k layers, in bytes: c ceil(L / k) + a k, for each k from 1 to L.

    `best` is the k with the lowest peak; `textbook` the k of sqrt(L) segments, sqrt(L) layers each;
    `continuous` sqrt(c L / a), the optimum if k needed not be whole.
    """

    peaks: tuple[int, ...]
    best: int
    textbook: int
    continuous: float


def segment_law(layer_bytes: int, input_bytes: int, num_layers: int) -> SegmentLaw:
    """The law of segments for a layer that keeps `layer_bytes` and whose input takes `input_bytes`.

    Source: arXiv 1604.06174, section 4 (sqrt(n) where both are alike); the whole minimiser is exact.
    """
    peaks = tuple(input_bytes * ceil_div(num_layers, k) + layer_bytes * k for k in range(1, num_layers + 1))
    return SegmentLaw(
        peaks=peaks,
        best=peaks.index(min(peaks)) + 1,
        textbook=max(round(sqrt(num_layers)), 1),
        continuous=sqrt(input_bytes * num_layers / layer_bytes),
    )
