"""Carrying out a plan: the schedule, interpreted on a real model.

The model's own forward and backward are the compute tasks, and hooks on its blocks advance the program to them
(``compute_lane``).  All other tasks run on lanes of their own beside it: ``transfer_lanes`` says when each does,
``lane_work`` what it does.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from ...shared.basics.errors import PlanError, ScheduleError
from ...shared.basics.progress import to_stderr
from ...shared.schema.plan import ParallelMode, Plan
from ...shared.schema.record import Record
from ...shared.schema.schedule import TaskKind
from ...shared.schema.workload import Workload
from ...shared.tables.explain import explain
from ..checkpoints.checkpoints import write_checkpoint
from ..checkpoints.plan_change import check_change, check_host
from ..checkpoints.rank_checkpoint import write_by_ranks
from ..checkpoints.saved import Saved
from ..checkpoints.saved_by_ranks import RankPlace, open_checkpoint
from ..checkpoints.state import Resumed, Scheduler
from ..hooks.refusals import refuse_cache, refuse_call
from ..lanes.progress import Call, Progress, TrainingPhase, refuse_copy
from ..model.nested_tensors import tensors_in
from ..optimizers.facade import ParameterStates
from ..optimizers.loss_scaling import LossScaler
from ..ranks.agreement import agree, agreed
from ..recording.counts import Counted, Counts
from ..recording.rank_records import record_of_ranks
from ..recording.summaries import StepSummary, Summaries
from .assembly import Assembly, Callbacks, Kept, Parts
from .evaluation import refuse_other_gradient_mode
from .guards import refuse_own_checkpointing, refuse_with_ranks, state_on_host, weight_of_rank
from .plan_changes import changed_parts
from .settings import TrainingSettings


class Training(Counted):
    """A model in the hands of a schedule.

    It lives as long as the model, whose ``training_of`` it is, until it is closed.
    """

    def __init__(self, model: nn.Module, plan: Plan, workload: Workload, settings: TrainingSettings) -> None:
        # First of all: whatever is raised below, __del__ asks for the phase.
        self._progress = Progress(plan.micro_batches)
        self.workload = workload
        self.device = settings.device
        self.world = settings.world
        """The ranks that train the same together, this one among them; None if it is alone."""
        self.everybody, self.stages = settings.everybody, settings.stages  # all ranks; who has what of a pipeline
        self.model = model
        self._resumed_steps = 0
        self._earlier = Counts()
        """What was done by plans before the present one."""
        self._earlier_peak_bytes = 0
        self._summaries: Summaries | None = None
        self._replanning = settings.replanning
        callbacks = Callbacks(
            enter_model=self._enter_model,
            step=self._step,
            has_gradients=self._has_gradients,
            optimizer_state=self._optimizer_state,
            set_optimizer_state=self._set_optimizer_state,
        )
        self._assembly = Assembly(
            model=model,
            plan=plan,
            workload=workload,
            settings=settings,
            progress=self._progress,
            owner=self,
            callbacks=callbacks,
        )
        self._checkpointable = [m for m in model.modules() if hasattr(m, "gradient_checkpointing")]
        # Last of all: whatever is raised afterwards, nobody would give the model back.
        self._take(plan, self._assembly.build())

    def _take(self, plan: Plan, parts: Parts) -> None:
        self.plan = plan
        self.schedule = parts.schedule
        self.loss_scaler = parts.loss_scaler  # of the losses, if they are scaled
        self.optimizer = parts.held.optimizer
        """What schedulers take: the user's parameter groups."""
        self._held = parts.held
        self._layout = parts.layout
        self._recorder = parts.recorder
        self._metering = parts.metering
        self._placed = parts.held.placed
        self._offloaded_weights = parts.held.offloaded_weights
        self._taken_over = parts.held.taken_over
        self._access = parts.held.access
        self._state = parts.held.state
        self._lanes = parts.lanes
        self._compute = parts.compute
        self._evaluation = parts.evaluation
        self._walker = parts.walker
        self._outputs = parts.outputs
        self._buffers = parts.buffers
        self._undo = parts.undo
        for name in ("_state", "_held"):
            self._undo.callback(self.__dict__.pop, name, None)

    # -- training ----------------------------------------------------------------------------------------------------

    def _enter_model(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Runs before the walker's hook of the model's forward."""
        refuse_call(module, kwargs)
        is_evaluating = self._progress.phase is TrainingPhase.EVALUATING
        refuse_other_gradient_mode(is_evaluating=is_evaluating)
        self._progress.check_usable()
        if is_evaluating:
            return
        refuse_cache(kwargs)
        self._progress.check(Call.FORWARD, self._compute.task_at_hand)
        refuse_own_checkpointing(self._checkpointable)
        self._taken_over.check()
        self._placed.check_parameters()
        self._offloaded_weights.check()
        # A weight's cast that autocast keeps from an earlier forward is stale, and its gradient would come late.
        torch.clear_autocast_cache()
        if self._progress.phase is TrainingPhase.IDLE:
            self.optimizer.begin_iteration()
        self._compute.begin_micro_batch(list(tensors_in((args, kwargs))))

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the scale of this step, to run backward from.  Raises ScheduleError without loss_scaling."""
        self._progress.check_usable()
        if not isinstance(self.loss_scaler, LossScaler):
            raise ScheduleError("losses are not scaled here. Pass loss_scaling=LossScaling() to carry_out().")
        return self.loss_scaler.scale_loss(loss)

    def weigh(self, loss: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """The loss times ``num_tokens``, as a part of the mean of all ranks' ``num_tokens``, to run backward from.

        Gradients are means over ranks, in which each counts alike.  Of losses that are means over a rank's tokens, this
        makes the mean over the tokens of all ranks.  With several micro-batches: each one's loss times its part of the
        rank's tokens in the step, and these for ``num_tokens``.  All ranks call it equally often, at the same places of
        a step.  One rank alone gets the loss as it is.  Raises PlanError, on all ranks, if a number is negative or all
        are 0.
        """
        self._progress.check_usable()
        of_ranks = [num_tokens] if self._placed.ranks is None else self._placed.ranks.numbers(num_tokens)
        weight = weight_of_rank(num_tokens, of_ranks)
        return loss if weight is None else loss * weight

    def step(self) -> None:
        """Step the persistent chunks and end the iteration; the others are stepped by CPU Adam meanwhile.

        The same as ``optimizer.step()``.  Raises ScheduleError without a completed backward, and whatever a lane
        raised.
        """
        # By way of the optimizer, so that schedulers notice, and hooks on its step run.
        self.optimizer.step()

    def _step(self) -> None:
        self._progress.check(Call.STEP, self._compute.task_at_hand)
        self._offloaded_weights.check()
        self.optimizer.begin_step()
        self._recorder.add(self._compute.step_on_device())
        if self._buffers is not None:
            with self._compute.failing():
                self._buffers.settle()
        self.optimizer.end_step()
        if self.loss_scaler is not None:
            self.loss_scaler.end_step()
        if self._outputs is not None:
            self._outputs.check()
        if self._summaries is not None:
            held = self._placed.held_blocks
            self._summaries.end_step(self.num_steps, self.peak_device_bytes, self._recorder.logs, held)
        if self._replanning is not None:
            self._replanning.after_step(self)

    def skip_step(self) -> None:
        """Give the running iteration up, with all its micro-batches, and let the next forward begin it anew.

        What follows is, bit for bit, what follows in a plain loop that calls ``optimizer.zero_grad()`` and goes on with
        its next batch: gradients and saved activations are dropped, nothing is stepped, and random states and buffers
        stay what forward has made of them.  May be called at any time, after an error above all (a bad batch, a lack of
        memory, Ctrl-C); without a running iteration it does nothing.

        Sure to be possible until backward of the last micro-batch begins; until it ends, if the norm of all gradients
        is limited; until the step on the device begins, with ``keep_last_step``.  Raises ScheduleError, with nothing
        changed, where CPU Adam has stepped weights already; and whatever kept an earlier step from being completed.
        """
        self._progress.check_open()
        if self._progress.is_idle and self._lanes.failure is None:
            return
        refuse_with_ranks(self.plan, "skip_step(): the others may have met in collectives of this step already")
        self._compute.skip_step()
        self._walker.forget()
        torch.clear_autocast_cache()
        if self.loss_scaler is not None:
            self.loss_scaler.skip_step()
        self._recorder.interrupt(self._progress.iteration)

    def _has_gradients(self) -> bool:
        """Whether a backward of this iteration has begun."""
        first = next(task.id for task in self.schedule.tasks if task.kind is TaskKind.BACKWARD)
        return self._compute.task_at_hand.id >= first

    def synchronize(self) -> None:
        """Wait until every task of the completed iterations has ended.  Raises what one of them raised.

        The next iteration starts with idle lanes, so a Record counts neither it nor the one before.
        """
        self._progress.check_usable()
        self._lanes.drain(before=self._progress.iteration)
        self._recorder.interrupt(self._progress.iteration)

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the rate of every group, from the next step on.  Raises PlanError unless finite and not negative."""
        if not 0 <= learning_rate < float("inf"):
            raise PlanError(f"learning rate {learning_rate} is not finite and at least 0.")
        self._progress.check_usable()
        if not self._progress.allows(Call.BETWEEN_STEPS):
            raise ScheduleError("the learning rate can change between step() and the next forward alone.")
        self.optimizer.set_learning_rate(learning_rate)

    # -- between two steps -------------------------------------------------------------------------------------------

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Within the block the model runs forward without gradients, on batches of any shape that memory allows.

        Every block's chunks come to the device when it runs and go after it; nothing else is there besides the
        persistent ones.  Gradients are off; ``model.eval()`` and ``model.train()`` are the caller's, as in a plain
        loop.  Steps of the iterations before are completed first, and training goes on as if nothing had been in
        between, but for what forward itself changes (random states, running statistics in training mode).  Ranks that
        have parts of weights evaluate together: all of them, equally often, in the same order.  Raises
        ScheduleError between a forward and its step, or within another evaluation.
        """
        self._progress.check(Call.EVALUATE, self._compute.task_at_hand, "the model can be evaluated")
        self._offloaded_weights.check()
        self.synchronize()
        self._lanes.settle(self._progress.iteration)
        with self._compute.changing_state(Call.EVALUATE):
            self._compute.suspend()
        try:
            with torch.no_grad(), self._evaluation.running():
                yield
        finally:
            # Within the block the training may have been closed, or a resume have left it half done.
            if self._progress.phase is TrainingPhase.EVALUATING:
                with self._compute.changing_state(Call.END_EVALUATION):
                    self._compute.go_on()

    def state_dict(self) -> dict[str, Any]:
        """What ``model.state_dict()`` holds, in copies on the host; tied weights are one tensor.

        To be called between step() and the next forward; changes nothing that follows, and needs no device memory.
        Of several ranks all have to call it: the first gets all weights, chunk by chunk, and the others an empty dict.
        ``load_state_dict`` of another model takes it, and ``save_pretrained(folder, state_dict=...)`` of transformers.
        """
        self._check_between_steps("weights can be read")
        self.synchronize()
        return state_on_host(self.model, self._placed, self._access)

    def _optimizer_state(self) -> ParameterStates:
        self._refuse_parts("reading the optimizer's state")
        self._check_between_steps("the optimizer's state can be read")
        self.synchronize()
        return self._state.optimizer.by_parameter()

    def _set_optimizer_state(self, groups: list[dict[str, Any]], states: ParameterStates) -> None:
        self._refuse_parts("replacing the optimizer's state")
        self._check_between_steps("the optimizer's state can be replaced")
        self.synchronize()
        whole = self._state.optimizer.checked(states)
        with self._compute.changing_state(Call.BETWEEN_STEPS), self._at_rest():
            self._state.optimizer.set_by_parameter(groups, whole)

    def _refuse_parts(self, what: str) -> None:
        if self.plan.parallel is ParallelMode.SHARDED:
            refuse_with_ranks(self.plan, f"{what}: every rank has parts of it")

    def change_plan(self, plan: Plan) -> None:
        """Go on by ``plan`` from the next forward on: what follows is bit for bit what would have followed.

        To be called between step() and the next forward.  The model, its parameters, ``optimizer`` with its groups and
        hooks, schedulers, the loss scaler and random states stay the same; weights and the optimizer's state move, by
        way of the host's memory (``change_bytes`` of ``runtime/checkpoints/plan_change.py``), without files.  A Record
        is of the plan that is carried out when it is made.  Raises PlanError, with nothing changed, if ``plan`` is for
        another workload, optimizer or step, does not fit the device or the host, or if one of the two has several
        ranks, state on a disk, or a student; if the device has no room after all, its out-of-memory error, and goes on
        by the plan that it had.
        """
        self._check_between_steps("the plan can be changed")
        self._offloaded_weights.check()
        check_change(self.plan, plan)
        kept, progress = Kept(optimizer=self.optimizer, scaler=self.loss_scaler), Progress(plan.micro_batches)
        assemble = partial(self._assembly.going_on, progress=progress, kept=kept)
        check_host(self.workload, assemble(plan).check_plan(), plan)
        self.synchronize()
        with self._compute.changing_state(Call.BETWEEN_STEPS):
            done, peak_bytes = self.counts, self.peak_device_bytes
            now = changed_parts(assemble, self.plan, plan, self._held, self._undo)
        self._resumed_steps += self._progress.iteration
        self._earlier, self._earlier_peak_bytes, self._progress = done, peak_bytes, progress
        self._take(now.plan, now.parts)
        if self._summaries is not None:
            self._summaries.go_on_by(self.schedule)
        now.check()

    # -- saving and resuming -----------------------------------------------------------------------------------------

    def save(self, folder: str | Path, *, scheduler: Scheduler | None = None, data_position: Any = None) -> None:
        """Save everything that training needs to go on into ``folder``, in the place of the checkpoint that is there.

        To be called between step() and the next forward; changes nothing that follows.  ``data_position`` is whatever
        the loop needs to find its next batch: numbers, text, lists, tables, tensors.  ``folder`` is replaced when the
        new checkpoint is complete, and loads at every moment.  Raises FileError if it cannot be written.

        Ranks save together: all of them call this, with the same ``folder``, which all of them see, and each with its
        own ``data_position``.  Every rank writes its part of weights and optimizer, its random states and buffers.
        What one of them raises, all do.
        """
        agreed(self.everybody, lambda: self._check_between_steps("a training can be saved"))
        self.synchronize()
        if self.everybody is None:
            write_checkpoint(folder, self._state.collect(self.num_steps, scheduler, data_position))
            return
        own = agreed(self.everybody, lambda: self._state.collect_own(self.num_steps, scheduler, data_position))
        write_by_ranks(self.everybody, folder, own)

    def resume(
        self, folder: str | Path, *, scheduler: Scheduler | None = None, allow_changed_step: bool = False
    ) -> Resumed:
        """Go on from the checkpoint in ``folder``, which may have been saved under another plan, or by other ranks.

        Weights, optimizer, options of the parameter groups, ``scheduler``, random states and buffers become what they
        were, so that what follows is, bit for bit, what would have followed there.  To be called between step() and
        the next forward; on all ranks.  ``allow_changed_step``: under a plan with other ``micro_batches`` or
        ``max_gradient_norm`` too, where what follows is not what would have followed there.  Raises FileError, with
        nothing changed, if the checkpoint is missing, damaged, of another model, optimizer or scheduler, of a plan
        whose steps compute something else, or written by a newer version.  What one rank raises, all do.

        The number of ranks may be another one than when it was saved.  Ranks that were there go on from their own
        random states and buffers; further ones have the buffers of rank 0, and random states that follow from its seed
        and their number.  ``data_position`` is rank 0's then, and ``data_positions`` has those of all that have saved.
        """
        ranks, place = self.everybody, RankPlace.of(self.everybody, self.stages)

        def opened() -> Saved:
            self._check_between_steps("a training can be resumed")
            return open_checkpoint(folder, workload=self.workload, place=place)

        saved = agreed(ranks, opened)
        told = f"step {saved.manifest.step} ({saved.manifest.digest[:16]})"
        agree(ranks, {"the checkpoint that they resume from": told})
        agreed(ranks, lambda: self._state.check(saved, scheduler, allow_changed_step=allow_changed_step))
        self.synchronize()
        self._lanes.settle(self._progress.iteration)
        with self._compute.changing_state(Call.BETWEEN_STEPS), self._at_rest():
            resumed = agreed(ranks, lambda: self._state.place(saved, scheduler))
        self._resumed_steps = resumed.step - self._progress.iteration
        return resumed

    @contextmanager
    def _at_rest(self) -> Iterator[None]:
        """Within the block no lane runs, if chunks lie on a disk, or in parts with ranks: these are read ahead."""
        if not self.plan.n_disk_state and self.world is None:
            yield
            return
        self._compute.suspend()
        yield
        self._compute.go_on()

    def _check_between_steps(self, what: str) -> None:
        self._progress.check(Call.BETWEEN_STEPS, self._compute.task_at_hand, what)

    # -- asking ------------------------------------------------------------------------------------------------------

    @property
    def counts(self) -> Counts:
        """What was moved and stepped so far."""
        return self._earlier + self._lanes.work.counts(self._progress.iteration)

    @property
    def num_steps(self) -> int:
        """Completed steps, with those of the checkpoint that was resumed from."""
        return self._resumed_steps + self._progress.iteration

    @property
    def peak_device_bytes(self) -> int:
        """Highest level seen by the ledger so far; on CUDA, by the allocator."""
        return max(self._earlier_peak_bytes, self._metering.peak_bytes)

    def explain(self) -> str:
        """What every iteration does with each block and chunk, as text: two tables and a summary.

        It names the class of the optimizer that steps.
        """
        return explain(self.schedule, self.plan, self.workload, self._layout, optimizer=self._placed.optimizers.name)

    def report_every(
        self, steps: int, *, to: Callable[[StepSummary], None] = to_stderr, predicted: Record | None = None
    ) -> None:
        """Tell a summary after every so many steps: ``str()`` of it is a line.

        ``predicted`` is what the search or the simulator says of the plan.  Raises ProtwinError unless ``steps`` is
        positive.
        """
        of_ranks = self.plan.micro_batches * self.plan.num_ranks
        samples, tokens = self.workload.num_samples * of_ranks, self.workload.num_tokens * of_ranks
        predicted_s = None if predicted is None else predicted.iteration_s
        self._summaries = Summaries(
            steps, to, self.schedule, self.device, num_samples=samples, num_tokens=tokens, predicted_step_s=predicted_s
        )

    def record(self, *, hardware_name: str = "", since: int = 0, until: int | None = None) -> Record:
        """The measured Record of the iterations from number ``since`` on and before ``until``, of the last 200.

        ``since=n, until=n + 1`` is iteration n alone.  The first three count in no Record, nor does the latest.

        After ``change_plan`` it is of the iterations since then, and the first three of these count in none.
        Several ranks make it together: all of them have to call this, and each gets what all have measured, with the
        times and the memory of the rank that waits least for the others.

        Raises ProtwinError if there are too few of them; of several ranks ScheduleError after ``close``.
        """
        since, until = since - self._earlier.num_iterations, until and until - self._earlier.num_iterations
        if self.world is None:
            return self._recorder.record(hardware_name=hardware_name, since=since, until=until)
        self._progress.check_records()
        return record_of_ranks(self._recorder, self.world, hardware_name=hardware_name, since=since, until=until)

    # -- ending ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Wait for the steps of completed iterations and give the model ordinary parameters again.  Idempotent.

        Ranks with parts of weights give each other the whole: all have to call it; after an error of one they are NaN.
        Raises what a lane raised since the last step, after the model was given back.  Chunks whose CPU Adam has run
        in an iteration that did not complete keep that step, unless ``keep_last_step`` was chosen.
        """
        if self._progress.phase is TrainingPhase.CLOSED:
            return
        is_idle = self._progress.is_idle
        self._progress.advance(Call.CLOSE)
        with self._undo:
            if self._progress.failure is not None:
                # What has failed has been raised; the steps that were completed before are to be kept all the same.
                self._finish_last_step()
                return
            try:
                self._lanes.drain(before=self._progress.iteration)
                if is_idle:
                    self._lanes.settle(self._progress.iteration)
            except BaseException as error:
                # Other ranks wait for what this one's lanes do ahead, and this one would wait for their parts.
                self._lanes.separate(error)
                raise

    def _finish_last_step(self) -> None:
        """Wait until CPU Adam of the last completed iteration has run, as far as it can.

        That of earlier ones has: every gather waits for its chunk's.
        """
        self._lanes.wait_for_steps(self._progress.iteration - 1)

    __reduce_ex__ = refuse_copy

    def __del__(self) -> None:
        # The collector may come by on any thread, a lane's among them, and the model goes too: nothing to give back.
        if self._progress.phase is not TrainingPhase.CLOSED and "_undo" in self.__dict__:
            self._progress.advance(Call.CLOSE)
            self._lanes.let_end()
            self._placed.let_end()
            words = (
                f"a training of {type(self.model).__name__} was dropped with its model and without close(); steps "
                f"since the latest checkpoint are lost. Use it as a context manager, or call close()."
            )
            warnings.warn(words, ResourceWarning, stacklevel=2)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self._compute.failed(error)
        self.close()
