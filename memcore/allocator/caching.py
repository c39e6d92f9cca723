"""PyTorch's caching allocator on a CUDA device, as far as bytes go: which blocks it cuts, joins, keeps and gives back.

Source: torch 2.13, c10/cuda/CUDACachingAllocator.cpp, class DeviceCachingAllocator, with its constants in
c10/core/AllocatorConfig.h; functions are named at the methods. Settings are its defaults but for expandable segments
(:mod:`memcore.allocator.expandable`): no max_split_size_mb, no roundup_power2_divisions, no garbage collection.
Addresses only order blocks of one size; each segment lies above those before it.
"""

from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from memcore.units import MIB, round_up

# kMinBlockSize: sizes are rounded up to multiples of it.
MIN_BLOCK_BYTES = 512
# kSmallSize: the largest size that is cut out of small segments.
SMALL_BYTES = MIB
# kSmallBuffer: a small segment.
SMALL_SEGMENT_BYTES = 2 * MIB
# kMinLargeAlloc: sizes below it take a segment of large_segment_size, by default 20 MiB.
MIN_LARGE_BYTES = 10 * MIB
LARGE_SEGMENT_BYTES = 20 * MIB
# kRoundLarge: segments for all other sizes are multiples of it.
ROUND_LARGE_BYTES = 2 * MIB
# A segment's addresses: above all that any device has.
_ADDRESSES = 1 << 50


class Block:
    """A part of a segment, between `before` and `after`. `mapped`: whether memory stands behind its addresses, as it
    always does but in an expandable segment."""

    __slots__ = ("address", "after", "before", "free", "mapped", "pool", "size")

    def __init__(self, pool: "Pool", address: int, size: int) -> None:
        self.pool = pool
        self.address = address
        self.size = size
        self.before: Block | None = None
        self.after: Block | None = None
        self.free = False
        self.mapped = True


@dataclass(slots=True)
class Pool:
    """The free blocks of one stream, of segments for small sizes or for large ones, by size and then by address."""

    small: bool
    free: list[tuple[int, int, Block]] = field(default_factory=list)

    def put(self, block: Block) -> None:
        """A block is free."""
        block.free = True
        insort(self.free, (block.size, block.address, block))

    def take(self, block: Block) -> None:
        """A block is no longer among the free ones."""
        block.free = False
        del self.free[bisect_left(self.free, (block.size, block.address))]


def rounded(num_bytes: int) -> int:
    """What a request takes (round_size)."""
    return round_up(max(num_bytes, 1), MIN_BLOCK_BYTES)


def segment_bytes(size: int) -> int:
    """The segment that is taken from the device for a rounded size (get_allocation_size)."""
    if size <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    return LARGE_SEGMENT_BYTES if size < MIN_LARGE_BYTES else round_up(size, ROUND_LARGE_BYTES)


class CachingAllocator:
    """One device's allocator. `capacity`: bytes that it can take from the device, after which it gives back what it
    keeps; where even that is not enough, the request is met all the same and `overfull` set.

    `allocated` and `reserved` are what ``torch.cuda.memory_allocated`` and ``memory_reserved`` say, in bytes, with
    their peaks.
    """

    def __init__(self, capacity: int | None = None) -> None:
        self._capacity = capacity
        self._pools: dict[tuple[int, bool], Pool] = {}
        self._segments = count(1)
        self.allocated = self.reserved = 0
        self.allocated_peak = self.reserved_peak = 0
        self.overfull = False

    def allocate(self, num_bytes: int, stream: int = 0) -> Block:
        """Take a block for a request on a stream (malloc): the smallest free one that is large enough (get_free_block,
        a best fit), else a new segment's; what is left of it is free (alloc_found_block)."""
        size = rounded(num_bytes)
        key = (stream, size <= SMALL_BYTES)
        pool = self._pools.get(key)
        if pool is None:
            pool = self._pools[key] = Pool(small=key[1])
        block = self._cached(pool, size)
        if block is None:
            block = self._new(pool, size)
        if self._splits(pool, block.size - size):
            self._split(block, size)
        self.allocated += block.size
        self.allocated_peak = max(self.allocated_peak, self.allocated)
        return block

    def release(self, block: Block) -> None:
        """Give a block back (free_block): it joins free neighbours, and is kept."""
        self.allocated -= block.size
        self._join(block)
        block.pool.put(block)

    def reset_peaks(self) -> None:
        """From here on peaks are of what comes (``torch.cuda.reset_peak_memory_stats``)."""
        self.allocated_peak, self.reserved_peak = self.allocated, self.reserved

    def _cached(self, pool: Pool, size: int) -> Block | None:
        place = bisect_left(pool.free, (size,))
        if place == len(pool.free):
            return None
        block = pool.free.pop(place)[2]
        block.free = False
        return block

    def _splits(self, pool: Pool, left: int) -> bool:
        """Whether what is left is cut off (should_split)."""
        return left >= MIN_BLOCK_BYTES if pool.small else left > SMALL_BYTES

    def _split(self, block: Block, size: int) -> None:
        """The block is cut to its size; the rest, above it, is free."""
        rest = Block(block.pool, block.address + size, block.size - size)
        block.size = size
        rest.before, rest.after = block, block.after
        if rest.after is not None:
            rest.after.before = rest
        block.after = rest
        rest.pool.put(rest)

    def _join(self, block: Block) -> None:
        """The block swallows its free neighbours (try_merge_blocks)."""
        for other in (block.before, block.after):
            if other is None or not other.free or other.mapped is not block.mapped:
                continue
            other.pool.take(other)
            block.size += other.size
            if other is block.before:
                block.address, block.before = other.address, other.before
                if block.before is not None:
                    block.before.after = block
            else:
                block.after = other.after
                if block.after is not None:
                    block.after.before = block

    def _new(self, pool: Pool, size: int) -> Block:
        """A block of a new segment (alloc_block); where the device is full, after giving back what is kept."""
        wanted = segment_bytes(size)
        self._make_room(lambda: wanted)
        self._reserve(wanted)
        return Block(pool, next(self._segments) * _ADDRESSES, wanted)

    def _make_room(self, wanted: Callable[[], int]) -> None:
        """Give back what is kept where the device has less left than a request takes of it: `wanted` bytes, asked again
        afterwards, since what goes may have been part of what the request could use."""
        if self._has_left(wanted()):
            return
        self._give_back()
        self.overfull = self.overfull or not self._has_left(wanted())

    def _has_left(self, num_bytes: int) -> bool:
        return self._capacity is None or self.reserved + num_bytes <= self._capacity

    def _reserve(self, num_bytes: int) -> None:
        self.reserved += num_bytes
        self.reserved_peak = max(self.reserved_peak, self.reserved)

    def _give_back(self) -> None:
        """Every segment that is free as a whole goes back to the device (release_cached_blocks)."""
        for pool in self._pools.values():
            kept = [entry for entry in pool.free if entry[2].before is not None or entry[2].after is not None]
            self.reserved -= sum(entry[0] for entry in pool.free) - sum(entry[0] for entry in kept)
            pool.free[:] = kept
