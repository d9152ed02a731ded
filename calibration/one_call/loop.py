"""The loop of ``train``: steps, evaluations and checkpoints, as one would write them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from ...runtime.checkpoints.checkpoints import has_checkpoint
from ...runtime.model.batches import Batch, loss_of, on_device, scalar_of
from ...runtime.ranks.world import exchanged
from ...runtime.timing.within_budget import autocast_on
from ...runtime.training.training import Training
from ...shared.schema.workload import DType
from .options import Wanted
from .streams import BatchStream


@dataclass
class Loop:
    """One training from its first step, or from its checkpoint."""

    training: Training
    stream: BatchStream
    evaluation: BatchStream | None
    wanted: Wanted
    scheduler: Any
    """Of torch, or None; stepped after every step."""
    tell: Callable[[str], None]
    losses: list[float] = field(default_factory=list)
    evaluations: list[tuple[int, float]] = field(default_factory=list)

    def run(self, steps: int | None) -> None:
        """Until so many steps are done, with those of the checkpoint; None: until there are no more batches."""
        self._resume()
        training, wanted = self.training, self.wanted
        batches, last_saved = self.stream.batches(), None
        while steps is None or training.num_steps < steps:
            loss = self._step(batches)
            if loss is None:
                break
            self.losses.append(loss)
            if self.scheduler is not None:
                self.scheduler.step()
            done = training.num_steps
            # The position is asked for before the next batch is.
            if wanted.checkpoint_every is not None and done % wanted.checkpoint_every == 0:
                self._save()
                last_saved = done
            if wanted.evaluate_every is not None and done % wanted.evaluate_every == 0:
                self._evaluate()
        if self.losses and last_saved != training.num_steps:
            self._save()
        if self.losses and (not self.evaluations or self.evaluations[-1][0] != training.num_steps):
            self._evaluate()

    def _resume(self) -> None:
        folder = self.wanted.checkpoint
        if folder is None or not self.wanted.resume:
            return
        if not has_checkpoint(Path(folder)):
            self.tell(f"{folder} holds no checkpoint: begins at the first step")
            return
        resumed = self.training.resume(folder, scheduler=self.scheduler)
        self.stream.go_to(resumed.data_position)
        self.tell(f"goes on from step {self.training.num_steps}")

    def _save(self) -> None:
        if self.wanted.checkpoint is not None:
            position = self.stream.position
            self.training.save(self.wanted.checkpoint, scheduler=self.scheduler, data_position=position)

    def _step(self, batches: Iterator[Batch]) -> float | None:
        """One step; gives its mean loss, None if there are too few batches left for one."""
        wanted, stream = self.wanted, self.stream
        if stream.weighs or self.training.world is not None:
            ahead = list(islice(batches, wanted.micro_batches))
            if len(ahead) < wanted.micro_batches:
                self._leave_out(len(ahead))
                return None
            batches = iter(ahead)
            weights = [stream.weight(batch) for batch in ahead] if stream.weighs else None
        else:
            weights = None
        losses: list[torch.Tensor] = []
        for number in range(wanted.micro_batches):
            batch = next(batches, None)
            if batch is None:
                self.training.skip_step()
                self._leave_out(number)
                return None
            losses.append(self._backward(batch, number, weights))
        self.training.step()
        return torch.stack(losses).float().sum().item()

    def _backward(self, batch: Batch, number: int, weights: Sequence[int] | None) -> torch.Tensor:
        """Backward of one micro-batch; gives its part of the step's mean loss."""
        training, num_batches = self.training, self.wanted.micro_batches
        with self._autocast():
            loss = loss_of(training.model, self._on(batch), self.wanted.loss)
        if weights is not None:
            part = loss if num_batches == 1 else loss * (weights[number] / sum(weights))
            training.weigh(part, sum(weights)).backward()  # type: ignore[no-untyped-call]
        else:
            part = loss if num_batches == 1 else loss / num_batches
            part.backward()  # type: ignore[no-untyped-call]
        return part.detach()

    def _leave_out(self, number: int) -> None:
        if number:
            left = "1 batch makes" if number == 1 else f"{number} batches make"
            self.tell(f"the last {left} no step of {self.wanted.micro_batches}: left out")

    def _evaluate(self) -> None:
        """The mean loss, dropout off."""
        if self.evaluation is None:
            return
        training = self.training
        total, weight = 0.0, 0
        with training.evaluation():
            training.model.eval()
            for batch in self.evaluation.once():
                own = self.evaluation.weight(batch)
                with self._autocast():
                    total += scalar_of(training.model, self._on(batch), self.wanted.loss).item() * own
                weight += own
            training.model.train()
        if training.world is not None:
            total, weight = map(sum, zip(*exchanged(training.world, (total, weight)), strict=True))
        self.evaluations.append((training.num_steps, total / weight))
        self.tell(f"step {training.num_steps}: evaluation loss {total / weight:.4f}")

    def _autocast(self) -> Any:
        dtype = None if self.wanted.autocast is None else DType(self.wanted.autocast)
        return autocast_on(self.training.device.torch_device.type, dtype)

    def _on(self, batch: Batch) -> Batch:
        return on_device(batch, self.training.device.torch_device)
