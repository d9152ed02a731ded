"""What ranks make sure of together: that each of them is able, that all mean the same, and one message where not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeVar

from ...shared.basics.errors import PlanError, ProtwinError, RanksError
from .launch import by_rank
from .world import World, exchanged

_T = TypeVar("_T")
_KNOWN: Final = "_protwin_known"
_Refusal = tuple[type[ProtwinError], str]
"""The class and message of what a rank raised."""


def agreed(world: World | None, work: Callable[[], _T], undo: Callable[[_T], object] | None = None) -> _T:
    """What ``work`` gives on this rank, once it has succeeded on all of them; to be called on all.

    If it raises on one rank, ``undo`` is called with what it gave here, and the same message is raised on all: of the
    class that was raised there if that is a ProtwinError, else a RanksError.  What is no user's mistake is raised as it
    is where it happened.  Without a world ``work`` is just done.

    ``work`` may call ``agreed`` itself: what all ranks of ``world`` have heard of there is not exchanged again.  A rank
    that fails in between tells it in the next exchange, whichever of the two functions that is in.
    """
    if world is None:
        return work()
    done: list[_T] = []
    error: BaseException | None = None
    try:
        done.append(work())
    except BaseException as raised:
        if _is_known(raised, world):
            raise
        error = raised
    try:
        refusals = exchanged(world, None if error is None else _refusal(error))
        if not any(refusals):
            return done[0]
        told: BaseException = _together(refusals)
    except BaseException as raised:
        told = raised
    if undo is not None and done:
        undo(done[0])
    if error is not None and not isinstance(error, ProtwinError):
        raise _known(error, world)
    raise _known(told, world) from error


def agree(world: World | None, facts: Mapping[str, str]) -> None:
    """Raise PlanError, on all ranks alike, unless all of them give the same ``facts``, by name; to be called on all.

    The message has the first fact in which they differ, in rank 0's order, and which ranks have what.
    """
    if world is None:
        return
    of_ranks: list[Mapping[str, str]] = exchanged(world, dict(facts))
    for name in dict.fromkeys(name for known in of_ranks for name in known):
        values = [known.get(name, "nothing") for known in of_ranks]
        if len(set(values)) > 1:
            raise PlanError(f"ranks differ in {name}: {by_rank(values)}. Let all ranks have the same.")


def _known(error: BaseException, world: World) -> BaseException:
    """``error``, marked as one that all ranks of ``world`` have heard of; those of another world may not have."""
    error.__dict__.setdefault(_KNOWN, set()).add(id(world))
    return error


def _is_known(error: BaseException, world: World) -> bool:
    return id(world) in error.__dict__.get(_KNOWN, ())


def _refusal(error: BaseException) -> _Refusal:
    if isinstance(error, ProtwinError):
        return type(error), str(error)
    return RanksError, f"{type(error).__name__}: {error}"


def _together(refusals: Sequence[_Refusal | None]) -> ProtwinError:
    """One error for what some ranks refuse; it names them unless all say the same."""
    kind, message = next(refusal for refusal in refusals if refusal is not None)
    if set(refusals) == {(kind, message)}:
        return kind(message)
    ranks: dict[str, list[str]] = {}
    for rank, refusal in enumerate(refusals):
        if refusal is not None:
            ranks.setdefault(refusal[1], []).append(str(rank))
    told = [f"rank{'s' if len(which) > 1 else ''} {', '.join(which)}: {said}" for said, which in ranks.items()]
    return kind(" And ".join(told))
