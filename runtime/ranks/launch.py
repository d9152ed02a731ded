"""What a launcher such as torchrun tells a process about itself, in its environment.  Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ...shared.basics.errors import PlanError, RanksError

_NUMBERS: Final = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
_PLACE: Final = ("MASTER_ADDR", "MASTER_PORT")
_LARGEST_PORT: Final = 2**16 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """One process among those that were started together."""

    rank: int
    num_ranks: int
    local_rank: int
    """Its number among the processes on its machine."""
    address: str
    """Where all of them meet."""
    port: int


def launch_of(environment: Mapping[str, str]) -> Launch | None:
    """What ``environment`` says; None if it speaks of no rank.

    Raises RanksError, which names the variable, if one is missing, is no number, or contradicts another one.
    """
    if not any(name in environment for name in _NUMBERS):
        return None
    missing = [name for name in (*_NUMBERS, *_PLACE) if not environment.get(name)]
    if missing:
        is_set = [f"{name}={environment[name]}" for name in (*_NUMBERS, *_PLACE) if environment.get(name)]
        raise RanksError(
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set, beside {', '.join(is_set) or 'none'}"
            f". Start every rank by torchrun, which sets all of them, or remove what is left of another launch."
        )
    num_ranks = _number(environment, "WORLD_SIZE", least=1)
    return Launch(
        rank=_number(environment, "RANK", below=num_ranks, bound="WORLD_SIZE"),
        num_ranks=num_ranks,
        local_rank=_number(environment, "LOCAL_RANK", below=num_ranks, bound="WORLD_SIZE"),
        address=environment["MASTER_ADDR"],
        port=_number(environment, "MASTER_PORT", least=1, below=_LARGEST_PORT + 1),
    )


def _number(
    environment: Mapping[str, str], name: str, *, least: int = 0, below: int | None = None, bound: str | None = None
) -> int:
    text = environment[name]
    # int() takes digits of every script, signs, spaces and underscores.
    if not (text.isascii() and text.isdigit()) or int(text) < least:
        raise RanksError(f"{name} is {text!r}; it must be a whole number of {least} or more. Start ranks by torchrun.")
    if below is not None and int(text) >= below:
        of = f", {bound}" if bound is not None else ""
        raise RanksError(f"{name} is {text}; it must be less than {below}{of}. Start ranks by torchrun.")
    return int(text)


def check_num_ranks(planned: int, started: int, source: str) -> None:
    """Raise PlanError if a plan for ``planned`` ranks was given to another number of processes.

    ``source`` says where their number was found.  The message is the same on all of them.
    """
    if planned == started:
        return
    if planned == 1:
        raise PlanError(
            f"the plan is for one rank, but {started} processes were started together ({source}), each of which would "
            f"train alone. Start one without torchrun, or search a plan with --ranks {started}."
        )
    plural = "processes were" if started > 1 else "process was"
    other = f"search a plan with --ranks {started}" if started > 1 else "search a plan without --ranks"
    raise PlanError(
        f"the plan is for {planned} ranks, but {started} {plural} started ({source}). Start {planned}: torchrun "
        f"--nproc-per-node {planned} SCRIPT, or protwin run --ranks {planned}. Or {other}."
    )


def check_planned(planned: Sequence[int | None], started: int, source: str) -> None:
    """The same for the numbers that all ranks plan for, by rank, None without a plan; PlanError too if these differ."""
    known = {number for number in planned if number is not None}
    if len(known) > 1:
        raise PlanError(
            f"ranks were given plans for different numbers of ranks: {by_rank(planned)}. Give every rank one plan, for "
            f"the {started} that were started ({source})."
        )
    for number in known:
        check_num_ranks(number, started, source)


def by_rank(values: Sequence[object], first: int = 0) -> str:
    """Which ranks, from ``first`` on, have what: ``"4 on ranks 0, 1; 8 on rank 2"``."""
    ranks: dict[str, list[str]] = {}
    for rank, value in enumerate(values, first):
        ranks.setdefault(str(value), []).append(str(rank))
    return "; ".join(
        f"{value} on rank{'s' if len(which) > 1 else ''} {', '.join(which)}" for value, which in ranks.items()
    )
