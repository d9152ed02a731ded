"""This process among its ranks: torch.distributed's groups, found or made, and given back.

[Note: Groups]
Collectives of one group have to be called in the same order on all ranks.  The collective lane and the compute thread
run side by side, so that each has a group of its own.  Both are gloo's: they carry the tensors of a CPU, and the
objects that ranks agree on.  A group of gloo's that is closed on one rank ends the collectives of all others with an
error within moments; a rank that does not come ends them after the group's timeout.

[Note: Joining again]
A store keeps what ranks wrote when they met: their addresses.  A second group of the same name would meet the addresses
of the first.  Every joining so has a number, and a part of the store for itself.  The store itself is kept while the
process lives, since rank 0 may serve it to the others.
"""

from __future__ import annotations

import math
import os
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from typing import Any, Final

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store
from torch.distributed.rendezvous import rendezvous

from ...shared.basics.errors import RanksError
from .launch import Launch, check_num_ranks, check_planned, launch_of

_REFUSAL_S: Final = 30.0
"""Seconds that a refusal waits for ranks which are to have the same one."""


@dataclass(frozen=True, kw_only=True, eq=False)
class World:
    """This process among the ranks that train together; ``leave`` it at the end."""

    rank: int
    num_ranks: int
    local_rank: int
    """Its number among the ranks on its host."""
    hosts: tuple[str, ...]
    """The host of every rank."""
    lane_group: dist.ProcessGroup
    """For collectives of the schedule: the thread of the collective lane alone uses it while lanes run."""
    control_group: dist.ProcessGroup
    """For agreement, evaluation, reading and saving: the compute thread alone uses it."""
    store: Store
    """A part of the ranks' store that is this world's alone: it can be read while groups are broken."""
    timeout_s: float
    """After so many seconds a collective ends by an error if a rank does not come."""

    def leave(self) -> None:
        """Close the groups; the default one goes with the last world if it was made here.  Others' collectives fail."""
        self.forget_groups()
        _OPEN.leave()

    def forget_groups(self) -> None:
        """Close both groups: collectives of other ranks in them fail as soon as nobody here holds them.  Idempotent."""
        for name in ("lane_group", "control_group"):
            # gloo closes a group when the last reference to it goes, this one among them.
            group = self.__dict__.pop(name, None)
            if group is not None:
                dist.destroy_process_group(group)


class _OpenWorlds:
    """How many there are in this process: several models may be trained side by side, in one default group."""

    def __init__(self) -> None:
        self._number = 0
        self._made_default = False

    def enter(self, *, made_default: bool) -> None:
        self._number += 1
        self._made_default = self._made_default or made_default

    def leave(self) -> None:
        self._number -= 1
        if self._number == 0 and self._made_default:
            self._made_default = False
            dist.destroy_process_group()


_OPEN: Final = _OpenWorlds()


def exchanged(world: World, value: Any) -> list[Any]:
    """What every rank gave for ``value``, by rank; to be called on all of them.

    Raises RanksError if a rank has ended, or does not come in time.
    """
    found = [None] * world.num_ranks
    try:
        dist.all_gather_object(found, value, group=world.control_group)
    except RuntimeError as error:
        raise RanksError(
            f"another rank has ended, or did not come within {world.timeout_s:g} s: {error}. Its own message says why."
        ) from error
    return found


def join_world(num_ranks: int, *, timeout_s: float) -> World | None:
    """Meet the other ranks, of which there are ``num_ranks`` with this one; None if that is 1.

    They are those of torch.distributed's default group; where there is none, it is made from torchrun's environment,
    on gloo.  To be called on all ranks, equally often.  Raises, on all alike, PlanError if ranks plan for another
    number than were started, and RanksError if variables of the launch are missing or contradict each other, or a rank
    does not come within ``timeout_s``; nothing is left open then.
    """
    if not 0 < timeout_s < math.inf:
        raise RanksError(f"rank_timeout_s is {timeout_s}; it must be positive and finite.")
    if not dist.is_available():
        check_num_ranks(num_ranks, 1, "this build of PyTorch has no torch.distributed")
        return None
    launch = launch_of(os.environ)
    made_default = not dist.is_initialized()
    if not made_default:
        started, source = dist.get_world_size(), "torch.distributed's default group"
    elif launch is not None:
        started, source = launch.num_ranks, f"WORLD_SIZE = {launch.num_ranks}"
    else:
        started, source = 1, "no RANK, WORLD_SIZE and LOCAL_RANK are set"
    if started == num_ranks == 1:
        return None
    if started == 1:
        check_num_ranks(num_ranks, started, source)
    if started != num_ranks:
        # Others may plan for another number: all are told of it.  Where they do not come, this is said alone.
        timeout_s = min(timeout_s, _REFUSAL_S)
    with _telling_who_misses(num_ranks, started, source, timeout_s):
        world = _met(launch, timeout_s, made_default=made_default)
    try:
        check_planned(exchanged(world, num_ranks), started, source)
    except BaseException:
        world.leave()
        raise
    return world


def _met(launch: Launch | None, timeout_s: float, *, made_default: bool) -> World:
    if not made_default:
        _check_same_rank(launch)
    else:
        assert launch is not None
        _make_default(launch, timeout_s)
    return _world(launch, timeout_s, made_default=made_default)


def _make_default(launch: Launch, timeout_s: float) -> None:
    """From the environment; see [Note: Joining again]."""
    timeout = timedelta(seconds=timeout_s)
    store = _met_store(launch, timeout)
    number = store.add(f"protwin/default/{launch.rank}", 1)
    dist.init_process_group(
        "gloo",
        store=PrefixStore(f"protwin/default{number}", store),
        rank=launch.rank,
        world_size=launch.num_ranks,
        timeout=timeout,
    )


@lru_cache(maxsize=1)
def _met_store(launch: Launch, timeout: timedelta) -> Store:
    """The store that the launch names: torchrun's own, or rank 0's."""
    store, _, _ = next(rendezvous("env://", launch.rank, launch.num_ranks, timeout=timeout))
    assert isinstance(store, Store)
    return store


def _check_same_rank(launch: Launch | None) -> None:
    """Raise RanksError if the default group and the environment are of two minds: LOCAL_RANK names the device."""
    if launch is None:
        return
    for name, said, is_now in (
        ("RANK", launch.rank, dist.get_rank()),
        ("WORLD_SIZE", launch.num_ranks, dist.get_world_size()),
    ):
        if said != is_now:
            raise RanksError(
                f"{name} is {said}, but torch.distributed's default group has {is_now} for it. Let both come from the "
                f"same launch, or remove RANK, WORLD_SIZE and LOCAL_RANK from the environment."
            )


def _world(launch: Launch | None, timeout_s: float, *, made_default: bool) -> World:
    """Groups of its own within the default one.  After an error they are closed."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    made: list[dist.ProcessGroup] = []
    try:
        for purpose in ("collective lane", "control"):
            # A name of its own in the store: the default group's, and how many have been made within it.
            made.append(
                dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s), group_desc=f"protwin {purpose}")
            )
        lane_group, control_group = made
        places: list[tuple[str, int | None]] = [("", None)] * num_ranks
        own = (socket.gethostname(), None if launch is None else launch.local_rank)
        dist.all_gather_object(places, own, group=control_group)
        base = _get_default_store()
        number = base.add(f"protwin/world/{rank}", 1)
        world = World(
            rank=rank,
            num_ranks=num_ranks,
            local_rank=_local_rank(places, rank),
            hosts=tuple(host for host, _ in places),
            lane_group=lane_group,
            control_group=control_group,
            store=PrefixStore(f"protwin/world{number}", base),
            timeout_s=timeout_s,
        )
        _OPEN.enter(made_default=made_default)
        return world
    except BaseException:
        if made_default:
            dist.destroy_process_group()
        else:
            for group in made:
                dist.destroy_process_group(group)
        raise


def _local_rank(places: list[tuple[str, int | None]], rank: int) -> int:
    """As launched; counted by host where no launcher numbered them.  Raises RanksError, on all, if two are the same."""
    if all(number is None for _, number in places):
        host, _ = places[rank]
        return sum(other == host for other, _ in places[:rank])
    unnumbered = [number for number, (_, local) in enumerate(places) if local is None]
    if unnumbered:
        raise RanksError(f"LOCAL_RANK is set on some ranks, but not on {unnumbered}. Start every rank by torchrun.")
    (place, count), *_ = Counter(places).most_common(1)
    if count > 1:
        ranks = [number for number, other in enumerate(places) if other == place]
        raise RanksError(
            f"LOCAL_RANK is {place[1]} on ranks {', '.join(map(str, ranks))} of host {place[0]}, but each of them "
            f"needs a number of its own there. Start every rank by torchrun."
        )
    local_rank = places[rank][1]
    assert local_rank is not None
    return local_rank


@contextmanager
def _telling_who_misses(planned: int, started: int, source: str, timeout_s: float) -> Iterator[None]:
    """Within the block, what torch says of ranks that do not come is one message.

    A plan for another number of ranks than were started is refused without them.
    """
    try:
        yield
    except (RuntimeError, ValueError) as error:
        # torch's DistError is a RuntimeError; what it raises of addresses is a ValueError.
        check_num_ranks(planned, started, source)
        raise RanksError(
            f"the ranks did not all meet within {timeout_s:g} s: {error}. See whether every one of them was started "
            f"and still runs, and whether MASTER_ADDR and MASTER_PORT are the same on all."
        ) from error
