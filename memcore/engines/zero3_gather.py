"""ZeRO-3's gathered parameters, moment by moment: DeepSpeed's prefetch queue, run over the model's modules.

Follows deepspeed 0.19.8, runtime/zero/partitioned_param_coordinator.py (fetch_sub_module, release_sub_module,
__params_to_release) and parameter_offload.py (hooks on every module, mark_persistent_parameters), from the
second step on, when the order of the modules is known. Sizes are in elements.

Two rules of it surprise users: ``max_live_parameters`` only limits how far the prefetcher runs ahead, and
``max_reuse_distance`` alone keeps a parameter that is needed again soon. So the set is small only if the
reuse distance is small and either prefetching is off or max_live_parameters is small.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from memcore.engines.zero3_order import END, Visit, block_modules, step_layout
from memcore.inventory import Inventory

# Runs that are kept: a page asks for the same ones over and over, and a search for some hundred of one model.
_KEPT_RUNS = 2048


@dataclass(frozen=True, kw_only=True, slots=True)
class GatherSettings:
    """The settings of a ds_config that decide the gathered set, in elements."""

    prefetch_bucket: int
    max_live: int
    max_reuse: int
    persistence: int
    model_persistence: int = 2**63 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Gathered:
    """Elements gathered at the most: in each layer's forward and backward, by layer, and in between.

    `forward_flat` and `backward_flat`: what comes on top for a moment, while parameters that were fetched
    together are copied out of the one buffer they came in.
    `persistent`: elements that are never divided. `turn`: what is gathered when the backward has
    fetched what its first module needs.
    Over the whole step: `gathers` calls fetch `fetched` elements, `awaited` of them only when the module that needs
    them is entered, so that nothing is computed meanwhile.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    forward_flat: tuple[int, ...]
    backward_flat: tuple[int, ...]
    end: int
    end_flat: int
    turn: int
    persistent: int
    fetched: int
    awaited: int
    gathers: int


@dataclass(slots=True)
class _Coordinator:
    """The state of PartitionedParameterCoordinator that decides what is gathered."""

    sizes: Sequence[int]
    settings: GatherSettings
    persistent: frozenset[int]
    visits: Sequence[Visit]
    step: int = 0
    available: set[int] = field(default_factory=set)
    gathered: int = 0
    fetched_for: dict[int, int] = field(default_factory=dict)
    queue: deque[tuple[int, int]] = field(default_factory=deque)
    # Parameters that came in one buffer and were not waited for yet: by parameter, the elements of all of them.
    in_flight: dict[int, tuple[int, ...]] = field(default_factory=dict)
    flat: int = 0
    fetched: int = 0
    awaited: int = 0
    gathers: int = 0

    def start(self) -> None:
        """Fill the queue with every use of every parameter, in order (reset_step)."""
        self.queue = deque((param, step) for step, visit in enumerate(self.visits) for param in sorted(visit.params))

    def enter(self, visit: Visit) -> None:
        """fetch_sub_module: gather the module's own parameters, then run ahead."""
        self.flat = 0
        if visit.params:
            self._fetch_own(visit.params)
        self._prefetch()
        self.step += 1

    def _fetch_own(self, params: Sequence[int]) -> None:
        self.awaited += self._gather(params)
        self._wait(params)
        waiting = {param for param in params if self.fetched_for.get(param, -1) < self.step}
        popped: set[int] = set()
        while self.queue and len(popped) < len(waiting):
            param, step = self.queue.popleft()
            self.fetched_for[param] = step
            popped.add(param)

    def _prefetch(self) -> None:
        room = min(self.settings.max_live - self.gathered, self.settings.prefetch_bucket)
        ahead = 0
        chosen: list[int] = []
        while self.queue and ahead < room:
            param, step = self.queue.popleft()
            self.fetched_for[param] = max(self.fetched_for.get(param, -1), step)
            if self._is_divided(param) and param not in chosen:
                chosen.append(param)
                ahead += self.sizes[param]
        self._gather(chosen)

    def _is_divided(self, param: int) -> bool:
        return param not in self.available and param not in self.persistent

    def _gather(self, params: Sequence[int]) -> int:
        """all_gather_coalesced: what is fetched together comes in one buffer, unless it is a single parameter.
        Returns the elements that are fetched."""
        group = tuple(dict.fromkeys(param for param in params if self._is_divided(param)))
        if not group:
            return 0
        for param in group:
            self.available.add(param)
            if len(group) > 1:
                self.in_flight[param] = group
        elements = sum(self.sizes[param] for param in group)
        self.gathered += elements
        self.fetched += elements
        self.gathers += 1
        return elements

    def _wait(self, params: Sequence[int]) -> None:
        """AllGatherCoalescedHandle.wait: the buffer is alive beside the copies of all that came in it."""
        for param in params:
            if group := self.in_flight.get(param):
                self.flat = max(self.flat, sum(self.sizes[each] for each in group))
                for each in group:
                    del self.in_flight[each]

    def leave(self, visit: Visit) -> None:
        """release_sub_module: let go of what is not persistent, not fetched for later, and not needed soon."""
        for param, distance in zip(visit.params, visit.reuse_distance, strict=True):
            soon = distance is not None and distance < self.settings.max_reuse
            if not soon and param in self.available and self.fetched_for.get(param, -1) <= self.step:
                self.available.remove(param)
                self.gathered -= self.sizes[param]


@lru_cache(maxsize=_KEPT_RUNS)
def simulate(inventory: Inventory, settings: GatherSettings, recomputed: tuple[bool, ...]) -> Gathered:
    """Run one step. `recomputed[i]` says whether layer i's forward runs again in the backward."""
    if settings.max_live and not settings.prefetch_bucket:
        # Only the prefetcher reads it: one run for all of them.
        return simulate(inventory, replace(settings, max_live=0), recomputed)
    coordinator = _coordinator(inventory, settings, recomputed)
    layers = len(inventory.layers)
    peaks: dict[tuple[str, int], int] = {}
    with_flat: dict[tuple[str, int], int] = {}
    turn = 0
    for visit in coordinator.visits:
        coordinator.enter(visit)
        # Leaving only lets go, so that the most is gathered now.
        gathered = coordinator.gathered
        if visit.segment[0] == "backward" and not turn:
            turn = gathered
        peaks[visit.segment] = max(peaks.get(visit.segment, 0), gathered)
        with_flat[visit.segment] = max(with_flat.get(visit.segment, 0), gathered + coordinator.flat)
        coordinator.leave(visit)

    def by_layer(what: dict[tuple[str, int], int], phase: str) -> tuple[int, ...]:
        return tuple(what.get((phase, i), 0) for i in range(layers))

    def flat(phase: str) -> tuple[int, ...]:
        return tuple(a - b for a, b in zip(by_layer(with_flat, phase), by_layer(peaks, phase), strict=True))

    return Gathered(
        forward=by_layer(peaks, "forward"),
        backward=by_layer(peaks, "backward"),
        forward_flat=flat("forward"),
        backward_flat=flat("backward"),
        end=peaks.get(END, 0),
        end_flat=with_flat.get(END, 0) - peaks.get(END, 0),
        turn=turn,
        persistent=sum(coordinator.sizes[param] for param in coordinator.persistent),
        fetched=coordinator.fetched,
        awaited=coordinator.awaited,
        gathers=coordinator.gathers,
    )


def gathered_blocks(
    inventory: Inventory, settings: GatherSettings, recomputed: tuple[bool, ...]
) -> dict[tuple[str, int], tuple[int, ...]]:
    """Elements of each block that are gathered at some time: in each ("forward" or "backward", layer), at `END`, and
    at ("turn", 0) when the backward has fetched what its first module needs. What is never divided is left out."""
    coordinator = _coordinator(inventory, settings, recomputed)
    sets: dict[tuple[str, int], set[int]] = {}
    for visit in coordinator.visits:
        coordinator.enter(visit)
        if visit.segment[0] == "backward":
            sets.setdefault(("turn", 0), set(coordinator.available))
        sets.setdefault(visit.segment, set()).update(coordinator.available)
        coordinator.leave(visit)
    modules, sizes = block_modules(inventory)
    blocks = [[param for module in block for param in module.params] for block in modules]
    return {
        segment: tuple(sum(sizes[param] for param in block if param in held) for block in blocks)
        for segment, held in sets.items()
    }


def _coordinator(inventory: Inventory, settings: GatherSettings, recomputed: tuple[bool, ...]) -> _Coordinator:
    """A coordinator at the beginning of a step."""
    sizes, visits = step_layout(inventory, recomputed)
    persistent = frozenset(_persistent(sizes, settings))
    coordinator = _Coordinator(sizes=sizes, settings=settings, persistent=persistent, visits=visits)
    coordinator.start()
    return coordinator


def _persistent(sizes: Sequence[int], settings: GatherSettings) -> Iterator[int]:
    """Parameters at or under the threshold, as long as all of them together stay under the model's."""
    held = 0
    for index, size in enumerate(sizes):
        if size <= settings.persistence and held + size <= settings.model_persistence:
            held += size
            yield index
