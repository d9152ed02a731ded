"""Trainings of several ranks that are saved and resumed, in the processes of the ranks."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from protwin.runtime import Training, carry_out
from protwin.runtime.checkpoints import pieces
from protwin.runtime.checkpoints.manifest import Manifest
from protwin.runtime.checkpoints.saved_by_ranks import RankPlace, SavedByRanks
from protwin.runtime.checkpoints.state import CheckpointState
from protwin.runtime.chunks.sharded_chunk import ShardedChunk
from protwin.shared.basics.errors import ProtwinError
from protwin.shared.schema.plan import Plan
from tests.runtime.models import SEED, Case, held, snapshot
from tests.runtime.ranks.beside_ddp import all_cases, batches_of, in_default_group, prepare, reference
from tests.runtime.resuming import disturb, other_weights

NUM_BATCHES = 12
STEPS = 4


def start(case: Case, model: nn.Module, plan: Plan, **changes: Any) -> Training:
    chosen: dict[str, Any] = {"optimizer": case.make_optimizer, "parameter_groups": case.groups(model)} | changes
    return carry_out(model, plan, case.workload, **chosen)


def steps_of(case: Case, model: nn.Module, training: Training, rank: int, last: int) -> list[float]:
    """Train up to step ``last``."""
    plan, losses = training.plan, []
    for batches in batches_of(case, rank, plan.num_ranks, plan.micro_batches, last)[training.num_steps :]:
        for batch in held(case, batches):
            loss = case.loss(model, batch)
            loss.backward()
            losses.append(loss.item())
        training.step()
    return losses


def position(rank: int, training: Training) -> dict[str, int]:
    return {"rank": rank, "step": training.num_steps}


@dataclass(frozen=True)
class Went:
    """How a training went on one rank."""

    losses: list[float]
    state: dict[str, torch.Tensor]
    resumed: Any = None
    optimizer: Any = None


def begun(rank: int, name: str, plan: Plan, folder: Path, steps: int) -> Went:
    """Train ``steps`` steps and save; what one rank alone does too."""
    case = all_cases(NUM_BATCHES)[name]
    model = prepare(case.build(), rank)
    with start(case, model, plan) as training:
        torch.manual_seed(SEED + rank)
        losses = steps_of(case, model, training, rank, steps)
        training.save(folder, data_position=position(rank, training))
    return Went(losses, snapshot(model))


def gone_on(rank: int, name: str, plan: Plan, folder: Path, steps: int, into: Path | None = None) -> Went:
    """Resume, train up to step ``steps``, and save ``into`` another folder."""
    case = all_cases(NUM_BATCHES)[name]
    model = other_weights(prepare(case.build(), rank))
    with start(case, model, plan) as training:
        disturb()
        resumed = training.resume(folder)
        assert training.num_steps == resumed.step
        losses = steps_of(case, model, training, rank, steps)
        if into is not None:
            training.save(into, data_position=position(rank, training))
    return Went(losses, snapshot(model), resumed)


@in_default_group
def compare(rank: int, name: str, plan: Plan, losses: list[float], state: dict[str, torch.Tensor]) -> list[str]:
    """What differs from training that nothing interrupted, by DistributedDataParallel."""
    expected = reference(name, rank, plan, NUM_BATCHES, STEPS)
    wrong = [key for key, value in expected.weights.items() if not torch.equal(value, state[key])]
    return wrong + ([] if losses == expected.losses else [f"losses {losses} instead of {expected.losses}"])


@in_default_group
def interrupted(rank: int, name: str, before: Plan, after: Plan, folder: Path) -> tuple[list[str], Any]:
    """Two steps under one plan, the rest under another; what differs from one that nothing interrupted."""
    first = begun(rank, name, before, folder, 2)
    then = gone_on(rank, name, after, folder, STEPS)
    return compare.__wrapped__(rank, name, before, first.losses + then.losses, then.state), then.resumed  # type: ignore[attr-defined]


@in_default_group
def began(rank: int, name: str, plan: Plan, folder: Path, steps: int) -> Went:
    """``begun`` in a default group, so that ranks go on without one."""
    return begun(rank, name, plan, folder, steps)


@in_default_group
def began_in_public(rank: int, name: str, plan: Plan, folder: Path, steps: int) -> tuple[Any, Any]:
    """``began``; gives what a user reads of weights and optimizer at that moment, in torch's own form."""
    case = all_cases(NUM_BATCHES)[name]
    model = prepare(case.build(), rank)
    with start(case, model, plan) as training:
        steps_of(case, model, training, rank, steps)
        training.save(folder)
        return training.state_dict(), training.optimizer.state_dict()


@in_default_group
def from_that_state(rank: int, name: str, plan: Plan, state: tuple[Any, Any], done: int, more: int) -> Went:
    """Train by ``plan`` from weights and optimizer state on that were loaded without any checkpoint."""
    case = all_cases(NUM_BATCHES)[name]
    model = prepare(case.build(), rank)
    model.load_state_dict(state[0])
    with start(case, model, plan) as training:
        training.optimizer.load_state_dict(state[1])
        training._resumed_steps = done
        losses = steps_of(case, model, training, rank, done + more)
    return Went(losses, snapshot(model))


@in_default_group
def from_the_checkpoint(rank: int, name: str, plan: Plan, folder: Path, last: int) -> Went:
    """``gone_on`` in a default group."""
    return gone_on(rank, name, plan, folder, last)


def through(rank: int, name: str, plan: Plan, folder: Path, into: Path | None, steps: int = 0) -> Went:
    """Resume under ``plan`` and save again; of several ranks or of one alone."""
    on_ranks: Callable[..., Went] = in_default_group(gone_on) if plan.num_ranks > 1 else gone_on
    return on_ranks(rank, name, plan, folder, steps, into)


def same_state(one: dict[str, torch.Tensor], other: Iterable[dict[str, torch.Tensor]]) -> bool:
    return all(all(torch.equal(value, found[key]) for key, value in one.items()) for found in other)


@in_default_group
def refused(rank: int, name: str, plan: Plan, folder: Path) -> tuple[str, bool]:
    """The message of a resumption that is refused, and whether training then goes on as if it had not been tried."""
    case = all_cases(NUM_BATCHES)[name]
    model = prepare(case.build(), rank)
    with start(case, model, plan) as training:
        torch.manual_seed(SEED + rank)
        losses = steps_of(case, model, training, rank, 1)
        try:
            training.resume(folder)
            message = ""
        except ProtwinError as error:
            message = f"{type(error).__name__}: {error}"
        losses += steps_of(case, model, training, rank, STEPS)
    return message, compare.__wrapped__(rank, name, plan, losses, snapshot(model)) == []  # type: ignore[attr-defined]


@in_default_group
def unsaved(rank: int, name: str, plan: Plan, folder: Path, fails_on: int) -> tuple[str, bool, int]:
    """Rank ``fails_on`` has no space left for the third step: the message, whether training goes on, what is saved."""
    case = all_cases(NUM_BATCHES)[name]
    model = prepare(case.build(), rank)
    with start(case, model, plan) as training:
        torch.manual_seed(SEED + rank)
        losses = steps_of(case, model, training, rank, 2)
        training.save(folder)
        losses += steps_of(case, model, training, rank, 3)
        with patch.object(pieces, "sync", full if rank == fails_on else pieces.sync):  # type: ignore[attr-defined]
            try:
                training.save(folder)
                message = ""
            except ProtwinError as error:
                message = f"{type(error).__name__}: {error}"
        losses += steps_of(case, model, training, rank, STEPS)
        step = training.resume(folder).step
        losses = losses[:2] + steps_of(case, model, training, rank, STEPS)
    return message, compare.__wrapped__(rank, name, plan, losses, snapshot(model)) == [], step  # type: ignore[attr-defined]


def full(stream: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@in_default_group
def weights_differ(rank: int, name: str, plan: Plan, weights: list[dict[str, torch.Tensor]]) -> list[str]:
    """The names of those that are not DistributedDataParallel's."""
    expected = reference(name, rank, plan, NUM_BATCHES, STEPS).weights
    return [key for key, value in expected.items() if not torch.equal(value, weights[rank][key])]


# -- wrong variants --------------------------------------------------------------------------------------------------


def _random_states_of_rank_0(self: SavedByRanks, path: Path, manifest: Manifest, place: RankPlace) -> None:
    _READ(self, path, manifest, place)
    self.training["random"] = self.of_rank(0)["random"]  # type: ignore[index]


def _one_scalar_off(self: ShardedChunk) -> list[tuple[str, nn.Parameter, int, torch.Tensor]]:
    return [(name, parameter, max(0, begin - 1), scalars) for name, parameter, begin, scalars in _OWN_SCALARS(self)]


def _without_masters(self: SavedByRanks, *args: Any) -> tuple[dict[str, Any], torch.Tensor | None]:
    state, _ = _STATE(self, *args)
    return state, None


def _moments_of_the_first_scalars(self: SavedByRanks, name: str, parameter: nn.Parameter, stretch: slice | None) -> Any:
    begin_anew = None if stretch is None else slice(0, stretch.stop - stretch.start)
    return _STATE(self, name, parameter, begin_anew)


_READ, _STATE, _OWN_SCALARS = SavedByRanks.__init__, SavedByRanks.state, ShardedChunk.own_scalars
_WRONG: dict[str, tuple[Any, str, Any]] = {
    "random states of rank 0": (SavedByRanks, "__init__", _random_states_of_rank_0),
    "buffers lost": (CheckpointState, "_place_buffers", lambda self, saved: None),
    "shards one scalar off": (ShardedChunk, "own_scalars", _one_scalar_off),
    "masters lost": (SavedByRanks, "state", _without_masters),
    "moments of the first scalars": (SavedByRanks, "state", _moments_of_the_first_scalars),
}


def through_wrong(rank: int, variant: str, *arguments: Any) -> Went:
    """``through`` with a wrong variant of resuming."""
    where, what, wrong = _WRONG[variant]
    with patch.object(where, what, wrong):
        return through(rank, *arguments)


@in_default_group
def interrupted_wrong(rank: int, variant: str, name: str, before: Plan, after: Plan, folder: Path) -> list[str]:
    """``interrupted`` with a wrong variant of resuming."""
    first = begun(rank, name, before, folder, 2)
    where, what, wrong = _WRONG[variant]
    with patch.object(where, what, wrong):
        then = gone_on(rank, name, after, folder, STEPS)
    return compare.__wrapped__(rank, name, before, first.losses + then.losses, then.state)  # type: ignore[attr-defined]
