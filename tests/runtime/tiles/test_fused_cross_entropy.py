"""The fused cross-entropy is torch's, in the memory of the logits."""

from __future__ import annotations

import random

import pytest
import torch
from torch.nn import functional

from protwin.runtime.tiles import fused_cross_entropy as module
from protwin.runtime.tiles.fused_cross_entropy import fused_cross_entropy
from protwin.shared.basics.errors import ScheduleError
from protwin.shared.observed import fused_loss

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(params=[1, 400, 2**24])
def scratch_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Room for one row, a few, and all."""
    monkeypatch.setattr(fused_loss, "SCRATCH_BYTES", request.param)
    return int(request.param)


def logits_of(seed: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    chance = random.Random(seed)
    num_tokens, vocabulary = chance.randint(1, 40), chance.randint(2, 60)
    generator = torch.Generator().manual_seed(seed)
    scale = chance.choice([0.1, 1.0, 30.0])
    logits = (torch.randn(num_tokens, vocabulary, generator=generator) * scale).to(dtype)
    labels = torch.randint(0, vocabulary, (num_tokens,), generator=generator)
    labels[torch.rand(num_tokens, generator=generator) < chance.choice([0.0, 0.3])] = -100
    return logits, labels


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.usefixtures("scratch_bytes")
def test_loss_and_gradient_are_those_of_torch(dtype: torch.dtype, reduction: str) -> None:
    for seed in range(8):
        logits, labels = logits_of(seed, dtype)
        smoothing = random.Random(seed).choice([0.0, 0.1])
        one, other = logits.clone().requires_grad_(), logits.clone().requires_grad_()
        exact = torch.promote_types(dtype, torch.float32)
        wanted = functional.cross_entropy((one * 1).to(exact), labels, reduction=reduction, label_smoothing=smoothing)
        found = fused_cross_entropy(other * 1, labels, reduction=reduction, label_smoothing=smoothing)
        assert found.dtype == exact
        torch.testing.assert_close(found, wanted, equal_nan=True)
        upstream = torch.rand(wanted.shape, dtype=exact)
        wanted.backward(upstream)
        found.backward(upstream)
        assert one.grad is not None
        assert other.grad is not None
        if labels.ne(-100).any():
            # A gradient of 16 bit is rounded once, here and there.
            spacing = {torch.bfloat16: 2**-7, torch.float16: 2**-9}.get(dtype, 1e-5)
            torch.testing.assert_close(other.grad, one.grad, rtol=spacing, atol=1e-6)


def test_the_gradient_lies_in_the_place_of_the_logits() -> None:
    logits, labels = logits_of(3, torch.bfloat16)
    made = logits.requires_grad_() * 1
    seen: list[int] = []
    made.register_hook(lambda gradient: seen.append(gradient.untyped_storage()._cdata))
    fused_cross_entropy(made, labels).backward()
    assert seen == [made.untyped_storage()._cdata]


def test_words_that_cannot_be_have_no_gradient() -> None:
    logits = torch.randn(3, 5)
    logits[:, 2] = -torch.inf
    one, other = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    labels = torch.tensor([0, 1, 4])
    functional.cross_entropy(one * 1, labels).backward()
    found = fused_cross_entropy(other * 1, labels)
    found.backward()
    torch.testing.assert_close(other.grad, one.grad)
    assert other.grad is not None
    assert not other.grad[:, 2].any()


def test_a_batch_without_labels_has_no_mean() -> None:
    logits = (torch.randn(3, 5, requires_grad=True)) * 1
    assert fused_cross_entropy(logits, torch.full((3,), -100)).isnan()


def test_nothing_runs_twice_over_logits_that_are_gone() -> None:
    logits, labels = logits_of(2, torch.float32)
    leaf = logits.requires_grad_()
    loss = fused_cross_entropy(leaf * 1, labels)
    loss.backward(retain_graph=True)
    with pytest.raises(ScheduleError, match=r"for the second time.*or train with loss eager"):
        loss.backward()
    with pytest.raises(ScheduleError, match="create_graph=True"):
        fused_cross_entropy(leaf * 1, labels).backward(create_graph=True)


def test_who_has_saved_the_logits_is_told_that_they_are_gone() -> None:
    logits, labels = logits_of(2, torch.float32)
    made = torch.tanh(logits.requires_grad_())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        fused_cross_entropy(made, labels).backward()


def test_labels_beyond_the_vocabulary_and_other_reductions_are_refused() -> None:
    logits = torch.randn(3, 5, requires_grad=True)
    with pytest.raises((RuntimeError, IndexError)):
        fused_cross_entropy(logits * 1, torch.tensor([0, 5, 1]))
    with pytest.raises(ValueError, match="not a valid value for reduction"):
        fused_cross_entropy(logits * 1, torch.tensor([0, 1, 1]), reduction="median")


def test_rows_are_widened_a_few_at_a_time() -> None:
    assert fused_loss.scratch_rows(4096, 128256, 4) == 32
    assert fused_loss.scratch_rows(10, 1000, 4) == 10
    assert fused_loss.scratch_rows(10, 10**8, 4) == 1
    scratch = module._scratch(torch.empty(4096, 128256, dtype=torch.bfloat16, device="meta"))
    assert scratch.shape == (32, 128256)
    assert scratch.dtype is torch.float32
