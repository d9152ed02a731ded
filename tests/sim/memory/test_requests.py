"""Nests of requests that are not carried out: the allocator must be none the wiser."""

from __future__ import annotations

import os
from collections.abc import Sequence
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from protwin.shared.compile.compile import compile_schedule
from protwin.sim.kernels import library
from protwin.sim.memory.allocator import AllocatorFullError, CachingAllocator
from protwin.sim.memory.request_replay import Replayed, RequestLog, Requests, replay, reserved_by
from protwin.sim.memory.requests import Nest, latest_first, nests
from protwin.sim.memory.requests_of_schedule import AllocationProgram, allocation_program
from protwin.sim.memory.static_tensors import StaticTensors, static_tensors
from protwin.sim.memory.within_task import Inside
from tests.proof_size import examples
from tests.strategies.plans import PlannedWorkload, planned_workloads

MIB = 2**20


class Given(RequestLog):
    """Requests that no program stands behind: the same in every iteration."""

    def __init__(self, set_up: Sequence[int], requests: Sequence[int]) -> None:
        super().__init__(AllocationProgram((), (), (), ()), StaticTensors((), ()))
        self.set_up = list(set_up)
        self._iterations = [Requests(list(requests), list(range(1, len(requests) + 1)))]
        self._repeats = True


@st.composite
def requests(draw: DrawFn) -> tuple[list[int], list[int]]:
    """What is made for good, and an iteration that frees all it makes: by turns the latest, and any."""
    sizes = st.one_of(st.integers(1, 3 * MIB), st.integers(1, 60).map(lambda n: n * MIB), st.integers(1, 40 * MIB))
    made: list[int] = []
    num_made = 0
    found: list[int] = []
    for _ in range(draw(st.integers(1, 40))):
        if made and draw(st.booleans()):  # type: ignore[arg-type]
            place = -1 if draw(st.integers(0, 3)) else draw(st.integers(0, len(made) - 1))
            found.append(made.pop(place) - num_made)
        else:
            found.append(draw(sizes))
            made.append(num_made)
            num_made += 1
    found += [number - num_made for number in draw(st.permutations(made))]
    return draw(st.lists(sizes, max_size=4)), found


def played(log: RequestLog, is_expandable: bool, limit_bytes: int | None, *, is_whole: bool):  # type: ignore[no-untyped-def]
    """What a replay came to and all that it left; ``is_whole``: with every request carried out."""
    allocator = CachingAllocator(expandable_segments=is_expandable, limit_bytes=limit_bytes)
    try:
        found = replay(log, allocator, on_change=(lambda iteration: None) if is_whole else None)
    except AllocatorFullError:
        return None
    return found, allocator.segments, allocator.reserved_bytes, allocator.allocated_bytes, allocator.requested_bytes


@settings(max_examples=examples(300, 24))
@given(requests(), st.booleans(), st.floats(0.5, 1.2))
def test_nests_leave_everything_as_it_was(
    drawn: tuple[list[int], list[int]], is_expandable: bool, share: float
) -> None:
    ample = played(Given(*drawn), is_expandable, None, is_whole=True)
    assert ample is not None
    assert played(Given(*drawn), is_expandable, None, is_whole=False) == ample
    limit_bytes = int(share * ample[0].peak_reserved_bytes)
    whole, quick = (played(Given(*drawn), is_expandable, limit_bytes, is_whole=is_whole) for is_whole in (True, False))
    assert whole == quick


@settings(max_examples=examples(40, 6))
@given(planned_workloads(), st.sampled_from(Inside), st.booleans())
def test_programs_are_replayed_to_the_same(drawn: PlannedWorkload, inside: Inside, is_expandable: bool) -> None:
    schedule = compile_schedule(drawn.plan, drawn.workload, drawn.layout)
    static = static_tensors(schedule, drawn.workload.parameters, drawn.layout)
    one, other = (RequestLog(allocation_program(schedule), static, inside=inside) for _ in range(2))
    assert played(one, is_expandable, None, is_whole=True) == played(other, is_expandable, None, is_whole=False)


def reserved(log: RequestLog, limit_bytes: int | None, is_expandable: bool, *, is_compiled: bool) -> Replayed | str:
    """What a replay came to, or why it did not."""
    with mock.patch.dict(os.environ, {} if is_compiled else {library.SWITCH: "0"}):
        assert library.is_available() is is_compiled
        try:
            return reserved_by(log, expandable_segments=is_expandable, limit_bytes=limit_bytes)
        except AllocatorFullError as error:
            return str(error)


@pytest.mark.skipif(not library.is_available(), reason=f"the allocator runs in {library.description()}")
@settings(max_examples=examples(1000, 48))
@given(requests(), st.booleans(), st.floats(0.5, 1.2))
def test_the_compiled_allocator_does_the_same(
    drawn: tuple[list[int], list[int]], is_expandable: bool, share: float
) -> None:
    ample, in_python = (
        reserved(Given(*drawn), None, is_expandable, is_compiled=is_compiled) for is_compiled in (True, False)
    )
    assert isinstance(ample, Replayed)
    assert ample == in_python
    limit_bytes = int(share * ample.peak_reserved_bytes)
    limited, in_python = (
        reserved(Given(*drawn), limit_bytes, is_expandable, is_compiled=is_compiled) for is_compiled in (True, False)
    )
    assert limited == in_python


def test_nests_by_hand() -> None:
    # Two nests in a row within a third, beside a tensor that stays: 30, 30 and 4 MiB, then 2 and 1.5 KiB.
    inner = [30 * MIB, 30 * MIB, -1, -2, 4 * MIB, -1]
    numbers = [5 * MIB, 8 * MIB, *inner, -4, 2048, 1536, -1, -2]
    assert latest_first([1, 1, -2, -1]) == [1, 1, -1, -2]
    found = nests(latest_first(numbers))
    assert sorted(found) == [1, 2, 3, 6, 9, 10]
    whole, eight = found[1]
    assert (whole.stop, whole.num_made, whole.large_bytes, whole.small_bytes) == (13, 6, 68 * MIB, 3584)
    assert (eight.stop, eight.num_made, eight.large_bytes, eight.small_bytes) == (9, 4, 68 * MIB, 0)
    assert [nest.large_bytes // MIB for nest in found[2]] == [60, 60]
    assert [nest.stop for nest in found[2]] == [8, 6]
    # Freed within by another order, or one that was made before, it is none.
    assert nests([8, 9, -2, 7, -2, -1]) == {}
    assert nests([8, -3, -1]) == {}


TWO_SEGMENTS = ([30 * MIB, 30 * MIB, -1, -2], [40 * MIB, -1, 25 * MIB, -1])
"""30 and 30 MiB are cached, and 40 are asked for."""
ROOM_BESIDE = ([2 * MIB], [10 * MIB, -1])
"""2 MiB have opened a segment of 20, most of which was never in use."""


def any_cache(self: CachingAllocator, large_bytes: int, small_bytes: int) -> bool:
    return True


def all_caches(self: CachingAllocator, large_bytes: int, small_bytes: int) -> bool:
    return all(sum(size for size, *_ in pool.free) >= large_bytes for pool in self._pools.values())


def without_peaks(numbers: Sequence[int]) -> dict[int, tuple[Nest, ...]]:
    found = nests(numbers)
    return {place: tuple(nest._replace(highest_bytes=0) for nest in row) for place, row in found.items()}


@pytest.mark.parametrize(
    ("drawn", "replaced", "wrong"),
    [
        (TWO_SEGMENTS, "memory.allocator.CachingAllocator.has_cached", any_cache),
        (TWO_SEGMENTS, "memory.allocator.CachingAllocator.has_cached", all_caches),
        (ROOM_BESIDE, "memory.request_replay.nests", without_peaks),
    ],
)
def test_what_nests_must_look_at(  # type: ignore[no-untyped-def]
    drawn: tuple[list[int], list[int]], replaced: str, wrong, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong variants: any cache will do; the free bytes of all blocks together; no look at the peak."""
    right = played(Given(*drawn), False, None, is_whole=True)
    assert played(Given(*drawn), False, None, is_whole=False) == right
    monkeypatch.setattr(f"protwin.sim.{replaced}", wrong)
    assert played(Given(*drawn), False, None, is_whole=False) != right
