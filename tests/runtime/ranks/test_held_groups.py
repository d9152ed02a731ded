"""Ctrl-C in the middle of a collective ends those of the others, although somebody keeps the error."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import torch.distributed as dist

from protwin.runtime.ranks import world as worlds
from protwin.runtime.ranks.failures import let_go_of_groups, tell_failure
from tests.runtime.ranks.processes import Ranks

LONG_S, SHORT_S = 60.0, 5.0
"""What ends a wait for nobody: long where none should be, short where the wrong variant waits in full."""
KEPT: list[BaseException] = []


def press(*_: Any, **__: Any) -> None:
    _ = __ = None  # type: ignore[assignment]
    raise KeyboardInterrupt


def exchange(rank: int, timeout_s: float) -> tuple[str, float]:
    """Rank 1 is interrupted within the exchange, and keeps the error as a notebook does; what ends it, and when."""
    world = worlds.join_world(2, timeout_s=timeout_s)
    assert world is not None
    begun = time.monotonic()
    try:
        if rank == 0:
            worlds.exchanged(world, "own")
        else:
            with mock.patch.object(dist.distributed_c10d, "all_gather", press):
                worlds.exchanged(world, "own")
    except (Exception, KeyboardInterrupt) as error:
        KEPT.append(error)
        tell_failure(world.store, rank, error)
        world.leave()
    return f"{type(KEPT[-1]).__name__}: {KEPT[-1]}", time.monotonic() - begun


def exchange_holding(rank: int, timeout_s: float) -> tuple[str, float]:
    """The wrong variant: what the error has passed keeps its variables."""
    with mock.patch.object(worlds, "let_go_of_groups", return_value=None):
        return exchange(rank, timeout_s)


def test_an_error_that_is_kept_does_not_keep_others_waiting(two_ranks: Ranks) -> None:
    (told, waited_s), (own, _) = two_ranks.run(exchange, LONG_S)
    assert (told, own) == ("RanksError: training was ended by rank 1: KeyboardInterrupt: ", "KeyboardInterrupt: ")
    assert waited_s < LONG_S / 2
    (_, waited_s), _ = two_ranks.run(exchange_holding, SHORT_S)
    assert waited_s >= SHORT_S - 0.1


def test_functions_that_still_run_keep_their_variables() -> None:
    def outer() -> str:
        mine = "mine"
        try:
            raise ValueError
        except ValueError as error:
            let_go_of_groups(error)
        return mine

    assert outer() == "mine"
    let_go_of_groups(None)
