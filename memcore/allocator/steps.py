"""Training steps through the allocator: what it reserves once they repeat themselves.

What is there before the first step comes first, tensor by tensor. Then in each step the traced storages are taken and
given back in their order, with what the engine has beside them as blocks at their moments; the optimizer's states come
with the first update and stay, and what it makes for a moment comes with each.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from memcore.allocator.caching import Block, CachingAllocator
from memcore.allocator.expandable import ExpandableAllocator
from memcore.allocator.wrapping import wrap
from memcore.trace.storages import Event

# The first makes the optimizer's states, the second finds room beside them, the third what the second left.
STEPS = 3

# The phases whose moments are layers'.
_LAYERED = ("forward", "backward")

Moments = Sequence[tuple[str, Sequence[Event]]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What a run asks of the allocator beside the traced storages, in bytes.

    `wrapped`: FSDP1's units as they are started (:mod:`memcore.allocator.wrapping`), with what stays of each.
    `resident`: other tensors that are there before the first step. `workspaces`: what is taken at the first forward and
    at the first backward, and kept. `levels`: for each of an engine's own terms what it has at each moment by name, 0
    elsewhere. `states`: the optimizer's, in order; `update`: what each update makes, all at once where
    `update_together`, else one after the other. `gradients_traced`: whether gradients are the trace's (else they are
    among the levels). `micro_steps`: forwards and backwards of a step. `capacity`: what the device gives, None for no
    end.
    """

    resident: tuple[int, ...]
    workspaces: tuple[int, int] = (0, 0)
    levels: tuple[Mapping[str, int], ...] = ()
    states: tuple[int, ...] = ()
    update: tuple[int, ...] = ()
    update_together: bool = True
    gradients_traced: bool = True
    micro_steps: int = 1
    expandable: bool = False
    capacity: int | None = None
    wrapped: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Reservation:
    """What the allocator has reserved at the most, and what it counts as allocated at the most, in bytes: blocks, which
    are rounded up. `overfull`: whether the device had less."""

    reserved: int
    allocated: int
    overfull: bool


def load_plan(data: Mapping[str, Any]) -> Plan:
    """A plan from its JSON data."""
    columns: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in data.items()}
    return Plan(**columns)


def dump_plan(plan: Plan) -> dict[str, Any]:
    """A plan as JSON data."""
    return asdict(plan)


def load_reservation(data: Mapping[str, Any]) -> Reservation:
    """A reservation from its JSON data."""
    return Reservation(**data)


def reserve(plan: Plan, moments: Moments, steps: int = STEPS) -> Reservation:
    """Run some of the plan's steps. `moments` are those of the trace, in order."""
    kind = ExpandableAllocator if plan.expandable else CachingAllocator
    plan = replace(plan, levels=tuple(_at_moments(level, [name for name, _events in moments]) for level in plan.levels))
    run = _Run(plan=plan, allocator=kind(plan.capacity))
    wrap(run.allocator, plan.wrapped)
    run.take(plan.resident)
    for step in range(steps):
        run.step(moments, first=not step)
    allocator = run.allocator
    return Reservation(
        reserved=allocator.reserved_peak, allocated=allocator.allocated_peak, overfull=allocator.overfull
    )


def _at_moments(level: Mapping[str, int], names: Sequence[str]) -> dict[str, int]:
    """A term's bytes at the moments that the trace has: of layers that are one unit there, the most of any of them. A
    unit has the name of its first layer in the forward, of its last in the backward."""
    found = {name: num_bytes for name, num_bytes in level.items() if _layer(name) is None}
    units = {phase: [each for each in map(_layer, names) if each and each[0] == phase] for phase in _LAYERED}
    for name, num_bytes in level.items():
        if (layer := _layer(name)) is None:
            continue
        forward = layer[0] == _LAYERED[0]
        own = [unit for unit in units[layer[0]] if (unit[1] <= layer[1] if forward else unit[1] >= layer[1])]
        if own:
            phase, number = max(own) if forward else min(own)
            unit = f"{phase}[{number}]"
            found[unit] = max(found.get(unit, 0), num_bytes)
    return found


def _layer(name: str) -> tuple[str, int] | None:
    """A moment's phase and layer, where it is a layer's."""
    phase, _bracket, rest = name.partition("[")
    return (phase, int(rest[:-1])) if phase in _LAYERED and rest[:-1].isdigit() else None


@dataclass(slots=True)
class _Run:
    plan: Plan
    allocator: CachingAllocator
    _gradients: list[Block] = field(default_factory=list)
    _levels: dict[int, list[Block]] = field(default_factory=dict)

    def take(self, sizes: Iterable[int]) -> list[Block]:
        return [self.allocator.allocate(size) for size in sizes if size]

    def give_back(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            self.allocator.release(block)

    def step(self, moments: Moments, *, first: bool) -> None:
        """Forwards and backwards, then the update."""
        for micro_step in range(self.plan.micro_steps):
            self._pass(moments, first=first and not micro_step, accumulates=micro_step > 0)
        for name in ("optimizer[norm]", "optimizer[gradients]", "optimizer"):
            self._set_levels(name)
        if first:
            self.take(self.plan.states)
        self._update()
        self.give_back(self._gradients)
        self._gradients.clear()
        self._set_levels("idle")

    def _update(self) -> None:
        if self.plan.update_together:
            self.give_back(self.take(self.plan.update))
            return
        for size in self.plan.update:
            self.give_back(self.take([size]))

    def _pass(self, moments: Moments, *, first: bool, accumulates: bool) -> None:
        blocks: dict[int, Block] = {}
        gradients: dict[int, Block] = {}
        allocate, release = self.allocator.allocate, self.allocator.release
        backward = False
        for name, events in moments:
            if first and name == "forward[0]":
                self.take(self.plan.workspaces[:1])
            if first and not backward and name.startswith("backward"):
                self.take(self.plan.workspaces[1:])
                backward = True
            self._set_levels(name)
            for event in events:
                if not event.num_bytes and event.storage in blocks:
                    release(blocks.pop(event.storage))
                elif not event.num_bytes:
                    self._drop_gradient(gradients.pop(event.storage, None))
                elif not event.gradient:
                    blocks[event.storage] = allocate(event.num_bytes, event.stream)
                elif self.plan.gradients_traced:
                    block = allocate(event.num_bytes, event.stream)
                    # A later micro-step's gradient is added to the first one's at once.
                    if accumulates:
                        release(block)
                    else:
                        gradients[event.storage] = block
                        self._gradients.append(block)
        # A trace without an engine that reduces has no such moment.
        self._set_levels("backward[reduce]")
        # A fused loss makes a gradient in the forward, where it is not known to be one.
        if self.plan.gradients_traced and not accumulates:
            self._gradients += blocks.values()
        else:
            self.give_back(blocks.values())

    def _drop_gradient(self, block: Block | None) -> None:
        """A gradient goes before the update: a tied head's, into its sum with the embedding's."""
        if block is not None:
            self._gradients = [each for each in self._gradients if each is not block]
            self.allocator.release(block)

    def _set_levels(self, moment: str) -> None:
        """Each of the engine's terms has its bytes of a moment. What goes, goes first, the newest block of a term
        before the others; then comes what is new, as one block for each term."""
        missing: list[tuple[list[Block], int]] = []
        for number, by_moment in enumerate(self.plan.levels):
            blocks = self._levels.setdefault(number, [])
            change = by_moment.get(moment, 0) - sum(block.size for block in blocks)
            while change < 0 and blocks:
                block = blocks.pop()
                change += block.size
                self.allocator.release(block)
            missing.append((blocks, change))
        for blocks, change in missing:
            if change > 0:
                blocks.append(self.allocator.allocate(change))
