"""A rank that waits in a collective without end is told by the store, and let out of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any, Final, cast
from unittest import mock

import pytest
import torch.distributed as dist

from protwin.runtime.ranks import failure_watch
from protwin.runtime.ranks.collectives import Collectives
from protwin.runtime.ranks.failure_watch import FailureWatch
from protwin.runtime.ranks.failures import tell_failure
from protwin.shared import RanksError

TOLD = "training was ended by rank 1: ValueError: on purpose"
MOST_S = 10.0
SOON_S = 0.3
"""How long a wrong variant waits for what does not come; who waits for what comes has ``MOST_S``."""
LOOKS = 3


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure_watch, "_PAUSE_S", 0.01)


class Gone:
    """A store that nobody serves any more."""

    def check(self, keys: list[str]) -> bool:
        raise RuntimeError("connection refused")


def world_with(abort: Callable[[], object]) -> Any:
    store = dist.HashStore()
    return SimpleNamespace(rank=0, num_ranks=2, store=store, watch=FailureWatch(store, abort))


def told_while_waiting(most_s: float = MOST_S) -> list[str]:
    """What a rank hears in a collective that waits for one that fails, and in the next one.

    As NCCL's: the first ends without an error when its communicator is aborted.
    """
    aborted, told = threading.Event(), []
    world = world_with(aborted.set)
    waiting = Collectives(world, cast(Any, SimpleNamespace(rank=lambda: 0, size=lambda: 2)))
    threading.Timer(0.05, tell_failure, (world.store, 1, ValueError("on purpose"))).start()
    for collective in (lambda _: aborted.wait(most_s), lambda _: None):
        try:
            waiting._together(collective)
            told.append("nothing")
        except RanksError as error:
            told.append(str(error))
    world.watch.stop()
    return told


def is_told_of_a_store_that_is_gone(most_s: float = MOST_S) -> bool:
    aborted = threading.Event()
    watch = FailureWatch(cast(Any, Gone()), aborted.set)
    found = aborted.wait(most_s)
    watch.stop()
    return found


def num_aborted_while_nobody_fails() -> int:
    """And the thread ends with the world, however often that is told."""
    aborted: list[None] = []
    has_failed, looks, is_enough = FailureWatch._has_failed, count(1), threading.Event()

    def looking(self: FailureWatch) -> bool:
        found = has_failed(self)
        if found or next(looks) == LOOKS:
            is_enough.set()
        return found

    with mock.patch.object(FailureWatch, "_has_failed", looking):
        world = world_with(lambda: aborted.append(None))
        assert is_enough.wait(MOST_S)
    world.watch.stop()
    world.watch.stop()
    assert not [thread for thread in threading.enumerate() if thread.name == "protwin-failure-watch"]
    assert world.watch.has_aborted == bool(aborted)
    return len(aborted)


def test_the_word_of_another_rank_ends_a_collective_that_waits_for_it_and_what_it_made_is_not_used() -> None:
    assert told_while_waiting() == [TOLD, TOLD]


def test_a_store_that_is_gone_ends_collectives_too() -> None:
    assert is_told_of_a_store_that_is_gone()


def test_nothing_is_aborted_while_nobody_fails_and_the_thread_ends_with_the_world() -> None:
    assert num_aborted_while_nobody_fails() == 0


# -- wrong variants --------------------------------------------------------------------------------------------------


@contextmanager
def _aborts_before_it_says_so() -> Iterator[None]:
    """Who was let out does not find yet that its communicator was aborted."""

    def run(self: FailureWatch) -> None:
        while not self._is_over.wait(failure_watch._PAUSE_S):
            if self._has_failed():
                self._abort()
                self._is_over.wait(MOST_S)
                self.has_aborted = True
                return

    with mock.patch.object(FailureWatch, "_run", run):
        yield


def _that_finds(found: Callable[[FailureWatch], bool]) -> AbstractContextManager[Any]:
    return mock.patch.object(FailureWatch, "_has_failed", found)


WRONG: Final[Mapping[str, Callable[[], AbstractContextManager[Any]]]] = {
    "right": nullcontext,
    "aborts before it says so": _aborts_before_it_says_so,
    "looks at nothing": partial(_that_finds, lambda _: False),
    "takes every store for one of failures": partial(_that_finds, lambda _: True),
    "believes in a store that is gone": partial(
        _that_finds, lambda self: not isinstance(self._store, Gone) and self._store.check([failure_watch.FAILURE_KEY])
    ),
}


@pytest.mark.parametrize(
    ("variant", "told", "is_told", "num_aborted"),
    [
        ("right", [TOLD, TOLD], True, 0),
        ("aborts before it says so", ["nothing", "nothing"], True, 0),
        ("looks at nothing", ["nothing", "nothing"], False, 0),
        ("believes in a store that is gone", [TOLD, TOLD], False, 0),
    ],
)
def test_a_wrong_watch_is_noticed(variant: str, told: list[str], is_told: bool, num_aborted: int) -> None:
    with WRONG[variant]():
        assert told_while_waiting(SOON_S if variant == "looks at nothing" else MOST_S) == told
        assert is_told_of_a_store_that_is_gone(MOST_S if is_told else SOON_S) == is_told
        assert num_aborted_while_nobody_fails() == num_aborted


def test_a_watch_that_always_finds_a_failure_is_noticed() -> None:
    with WRONG["takes every store for one of failures"]():
        assert num_aborted_while_nobody_fails() == 1


def test_collectives_that_do_not_ask_the_watch_are_noticed() -> None:
    """A flag that nobody can raise is as one that nobody looks at."""
    with mock.patch.object(FailureWatch, "has_aborted", property(lambda _: False, lambda *_: None), create=True):
        assert told_while_waiting() == ["nothing", "nothing"]
