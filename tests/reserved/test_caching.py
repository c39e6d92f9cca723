"""The allocator's rules, each by an example worked from torch's own source and tests.

Run: pytest tests/reserved/test_caching.py

Sources: torch 2.13, c10/cuda/CUDACachingAllocator.cpp (the comment at its head, Note [Expandable Segments]),
c10/core/AllocatorConfig.h, test/test_cuda.py.
"""

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memcore.allocator.caching import Block, CachingAllocator, rounded, segment_bytes
from memcore.allocator.expandable import ExpandableAllocator
from memcore.units import MIB

KINDS = (CachingAllocator, ExpandableAllocator)
SIZES = (100, 512, 5000, MIB, MIB + 1, 3 * MIB, 12 * MIB, 55 * MIB + 7)


@pytest.mark.parametrize(
    ("asked", "size", "segment"),
    [
        # "all sizes are rounded to at least 512 bytes"; "small allocations are packed in 2 MiB blocks"
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        # "allocations between 1 and 10 MiB may use kLargeBuffer", 20 MiB
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        # "round up large allocations to 2 MiB"
        (10 * MIB, 10 * MIB, 10 * MIB),
        (21 * MIB, 21 * MIB, 22 * MIB),
    ],
)
def test_sizes_and_segments(asked: int, size: int, segment: int):
    assert rounded(asked) == size
    assert segment_bytes(size) == segment
    allocator = CachingAllocator()
    allocator.allocate(asked)
    assert allocator.reserved == segment


def test_small_requests_share_a_segment():
    """2 MiB hold 4096 blocks of 512 bytes, and no more."""
    allocator = CachingAllocator()
    for _each in range(4096):
        allocator.allocate(4)
    assert (allocator.allocated, allocator.reserved) == (2 * MIB, 2 * MIB)
    allocator.allocate(4)
    assert allocator.reserved == 4 * MIB


def test_a_cublas_workspace_leaves_room_for_its_like_in_its_segment():
    """8,519,680 bytes twice in 20 MiB: 3,932,160 are left, which 1 MiB and 512 bytes more fit into."""
    allocator = CachingAllocator()
    for size in (8_519_680, 8_519_680, 3_932_160):
        allocator.allocate(size)
    assert allocator.reserved == 20 * MIB
    allocator.allocate(MIB + 512)
    assert allocator.reserved == 40 * MIB


def test_a_large_block_is_not_split_for_the_last_mib():
    """should_split: what is left must be more than 1 MiB; else it counts as allocated, as memory_allocated says."""
    allocator = CachingAllocator()
    allocator.release(allocator.allocate(100 * MIB))
    allocator.allocate(99 * MIB)
    assert (allocator.allocated, allocator.reserved) == (100 * MIB, 100 * MIB)
    other = CachingAllocator()
    other.release(other.allocate(100 * MIB))
    other.allocate(98 * MIB)
    assert (other.allocated, other.reserved) == (98 * MIB, 100 * MIB)
    other.allocate(2 * MIB)
    assert (other.allocated, other.reserved) == (100 * MIB, 100 * MIB)


def test_expandable_segments_split_to_the_block():
    allocator = ExpandableAllocator()
    allocator.release(allocator.allocate(100 * MIB))
    allocator.allocate(99 * MIB)
    assert (allocator.allocated, allocator.reserved) == (99 * MIB, 100 * MIB)


def test_the_smallest_block_that_fits_is_taken():
    """20, 40 and 30 MiB are free: 25 MiB go into the 30, so that 40 still fit without a new segment."""
    allocator = CachingAllocator()
    blocks = [allocator.allocate(size * MIB) for size in (20, 40, 30)]
    for block in blocks:
        allocator.release(block)
    allocator.allocate(25 * MIB)
    allocator.allocate(40 * MIB)
    allocator.allocate(20 * MIB)
    assert allocator.reserved == 90 * MIB


def test_free_neighbours_join():
    allocator = CachingAllocator()
    allocator.release(allocator.allocate(90 * MIB))
    parts = [allocator.allocate(30 * MIB) for _each in range(3)]
    allocator.release(parts[0])
    allocator.release(parts[2])
    allocator.allocate(60 * MIB)
    assert allocator.reserved == 150 * MIB, "30 and 30 MiB with something between are not 60"
    allocator.release(parts[1])
    allocator.allocate(90 * MIB)
    assert allocator.reserved == 150 * MIB


def test_a_block_is_for_its_stream_alone():
    """ "Once freed, blocks can be re-allocated on the same stream, but not on any other stream." """
    for kind in KINDS:
        allocator = kind()
        allocator.release(allocator.allocate(20 * MIB, stream=0))
        allocator.allocate(20 * MIB, stream=1)
        assert allocator.reserved == 40 * MIB


def test_batch_n_plus_1_leaves_slivers_but_not_in_segments_that_grow():
    """The example of Note [Expandable Segments]: tensors of N x A and N x A x B, then of N + 1.

    100 layers of 20 and of 40 MiB, then each 1/10 larger: 22 MiB fit into the free 40, whose rest is lost to 44, so
    that new segments come on top. One segment that grows tiles them: it has the larger step's bytes, and no more.
    """
    plain, growing = CachingAllocator(), ExpandableAllocator()
    for allocator in (plain, growing):
        for sizes in ((20, 40), (22, 44)):
            alive: list[Block] = [allocator.allocate(size * MIB) for _layer in range(100) for size in sizes]
            for block in alive:
                allocator.release(block)
    assert growing.reserved == 100 * (22 + 44) * MIB
    assert plain.reserved == 100 * (20 + 40 + 44) * MIB


def test_granules_of_20_mib():
    """ "we use 2MiB pages for our small pool and 20MiB pages for our large pool" """
    allocator = ExpandableAllocator()
    allocator.allocate(21 * MIB)
    assert allocator.reserved == 40 * MIB
    allocator.allocate(30 * MIB)
    assert allocator.reserved == 60 * MIB, "19 MiB are left of 40: 30 need 11 more"
    allocator.allocate(100)
    assert allocator.reserved == 62 * MIB


@pytest.mark.parametrize("kind", KINDS)
def test_a_full_device_gets_back_what_is_kept(kind: type[CachingAllocator]):
    """As torch's test_max_split_expandable: within 120 MiB, 40 three times, freed, then 120 at once."""
    allocator = kind(capacity=120 * MIB)
    for block in [allocator.allocate(40 * MIB) for _each in range(3)]:
        allocator.release(block)
    allocator.allocate(120 * MIB)
    assert not allocator.overfull
    assert allocator.reserved == 120 * MIB
    allocator.allocate(40 * MIB)
    assert allocator.overfull


def test_a_split_segment_is_not_given_back_but_pages_are():
    """ "attempt to free all cached blocks that are not split"; "unmap all the memory in our segment corresponding to
    empty physical pages": of 40 MiB in use at the end of 100, only segments that grow give back the rest."""
    left: dict[type[CachingAllocator], int] = {}
    for kind in KINDS:
        allocator = kind(capacity=160 * MIB)
        allocator.release(allocator.allocate(100 * MIB))
        first, _second = allocator.allocate(60 * MIB), allocator.allocate(40 * MIB)
        allocator.release(first)
        allocator.allocate(100 * MIB)
        left[kind] = allocator.reserved
        assert allocator.overfull is (kind is CachingAllocator)
    assert left == {CachingAllocator: 200 * MIB, ExpandableAllocator: 140 * MIB}


def test_what_is_given_back_was_perhaps_what_the_request_was_to_grow_from():
    """30 MiB free at a segment's start, in 40 MiB of memory, and 45 MiB asked on a full device: the 40 MiB go first,
    and then 60 are mapped anew, where before only 20 were missing. In use beside: 32 MiB in 40 of another stream."""
    allocator = ExpandableAllocator(capacity=100 * MIB)
    first = allocator.allocate(30 * MIB)
    beside = [allocator.allocate(size * MIB, stream=1) for size in (20, 12)]
    assert allocator.reserved == 80 * MIB
    allocator.release(first)
    third = allocator.allocate(15 * MIB, stream=2)
    assert (allocator.reserved, allocator.overfull) == (100 * MIB, False)
    allocator.release(third)
    last = allocator.allocate(45 * MIB)
    assert (allocator.reserved, allocator.overfull) == (100 * MIB, False)
    assert (last.address, last.size) == (first.address, 45 * MIB)
    assert allocator.allocated == last.size + sum(block.size for block in beside)


@given(
    steps=st.lists(st.tuples(st.sampled_from(SIZES), st.booleans(), st.integers(0, 1)), max_size=80),
    capacity=st.sampled_from((None, 100 * MIB)),
)
def test_nothing_is_lost(steps: list[tuple[int, bool, int]], capacity: int | None):
    """Whatever is taken and given back: blocks in use never overlap, and all that is reserved can be given back."""
    for kind in KINDS:
        allocator, alive = kind(capacity), []
        for size, frees, stream in steps:
            if frees and alive:
                allocator.release(alive.pop(size % len(alive)))
            else:
                alive.append(allocator.allocate(size, stream))
            spans = sorted((block.address, block.address + block.size) for block in alive)
            assert all(end <= start for (_start, end), (start, _end) in pairwise(spans))
            assert allocator.allocated == sum(block.size for block in alive) <= allocator.reserved
        for block in alive:
            allocator.release(block)
        assert allocator.allocated == 0
        pools = allocator._pools.values()
        assert sum(size for pool in pools for size, _address, _block in pool.free) == allocator.reserved
        if kind is CachingAllocator:
            joined = Counter(block.before is block.after is None for pool in pools for *_at, block in pool.free)
            assert not joined[False], "segments without a block in use are whole again"
