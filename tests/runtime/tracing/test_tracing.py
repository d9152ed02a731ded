"""A trace leaves the model as it was, and its figures are those that a hand computes."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from protwin.runtime import CpuDevice, carry_out, trace
from protwin.shared.basics.errors import ProtwinError, WorkloadError
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.layout.layout import build_layout
from protwin.shared.schema.plan import Plan
from protwin.shared.verify.guaranteed_peak import guaranteed_device_peak
from tests.runtime.life_cycle import hooks_of, same
from tests.runtime.models import gpt2, hand_written, llama, point_batches, snapshot, token_batches

# -- left as found ---------------------------------------------------------------------------------------------------

WIDTH = 16


def everything(model: nn.Module) -> dict[str, Any]:
    """All that a trace could leave changed."""
    return {
        "weights": snapshot(model),
        "buffers": [(name, id(buffer)) for name, buffer in model.named_buffers()],
        "identities": [(id(p), p.data_ptr(), p.requires_grad) for p in model.parameters()],
        "gradients": [(id(p.grad), p.grad.clone()) if p.grad is not None else None for p in model.parameters()],
        "gradient hooks": [p._post_accumulate_grad_hooks for p in model.parameters()],
        "flags": [module.training for module in model.modules()],
        "hooks": hooks_of(model),
        "attributes": [sorted(vars(module)) for module in model.modules()],
        "caches": [getattr(getattr(module, "config", None), "use_cache", None) for module in model.modules()],
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state()[1],
        "python": random.getstate(),
        "modes": list(_get_current_dispatch_mode_stack()),
        "gradients enabled": torch.is_grad_enabled(),
    }


def check_left(before: dict[str, Any], model: nn.Module) -> None:
    after = everything(model)
    assert [name for name in before if not same(before[name], after[name])] == []


def prepared(model: nn.Module, loss: Callable[[], torch.Tensor]) -> nn.Module:
    """A model in the middle of something: gradients, some parts in evaluation."""
    loss().backward()
    next(model.parameters()).grad = None
    model.eval()
    next(model.children()).train()
    return model


def test_a_trace_leaves_a_transformer_as_it_was() -> None:
    model, batch = gpt2(), token_batches(1)[0]
    prepared(model, lambda: model(**batch).loss)
    assert model.config.use_cache is True
    before = everything(model)
    trace(model, batch, repeats=1)
    check_left(before, model)


def test_a_trace_leaves_running_statistics_as_they_were() -> None:
    model, batch = hand_written(has_statistics=True), point_batches(1)[0]
    prepared(model, lambda: model(batch["points"]).sum())
    before = everything(model)
    trace(model, batch["points"], loss=lambda output, _: output.sum(), repeats=1)
    check_left(before, model)


class Doubling(torch.autograd.Function):
    """Keeps a tensor as nobody should, so that it lives as long as its node of the graph."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
        ctx.kept = hidden.detach() + 1
        return hidden * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient * 2


class Doubled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(rows, WIDTH)."""
        found: torch.Tensor = Doubling.apply(self.map(hidden))
        return found


def test_what_functions_put_on_their_context_counts_as_long_as_a_loop_holds_its_loss() -> None:
    """Through the next forward, within the guaranteed peak; the plain loop of the documents holds its loss."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(Doubled() for _ in range(3)))
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), layers, nn.Linear(WIDTH, 1))
    batch = torch.randn(96, WIDTH)

    def loss_of(output: Any, _: Any) -> Any:
        return output.square().mean()

    workload = trace(model, batch, loss=loss_of, repeats=0)
    assert 0 <= workload.resident_bytes - 4 * batch.numel() * (1 + 3) < 100
    n_persist = len(build_layout(workload.parameters, num_blocks=3, chunk_bytes=4096).chunks)
    plan = Plan(workload_id=workload.identity, chunk_bytes=4096, n_persist=n_persist, n_buffer=0)
    limit_bytes = guaranteed_device_peak(compile_schedule(plan, workload)).size_bytes
    with carry_out(model, plan, workload, device=CpuDevice(limit_bytes)) as training:
        for _ in range(3):
            loss = loss_of(model(batch), batch)
            loss.backward()
            training.step()
        assert training.peak_device_bytes > 0.99 * limit_bytes


class Masked(nn.Module):
    """Makes its mask when it first runs, and anew for other shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mask", None)
        self.register_buffer("grows", torch.empty(0))
        self.mask: torch.Tensor | None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(B, T, WIDTH)."""
        length = hidden.shape[1]
        if self.mask is None or len(self.mask) != length:
            self.mask = torch.tril(torch.ones(length, length)) / length
        if len(self.grows) != length:
            self.grows = torch.ones(length, 1)
        found: torch.Tensor = hidden + self.map(self.mask @ (hidden * self.grows))
        return found


def masked() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(*(Masked() for _ in range(3))), nn.Linear(WIDTH, 1))


@pytest.mark.parametrize("is_meta", [False, True])
def test_buffers_that_a_forward_fills_are_empty_after_a_trace_and_on_the_device_in_training(is_meta: bool) -> None:
    """The workload is of every model that was never run, and of one that was trained by it."""
    batch, length = torch.randn(2, 48, WIDTH), 48

    def loss(output: Any, _: Any) -> Any:
        return output.square().mean()

    traced = masked().to("meta") if is_meta else masked()
    workload = trace(traced, batch.to(next(traced.parameters()).device), loss=loss, repeats=0)
    assert [name for name, _ in traced.named_buffers()] == [f"1.{number}.grows" for number in range(3)]
    assert all(buffer.numel() == 0 for buffer in traced.buffers())
    # The batch, three masks, three columns, and less than 100 bytes for losses.
    assert 0 <= workload.resident_bytes - 4 * (batch.numel() + 3 * (length**2 + length)) < 100
    # The input of the linear map alone, which the block makes.
    assert workload.profile_of(0).swappable_bytes == 4 * batch.numel()
    n_persist = len(build_layout(workload.parameters, num_blocks=3, chunk_bytes=4096).chunks)
    plan = Plan(workload_id=workload.identity, chunk_bytes=4096, n_persist=n_persist, n_buffer=0)
    model = masked()
    for _ in range(2):
        for layer in model[1]:
            layer.grows = torch.empty(0)
        limit_bytes = guaranteed_device_peak(compile_schedule(plan, workload)).size_bytes
        with carry_out(model, plan, workload, device=CpuDevice(limit_bytes)) as training:
            for _ in range(5):
                loss(model(batch), batch).backward()
                training.step()
            assert training.peak_device_bytes > 0.99 * limit_bytes
        mask = model[1][0].mask
        assert isinstance(mask, torch.Tensor)
        assert mask.shape == (length, length)


def test_the_comparison_of_these_tests_sees_a_difference() -> None:
    """What they would find if a trace did no more than run the model."""
    model, batch = hand_written(has_statistics=True), point_batches(1)[0]
    before = everything(model)
    model(batch["points"]).sum().backward()
    after = everything(model)
    assert {name for name in before if not same(before[name], after[name])} >= {"weights", "gradients", "torch"}


class Failing(nn.Module):
    """Fails in the middle of the stack, in forward or in backward, at the n-th call."""

    def __init__(self, layer: nn.Module, *, in_backward: bool, call: int) -> None:
        super().__init__()
        self.layer = layer
        self.in_backward = in_backward
        self.call = call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.call -= 1
        if self.call == 0:
            if not self.in_backward:
                raise ZeroDivisionError("in forward")
            x = x * 1
            x.register_hook(lambda _: 1 / 0)
        return self.layer(x)


@pytest.mark.parametrize(
    ("call", "in_backward"),
    [(1, False), (2, False), (3, False), (4, False), (7, False), (1, True), (3, True), (7, True)],
)
def test_a_trace_that_fails_midway_leaves_the_model_as_it_was(call: int, in_backward: bool) -> None:
    """Calls 1 and 2 keep, 3 to 6 checkpoint, every other one a recomputation, the later ones are timed."""
    model, batch = hand_written(has_statistics=True), point_batches(1)[0]
    model.stack[2].up = Failing(model.stack[2].up, in_backward=in_backward, call=call)
    before = everything(model)
    with pytest.raises(ZeroDivisionError):
        trace(model, batch["points"], loss=lambda output, _: output.sum(), repeats=1)
    check_left(before, model)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"input_ids": torch.full((2, 12), 10_000)}, r"refuses the batch \(input_ids \[2, 12\]\).*IndexError"),
        ({"input_ids": torch.ones(2, 12)}, "refuses the batch"),
        ({"input_id": torch.ones(2, 12, dtype=torch.long)}, "refuses the batch"),
        ({"input_ids": torch.ones(2, 100, dtype=torch.long)}, r"refuses the batch \(input_ids \[2, 100\]\)"),
        ({"input_ids": torch.ones(2, 12, dtype=torch.long)}, "gives no scalar loss. Put labels into the batch"),
        ({"input_ids": torch.ones(0, 12, dtype=torch.long)}, "non-empty first dim"),
        ({}, "holds no tensors"),
        ({"input_ids": [[1, 2]]}, "holds no tensors"),
    ],
)
def test_a_refused_batch_leaves_the_model_as_it_was(batch: dict[str, Any], message: str) -> None:
    model = gpt2()
    before = everything(model)
    with pytest.raises(WorkloadError, match=message):
        trace(model, batch, repeats=0)
    check_left(before, model)


def test_models_that_cannot_be_traced() -> None:
    batch = token_batches(1)[0]
    model = llama()
    model.model.layers[1].gradient_checkpointing = True
    with pytest.raises(WorkloadError, match="gradient_checkpointing_disable"):
        trace(model, batch)
    model.model.layers[1].gradient_checkpointing = False
    model.config.encoder_layerdrop = 0.05
    with pytest.raises(WorkloadError, match=r"skips blocks by chance.* set to 0: encoder_layerdrop 0\.05"):
        trace(model, batch)
    model.config.encoder_layerdrop = 0.0
    model.requires_grad_(False)
    with pytest.raises(WorkloadError, match="no trainable parameter"):
        trace(model, batch)
    model.model.norm.weight.requires_grad_(True)
    with pytest.raises(WorkloadError, match="no scalar loss"):
        trace(model, batch, loss=lambda output, _: output.logits)
    with pytest.raises(WorkloadError, match=r"depends on no trainable parameter, .* detached"):
        trace(model, batch, loss=lambda output, _: output.loss.detach())
    for off in (torch.no_grad(), torch.inference_mode()):
        with off, pytest.raises(WorkloadError, match="gradients are off"):
            trace(model, batch)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"model": None}, "model is None; it must be an nn.Module"),
        ({"batch": None}, "batch is None; it must be a tensor"),
        ({"batch": "text"}, "batch is 'text'; it must be a tensor"),
        ({"loss": "mse"}, "loss is 'mse'; it must be a function"),
        ({"blocks": 2}, "blocks is 2; it must be the path"),
    ],
)
def test_what_is_no_model_batch_loss_or_block_is_told(given: dict[str, Any], words: str) -> None:
    arguments = {"model": llama(num_layers=2), "batch": token_batches(1)[0]} | given
    with pytest.raises(WorkloadError, match=words):
        trace(arguments.pop("model"), arguments.pop("batch"), **arguments)


class Caching(nn.Module):
    """A block that changes what it is given: its input in place, or a cache that all blocks share."""

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.weight = nn.Linear(8, 8)
        self.in_place = in_place

    def forward(self, hidden: torch.Tensor, cache: SimpleNamespace) -> torch.Tensor:
        """(rows, 8) in and out."""
        if self.in_place:
            return self.weight(hidden.relu_())
        cache.keys = torch.cat([cache.keys, hidden.detach()])
        return (self.weight(hidden) @ cache.keys.T).softmax(1) @ cache.keys


class CachingStack(nn.Module):
    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.entry = nn.Linear(8, 8)
        self.layers = nn.ModuleList(Caching(in_place=in_place) for _ in range(3))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """(rows, 8)."""
        hidden, cache = self.entry(rows), SimpleNamespace(keys=rows[:0])
        for layer in self.layers:
            hidden = layer(hidden, cache)
        return hidden.square().mean()


@pytest.mark.parametrize(("in_place", "said"), [(True, "by an inplace operation"), (False, "different metadata")])
def test_blocks_that_change_what_they_are_given_are_refused_in_one_line(in_place: bool, said: str) -> None:
    """As XLM's, which fill a cache of keys that all of them are given: a recomputation would fill it again."""
    torch.manual_seed(0)
    with pytest.raises(WorkloadError, match=rf"^blocks of CachingStack cannot run a second time.*{said}[^\n]*$"):
        trace(CachingStack(in_place=in_place), torch.randn(4, 8), loss=lambda output, _: output, repeats=0)


def test_every_error_of_a_trace_is_a_message() -> None:
    assert issubclass(WorkloadError, ProtwinError)


def test_a_timed_trace_has_times_and_an_untimed_one_none() -> None:
    model, batch = llama(num_layers=2), token_batches(1)[0]
    seen: list[tuple[int, int]] = []
    timed = trace(model, batch, repeats=2, on_progress=lambda done, total: seen.append((done, total)))
    assert timed.is_measured
    assert timed.measured_on
    assert all(phase.measured_s > 0 for phase in (timed.prologue_forward, timed.epilogue_backward))
    assert [done for done, _ in seen] == list(range(1, seen[0][1] + 1))
    untimed = trace(model, batch, repeats=0)
    assert not untimed.is_measured
    assert untimed.measured_on is None
    assert untimed.identity == timed.identity
