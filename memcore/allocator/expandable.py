"""The caching allocator with ``expandable_segments:True``: one segment for each stream and kind of pool, which grows.

Source: torch 2.13, c10/cuda/CUDACachingAllocator.cpp, struct ExpandableSegment and, of DeviceCachingAllocator,
get_free_block, try_allocate_expandable_block, find_expandable_block, map_block, unmap_block, should_split and
release_cached_blocks. A segment has more addresses than the device has memory; memory is mapped behind them in
granules of 2 MiB (small sizes) or 20 MiB (large ones), and unmapped where the device is full.
"""

from bisect import bisect_left

from memcore.allocator.caching import (
    LARGE_SEGMENT_BYTES,
    MIN_BLOCK_BYTES,
    SMALL_SEGMENT_BYTES,
    Block,
    CachingAllocator,
    Pool,
)
from memcore.units import round_up

# More than any run maps: one segment is enough for a pool. Whole granules, as a segment's first address is.
_ENDLESS = LARGE_SEGMENT_BYTES << 25


class ExpandableAllocator(CachingAllocator):
    """The same device with segments that grow."""

    def __init__(self, capacity: int | None = None) -> None:
        super().__init__(capacity)
        # For each pool the blocks without memory behind them, by address; the last is what the segment can grow to.
        self._unmapped: dict[int, list[Block]] = {}

    def _cached(self, pool: Pool, size: int) -> Block | None:
        """The best fit, where a block before addresses without memory counts with all that it can grow to."""
        place = bisect_left(pool.free, (size,))
        if place == len(pool.free):
            return None
        while place + 1 < len(pool.free) and _room(pool.free[place + 1][2]) < _room(pool.free[place][2]):
            place += 1
        block = pool.free.pop(place)[2]
        block.free = False
        return block

    def _splits(self, pool: Pool, left: int) -> bool:
        return left >= MIN_BLOCK_BYTES

    def _new(self, pool: Pool, size: int) -> Block:
        """Map memory at the lowest addresses where the size fits (try_allocate_expandable_block)."""
        self._make_room(lambda: self._to_map(pool, size))
        block = self._lowest(pool, size)
        if not block.mapped:
            block = self._map(block, min(block.size, size))
        while block.size < size:
            assert block.after is not None, "there are addresses to grow into"
            block = self._map(block.after, min(size - block.size, block.after.size))
        if block.free:
            pool.take(block)
        return block

    def _to_map(self, pool: Pool, size: int) -> int:
        """The memory that is to be mapped for the size, in bytes."""
        block: Block | None = self._lowest(pool, size)
        left, num_bytes = size, 0
        while block is not None and left > 0:
            if not block.mapped:
                num_bytes += round_up(min(block.size, left), _granule(pool))
            left -= block.size
            block = block.after
        return num_bytes

    def _lowest(self, pool: Pool, size: int) -> Block:
        """The first free block of a run of free ones, mapped or not, in which the size fits (find_expandable_block)."""
        for hole in self._holes(pool):
            first = hole.before if hole.before is not None and _available(hole.before) else hole
            room, block = 0, first
            while block is not None and _available(block) and room < size:
                room += block.size
                block = block.after  # type: ignore[assignment]
            if room >= size:
                return first
        raise AssertionError("a segment does not end")

    def _holes(self, pool: Pool) -> list[Block]:
        if id(pool) not in self._unmapped:
            segment = Block(pool, next(self._segments) * (2 * _ENDLESS), _ENDLESS)
            segment.mapped = False
            self._unmapped[id(pool)] = [segment]
        return self._unmapped[id(pool)]

    def _map(self, hole: Block, size: int) -> Block:
        """Map memory behind the first addresses of a block without any, whole granules; it joins its neighbours and is
        free (map_block)."""
        pool = hole.pool
        wanted = round_up(size, _granule(pool))
        self._reserve(wanted)
        holes = self._unmapped[id(pool)]
        place = holes.index(hole)
        if wanted < hole.size:
            rest = Block(pool, hole.address + wanted, hole.size - wanted)
            rest.mapped = False
            _link(hole, rest, hole.after)
            hole.size = wanted
            holes[place] = rest
        else:
            del holes[place]
        hole.mapped = True
        self._join(hole)
        pool.put(hole)
        return hole

    def _give_back(self) -> None:
        """Whole granules inside free blocks are unmapped (release_cached_blocks, unmap_block)."""
        for pool in self._pools.values():
            granule = _granule(pool)
            for _size, _address, block in list(pool.free):
                start = round_up(block.address, granule)
                end = (block.address + block.size) // granule * granule
                if start < end:
                    self._unmap(block, start, end)

    def _unmap(self, block: Block, start: int, end: int) -> None:
        pool = block.pool
        pool.take(block)
        self.reserved -= end - start
        if block.address < start:
            head = Block(pool, block.address, start - block.address)
            _link(block.before, head, block)
            pool.put(head)
        if end < block.address + block.size:
            tail = Block(pool, end, block.address + block.size - end)
            _link(block, tail, block.after)
            pool.put(tail)
        block.address, block.size, block.mapped = start, end - start, False
        holes = self._unmapped[id(pool)]
        for other in (block.before, block.after):
            if other is None or other.mapped:
                continue
            holes.remove(other)
            block.size += other.size
            block.address = min(block.address, other.address)
            _link(other.before, block, block.after) if other is block.before else _link(
                block.before, block, other.after
            )
        holes.append(block)
        holes.sort(key=lambda each: each.address)


def _granule(pool: Pool) -> int:
    return SMALL_SEGMENT_BYTES if pool.small else LARGE_SEGMENT_BYTES


def _available(block: Block) -> bool:
    return block.free or not block.mapped


def _room(block: Block) -> int:
    """A free block's size with that of the addresses after it that have no memory."""
    after = block.after
    return block.size + (after.size if after is not None and not after.mapped else 0)


def _link(before: Block | None, block: Block, after: Block | None) -> None:
    """A block's place between two others."""
    block.before, block.after = before, after
    if before is not None:
        before.after = block
    if after is not None:
        after.before = block
