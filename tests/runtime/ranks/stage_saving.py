"""Distillations by pipelines that are saved and go on elsewhere: what each rank does, beside each block alone."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from protwin.runtime import CpuDevice
from protwin.runtime.checkpoints import joined_stages, rank_checkpoint
from protwin.runtime.checkpoints import state as state_module
from protwin.runtime.checkpoints.checkpoints import has_checkpoint
from protwin.runtime.checkpoints.saved_by_ranks import SavedByRanks
from protwin.runtime.distillation.distil import Distilling, distil
from protwin.runtime.optimizers.loss_scaling import LossScaling
from protwin.shared.basics.errors import ProtwinError
from protwin.shared.pipelines.pipeline import Pipeline
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.workload import Workload
from tests.runtime.distillation.cases import Expected, adamw, mse, quiet, snapshot, unlike, unlike_moments
from tests.runtime.distillation.distilling import state_by_name
from tests.runtime.ranks.beside_ddp import in_default_group
from tests.runtime.ranks.processes import without_a_word
from tests.runtime.ranks.staging import subject

SCALING = LossScaling(initial_scale=2.0**6, growth_interval=2)
"""A scale that grows after the second step; it is a power of two, so that it changes no bit."""


@dataclass(frozen=True, kw_only=True)
class Leg:
    """A part of a run."""

    name: str
    carried: Plan | Pipeline
    workload: Workload
    reference: Expected
    """Of the whole run."""
    first: int
    last: int
    """Steps from ``first`` on and before ``last``."""
    resumed: Path | None = None
    into: Path | None = None
    """Saved after every step."""
    is_scaled: bool = False
    given: dict[str, Any] = field(default_factory=dict)
    """Other options of ``distil``."""


@dataclass(frozen=True)
class Went:
    """How it went on one rank."""

    wrong: list[str]
    resumed: Any
    scales: Any
    drawn: list[float]
    """Random numbers behind the last step."""
    student: dict[str, torch.Tensor]
    """The rank's student afterwards, as far as it is not on the meta device."""


def models_of(leg: Leg, rank: int) -> tuple[nn.Module, nn.Module, tuple[str, ...]]:
    """Both models, with the blocks of other stages on the meta device, and the names of the rank's own blocks."""
    family = subject(leg.name)
    teacher, student = family.teacher(), family.student()
    if leg.resumed is not None:
        # All that is to be resumed has other values.
        generator = torch.Generator().manual_seed(7 + rank)
        with torch.no_grad():
            for parameter in student.parameters():
                parameter.normal_(generator=generator)
    if isinstance(leg.carried, Plan):
        return teacher, student, family.blocks
    stage = leg.carried.stage_of(rank)
    begin = leg.carried.first_pair(stage)
    own = family.blocks[begin : begin + leg.carried.stages[stage].num_pairs]
    for model in (teacher, student):
        for name in set(family.blocks) - set(own):
            model.get_submodule(name).to("meta")
    return teacher, student, own


def begin(leg: Leg, teacher: nn.Module, student: nn.Module) -> Distilling:
    given: dict[str, Any] = {"optimizer": adamw, "device": CpuDevice(), "rank_timeout_s": 60.0} | leg.given
    scaling = SCALING if leg.is_scaled else None
    return distil(teacher, student, leg.carried, leg.workload, mse, loss_scaling=scaling, **given)


def train(training: Distilling, leg: Leg, rank: int, steps: range) -> list[list[list[float]]]:
    """The losses of all pairs, of every step and micro-batch; saved after every step where that is wanted."""
    pipeline = training.plan if isinstance(leg.carried, Plan) else leg.carried
    replica, num_replicas = (0, 1) if isinstance(pipeline, Plan) else (pipeline.replica_of(rank), pipeline.num_replicas)
    losses = []
    for step in steps:
        batches = leg.reference.steps[step][replica::num_replicas]
        losses.append([training.all_losses(training(**batch)).tolist() for batch in batches])
        training.step()
        if leg.into is not None:
            training.save(leg.into, data_position={"step": step + 1, "replica": replica})
    return losses


def carry(rank: int, leg: Leg) -> Went:
    """One leg; of several ranks on each of them."""
    teacher, student, own = models_of(leg, rank)
    before, resumed = snapshot(teacher), None
    torch.manual_seed(3 + rank if leg.resumed is None else 99)
    with quiet(), begin(leg, teacher, student) as training:
        if leg.resumed is not None:
            resumed = training.resume(leg.resumed)
            assert training.num_steps == resumed.step == leg.first
        losses = train(training, leg, rank, range(leg.first, leg.last))
        scalers = training.block_scalers
        scales = None if scalers is None else scalers.state_dict()
        state = state_by_name(training) if training.plan.n_shard == 0 and not is_in_parts(training) else None
        drawn = torch.rand(4).tolist()
    wrong = [f"teacher.{name}" for name in changed_here(teacher, before)]
    wrong += unlike_losses(leg, losses, rank)
    wrong += unlike_ends(leg, student)
    if leg.last == len(leg.reference.steps):
        for block, alone in zip(subject(leg.name).blocks, leg.reference.learnt, strict=True):
            if block in own:
                wrong += [f"student.{block}.{n}" for n in unlike(alone, student.get_submodule(block))]
                prefix = f"student.{block}."
                moments = {n.removeprefix(prefix): s for n, s in (state or {}).items() if n.startswith(prefix)}
                wrong += [] if state is None else unlike_moments(alone, moments)
    held = {name: value for name, value in student.state_dict().items() if not value.is_meta}
    return Went(wrong, resumed, scales, drawn, held)


def is_in_parts(training: Distilling) -> bool:
    return training.plan.parallel.value == "sharded"


def changed_here(teacher: nn.Module, before: dict[str, torch.Tensor]) -> list[str]:
    """As ``changed``, of what is not on the meta device."""
    after = teacher.state_dict()
    wrong = [name for name, value in before.items() if value.is_meta != after[name].is_meta]
    return wrong + [n for n, value in before.items() if not value.is_meta and not torch.equal(value, after[n])]


def unlike_ends(leg: Leg, student: nn.Module) -> list[str]:
    """What is in no block never changes; a resumed student had other values before."""
    inside = tuple(f"{block}." for block in subject(leg.name).blocks)
    plain, found = subject(leg.name).student().state_dict(), student.state_dict()
    return [n for n, value in plain.items() if not n.startswith(inside) and not torch.equal(value, found[n])]


def unlike_losses(leg: Leg, losses: list[list[list[float]]], rank: int) -> list[str]:
    pipeline = leg.carried
    replica, num_replicas = (0, 1) if isinstance(pipeline, Plan) else (pipeline.replica_of(rank), pipeline.num_replicas)
    wrong = []
    for pair, alone in enumerate(leg.reference.learnt):
        theirs = [step[replica::num_replicas] for step in alone.losses[leg.first : leg.last]]
        if [[of_pairs[pair] for of_pairs in step] for step in losses] != theirs:
            wrong.append(f"losses of pair {pair}")
    return wrong


@in_default_group
def carry_together(rank: int, leg: Leg, variant: str | None = None) -> Went:
    """``carry`` on the ranks of a pipeline, with a wrong variant of saving or resuming where one is named."""
    with WRONG[variant]():
        return carry(rank, leg)


# -- wrong variants --------------------------------------------------------------------------------------------------


def _new_scales(of_ranks: Any) -> Any:
    scales = joined(of_ranks)
    assert scales is not None
    return {name: state | {"num_good_steps": 0} for name, state in scales.items()}


def _buffers_of_the_first_stage(self: SavedByRanks, rank: int) -> dict[str, Any]:
    found = of_rank(self, rank)
    first = self._file(rank * self._num_stages)
    return {**found, "buffers": {n: first["buffers"].get(n, v * 0) for n, v in found["buffers"].items()}}


joined, of_rank = joined_stages._scales, SavedByRanks.of_rank
WRONG: dict[str | None, Callable[[], AbstractContextManager[Any]]] = {
    None: nullcontext,
    "random states": lambda: mock.patch.object(state_module, "set_random_states"),
    "moments": lambda: mock.patch.object(state_module.OptimizerState, "place"),  # type: ignore[attr-defined]
    "ends": lambda: mock.patch.object(state_module.CheckpointState, "_outside", return_value=[]),
    "scales begin anew": lambda: mock.patch.object(joined_stages, "_scales", _new_scales),
    "buffers of the first stage": lambda: mock.patch.object(SavedByRanks, "of_rank", _buffers_of_the_first_stage),
}


# -- refusals and kills ----------------------------------------------------------------------------------------------


@in_default_group
def refused(rank: int, leg: Leg, folder: Path, spoil: str | None) -> tuple[str, list[str]]:
    """The message of a resumption that is refused, and what is wrong with the run that goes on as if nothing were."""
    teacher, student, own = models_of(leg, rank)
    if spoil is not None and any(spoil.startswith(f"{block}.") for block in own):
        with torch.no_grad():
            teacher.get_parameter(spoil).add_(1e-3)
    before, message = snapshot(student), ""
    with quiet(), begin(leg, teacher, student) as training:
        try:
            training.resume(folder)
        except ProtwinError as error:
            message = f"{type(error).__name__}: {error}"
        losses = [] if spoil is not None else train(training, leg, rank, range(leg.first, leg.last))
    wrong = changed_here(student, before) if spoil is not None else unlike_losses(leg, losses, rank)
    return message, wrong


@in_default_group
def killed_while_saving(rank: int, leg: Leg, victim: int, at_save: int, where: str) -> None:
    """The ``victim`` is killed in its save number ``at_save``: before it writes its part, or what comes behind that."""
    saves = count()
    write_parts, write = rank_checkpoint._write_parts, rank_checkpoint.PieceWriter.write  # type: ignore[attr-defined]

    def die(place: str) -> None:
        if rank == victim and place == where and next(saves) == at_save:
            os.kill(os.getpid(), signal.SIGKILL)

    def dying_parts(*args: Any) -> None:
        die("before its part")
        write_parts(*args)
        die("behind its part")

    def dying_write(*args: Any) -> Any:
        found = write(*args)
        die("in its part")
        return found

    with (
        without_a_word(),
        mock.patch.object(rank_checkpoint, "_write_parts", dying_parts),
        mock.patch.object(rank_checkpoint.PieceWriter, "write", dying_write),  # type: ignore[attr-defined]
    ):
        carry(rank, leg)


@in_default_group
def until_killed(rank: int, leg: Leg, folder: Path, note: Path) -> Went | None:
    """Go on from the checkpoint, if there is one, to the end; notes on every rank what was saved for sure."""
    teacher, student, own = models_of(leg, rank)
    with without_a_word(), quiet(), begin(leg, teacher, student) as training:
        done = training.resume(folder).step if has_checkpoint(folder) else 0
        (note / f"from-{rank}").write_text(str(done))
        for step in range(done, leg.last):
            train(training, leg, rank, range(step, step + 1))
            training.save(folder)
            (note / f"saved-{rank}").write_text(str(step + 1))
    wrong = []
    for block, alone in zip(subject(leg.name).blocks, leg.reference.learnt, strict=True):
        wrong += [f"{block}.{n}" for n in unlike(alone, student.get_submodule(block))] if block in own else []
    return Went(wrong, done, None, [], {})
