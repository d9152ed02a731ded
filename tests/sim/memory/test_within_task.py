"""What one task asks of the allocator: beside a plain account of levels, and by hand."""

from __future__ import annotations

from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from protwin.sim.memory.requests import Made, Recorder
from protwin.sim.memory.within_task import Inside, TaskRequests, task_requests
from tests.proof_size import examples


class Drawn(NamedTuple):
    levels: tuple[tuple[int, bool], ...]
    frees: tuple[int, ...]
    leaves: tuple[tuple[int, range], ...]
    inside: Inside


@st.composite
def tasks(draw: st.DrawFn) -> Drawn:
    sizes = st.sampled_from((1, 2, 3, 5, 8, 13, 64))
    frees = tuple(draw(st.lists(sizes, max_size=6)))
    levels, level, least = [], 0, -sum(frees)
    for _ in range(draw(st.integers(0, 14))):
        level = level + draw(sizes) if draw(st.booleans()) else draw(st.integers(least, max(least, level - 1)))
        levels.append((level, draw(st.booleans())))
    places = sorted(draw(st.lists(st.integers(0, len(frees)), min_size=4, max_size=4)))
    kept = (range(*places[:2]), range(*places[2:]))
    leaves = tuple((draw(st.integers(0, 80)), of) for of in kept[: draw(st.integers(0, 2))])
    return Drawn(tuple(levels), frees, leaves, draw(st.sampled_from(Inside)))


def account(wanted: TaskRequests, frees: tuple[int, ...]) -> tuple[list[int], list[list[Made]], dict[int, int]]:
    """The levels behind every change, what is left, and what is there at the end, by number: played one by one."""
    recorder = Recorder()
    held = [recorder.malloc(size_bytes) for size_bytes in frees]
    recorder.malloc(7)  # something in between, of somebody else
    before = recorder.num_made
    recorder.take()
    left = recorder.play(wanted, held)
    there = {one.number: one.requested_bytes for one in held}
    levels, num_made = [], before
    for number, request in enumerate([*recorder.take(), None]):
        levels += [sum(there.values()) - sum(frees)] * wanted.changes.count(number)
        if request is None:
            break
        if request > 0:
            there[num_made] = request
            num_made += 1
        else:
            del there[num_made + request]
    assert num_made == recorder.num_made
    return levels, left, there


@settings(max_examples=examples(3000, 300))
@given(tasks())
def test_every_level_is_met_and_what_is_left_is_all_that_is_there(drawn: Drawn) -> None:
    wanted = task_requests(*drawn)
    levels, left, there = account(wanted, drawn.frees)
    assert levels[: 1 + len(drawn.levels)] == [0, *(level for level, _ in drawn.levels)]
    assert [sum(made.requested_bytes for made in of) for of in left] == [size_bytes for size_bytes, _ in drawn.leaves]
    numbers = [made.number for of in left for made in of]
    assert sorted(numbers) == sorted(there)
    assert {made.number: made.requested_bytes for of in left for made in of} == there
    for of, (_, kept) in zip(wanted.left, drawn.leaves, strict=True):
        assert {number for number in of if number < len(drawn.frees)} <= set(kept)


def left_by(levels: list[int], frees: tuple[int, ...], leaves: list[int], final: set[int] = frozenset()) -> list[int]:  # type: ignore[assignment]
    """The sizes of what stays of one buffer after another."""
    asked = tuple((level, number in final) for number, level in enumerate(levels))
    wanted = task_requests(asked, frees, tuple((size, range(0)) for size in leaves), Inside.BY_SIZE)
    return [wanted.sizes_bytes[number] for of in wanted.left for number in of]


def test_the_loss_keeps_its_result_in_one_piece() -> None:
    # Logits of 2, widened to 4, and a log-softmax of 4; then both go that it was made of.  The next tensor finds a hole
    # of 6: it has room there, and the one after it has not.
    assert left_by([2, 6, 10, 4], (), [4]) == [4]
    wanted = task_requests(((2, False), (6, False), (10, False), (4, False)), (), ((4, range(0)),), Inside.BY_SIZE)
    # By numbers the third stays, where the rule of the latest would have kept 2 and 2 of the second.
    assert wanted.left == ((2,),)
    assert sorted(wanted.requests[3:]) == [-3, -2]


def test_a_gradient_that_is_final_stays() -> None:
    # A gradient of 8 is made beside what was saved, of the same size; then 8 go.
    kept = task_requests(((8, True), (9, False), (1, False)), (8,), ((8, range(0)), (1, range(0))), Inside.BY_SIZE)
    assert kept.left == ((1,), (2,))
    gone = task_requests(((8, False), (9, False), (1, False)), (8,), ((8, range(0)), (1, range(0))), Inside.BY_SIZE)
    assert gone.left != kept.left


def test_what_was_made_last_goes_last() -> None:
    # 4 and 4 of it, then 4 go: not the one that the next operation reads.
    assert task_requests(((4, False), (8, False), (4, False)), (), ((4, range(0)),), Inside.BY_SIZE).left == ((1,),)


def test_a_buffer_that_is_handed_on_stays_where_it_is() -> None:
    # Of a gradient with parts of 50 and 3, the 3 go, and 3 others come.
    kept = task_requests(((3, False), (0, False)), (50, 3), ((53, range(2)),), Inside.BY_SIZE)
    assert kept.left == ((2, 0),)
    # The wrong variant makes the large part anew.
    anew = task_requests(((3, False), (0, False)), (50, 3), ((53, range(0)),), Inside.BY_SIZE)
    assert 50 in anew.requests
    assert 50 not in kept.requests
