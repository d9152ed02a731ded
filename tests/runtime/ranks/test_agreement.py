"""What one rank refuses, all do, with one message; facts that differ are named with who has what."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from protwin.runtime import CpuOutOfMemoryError, NonFiniteGradientError
from protwin.runtime.ranks.agreement import agree, agreed
from protwin.runtime.ranks.world import World, join_world
from protwin.shared import FileError, PlanError, RanksError
from tests.runtime.ranks.processes import Ranks, without_a_word

ERRORS = {
    "plan": PlanError("the plan is too large."),
    "file": FileError("no such file."),
    "memory": CpuOutOfMemoryError("no room."),
    "gradient": NonFiniteGradientError("a gradient is NaN."),
    "bug": ZeroDivisionError("division by zero"),
    "interruption": KeyboardInterrupt(),
}


@contextmanager
def world_of(num_ranks: int) -> Iterator[World]:
    world = join_world(num_ranks, timeout_s=20)
    assert world is not None
    try:
        yield world
    finally:
        world.leave()


def agree_on_work(rank: int, wrong: tuple[str | None, ...]) -> tuple[str, str, list[str]]:
    """Which error came out, its message, and what was undone; then the ranks go on together."""
    undone: list[str] = []

    def work() -> str:
        if (name := wrong[rank]) is not None:
            raise ERRORS[name]
        return f"done by {rank}"

    with world_of(3) as world:
        try:
            came = ("", agreed(world, work, undo=undone.append))
        except BaseException as error:
            came = (type(error).__name__, str(error))
        assert agreed(world, lambda: rank) == rank
        return *came, undone


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ((None, "plan", None), ("PlanError", "rank 1: the plan is too large.")),
        ((None, None, "file"), ("FileError", "rank 2: no such file.")),
        (("memory", "memory", None), ("CpuOutOfMemoryError", "ranks 0, 1: no room.")),
        (("plan", "plan", "plan"), ("PlanError", "the plan is too large.")),
        ((None, "file", "plan"), ("FileError", "rank 1: no such file. And rank 2: the plan is too large.")),
        ((None, None, "gradient"), ("NonFiniteGradientError", "rank 2: a gradient is NaN.")),
    ],
)
def test_what_one_rank_refuses_all_refuse_alike(
    three_ranks: Ranks, wrong: tuple[str | None, ...], expected: tuple[str, str]
) -> None:
    for rank, (kind, message, undone) in enumerate(three_ranks.run(agree_on_work, wrong)):
        assert (kind, message) == expected
        assert undone == ([] if wrong[rank] else [f"done by {rank}"])


@pytest.mark.parametrize("name", ["bug", "interruption"])
def test_what_is_no_users_mistake_stays_itself_where_it_happened(three_ranks: Ranks, name: str) -> None:
    first, own, last = three_ranks.run(agree_on_work, (None, name, None))
    kind = type(ERRORS[name]).__name__
    assert own == (kind, str(ERRORS[name]), [])
    assert first == ("RanksError", f"rank 1: {kind}: {ERRORS[name]}", ["done by 0"])
    assert last[:2] == first[:2]


def test_what_succeeds_everywhere_is_given_and_kept(three_ranks: Ranks) -> None:
    found = three_ranks.run(agree_on_work, (None, None, None))
    assert found == [("", f"done by {rank}", []) for rank in range(3)]


def test_one_rank_alone_just_works() -> None:
    assert agreed(None, lambda: 7) == 7
    with pytest.raises(FileError, match=r"^no such file\.$"):
        agreed(None, lambda: (_ for _ in ()).throw(ERRORS["file"]))
    agree(None, {"a": "b"})


def compare(rank: int, facts: tuple[dict[str, str], ...]) -> None:
    with world_of(3) as world:
        agree(world, facts[rank])


def test_the_first_fact_that_differs_is_named_with_who_has_what(three_ranks: Ranks) -> None:
    same = {"the plan": "a", "the optimizer": "AdamW"}
    three_ranks.run(compare, (same, same, dict(reversed(same.items()))))
    for facts, told in (
        ((same, {**same, "the plan": "b"}, same), "the plan: a on ranks 0, 2; b on rank 1"),
        ((same, same, {"the plan": "a"}), "the optimizer: AdamW on ranks 0, 1; nothing on rank 2"),
        (({"the plan": "a"}, same, same), "the optimizer: nothing on rank 0; AdamW on ranks 1, 2"),
        (({**same, "x": "0"}, {**same, "x": "1"}, {**same, "x": "2"}), "x: 0 on rank 0; 1 on rank 1; 2 on rank 2"),
    ):
        assert (
            three_ranks.errors(compare, facts)
            == [f"PlanError: ranks differ in {told}. Let all ranks have the same."] * 3
        )


def end_early(rank: int) -> str:
    with world_of(3) as world:
        if rank == 1:
            return ""
        with without_a_word(), pytest.raises(RanksError) as caught:
            agreed(world, lambda: None)
    return str(caught.value)


def test_a_rank_that_has_left_ends_the_agreement_of_others_at_once(three_ranks: Ranks) -> None:
    first, _, last = three_ranks.run(end_early, patience_s=15)
    assert first.startswith("another rank has ended, or did not come within 20 s")
    assert last.startswith("another rank has ended, or did not come within 20 s")
