"""What block losses are said to take of the device's memory, beside what their formulas take when torch runs them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from protwin.runtime.devices.ledger import MemoryLedger
from protwin.shared.schema.workload import DType
from protwin.shared.workloads.block_losses import loss_phases

SHAPE = (4, 64, 512)
VECTOR_FRAC = 0.01
"""One number for each vector of 512, some of which backward keeps."""


def mse(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    prediction, target = prediction.float(), target.float()
    return (prediction - target).square().mean()


def normalized_mse(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    prediction, target = prediction.float(), target.float()
    error, squares = (prediction - target).square(), target.square()
    error, squares = error.mean(), squares.mean()
    return error / squares.clamp(min=1e-6)


def cosine(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    prediction, target = prediction.float(), target.float()
    lengths = [one.square().sum(dim=-1).clamp(min=1e-16).sqrt() for one in (prediction, target)]
    return (1 - (prediction * target).sum(dim=-1) / (lengths[0] * lengths[1])).mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("loss", [mse, normalized_mse, cosine], ids=lambda loss: loss.__name__)
def test_a_loss_takes_what_its_phases_say(
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], dtype: torch.dtype
) -> None:
    given, target = (torch.randn(SHAPE).to(dtype) for _ in range(2))
    given.requires_grad_()
    output_bytes = given.numel() * dtype.itemsize
    ledger = MemoryLedger(device_type="cpu")
    ledger.adopt([given, target])
    with ledger.metering():
        prediction = given * 1
        levels, peaks = [ledger.watched_bytes], []
        ledger.reset_watched_peak()
        found = loss(prediction, target)
        levels.append(ledger.watched_bytes)
        peaks.append(ledger.watched_peak_bytes - levels[0])
        ledger.reset_watched_peak()
        (gradient,) = torch.autograd.grad(found, prediction)
        peaks.append(ledger.watched_peak_bytes - levels[1])
        del found
        levels.append(ledger.watched_bytes)
    assert gradient.dtype is dtype
    phases = loss_phases(loss.__name__, output_bytes, DType(str(dtype).removeprefix("torch.")))
    tolerance_bytes = VECTOR_FRAC * 4 * given.numel() if loss is cosine else 16
    assert phases.forward.net_bytes == pytest.approx(levels[1] - levels[0], abs=tolerance_bytes)
    assert phases.backward.net_bytes == pytest.approx(levels[2] - levels[1], abs=tolerance_bytes)
    assert phases.forward.peak_bytes == pytest.approx(peaks[0], abs=tolerance_bytes)
    # Of a narrow cosine it is an upper bound.
    assert phases.backward.peak_bytes >= peaks[1] - tolerance_bytes
    if loss is not cosine:
        assert phases.backward.peak_bytes == pytest.approx(peaks[1], abs=tolerance_bytes)
