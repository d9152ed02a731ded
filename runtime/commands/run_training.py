"""The loop of ``protwin run``: a plan carried out on text, from the first step or from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice

import torch
from torch import nn

from ...shared.basics.errors import PlanError, ProtwinError
from ...shared.basics.progress import progress_bar
from ...shared.schema.plan import Plan
from ...shared.schema.record import Record
from ...shared.schema.workload import Workload
from ..devices.cpu_device import CpuDevice
from ..devices.cuda_device import CudaDevice
from ..devices.device import TrainingDevice
from ..model.byte_text import head_batches
from ..training.carry_out import carry_out
from ..training.training import Training
from .run_checkpoints import RunCheckpoints
from .run_record import check_record, missing_for_record


@dataclass(frozen=True, slots=True)
class TextTraining:
    """What is trained on text, and how far."""

    plan: Plan
    workload: Workload
    steps: int
    """With those before the checkpoint that is resumed."""
    learning_rate: float
    seed: int
    """Of the batches."""
    text: bytes
    checkpoints: RunCheckpoints
    wants_record: bool
    """Whether training is refused where it would give no record."""

    def run(self, model: nn.Module, device: TrainingDevice, tell: Callable[[str], None]) -> Record | None:
        """Train ``model``, and ``tell`` how its loss went; gives the measured Record.

        None if the steps were too few for one, which is told.  Raises ProtwinError if the plan, the checkpoint or the
        device refuse.
        """
        make_optimizer = partial(torch.optim.AdamW, lr=self.learning_rate, fused=True)
        with (
            progress_bar("training") as report,
            carry_out(model, self.plan, self.workload, optimizer=make_optimizer, device=device) as training,
        ):
            num_batches = self.checkpoints.resume(training, self.learning_rate)
            done = training.num_steps
            if done >= self.steps:
                raise PlanError(f"the checkpoint is at step {done} already; --steps is {self.steps}. Raise it.")
            if self.wants_record:
                check_record(self.steps, self.checkpoints.every, done)
            batches = self._batches(model, num_batches, num_steps=self.steps - done)
            losses = []
            for step in range(done + 1, self.steps + 1):
                losses.append(self._step(training, batches))
                report(step, self.steps)
                num_batches += self.plan.micro_batches
                self.checkpoints.after_step(training, num_batches=num_batches, is_last=step == self.steps)
            tell(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} over {len(losses)} steps")
            missing = missing_for_record(self.steps, self.checkpoints.every, done)
            if missing is not None and not self.wants_record:
                tell(f"no times: {missing}")
                return None
            return training.record()

    def _batches(self, model: nn.Module, num_before: int, *, num_steps: int) -> Iterator[dict[str, torch.Tensor]]:
        """The batches that come after ``num_before`` others."""
        samples = self.workload.num_samples
        # Of several choices per sample each has this length.
        shape = self.workload.batch_shapes.get("input_ids", (samples, self.workload.num_tokens // samples))
        batches = head_batches(
            model,
            self.text,
            batch_size=samples,
            sequence_length=shape[-1],
            num_batches=num_before + num_steps * self.plan.micro_batches,
            seed=self.seed,
        )
        # Drawn again rather than kept: their places follow from the seed.
        return islice(batches, num_before, None)

    def _step(self, training: Training, batches: Iterator[dict[str, torch.Tensor]]) -> float:
        """One step; gives the mean loss of its micro-batches."""
        micro_batches = self.plan.micro_batches
        losses = []
        for batch in islice(batches, micro_batches):
            loss = training.model(**{name: t.to(training.device.torch_device) for name, t in batch.items()}).loss
            (loss / micro_batches if micro_batches > 1 else loss).backward()
            losses.append(loss.detach())
        training.step()
        return torch.stack(losses).mean().item()


def device_at_hand(
    budget_bytes: int | None, host_to_device_bytes_per_s: float | None, device_to_host_bytes_per_s: float | None
) -> TrainingDevice:
    """The first CUDA device where there is one, else the CPU as a device.  Raises ProtwinError."""
    if torch.cuda.is_available():
        if host_to_device_bytes_per_s is not None or device_to_host_bytes_per_s is not None:
            raise ProtwinError(
                "a CUDA device's link cannot be throttled. Leave out --host-to-device, --device-to-host."
            )
        return CudaDevice(budget_bytes=budget_bytes)
    return CpuDevice(
        budget_bytes,
        host_to_device_bytes_per_s=host_to_device_bytes_per_s,
        device_to_host_bytes_per_s=device_to_host_bytes_per_s,
    )
