"""One-click sweeps: the cases that show one law each, of a scenario's own layer."""

from dataclasses import dataclass
from enum import StrEnum
from math import isqrt

from memcore.bench.case import ATTENTIONS, Case, Part
from memcore.bench.slices import Slice, room
from memcore.i18n import gettext as _

# Five lengths, each twice the one before.
_DOUBLINGS = range(5)
DEPTHS = (4, 9, 16, 36, 64)
SEGMENT_LAYERS = 9
_FRONTIER_LAYERS = 4
FRONTIER_KINDS = ("none", "attention", "save(attention,mm)", "segments(2)", "full")
# So many tokens for each unit of width that a weight's gradient, which is there for a moment, hardly counts.
_TOKENS_PER_WIDTH = 16
# A case runs its step about so many times, and takes so long whatever its size.
_RUNS, _OVERHEAD_S = 6, 0.8
# Floating point operations per second: two modest cores, and a modest accelerator.
_SPEED = {"cpu": 1e11, "accelerator": 2e13}


class SweepKind(StrEnum):
    """Which law: bytes over the sequence length, the depth, the segment length; or memory against time."""

    SEQUENCE = "sequence"
    DEPTH = "depth"
    SEGMENTS = "segments"
    FRONTIER = "frontier"


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweep:
    """The cases of a sweep, in the order in which they run: the plain variant of each slice comes first."""

    kind: SweepKind
    part: Slice
    cases: tuple[Case, ...]

    def notes(self) -> list[str]:
        """Every reduction against the scenario's own layer and step, as sentences."""
        found = self.part.reductions()
        layers = [case for case in self.cases if case.part is Part.LAYERS]
        alone = [case for case in self.cases if case.part is Part.ATTENTION]
        stack = [case for case in self.cases if case.part is Part.PROJECTIONS]
        if layers:
            sentence = _("Depth and length: up to {layers} of the model's {whole} layers, up to {tokens:,} tokens.")
            most = {"layers": max(case.num_layers for case in layers), "tokens": max(case.seq_len for case in layers)}
            found.append(sentence.format(**most, whole=self.part.shapes.num_layers))
        if alone and alone[0].num_heads < self.part.shapes.num_heads:
            sentence = _("Attention alone: {heads} of {whole} heads of {size}; each takes the same.")
            sizes = {"heads": alone[0].num_heads, "whole": self.part.shapes.num_heads, "size": alone[0].head_dim}
            found.append(sentence.format(**sizes))
        if stack:
            sentence = _(
                "Depth law: a stack of square projections of width {width}, which keep exactly their input; a whole "
                "layer keeps many times its input."
            )
            found.append(sentence.format(width=stack[0].hidden_size))
        return found


def plan(kind: SweepKind, part: Slice) -> Sweep:
    """The cases of a sweep."""
    cases = {
        SweepKind.SEQUENCE: _sequence,
        SweepKind.DEPTH: _depth,
        SweepKind.SEGMENTS: _segments,
        SweepKind.FRONTIER: _frontier,
    }[kind](part)
    return Sweep(kind=kind, part=part, cases=tuple(cases))


def estimate_s(case: Case) -> float:
    """Seconds that measuring a case takes, about."""
    size, width = case.seq_len, case.hidden_size
    scores = 12 * case.micro_batch * case.num_heads * case.head_dim * size**2
    params = {Part.ATTENTION: 0, Part.PROJECTIONS: width**2, Part.LAYERS: 14 * width**2}[case.part]
    operations = 8 * params * case.tokens + (0 if case.part is Part.PROJECTIONS else scores)
    speed = _SPEED["cpu" if case.device == "cpu" else "accelerator"]
    return _OVERHEAD_S + _RUNS * operations * case.num_layers / speed


def _sequence(part: Slice) -> list[Case]:
    """Attention alone, and one whole layer: plain and flash, over five lengths."""
    alone = [_attention(part, attention, length) for length in _lengths(part) for attention in ("plain", "flash")]
    longest = room(part.device).most_tokens
    lengths = [longest >> power for power in reversed(_DOUBLINGS)]
    config = part.config(1, longest)
    whole = [
        _layers(part, config, 1, length, attention, checkpointing)
        for length in lengths
        for attention, checkpointing in (("plain", "none"), ("flash", "none"), ("flash", "full"))
    ]
    return [*alone, *whole]


def _lengths(part: Slice) -> list[int]:
    """Lengths at which plain attention's scores outweigh queries, keys and values: from twice the head size on."""
    shortest = max(256, 2 * part.shapes.head_dim)
    return [shortest << power for power in _DOUBLINGS]


def _attention(part: Slice, attention: str, length: int) -> Case:
    """As many of the model's heads as there is room for at the longest length, grouped as they are."""
    shapes = part.shapes
    most = max(room(part.device).score_elements // _lengths(part)[-1] ** 2, 1)
    heads = min(shapes.num_heads, most)
    group = max(shapes.num_heads // max(shapes.num_kv_heads, 1), 1)
    if heads >= group:
        heads = heads // group * group
    return Case(
        part=Part.ATTENTION,
        device=part.device,
        dtype=part.dtype,
        attention=attention,
        seq_len=length,
        num_heads=heads,
        num_kv_heads=max(heads // group, 1),
        head_dim=shapes.head_dim,
    )


def _layers(
    part: Slice, config: dict[str, object], num_layers: int, length: int, attention: str, checkpointing: str
) -> Case:  # fmt: skip
    return Case(
        part=Part.LAYERS,
        device=part.device,
        dtype=part.dtype,
        attention=attention,
        checkpointing=checkpointing,
        num_layers=num_layers,
        seq_len=length,
        num_heads=part.num_heads,
        num_kv_heads=part.num_kv_heads,
        head_dim=part.shapes.head_dim,
        hidden_size=part.hidden_size,
        config=config,
    )


def _short(part: Slice) -> int:
    """A length at which many layers run quickly."""
    return room(part.device).most_tokens // 16


def _depth(part: Slice) -> list[Case]:
    """A stack of projections with and without sqrt(L) segments, and the model's own layers with and without
    checkpointing."""
    width = min(part.shapes.hidden_size, room(part.device).projection_width)
    stack = [
        Case(
            part=Part.PROJECTIONS,
            device=part.device,
            dtype=part.dtype,
            checkpointing=checkpointing,
            num_layers=depth,
            seq_len=_TOKENS_PER_WIDTH * width,
            hidden_size=width,
        )
        for depth in DEPTHS
        for checkpointing in ("none", f"segments({isqrt(depth)})")
    ]
    length = _short(part)
    depths = [depth for depth in DEPTHS[:3] if depth <= part.shapes.num_layers]
    return [
        *stack,
        *(
            _layers(part, part.config(depth, length), depth, length, "flash", checkpointing)
            for depth in depths
            for checkpointing in ("none", "full")
        ),
    ]


def _segments(part: Slice) -> list[Case]:
    """The model's own layers in segments of every k."""
    depth, length = min(SEGMENT_LAYERS, part.shapes.num_layers), _short(part)
    config = part.config(depth, length)
    kinds = ["none", *(f"segments({k})" for k in range(1, depth + 1))]
    return [_layers(part, config, depth, length, "flash", kind) for kind in kinds]


def _frontier(part: Slice) -> list[Case]:
    """Each attention with each kind of checkpointing, at one length."""
    depth, length = min(_FRONTIER_LAYERS, part.shapes.num_layers), room(part.device).most_tokens // 4
    kinds = [kind for kind in FRONTIER_KINDS if depth > 1 or not kind.startswith("segments")]
    config = part.config(depth, length)
    return [_layers(part, config, depth, length, attention, kind) for attention in ATTENTIONS for kind in kinds]
