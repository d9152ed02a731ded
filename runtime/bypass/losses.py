"""Losses of all blocks on their way to whoever reads them: without a wait per step, and with what is not finite apart.

[Note: One wait per report]
Every micro-batch's losses are copied to the host behind the computation that made them, and nothing waits for the copy
until a report is due.  They are added up there, since the device's memory has been planned to the byte.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch

from ...shared.basics.documents import Document, FrozenModel


class BlockReport(FrozenModel):
    """What blocks did since the report before."""

    step: int
    """Completed steps."""
    learning_rate: float
    """Of the last of them."""
    losses: tuple[float | None, ...]
    """(blocks,) the mean of every block's finite losses; None: it had none."""
    num_not_finite: tuple[int, ...]
    """(blocks,) micro-batches in which a block's loss was not finite."""


class Validation(FrozenModel):
    """Losses of both language models on what is held out."""

    step: int
    """Completed steps."""
    student_loss: float | None
    """In nats per token; None: not finite."""
    teacher_loss: float | None
    """The same of the teacher, which never changes."""


class BypassHistory(Document):
    """How a bypass run has gone so far."""

    KIND: ClassVar[str] = "bypass_history"

    blocks: tuple[str, ...]
    """Paths of the blocks."""
    reports: tuple[BlockReport, ...] = ()
    """In the order of steps."""
    validations: tuple[Validation, ...] = ()
    """In the order of steps."""

    def until(self, step: int) -> BypassHistory:
        """What was known after ``step`` completed steps."""
        reports = tuple(one for one in self.reports if one.step <= step)
        validations = tuple(one for one in self.validations if one.step <= step)
        return self.model_copy(update={"reports": reports, "validations": validations})

    def with_report(self, report: BlockReport) -> BypassHistory:
        """With one report more."""
        return self.model_copy(update={"reports": (*self.reports, report)})

    def with_validation(self, validation: Validation) -> BypassHistory:
        """With one validation more."""
        return self.model_copy(update={"validations": (*self.validations, validation)})


class LossMeter:
    """Losses of the micro-batches since the last report (Note: One wait per report)."""

    def __init__(self, num_blocks: int, most_rows: int, device: torch.device) -> None:
        """``most_rows``: micro-batches between two reports."""
        is_cuda = device.type == "cuda"
        self._rows = torch.empty(most_rows, num_blocks, pin_memory=is_cuda)
        self._num_rows = 0
        self._copied = torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]

    def add(self, losses: torch.Tensor) -> None:
        """(blocks,) of one micro-batch, on the device."""
        self._rows[self._num_rows].copy_(losses, non_blocking=True)
        self._num_rows += 1
        if self._copied is not None:
            self._copied.record()

    def rows(self) -> torch.Tensor:
        """(micro-batches, blocks) what was added, in a copy."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._rows[: self._num_rows].clone()

    def restore(self, rows: torch.Tensor) -> None:
        """What ``rows`` gave."""
        self._num_rows = 0
        for row in rows[-len(self._rows) :]:
            self._rows[self._num_rows].copy_(row)
            self._num_rows += 1

    def taken(self) -> torch.Tensor:
        """What ``rows`` gives, which is forgotten."""
        rows = self.rows()
        self._num_rows = 0
        return rows


def report_of(rows: torch.Tensor, step: int, learning_rate: float) -> BlockReport:
    """Of (micro-batches, blocks) losses."""
    rows = rows.double()
    is_finite = rows.isfinite()
    sums = rows.where(is_finite, 0.0).sum(dim=0).tolist()
    counts = is_finite.sum(dim=0).tolist()
    return BlockReport(
        step=step,
        learning_rate=learning_rate,
        losses=tuple(total / count if count else None for total, count in zip(sums, counts, strict=True)),
        num_not_finite=tuple(len(rows) - count for count in counts),
    )


def finite(loss: float) -> float | None:
    """None for what no document holds."""
    return loss if math.isfinite(loss) else None


def told(report: BlockReport, blocks: tuple[str, ...]) -> str:
    """A report in a line, and one more for every block whose loss was not finite."""
    known = {name: loss for name, loss in zip(blocks, report.losses, strict=True) if loss is not None}
    lines = [f"step {report.step}: no block has a finite loss"]
    if known:
        worst = max(known, key=lambda name: known[name])
        mean = sum(known.values()) / len(known)
        lines = [f"step {report.step}: loss of blocks {mean:.4g}, at most {known[worst]:.4g} in {worst}"]
    lines += [
        f"step {report.step}: the loss of {name} was not finite in {count} micro-batch{'es' * (count > 1)}"
        for name, count in zip(blocks, report.num_not_finite, strict=True)
        if count
    ]
    return "\n".join(lines)


def position_of(best_loss: float | None, teacher_loss: float | None, rows: torch.Tensor) -> dict[str, Any]:
    """What a checkpoint keeps of the losses."""
    return {"best_loss": best_loss, "teacher_loss": teacher_loss, "losses": rows}
