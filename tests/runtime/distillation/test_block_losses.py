"""Block losses against their formulas in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from protwin.runtime.distillation.block_losses import EPSILON, batched_normalized_mse, block_loss, cosine
from protwin.shared.basics.errors import WorkloadError
from protwin.shared.students.student import BlockLoss

Array = np.ndarray[Any, np.dtype[np.float64]]


def by_members(members: int) -> Callable[[Array, Array], float]:
    """The first ``members`` dims count members of the batch."""

    def loss(prediction: Array, target: Array) -> float:
        found = []
        for index in np.ndindex(prediction.shape[:members]):
            error = np.mean((prediction[index] - target[index]) ** 2)
            found.append(error / max(np.mean(target[index] ** 2), EPSILON))
        return float(np.mean(found))

    return loss


def cosine_distance(prediction: Array, target: Array) -> float:
    found = []
    for index in np.ndindex(prediction.shape[:-1]):
        lengths = [max(np.linalg.norm(one[index]), 1e-8) for one in (prediction, target)]
        found.append(1 - prediction[index] @ target[index] / (lengths[0] * lengths[1]))
    return float(np.mean(found))


FORMULAS: dict[BlockLoss, Callable[[Array, Array], float]] = {
    BlockLoss.MSE: lambda prediction, target: float(np.mean((prediction - target) ** 2)),
    BlockLoss.NORMALIZED_MSE: by_members(0),
    BlockLoss.BATCHED_NORMALIZED_MSE: by_members(1),
    BlockLoss.VECTORWISE_NORMALIZED_MSE: by_members(2),
    BlockLoss.COSINE: cosine_distance,
}
SCALE_INVARIANT = [kind for kind in BlockLoss if kind is not BlockLoss.MSE]


def pair(seed: int = 0, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    target = scale * torch.randn(3, 5, 8, generator=made)
    target *= torch.rand(3, 5, 1, generator=made) + 0.1  # members of unequal size
    prediction = target + 0.3 * scale * torch.randn(3, 5, 8, generator=made)
    return prediction.to(dtype), target.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("kind", BlockLoss)
def test_a_loss_is_its_formula_computed_in_float32(kind: BlockLoss, dtype: torch.dtype) -> None:
    for seed in range(5):
        prediction, target = pair(seed, dtype)
        prediction.requires_grad_()
        found = block_loss(kind)(prediction, target.requires_grad_())
        assert found.dtype is torch.float32
        assert found.shape == ()
        expected = FORMULAS[kind](prediction.detach().double().numpy(), target.detach().double().numpy())
        assert found.item() == pytest.approx(expected, rel=2e-6)
        found.backward()
        assert prediction.grad is not None
        assert torch.isfinite(prediction.grad).all()
        assert target.grad is None, "targets are given"


@pytest.mark.parametrize("kind", BlockLoss)
def test_targets_of_zeros_give_finite_losses_and_gradients(kind: BlockLoss) -> None:
    prediction = torch.full((2, 3, 4), 0.5, requires_grad=True)
    found = block_loss(kind)(prediction, torch.zeros(2, 3, 4))
    found.backward()
    expected = {BlockLoss.MSE: 0.25, BlockLoss.COSINE: 1.0}.get(kind, 0.25 / EPSILON)
    assert found.item() == pytest.approx(expected, rel=1e-6)
    assert prediction.grad is not None
    assert torch.isfinite(prediction.grad).all()
    zero = torch.zeros(2, 3, 4, requires_grad=True)
    block_loss(kind)(zero, torch.zeros(2, 3, 4)).backward()
    assert zero.grad is not None
    assert torch.isfinite(zero.grad).all(), "also where both vanish"


@pytest.mark.parametrize("kind", SCALE_INVARIANT)
def test_scaling_both_changes_nothing_above_the_floor(kind: BlockLoss) -> None:
    """By a power of two, which rounds nothing: the floor may not even change the last bit."""
    prediction, target = pair()
    loss = block_loss(kind)(prediction, target)
    for scale in (0.25, 8.0, 2.0**20):
        assert torch.equal(block_loss(kind)(scale * prediction, scale * target), loss)


def test_the_floor_is_reached_below_epsilon_alone() -> None:
    error = 0.01
    for size, is_floored in ((2 * EPSILON**0.5, False), (0.5 * EPSILON**0.5, True)):
        target = torch.full((4,), size)
        found = block_loss(BlockLoss.NORMALIZED_MSE)(target + error, target).item()
        assert found == pytest.approx(error**2 / (EPSILON if is_floored else size**2), rel=1e-4)


@pytest.mark.parametrize("dims", [(), (0,), (1,), (-1,), (0, -1), (0, 1, 2)])
def test_any_dims_count_members(dims: tuple[int, ...]) -> None:
    prediction, target = (one.abs() + 0.1 for one in pair())
    found = batched_normalized_mse(prediction, target, batch_dims=dims)
    error, squares = (one.double().numpy() for one in ((prediction - target) ** 2, target**2))
    rest = tuple(dim for dim in range(3) if dim not in {dim % 3 for dim in dims})
    expected = np.mean(error.mean(axis=rest) / squares.mean(axis=rest) if rest else error / squares)
    assert found.item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("kind", BlockLoss)
def test_what_cannot_be_compared_is_refused(kind: BlockLoss) -> None:
    for prediction, target, words in (
        (torch.ones(2, 3), torch.ones(3), r"shape \[2, 3\] and its teacher's \[3\]"),
        (torch.ones(0, 3), torch.ones(0, 3), "holds nothing"),
        (torch.ones(2, 3).long(), torch.ones(2, 3).long(), "int64; losses are of floats"),
    ):
        with pytest.raises(WorkloadError, match=words):
            block_loss(kind)(prediction, target)


def test_impossible_options_are_refused() -> None:
    one = torch.ones(2, 3)
    for dims, words in (((2,), "names dim 2, but outputs have 2"), ((0, -2), "names a dim twice")):
        with pytest.raises(WorkloadError, match=words):
            batched_normalized_mse(one, one, batch_dims=dims)
    for epsilon in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(WorkloadError, match="positive and finite"):
            batched_normalized_mse(one, one, epsilon=epsilon)
        with pytest.raises(WorkloadError, match="positive and finite"):
            cosine(one, one, least_length=epsilon)
    with pytest.raises(WorkloadError, match="between vectors"):
        cosine(torch.ones(()), torch.ones(()))
