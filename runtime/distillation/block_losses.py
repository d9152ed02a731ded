"""How far a student block's output is from the output of its teacher's block: one number, computed in float32.

[Note: Floor of the denominator]
A normalized loss is the mean square of the error over the mean square of the target, of which the latter counts as at
least ε.  So a target of zeros gives a finite loss, and wherever the floor is not reached, scaling prediction and target
alike changes nothing.  An ε added to the target would bound nothing, since a target of ε's would still vanish, and one
added to its mean square would change every loss a little.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

import torch

from ...shared.basics.errors import WorkloadError
from ...shared.students.student import BlockLoss

EPSILON: Final = 1e-6
"""Least mean square of a target (Note: Floor of the denominator)."""
LEAST_LENGTH: Final = 1e-8
"""Of a vector whose direction is asked for, as in ``torch.nn.functional.cosine_similarity``."""

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Of prediction and target, which have one shape: a scalar in float32."""


def block_loss(kind: BlockLoss) -> Loss:
    """The loss of that name.  Targets get no gradient."""
    return _LOSSES[kind]


def mse(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Mean of (prediction - target)².  Raises WorkloadError if the shapes differ or hold nothing."""
    prediction, target = _checked(prediction, target)
    return (prediction - target).square().mean()


def normalized_mse(prediction: torch.Tensor, target: torch.Tensor, *, epsilon: float = EPSILON) -> torch.Tensor:
    """Mean of (prediction - target)² over max(mean of target², ε) (Note: Floor of the denominator).

    Raises WorkloadError if the shapes differ or hold nothing, or if ``epsilon`` is not positive and finite.
    """
    return batched_normalized_mse(prediction, target, batch_dims=(), epsilon=epsilon)


def batched_normalized_mse(
    prediction: torch.Tensor, target: torch.Tensor, *, batch_dims: Sequence[int] = (0,), epsilon: float = EPSILON
) -> torch.Tensor:
    """``normalized_mse`` of each member of the batch by itself; the mean over the batch.

    ``batch_dims``: the dims that count members, negative ones from the end; means are over the others.  None: the
    whole is one member.  All: every scalar is one.  Raises WorkloadError as ``normalized_mse`` does, and if a dim is
    not there or is named twice.
    """
    _check_positive("epsilon", epsilon)
    members = _dims(batch_dims, prediction.dim())
    prediction, target = _checked(prediction, target)
    others = [dim for dim in range(prediction.dim()) if dim not in members]
    error, squares = (prediction - target).square(), target.square()
    if others:  # no dims would mean all
        error, squares = error.mean(dim=others), squares.mean(dim=others)
    return (error / squares.clamp(min=epsilon)).mean()


def vectorwise_normalized_mse(
    prediction: torch.Tensor, target: torch.Tensor, *, epsilon: float = EPSILON
) -> torch.Tensor:
    """``batched_normalized_mse`` of every vector along the last dim.  Raises WorkloadError as that does."""
    batch_dims = range(max(0, prediction.dim() - 1))
    return batched_normalized_mse(prediction, target, batch_dims=batch_dims, epsilon=epsilon)


def cosine(prediction: torch.Tensor, target: torch.Tensor, *, least_length: float = LEAST_LENGTH) -> torch.Tensor:
    """1 minus the cosine between vectors along the last dim; the mean over vectors, from 0 to 2.

    Vectors count as at least ``least_length`` long, so that one of zeros has cosine 0.  Raises WorkloadError if the
    shapes differ, or hold nothing or no vectors, or if ``least_length`` is not positive and finite.
    """
    _check_positive("least_length", least_length)
    prediction, target = _checked(prediction, target)
    if prediction.dim() == 0:
        raise WorkloadError("a cosine is between vectors, but the outputs are single numbers. Choose another loss.")
    # The square root of a clamped sum: the gradient of a length itself is infinite at zero.
    lengths = [one.square().sum(dim=-1).clamp(min=least_length**2).sqrt() for one in (prediction, target)]
    return (1 - (prediction * target).sum(dim=-1) / (lengths[0] * lengths[1])).mean()


def _check_positive(name: str, value: float) -> None:
    """Raise WorkloadError unless ``value`` can be a floor."""
    if not (value > 0 and math.isfinite(value)):
        raise WorkloadError(f"{name} = {value} must be positive and finite: quotients have it in their denominator.")


def _checked(prediction: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both in float32, the target without a gradient.  Raises WorkloadError."""
    if prediction.shape != target.shape:
        raise WorkloadError(
            f"a student block's output has shape {list(prediction.shape)} and its teacher's {list(target.shape)}. "
            f"Blocks of one pair have outputs of one shape."
        )
    if prediction.numel() == 0:
        raise WorkloadError(f"a block's output of shape {list(prediction.shape)} holds nothing to compare.")
    for one in (prediction, target):
        if not one.is_floating_point():
            raise WorkloadError(f"a block's output is {str(one.dtype).removeprefix('torch.')}; losses are of floats.")
    return prediction.float(), target.detach().float()


def _dims(named: Sequence[int], num_dims: int) -> set[int]:
    """Dims counted from 0.  Raises WorkloadError."""
    for dim in named:
        if not -num_dims <= dim < num_dims:
            raise WorkloadError(f"batch_dims names dim {dim}, but outputs have {num_dims} dims.")
    found = [dim % num_dims for dim in named]
    if len(set(found)) < len(found):
        raise WorkloadError(f"batch_dims = {tuple(named)} names a dim twice.")
    return set(found)


_LOSSES: Final[dict[BlockLoss, Loss]] = {
    BlockLoss.MSE: mse,
    BlockLoss.NORMALIZED_MSE: normalized_mse,
    BlockLoss.BATCHED_NORMALIZED_MSE: batched_normalized_mse,
    BlockLoss.VECTORWISE_NORMALIZED_MSE: vectorwise_normalized_mse,
    BlockLoss.COSINE: cosine,
}
