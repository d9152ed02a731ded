"""This process among its ranks: torch.distributed's groups, found or made, and given back.

[Note: Groups]
Collectives of one group have to be called in the same order on all ranks.  The collective lane and the compute thread
run side by side, so that each has a group of its own.  The control group is gloo's: it carries the objects that ranks
agree on.  The lane's is gloo's for tensors of the host, and NCCL's for those of CUDA devices.  A group of gloo's that
is closed on one rank ends the collectives of all others with an error within moments; a rank that does not come ends
them after the group's timeout.

[Note: Collectives that never end]
A kernel of NCCL's waits on the device for the other ranks' kernels, and nobody tells it that a rank has failed: its
stream stands still, and with it every thread that waits for the stream.  So where there are devices a thread watches
the store for the word of a rank that has failed, and aborts the communicator.  What kernels have made by then is of no
use, so that whoever is in a collective of an aborted group raises.

[Note: Joining again]
A store keeps what ranks wrote when they met: their addresses.  A second group of the same name would meet the addresses
of the first.  Every joining so has a number, and a part of the store for itself.  The store itself is kept while the
process lives, since rank 0 may serve it to the others.
"""

from __future__ import annotations

import math
import os
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import lru_cache
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store
from torch.distributed.rendezvous import rendezvous

from ...shared.basics.errors import RanksError
from .failure_watch import FailureWatch
from .failures import first_failure, let_go_of_groups
from .launch import Launch, check_planned, launch_of

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
    lane_group: dist.ProcessGroup = field(init=False)
    """For collectives of the schedule, once ``open_lane`` has made it: the thread of the collective lane alone uses it
    while lanes run."""
    lane_shard_group: dist.ProcessGroup | None = field(init=False, default=None)
    """As ``lane_group``, of this rank's shard group alone; None where ranks form none."""
    lane_replica_group: dist.ProcessGroup | None = field(init=False, default=None)
    """As ``lane_group``, of the ranks alone that have the same parts."""
    sequence_group: dist.ProcessGroup | None = field(init=False, default=None)
    """Of the ranks alone that share sequences with this one: the compute thread uses it while lanes run."""
    control_group: dist.ProcessGroup
    """For agreement, reading and saving, with tensors of the host: the compute thread alone uses it."""
    control_shard_group: dist.ProcessGroup | None = field(init=False, default=None)
    """As ``control_group``, of this rank's shard group alone."""
    store: Store
    """A part of the ranks' store that is this world's alone: it can be read while groups are broken."""
    timeout_s: float
    """After so many seconds a collective ends by an error if a rank does not come."""
    teams: tuple[tuple[int, ...], ...] | None = None
    """Of a part of all processes: how all of them are divided, by their numbers in the default group; None: this world
    is all of them."""
    watch: FailureWatch | None = field(init=False, default=None)
    """Ends collectives that would never end ([Note: Collectives that never end])."""
    users: list[Callable[[], None]] = field(init=False, default_factory=list)
    """Let go of groups, which are closed only when nobody holds them."""

    def open_lane(self, device: torch.device, shard_ranks: int | None = None, sequence_ranks: int = 1) -> None:
        """Make the lane's groups, for tensors of the host and of ``device``; to be called on all ranks, once.

        ``shard_ranks``: ranks of a shard group, if they form some; ``sequence_ranks``: those that share each sequence,
        which are neighbours.  Raises RanksError if a rank does not come, or NCCL
        cannot connect the devices.
        """
        is_cuda = device.type == "cuda"
        backend = "cpu:gloo,cuda:nccl" if is_cuda else "gloo"
        teams = [list(team) for team in self.teams or (range(self.num_ranks),)]
        try:
            self._open("lane_group", backend, teams)
            if shard_ranks is not None:
                firsts = range(0, self.num_ranks, shard_ranks)
                shards = [team[first : first + shard_ranks] for team in teams for first in firsts]
                replicas = [team[member::shard_ranks] for team in teams for member in range(shard_ranks)]
                self._open("lane_shard_group", backend, shards)
                self._open("lane_replica_group", backend, replicas)
                self._open("control_shard_group", "gloo", shards)
            if sequence_ranks > 1:
                firsts = range(0, self.num_ranks, sequence_ranks)
                neighbours = [team[first : first + sequence_ranks] for team in teams for first in firsts]
                self._open("sequence_group", backend, neighbours)
            if is_cuda:
                lanes = (self.lane_group, self.lane_shard_group, self.lane_replica_group, self.sequence_group)
                groups = [group for group in lanes if group is not None]
                del lanes
                # NCCL connects devices in their first collective: here, where all ranks are told if it cannot.
                for group in groups:
                    dist.all_reduce(torch.zeros(1, device=device), group=group)
                torch.cuda.synchronize(device)
                self.__dict__["watch"] = FailureWatch(self.store, lambda: _abort(groups))
        except RuntimeError as error:
            raise RanksError(
                f"the ranks could not be connected for collectives on {device}: {error}. NCCL_DEBUG=WARN lets NCCL say "
                f"more."
            ) from error

    def _open(self, name: str, backend: str, groups: list[list[int]]) -> None:
        """Make all ``groups``, in one order on all ranks; ``name`` is the one that has this rank."""
        for ranks in groups:
            group = dist.new_group(
                ranks,
                backend=backend,
                timeout=timedelta(seconds=self.timeout_s),
                group_desc=f"protwin {name.replace('_', ' ')}",
            )
            if dist.get_rank() in ranks:
                self.__dict__[name] = group

    @property
    def between_steps_shard_group(self) -> dist.ProcessGroup | None:
        """As ``between_steps_group``, of this rank's shard group alone; None where ranks form none."""
        return self.lane_shard_group if self.watch is not None else self.control_shard_group

    @property
    def between_steps_group(self) -> dist.ProcessGroup:
        """For collectives of the compute thread while no lane runs: a group that carries the device's tensors."""
        return self.lane_group if self.watch is not None else self.control_group

    def leave(self) -> None:
        """Close the groups; the default one goes with the last world if it was made here.  Others' collectives fail."""
        self.forget_groups()
        _OPEN.leave()

    def forget_groups(self) -> None:
        """Close all groups: collectives of other ranks in them fail as soon as nobody here holds them.  Idempotent.

        The error that is being handled, if one is, does not hold them any more ([Note: Groups that an error holds] in
        ``failures``).
        """
        let_go_of_groups(sys.exc_info()[1])
        for let_go in self.users:
            let_go()
        watch = self.__dict__.pop("watch", None)
        if watch is not None:
            watch.stop()
        for name in _GROUPS:
            # gloo closes a group when the last reference to it goes, this one among them.
            group = self.__dict__.pop(name, None)
            if group is not None:
                dist.destroy_process_group(group)


def team_world(world: World, teams: Sequence[tuple[int, ...]]) -> World:
    """The ranks of ``world`` that are in one of ``teams`` with this one, numbered within it; to be called on all ranks.

    The teams have all ranks, each once, and equally many.  Failures are told to all ranks of ``world``.  To be left by
    ``forget_groups``, before ``world`` is.  Raises RanksError if a rank does not come.
    """
    found: list[tuple[tuple[int, ...], dist.ProcessGroup]] = []
    try:
        for team in teams:
            group = dist.new_group(
                list(team),
                backend="gloo",
                timeout=timedelta(seconds=world.timeout_s),
                group_desc="protwin control of a team",
            )
            if world.rank in team:
                found.append((team, group))
    except RuntimeError as error:
        raise RanksError(f"the ranks of a team could not be connected: {error}.") from error
    ((own, control_group),) = found
    return World(
        rank=own.index(world.rank),
        num_ranks=len(own),
        local_rank=world.local_rank,
        hosts=tuple(world.hosts[rank] for rank in own),
        control_group=control_group,
        store=world.store,
        timeout_s=world.timeout_s,
        teams=tuple(teams),
    )


def _abort(groups: list[dist.ProcessGroup]) -> None:
    for group in groups:
        group.abort()


_GROUPS: Final = (
    "lane_group",
    "lane_shard_group",
    "lane_replica_group",
    "sequence_group",
    "control_group",
    "control_shard_group",
)


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
            first_failure(world.store)
            or f"another rank has ended, or did not come within {world.timeout_s:g} s: {error}. Its own message says "
            f"why."
        ) from error
    return found


def join_world(num_ranks: int | None, *, timeout_s: float) -> World | None:
    """Meet the other ranks, of which there are ``num_ranks`` with this one; None if that is 1.

    Without a number they are as many as were started.  They are those of torch.distributed's default group; where there
    is none, it is made from torchrun's environment, on gloo.  To be called on all ranks, equally often.  Raises, on all
    alike, PlanError if ranks plan for another number than were started, and RanksError if variables of the launch are
    missing or contradict each other, or a rank does not come within ``timeout_s``; nothing is left open then.
    """
    if not 0 < timeout_s < math.inf:
        raise RanksError(f"rank_timeout_s is {timeout_s}; it must be positive and finite.")
    if not dist.is_available():
        check_planned([num_ranks], 1, "this build of PyTorch has no torch.distributed")
        return None
    launch = launch_of(os.environ)
    made_default = not dist.is_initialized()
    if not made_default:
        started, source = dist.get_world_size(), "torch.distributed's default group"
    elif launch is not None:
        started, source = launch.num_ranks, f"WORLD_SIZE = {launch.num_ranks}"
    else:
        started, source = 1, "no RANK, WORLD_SIZE and LOCAL_RANK are set"
    if started == 1:
        check_planned([num_ranks], started, source)
        return None
    if num_ranks not in (None, started):
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


@contextmanager
def met_group(num_ranks: int, *, timeout_s: float) -> Iterator[dist.ProcessGroup | None]:
    """Within the block, all ranks' group for tensors of the host; None if there is one rank.  As of ``join_world``."""
    world = join_world(num_ranks, timeout_s=timeout_s)
    try:
        yield None if world is None else world.control_group
    finally:
        if world is not None:
            world.leave()


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
    """A control group of its own within the default one.  After an error it is closed."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    control_group: dist.ProcessGroup | None = None
    try:
        # A name of its own in the store: the default group's, and how many have been made within it.
        control_group = dist.new_group(
            backend="gloo", timeout=timedelta(seconds=timeout_s), group_desc="protwin control"
        )
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
            control_group=control_group,
            store=PrefixStore(f"protwin/world{number}", base),
            timeout_s=timeout_s,
        )
        _OPEN.enter(made_default=made_default)
        return world
    except BaseException:
        if made_default:
            dist.destroy_process_group()
        elif control_group is not None:
            dist.destroy_process_group(control_group)
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
def _telling_who_misses(planned: int | None, started: int, source: str, timeout_s: float) -> Iterator[None]:
    """Within the block, what torch says of ranks that do not come is one message.

    A plan for another number of ranks than were started is refused without them.
    """
    try:
        yield
    except (RuntimeError, ValueError) as error:
        # torch's DistError is a RuntimeError; what it raises of addresses is a ValueError.
        check_planned([planned], started, source)
        raise RanksError(
            f"the ranks did not all meet within {timeout_s:g} s: {error}. See whether every one of them was started "
            f"and still runs, and whether MASTER_ADDR and MASTER_PORT are the same on all."
        ) from error
