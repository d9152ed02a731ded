"""The steps of a bypass run: what is trained, told, validated and saved, and when.

[Note: One checkpoint per step]
A step may be due for several reasons, and is saved once: as the best if it is, else as the final one, else as one of
every so many.  All hold the same, so that the newest is what a run goes on from, whatever its role.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Final

from ...shared.basics.errors import FileError
from ..data.sources import Batch
from ..data.token_stream import TokenStream
from ..distillation.distil import Distilling
from ..distillation.learning_rate import CosineRate
from ..distillation.pairs import Pairs
from ..runs.run_folder import CheckpointRole, RunFolder
from ..runs.run_settings import KeptWeights
from .interruption import Interruption, RunInterruptedError
from .losses import BypassHistory, LossMeter, Validation, finite, position_of, report_of, told
from .ranks import BypassRanks
from .validation import language_model_losses

HISTORY: Final = "losses.json"
"""Name of a run's ``BypassHistory`` in its folder."""


@dataclass(slots=True)
class Position:
    """What a run knows besides the training itself."""

    step: int = 0
    """Completed steps."""
    best_loss: float | None = None
    """The lowest validation loss so far; None: none was finite."""
    best_step: int | None = None
    """After how many steps."""
    teacher_loss: float | None = None
    """Once it is known."""


@dataclass
class BypassLoop:
    """One run, while its models are trained."""

    folder: RunFolder
    training: Distilling
    teacher: Any
    student: Any
    source: TokenStream
    validation: Sequence[Batch]
    tell: Callable[[str], None]
    on_progress: Callable[[int, int], None]
    interruption: Interruption
    look: Callable[[Distilling], None] | None = None
    """Sees the training when all steps are done."""
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    """What forwards run within: autocast, or nothing."""
    ranks: BypassRanks = field(default_factory=BypassRanks)
    at: Position = field(default_factory=Position)

    def __post_init__(self) -> None:
        settings = self.folder.settings
        budget = settings.budget
        self._settings = settings
        self._rate = CosineRate(
            settings.learning_rate,
            budget.warmup_steps(settings.warmup_frac),
            budget.num_steps,
            settings.least_rate_frac,
        )
        pairs = self.training.model
        assert isinstance(pairs, Pairs)
        self._num_pairs = pairs.num_pairs
        rows = settings.log_every * (settings.micro_batches // self.ranks.num_replicas)
        self._meter = LossMeter(self._num_pairs, rows, self.training.device.torch_device)
        self._history = BypassHistory(blocks=pairs.all_blocks)
        self._held: Counter[str] = Counter()
        """In how many steps blocks were held since the last report."""

    @property
    def ended_with(self) -> Path:
        """The checkpoint whose weights the run has ended with."""
        is_best = self._settings.kept_weights is KeptWeights.BEST and self.at.best_step is not None
        found = self.folder.best if is_best else self.folder.newest
        assert found is not None, "the last step is saved, and the best one"
        return found.path

    @property
    def history_path(self) -> Path:
        """Where the history lies."""
        return self.folder.path / HISTORY

    def run(self) -> None:
        """Go on from the newest checkpoint to the end; the training then holds the weights that the run ends with.

        Raises RunInterruptedError, once all is saved, if the user wants that, and ProtwinError.
        """
        self._resume()
        settings, steps = self._settings, self._settings.budget.num_steps
        batches = self.source.batches(self.at.step * settings.micro_batches)
        while self.at.step < steps:
            step = self.at.step + 1
            self.training.set_learning_rate(self._rate.at(step))
            for batch in self.ranks.own_batches(list(islice(batches, settings.micro_batches))):
                tokens = batch["input_ids"].to(self.training.device.torch_device)
                with self.around():
                    losses = self.training(input_ids=tokens)
                self._meter.add(losses)
            self.training.step()
            self._held.update(self.training.held_blocks)
            self.at.step = step
            self.on_progress(step, steps)
            self._after_step(is_last=step == steps)
        if self.look is not None:
            self.look(self.training)
        self._take_best()

    def _after_step(self, *, is_last: bool) -> None:
        """Report, validate and save what is due.  Raises RunInterruptedError."""
        step, settings, before = self.at.step, self._settings, self._history
        if is_last or step % settings.log_every == 0:
            report = report_of(self.ranks.all_losses(self._meter.taken()), step, self._rate.at(step))
            self._history = self._history.with_report(report)
            self.tell(told(report, self._history.blocks))
            all_held = self.ranks.held(self._held)
            self._held.clear()
            if all_held:
                held = ", ".join(f"{name} ({steps}x)" for name, steps in all_held.items())
                self.tell(f"step {step}: held, since the norm of their gradients was not finite: {held}")
        is_best = (is_last or _is_due(step, settings.validate_every)) and self._is_best()
        role = _role(is_best=is_best, is_last=is_last, is_due=_is_due(step, settings.save_every))
        is_wanted = self.interruption.is_wanted and not is_last
        if self._history is not before:
            # First: what a checkpoint does not know yet is left out when the run goes on.
            self.ranks.decided(lambda: self._history.save(self.history_path))
        if role is not None or is_wanted:
            self._save(role or CheckpointRole.PERIODIC)
        if is_wanted:
            raise RunInterruptedError(self.folder.path, step)

    def _is_best(self) -> bool:
        """Validate; whether the weights are the best so far, and these are what the run is to end with."""
        knows_teacher = self.at.teacher_loss is not None
        models = [self.student] if knows_teacher else [self.student, self.teacher]
        with self.around():
            losses = language_model_losses(self.training, models, self.validation)
        if not knows_teacher:
            self.at.teacher_loss = losses[1]
        loss, of_teacher = losses[0], self.at.teacher_loss
        assert of_teacher is not None
        found = Validation(step=self.at.step, student_loss=finite(loss), teacher_loss=finite(of_teacher))
        self._history = self._history.with_validation(found)
        self.tell(
            f"step {self.at.step}: language-model loss of the student {loss:.4f}, of the teacher {of_teacher:.4f}"
        )
        if not math.isfinite(loss) or (self.at.best_loss is not None and loss >= self.at.best_loss):
            return False
        self.at.best_loss, self.at.best_step = loss, self.at.step
        return self._settings.kept_weights is KeptWeights.BEST

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def _save(self, role: CheckpointRole) -> None:
        at = self.at
        position = {
            **self.source.identity,
            **position_of(at.best_loss, at.teacher_loss, self.ranks.all_losses(self._meter.rows())),
            "best_step": at.best_step,
        }
        self.training.save(self.folder.checkpoint_path(at.step, role), data_position=position)
        self.ranks.decided(self.folder.remove_superseded)

    def _resume(self) -> None:
        """Go on from the newest checkpoint, if there is one.  Raises FileError if it is of another run."""
        newest = self.ranks.decided(lambda: self.folder.newest)
        if newest is None:
            return
        found = self._resumed(newest.path)
        own = dict(self.source.identity)
        if not isinstance(found, dict) or {name: found.get(name) for name in own} != own:
            raise FileError(f"{newest.path} is a checkpoint of another run: its data are others. Name another folder.")
        self.at = Position(newest.step, found["best_loss"], found["best_step"], found["teacher_loss"])
        self._meter.restore(self.ranks.own_losses(found["losses"], self.training.first_pair, self._num_pairs))
        # Rank 0 alone writes it again.
        if self.ranks.speaks and self.history_path.exists():
            self._history = BypassHistory.load(self.history_path).until(newest.step)
        self.tell(f"goes on after step {newest.step}")

    def _resumed(self, path: Path) -> Any:
        """The data position of a checkpoint that the training goes on from.

        With other replicas each rank has other micro-batches of the same steps, which the run's settings name.
        """
        found = self.training.resume(path, allow_changed_step=True)
        own = self.training.plan.host_gradients
        if found.step_knobs["host_gradients"] != own:
            raise FileError(
                f"{path} was saved under a plan with host_gradients {found.step_knobs['host_gradients']}, and this one "
                f"has {own}, so that steps would compute something else. Carry out a plan that has the same."
            )
        return found.data_position

    def _take_best(self) -> None:
        """Give the student the weights that the run ends with."""
        is_best = self._settings.kept_weights is KeptWeights.BEST
        if not is_best or self.at.best_step in (None, self.at.step):
            if is_best and self.at.best_step is None:
                self.tell("no validation loss was finite, so that the run ends with its last weights")
            return
        best = self.ranks.decided(lambda: self.folder.best)
        if best is None or best.step != self.at.best_step:
            raise FileError(
                f"{self.folder.path} lacks the checkpoint after step {self.at.best_step}, whose weights were the best. "
                f"Run again in a new folder, or end with the last weights (--keep final)."
            )
        self._resumed(best.path)
        self.tell(f"the weights after step {best.step} were the best")


def _is_due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def _role(*, is_best: bool, is_last: bool, is_due: bool) -> CheckpointRole | None:
    """Why a step is saved (Note: One checkpoint per step); None: it is not."""
    if is_best:
        return CheckpointRole.BEST
    if is_last:
        return CheckpointRole.FINAL
    return CheckpointRole.PERIODIC if is_due else None
