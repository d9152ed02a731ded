"""A model is traced with time on a device that never holds it whole, and is afterwards what it was."""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from protwin.runtime import CpuDevice, CpuOutOfMemoryError, carry_out, parameters_on_meta, trace
from protwin.runtime.model.adapters import add_lora
from protwin.runtime.timing import within_budget
from protwin.runtime.timing.visits import VisitingModel
from protwin.runtime.timing.within_budget import least_plan, meta_twin, mode_rows, trace_within
from protwin.shared.basics.errors import FileError, InfeasibleError
from protwin.shared.schema.hardware import DeviceKind
from protwin.shared.schema.plan import ActivationMode
from protwin.shared.schema.schedule import TaskKind
from protwin.shared.schema.workload import DType, Workload
from tests.proof_size import some_quick
from tests.runtime.models import gpt2, token_batches
from tests.runtime.timing.held import Held

_WIDTH = 64
_PAUSE_S = 0.004


class Block(nn.Module):
    """Two maps with batch statistics between; ``pause_s``: what forward takes at least."""

    def __init__(self, pause_s: float = 0.0) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(_WIDTH, 4 * _WIDTH), nn.BatchNorm1d(4 * _WIDTH)
        self.down, self.dropout = nn.Linear(4 * _WIDTH, _WIDTH), nn.Dropout(0.1)
        self.pause_s = pause_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.pause_s)
        return x + self.dropout(self.down(self.norm(self.up(x)).relu()))


class Model(nn.Module):
    """A row of such blocks."""

    def __init__(self, num_blocks: int = 4, *, pause_s: float = 0.0) -> None:
        super().__init__()
        self.inner = nn.Linear(_WIDTH, _WIDTH)
        self.layers = nn.ModuleList(Block(pause_s) for _ in range(num_blocks))
        self.head = nn.Linear(_WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        for layer in self.layers:
            x = layer(x)
        loss: torch.Tensor = self.head(x).square().mean()
        return loss


def made(num_blocks: int = 4, **settings: Any) -> tuple[Model, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    return Model(num_blocks, **settings), {"x": torch.randn(8, _WIDTH)}


def seen(model: nn.Module, batch: Any) -> Workload:
    """What a trace without memory sees."""
    return trace(meta_twin(model), batch, device_kind=DeviceKind.CPU)


# -- what is measured ------------------------------------------------------------------------------------------------


def test_every_phase_has_seconds_and_plans_of_the_model_are_for_the_workload() -> None:
    model, batch = made()
    workload = trace_within(model, batch, CpuDevice("10MiB"), repeats=1)
    phases = [phase for profile in workload.profiles for phase in profile.phases]
    outer = (workload.prologue_forward, workload.prologue_backward)
    phases += [*outer, workload.epilogue_forward, workload.epilogue_backward]
    assert all(phase.measured_s is not None and phase.measured_s > 0 for phase in phases)
    assert workload.is_measured
    assert workload.measured_on == CpuDevice().description
    assert workload.identity == trace(model, batch, repeats=0).identity
    plan, least_bytes = least_plan(workload)
    with carry_out(model, plan, workload, device=CpuDevice(least_bytes)) as training:
        model(**batch).backward()
        training.step()


def test_a_section_takes_what_it_computes_and_not_what_its_parameters_way_costs() -> None:
    """Its parameters take ten times as long to come as it computes."""
    model, batch = made(2, pause_s=_PAUSE_S)
    block_bytes = sum(p.numel() * 4 for p in model.layers[0].parameters())

    def measured(repeats: int) -> Workload:
        device = CpuDevice(host_to_device_bytes_per_s=block_bytes / (10 * _PAUSE_S))
        return trace_within(model, batch, device, repeats=repeats)

    def longest_s(workload: Workload) -> float:
        return max(phase.measured_s or 0.0 for phase in workload.profiles[0].phases)

    found = measured(3)
    profile = found.profiles[0]
    assert (
        min(p.measured_s or 0.0 for p in (profile.forward, profile.checkpoint_forward, profile.recompute)) >= _PAUSE_S
    )
    assert longest_s(found) < 5 * _PAUSE_S
    bring = VisitingModel.bring
    with patch("protwin.runtime.timing.visits._Visits.begin", _with_the_clock_running(bring)):
        assert longest_s(measured(1)) > 9 * _PAUSE_S


def _with_the_clock_running(bring: Any) -> Any:
    """The wrong variant: parameters come after the clock has begun."""

    def begin(self: Any, kind: TaskKind, section: Any) -> None:
        self.end_backward()
        self._clock.begin(kind, section)
        bring(self._model, kind, section)
        self._running = kind, section

    return begin


def test_blocks_are_kept_as_far_as_the_budget_allows() -> None:
    """All of them at once, in less by turns, and in the least the last one alone, which is recomputed right away."""
    model, _ = made(5)
    workload = seen(model, {"x": torch.randn(512, _WIDTH)})
    _, least_bytes = least_plan(workload)
    keep, again = ActivationMode.KEEP, ActivationMode.CHECKPOINT
    assert tuple(mode_rows(workload, least_bytes)) == ((again,) * 5, (*(again,) * 4, keep))
    in_plenty = list(mode_rows(workload, None))
    assert in_plenty[0] == (again,) * 5
    kept = {place for row in in_plenty for place, mode in enumerate(row) if mode is keep}
    assert {workload.blocks[place].profile for place in kept} == set(range(len(workload.profiles)))
    with patch.object(within_budget, "_examples", lambda _: list(range(5))):
        numbers = [len(list(mode_rows(workload, least_bytes + more))) for more in range(0, 2**23, 2**20)]
    assert max(numbers) > len(in_plenty) == 2
    assert numbers[-1] == 2


def test_a_block_that_is_never_kept_takes_what_its_recomputation_takes() -> None:
    model, batch = made()
    with patch.object(within_budget, "mode_rows", lambda workload, _: [(ActivationMode.CHECKPOINT,) * 4]):
        workload = trace_within(model, batch, CpuDevice("10MiB"), repeats=1)
    for profile in workload.profiles:
        again = (profile.checkpoint_forward.measured_s, profile.recompute.measured_s)
        assert profile.forward.measured_s == max(seconds for seconds in again if seconds is not None)
        assert profile.backward.measured_s == profile.checkpoint_backward.measured_s


# -- the budget ------------------------------------------------------------------------------------------------------


def _bring_everything(self: VisitingModel, kind: TaskKind, section: Any) -> None:
    """The wrong variant: what has come stays."""
    for chunk in self._chunks:
        chunk.leave()
        chunk.gather()


@some_quick("way", ["plain", "lora", "autocast"], quick=1)
def test_the_least_budget_is_enough_and_is_enforced(way: str) -> None:
    """Low-rank matrices and casts included; the whole model on the device is refused."""
    model, batch = made()
    if way == "lora":
        add_lora(model, rank=2)
    autocast = DType.BFLOAT16 if way == "autocast" else None
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast is not None):
        _, least_bytes = least_plan(seen(model, batch))
    device = CpuDevice(least_bytes)
    trace_within(model, batch, device, repeats=1, autocast=autocast)
    assert least_bytes // 3 < device.ledger.peak_bytes <= least_bytes
    assert device.ledger.named_bytes == 0
    with pytest.raises(InfeasibleError, match=r"too small to measure.*Raise it to"):
        trace_within(model, batch, CpuDevice(least_bytes - 1), repeats=1, autocast=autocast)
    if sum(p.numel() * 4 for p in model.parameters()) > least_bytes:
        with patch.object(VisitingModel, "bring", _bring_everything), pytest.raises(CpuOutOfMemoryError):
            trace_within(model, batch, CpuDevice(least_bytes), repeats=1, autocast=autocast)
    else:
        assert way == "autocast", "casts of weights are larger than they save"


def test_a_tied_head_comes_where_it_is_used() -> None:
    """Its gradient stays until the prologue has completed it."""
    model, batch = gpt2(num_layers=1), token_batches()[0]
    found = trace_within(model, batch, CpuDevice("10MiB"), repeats=1)
    assert found.is_measured
    assert found.identity == trace(model, batch, repeats=0).identity


@contextmanager
def no_copies() -> Iterator[None]:
    """Within the block no parameter that has memory is copied as a whole."""
    copied = nn.Parameter.__deepcopy__

    def refuse(self: nn.Parameter, memo: Any) -> Any:
        assert self.is_meta or type(self.data).__name__ == "FakeTensor", "a parameter is copied"
        return copied(self, memo)

    with patch.object(nn.Parameter, "__deepcopy__", refuse):
        yield


def test_the_host_has_one_copy() -> None:
    model, batch = made()
    with no_copies():
        trace_within(model, batch, CpuDevice("10MiB"), repeats=1)
        with pytest.raises(AssertionError, match="is copied"):
            copy.deepcopy(model)


# -- left as found ---------------------------------------------------------------------------------------------------


class _Stop(Exception):
    """Injected."""


@contextmanager
def failing_at(model: nn.Module, step: int) -> Iterator[list[int]]:
    """Within the block the forward of a module fails that is the ``step``-th to begin; gives how many have begun."""
    begun = [0]

    def count(*_: Any) -> None:
        begun[0] += 1
        if begun[0] == step:
            raise _Stop

    handles = [module.register_forward_pre_hook(count) for module in model.modules() if isinstance(module, Block)]
    try:
        yield begun
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.slow
def test_everything_is_as_found_whatever_fails() -> None:
    """At the forward of every block in every iteration, that of the twin included."""
    model, batch = made(2)
    model(**batch).backward()
    model.layers[0].eval()
    random.seed(1)
    with failing_at(model, -1) as begun:
        trace_within(model, batch, CpuDevice("10MiB"), repeats=1)
    assert begun[0] > 10
    held = Held.of(model)
    for step in range(1, begun[0] + 2):
        assert held.changed(model) == []
        with failing_at(model, step):
            if step <= begun[0]:
                with pytest.raises(_Stop):
                    trace_within(model, batch, CpuDevice("10MiB"), repeats=1)
            else:
                trace_within(model, batch, CpuDevice("10MiB"), repeats=1)
    assert held.changed(model) == []


@pytest.mark.parametrize("step", [1, 5, 9, None])
def test_weights_in_a_folder_stay_there(tmp_path: Path, step: int | None) -> None:
    torch.manual_seed(0)
    save_file({name: tensor.clone() for name, tensor in Model(2).state_dict().items()}, tmp_path / "model.safetensors")
    with parameters_on_meta():
        model = Model(2)
    _, batch = made(2)
    before = {id(parameter) for parameter in model.parameters()}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with failing_at(model, step or -1):
        if step is None:
            assert trace_within(model, batch, CpuDevice("10MiB"), repeats=1, weights=tmp_path).is_measured
        else:
            with pytest.raises(_Stop):
                trace_within(model, batch, CpuDevice("10MiB"), repeats=1, weights=tmp_path)
    assert {id(parameter) for parameter in model.parameters()} == before
    assert all(parameter.is_meta for parameter in model.parameters())
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())
    save_file({"head.bias": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(FileError, match="lack"):
        trace_within(model, batch, CpuDevice("10MiB"), weights=tmp_path)
