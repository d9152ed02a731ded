"""The plan of a Lightning Trainer, and the training that carries it out while ``fit`` runs.

[Note: Micro-batches that are missing]
An epoch's last step may have fewer micro-batches than the plan.  The last one then runs again, for nothing: its
gradients are zeros, and what a step leaves behind is put back.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import nn

from ...shared.basics.errors import PlanError, ScheduleError
from ...shared.schema.optimizer import Optimizer
from ...shared.schema.plan import ParallelMode
from ..devices.device import TrainingDevice
from ..integrations.accelerated import training_mode
from ..integrations.largest_batch import size_of
from ..integrations.loop_run import LoopRun, Wishes
from ..integrations.made_optimizer import made_optimizer, rebind
from ..planning.planned import Planned, planned
from ..planning.request import PlanRequest
from ..training.guards import refuse_own_checkpointing
from ..training.training import Training
from .refusals import limit_of, refuse_module, refuse_other_step
from .steps import PREFIX, StepModule, largest_arguments, quiet


class LightningRun(LoopRun):
    """What a Trainer of Lightning knows of its plan."""

    def __init__(self, wishes: Wishes) -> None:
        super().__init__(wishes)
        self.has_ended = False
        """Whether a training has ended, and its optimizer with it."""
        self._steps: StepModule | None = None
        self._ending, self._evaluating = ExitStack(), ExitStack()
        self._is_evaluating = False
        self._micro_batches = 0
        """Of the running step, done."""
        self._given: tuple[Any, ...] = ()
        """What the step of the running micro-batch was given."""

    def plans_for(self, module: nn.Module) -> bool:
        """Whether the plan that is known is for ``module``."""
        return bool(self._planned_for) and self._planned_for[0]() is module

    # -- before and after --------------------------------------------------------------------------------------------

    def begin(self, strategy: Any, trainer: Any) -> None:
        """Find the plan and take the module over; the strategy's optimizer and schedulers are the plan's from now on.

        Raises what ``planned`` and ``carry_out`` raise, with the module as it was.
        """
        module = strategy.lightning_module
        refuse_module(module, strategy.optimizers)
        refuse_own_checkpointing(module.modules())
        made = made_optimizer(strategy.optimizers[0])
        with ExitStack() as undo:
            steps = _step_module(strategy, trainer)
            self._find(steps, strategy, trainer, made.name)
            steps.stepped = tuple(p for group in made.groups for p in group["params"])
            training = self._run_by_plan(steps, undo, optimizer=made.make, parameter_groups=made.groups)
            for config in strategy.lr_scheduler_configs:
                for bound, former in rebind(config.scheduler, training.optimizer):
                    undo.callback(setattr, bound, "optimizer", former)
            strategy.optimizers = [training.optimizer]
            plugin = strategy.precision_plugin
            plugin.clip_gradients = self._check_clipping
            undo.callback(plugin.__dict__.pop, "clip_gradients", None)
            self._micro_batches, self.has_ended = 0, False
            self._ending = undo.pop_all()

    def begin_evaluation(self, strategy: Any, trainer: Any) -> None:
        """Take the module over for ``validate``, ``test`` or ``predict`` by the plan of its training."""
        with ExitStack() as undo:
            self._run_by_plan(_step_module(strategy, trainer), undo)
            self._ending = undo.pop_all()

    def _run_by_plan(self, steps: StepModule, ending: ExitStack, **optimizing: Any) -> Training:
        training = self._take_over(steps, ending, **optimizing)
        ending.callback(self.leave_evaluation)
        self._steps = steps
        return training

    def _ended(self) -> None:
        super()._ended()
        self._steps = None
        self._given, self.has_ended = (), True

    def end(self) -> None:
        """The module is an ordinary one from now on.  Idempotent."""
        self._ending.close()

    # -- the plan ----------------------------------------------------------------------------------------------------

    def _find(self, steps: StepModule, strategy: Any, trainer: Any, optimizer: Optimizer) -> None:
        """The plan for the step that is asked for, unless it is known already."""
        limit = limit_of(trainer.gradient_clip_val)
        key = weakref.ref(steps.module), trainer.accumulate_grad_batches, limit, optimizer
        if self._planned_for == key:
            return
        wishes = self._wishes
        plan, workload = wishes.request.get("plan"), wishes.request.get("workload")
        if plan is not None:
            refuse_other_step(trainer, plan)
        root = strategy.root_device
        device = wishes.given_device(root.type, strategy.local_rank if root.index is None else root.index)
        if plan is not None and workload is not None:
            self.plan, self.workload, self.device = plan, workload, device
        else:
            request = {
                "micro_batches": trainer.accumulate_grad_batches,
                "max_gradient_norm": limit,
                "optimizer": optimizer if plan is None else plan.optimizer,
                "name": type(steps.module).__name__,
                **wishes.request,
            }
            if request.get("blocks") is not None:
                blocks = request["blocks"]
                request["blocks"] = PREFIX + blocks if isinstance(blocks, str) else [PREFIX + one for one in blocks]
            self.planned = self._search(steps, trainer, PlanRequest(**request), device)
            self.plan, self.workload, self.device = self.planned.plan, self.planned.workload, self.planned.device
        self._planned_for = key

    def _search(self, steps: StepModule, trainer: Any, request: PlanRequest, device: TrainingDevice) -> Planned:
        given: tuple[Any, ...]
        if self._wishes.batch is not None:
            given = tuple(trainer.fit_loop.epoch_loop._build_kwargs({}, self._wishes.batch, 0).values())
        else:
            given, number, is_all = largest_arguments(trainer)
            if not is_all and trainer.is_global_zero:
                self._wishes.tell(
                    f"the plan is for the largest of the first {number} batches ({size_of(given[0]):,} scalars). Pass "
                    f"batch= if training meets larger ones."
                )
        with quiet(steps.module), training_mode(steps.module), steps.traced_with(*given) as batch:
            return planned(steps, batch, request, device=device, tell=self._wishes.tell)

    # -- the loop ----------------------------------------------------------------------------------------------------

    def training_step(self, trainer: Any, given: tuple[Any, ...]) -> Any:
        """The step of one micro-batch.  Raises ScheduleError if it gives no loss, or steps have other micro-batches."""
        assert self.training is not None
        assert self._steps is not None
        self.leave_evaluation()
        if trainer.accumulate_grad_batches != self.training.plan.micro_batches:
            raise ScheduleError(
                f"accumulate_grad_batches is {trainer.accumulate_grad_batches} now, but the plan has "
                f"{self.training.plan.micro_batches} micro-batches in every step. Leave out what changes it "
                f"(GradientAccumulationScheduler), or train each number by a fit() of its own."
            )
        # A step may take what it wants out of its batch, and that of the last one may run again.
        self._given = (copy.copy(given[0]) if isinstance(given[0], Mapping) else given[0], *given[1:])
        output = self._steps(*given)
        if output is None:
            raise ScheduleError(
                "training_step() returned None, which skips the batch, but in a plan every forward has its backward. "
                "Return the loss times 0, or leave such batches out of the data."
            )
        return output

    def after_backward(self, is_last: bool) -> None:
        """A micro-batch is through; ``is_last``: a step follows.  See [Note: Micro-batches that are missing]."""
        assert self.training is not None
        assert self._steps is not None
        self._micro_batches += 1
        if not is_last:
            return
        missing = self.training.plan.micro_batches - self._micro_batches
        self._micro_batches = 0
        for _ in range(missing):
            with quiet(self._steps.module):
                output = self._steps(*self._given)
                loss = output["loss"] if isinstance(output, Mapping) else output
                (loss * 0.0).backward()
        self._given = ()

    def _check_clipping(self, _: Any, clip_val: float | None = 0.0, gradient_clip_algorithm: Any = None) -> None:
        """Stands for what clips in Lightning: the plan does.  Raises ScheduleError if it is to clip otherwise."""
        assert self.training is not None
        asked, limit = limit_of(clip_val), self.training.plan.max_gradient_norm
        algorithm = str(getattr(gradient_clip_algorithm, "value", gradient_clip_algorithm) or "norm")
        if asked is not None and (asked != limit or algorithm != "norm"):
            raise ScheduleError(
                f"gradients are to be clipped by {algorithm} to {asked:g}, but the plan limits their norm to "
                f"{'nothing' if limit is None else f'{limit:g}'} (max_gradient_norm). Pass gradient_clip_val to the "
                f"Trainer, and the same to clip_gradients(). Nothing was changed; step() is still possible."
            )

    # -- without gradients -------------------------------------------------------------------------------------------

    def evaluate(self, step: str, given: tuple[Any, ...]) -> Any:
        """What ``step`` gives, ``validation_step`` or one of the others, with every section's weights brought to it."""
        assert self.training is not None
        assert self._steps is not None
        if not self._is_evaluating:
            self._evaluating.enter_context(self.training.evaluation())
            self._is_evaluating = True
        with self._steps.running(step):
            return self._steps(*given)

    def leave_evaluation(self) -> None:
        """What follows is no evaluation.  Idempotent."""
        self._is_evaluating = False
        self._evaluating.close()

    # -- saving ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The module's, in copies on the host; of several ranks, the first one's, and the others' are empty."""
        assert self.training is not None
        self.leave_evaluation()
        return {name.removeprefix(PREFIX): value for name, value in self.training.state_dict().items()}

    def optimizer_state(self) -> dict[str, Any]:
        """What the optimizer of a plain training would give.  Raises PlanError where ranks have parts of it."""
        assert self.training is not None
        self.leave_evaluation()
        self._check_whole("save_weights_only=True of ModelCheckpoint, which a training does not resume from")
        return self.training.optimizer.state_dict()

    def load_optimizer_state(self, state: Mapping[str, Any]) -> None:
        """Go on from it.  Raises PlanError where ranks have parts of it."""
        assert self.training is not None
        self._check_whole("the weights alone (weights_only)")
        self.training.optimizer.load_state_dict(dict(state))

    def _check_whole(self, otherwise: str) -> None:
        assert self.training is not None
        if self.training.plan.parallel is ParallelMode.SHARDED:
            raise PlanError(
                f"every rank of the plan has parts of the optimizer's state (parallel = sharded), which a checkpoint "
                f"of Lightning, one file, has no room for. Pass modes=[ParallelMode.REPLICATED] to "
                f"planned_lightning(), save {otherwise}, or call trainer.protwin.training.save(folder) between steps."
            )


def _step_module(strategy: Any, trainer: Any) -> StepModule:
    # Functions, which a copy of the module shares with it: a trace may copy it, and is not to copy the Trainer.
    def context(step: str) -> AbstractContextManager[Any]:
        name = {"training_step": "train", "validation_step": "val"}.get(step, step.removesuffix("_step"))
        found: AbstractContextManager[Any] = getattr(strategy.precision_plugin, f"{name}_step_context")()
        return found

    def attached(module: Any) -> None:
        if module._trainer is None:
            module._trainer = trainer

    return StepModule(strategy.lightning_module, context, attached)


def to_device(module: nn.Module, device: torch.device) -> None:
    """Move what no plan moves: submodules without parameters that know how to move, such as metrics."""
    for child in module.modules():
        if type(child)._apply is not nn.Module._apply and next(child.parameters(), None) is None:
            child.to(device)
