"""Cross-entropy of whole logits in their own element type: its gradient takes their place.

[Note: Fused cross-entropy]
Eager cross-entropy widens all logits to float32, keeps their log-softmax for backward, and forms a gradient of the
same size there.  Here forward reads the logits once and keeps 4 bytes per token beside them, the logarithm of the sum
of exponentials; backward reads them again and writes the gradient in their place.  All arithmetic is in float32 (or
float64), so that the gradient is rounded once, as eager's is.  Rows are widened a few at a time, in scratch memory that
is no larger than a GPU's cache.  Kernels of others do the same in one pass each, without the scratch.

Logits are gone after backward.  What else has saved them for its own backward is told so by autograd, which counts the
changes of every tensor.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from ...shared.basics.errors import ScheduleError
from ...shared.observed.fused_loss import scratch_rows

_MEAN: Final = "mean"
_SUM: Final = "sum"
_NONE: Final = "none"


def fused_cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = _MEAN,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """``torch.nn.functional.cross_entropy`` of ``logits`` (tokens, vocabulary) and ``labels`` (tokens).

    It is in float32, or float64 where the logits are; backward runs once, and overwrites ``logits``, which stay without
    a graph.  See [Note: Fused cross-entropy].  Raises ValueError for another ``reduction``, ScheduleError in a second
    backward.
    """
    if reduction not in (_MEAN, _SUM, _NONE):
        raise ValueError(f"{reduction} is not a valid value for reduction")
    found: torch.Tensor
    if not torch.is_grad_enabled() or not logits.requires_grad:
        found, *_ = _cross_entropy(logits, labels, _scratch(logits), ignore_index, reduction, label_smoothing)
        return found
    found = _Fused.apply(logits.contiguous(), labels, ignore_index, reduction, label_smoothing)  # type: ignore[no-untyped-call]
    return found


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, labels: torch.Tensor, ignore_index: int, reduction: str, smoothing: float
    ) -> torch.Tensor:
        loss: torch.Tensor
        loss, sums, total = _cross_entropy(logits, labels, _scratch(logits), ignore_index, reduction, smoothing)
        ctx.save_for_backward(logits, labels, sums, total)
        ctx.how = ignore_index, reduction, smoothing
        ctx.has_run = False
        return loss

    @staticmethod
    def backward(ctx: Any, *incoming: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise ScheduleError(
                "backward of a fused loss keeps a graph of itself (create_graph=True), to be differentiated again, but "
                "the logits are gone. Call loss.backward() alone, or train with loss eager."
            )
        if ctx.has_run:
            raise ScheduleError(
                "backward of a fused loss runs for the second time, but its gradient has taken the place of the "
                "logits. Add the losses up and call backward() once, or train with loss eager."
            )
        logits, labels, sums, total = ctx.saved_tensors
        ctx.has_run = True
        _cross_entropy_backward(logits, labels, sums, total, incoming[0], _scratch(logits), *ctx.how)
        return logits.detach(), None, None, None, None


def _exact(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def _scratch(logits: torch.Tensor) -> torch.Tensor:
    exact = _exact(logits.dtype)
    num_tokens, vocabulary = logits.shape
    return logits.new_empty((scratch_rows(num_tokens, vocabulary, exact.itemsize), vocabulary), dtype=exact)


@torch.library.custom_op("protwin::fused_cross_entropy", mutates_args=("scratch",))
def _cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    scratch: torch.Tensor,
    ignore_index: int,
    reduction: str,
    smoothing: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The loss, by token the logarithm of the sum of exponentials, and how many tokens count."""
    losses, sums = (torch.empty(len(logits), dtype=scratch.dtype, device=logits.device) for _ in range(2))
    for begin in range(0, len(logits), max(1, len(scratch))):
        rows = logits[begin : begin + len(scratch)]
        some, of_rows = scratch[: len(rows)], slice(begin, begin + len(rows))
        wanted, counts = _wanted(labels[of_rows], ignore_index)
        some.copy_(rows)
        own = some.gather(1, wanted).squeeze(1)
        mean = some.mean(1) if smoothing else None
        highest = some.amax(1, keepdim=True)
        torch.add(some.sub_(highest).exp_().sum(1).log_(), highest.squeeze(1), out=sums[of_rows])
        found = sums[of_rows] - own
        if mean is not None:
            found = (1 - smoothing) * found + smoothing * (sums[of_rows] - mean)
        losses[of_rows] = found.masked_fill_(~counts, 0)
    total = (labels != ignore_index).sum().to(scratch.dtype)
    if reduction == _NONE:
        return losses, sums, total
    loss = losses.sum()
    return (loss / total if reduction == _MEAN else loss), sums, total


@_cross_entropy.register_fake
def _(
    logits: torch.Tensor,
    labels: torch.Tensor,
    scratch: torch.Tensor,
    ignore_index: int,
    reduction: str,
    smoothing: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    sums = scratch.new_empty(len(logits))
    return torch.empty_like(sums) if reduction == _NONE else sums.new_empty(()), sums, sums.new_empty(())


@torch.library.custom_op("protwin::fused_cross_entropy_backward_", mutates_args=("logits", "scratch"))
def _cross_entropy_backward(
    logits: torch.Tensor,
    labels: torch.Tensor,
    sums: torch.Tensor,
    total: torch.Tensor,
    upstream: torch.Tensor,
    scratch: torch.Tensor,
    ignore_index: int,
    reduction: str,
    smoothing: float,
) -> None:
    """Put the gradient in the place of ``logits``, whose ``sums`` and ``total`` forward gave."""
    upstream = upstream.to(scratch.dtype)
    factor = upstream / total if reduction == _MEAN else upstream
    for begin in range(0, len(logits), max(1, len(scratch))):
        rows = logits[begin : begin + len(scratch)]
        some, of_rows = scratch[: len(rows)], slice(begin, begin + len(rows))
        wanted, counts = _wanted(labels[of_rows], ignore_index)
        some.copy_(rows)
        some.sub_(sums[of_rows].unsqueeze(1)).exp_()
        if smoothing:
            some.sub_(smoothing / rows.shape[1])
        some.scatter_add_(1, wanted, some.new_full(wanted.shape, smoothing - 1))
        by_token = factor[of_rows] if reduction == _NONE else factor
        some.mul_(torch.where(counts, by_token, 0).unsqueeze(1))
        rows.copy_(some)


@_cross_entropy_backward.register_fake
def _(*_: object) -> None:
    return None


def _wanted(labels: torch.Tensor, ignore_index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Labels as a column to gather by, 0 where they do not count, and whether each counts.

    One beyond the vocabulary is refused by the gather, as eager cross-entropy refuses it.
    """
    counts = labels != ignore_index
    return torch.where(counts, labels, 0).unsqueeze(1), counts
