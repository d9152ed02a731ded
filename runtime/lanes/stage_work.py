"""The tasks of the collective lane that join a stage with its neighbours: activations that come and go."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import torch

from ...shared.basics.errors import ScheduleError
from ...shared.schema.schedule import Task, TaskKind
from ..devices.lanes import WorkerLane
from ..ranks.failures import let_go_of_groups, tell_failure
from ..ranks.stages import Neighbours, StageRanks

STAGE_KINDS = (TaskKind.RECEIVE, TaskKind.SEND)


class StageWork:
    """Receives the teacher's activation before a stage's first pair, and sends that behind its last pair."""

    def __init__(self, ranks: StageRanks, pace: Callable[[float, int], None] | None) -> None:
        """``pace``: as of ``Collectives``."""
        self._ranks = ranks
        self._neighbours = Neighbours(ranks, pace)
        self._leaving: threading.Thread | None = None
        """Closes groups when the lane is out of them."""
        self._lent: dict[tuple[int, TaskKind, int], torch.Tensor] = {}
        """Where an activation comes, or the one that goes, by iteration, kind and micro-batch: from ``lend`` (compute
        thread), when the forward that has made it is about to end, to the task (collective), which waits for that
        end."""

    def lend(self, kind: TaskKind, iteration: int, micro_batch: int, activation: torch.Tensor, size_bytes: int) -> None:
        """``activation`` is what the task moves, which has ``size_bytes``.  Raises ScheduleError if it has others."""
        if activation.nbytes != size_bytes:
            raise ScheduleError(
                f"the activation between two stages has {activation.nbytes:,} B, but the plan was made for "
                f"{size_bytes:,} B. Train with batches of the shapes that were traced."
            )
        self._lent[iteration, kind, micro_batch] = activation

    def work(self, task: Task, iteration: int) -> Callable[[], None]:
        """What the collective lane does for ``task``."""
        key = (iteration, task.kind, task.micro_batch)
        return partial(self._receive if task.kind is TaskKind.RECEIVE else self._send, key)

    def _receive(self, key: tuple[int, TaskKind, int]) -> None:
        self._neighbours.receive(self._lent.pop(key))

    def _send(self, key: tuple[int, TaskKind, int]) -> None:
        self._neighbours.send(self._lent.pop(key))

    def separate(self, error: BaseException, lane: WorkerLane | None) -> None:
        """No rank is to wait for this one any more: ``error`` has ended training here, and ``lane`` was cancelled.

        Groups are closed when their thread is out of them: until then others may still be served.
        """
        world = self._ranks.world
        tell_failure(world.store, world.rank, error)
        let_go_of_groups(error)
        self._leaving = threading.Thread(target=self._leave, args=(lane,), name="protwin-stage-leaving", daemon=True)
        self._leaving.start()

    def _leave(self, lane: WorkerLane | None) -> None:
        if lane is not None:
            lane.close()
        self._neighbours.close()
        self._ranks.forget_groups()

    def forget(self) -> None:
        """Let go of what has not been moved; the lane has ended.  Where ranks part, wait until this one has left."""
        if self._leaving is not None:
            self._leaving.join()
        self._lent.clear()
