"""The ledger's dispatch mode goes with its training, and bears modes of the user's own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, is_in_torch_dispatch_mode
from torch.utils.flop_counter import FlopCounterMode

from protwin.runtime import CpuDevice, CpuOutOfMemoryError, carry_out
from tests.proof_size import some_quick
from tests.runtime.life_cycle import check_ordinary, ordinary_facts, plan_for, start, train
from tests.runtime.models import SEED, Case, cases, differences, snapshot, uncached
from tests.runtime.watchdog import ends_in_time


@pytest.fixture
def case() -> Case:
    return cases()["llama"]


# -- dispatch modes --------------------------------------------------------------------------------------------------


def test_nothing_is_watched_after_an_error_within_a_watched_operation(case: Case) -> None:
    model = case.build()
    device = CpuDevice()
    with ends_in_time():
        training = start(case, model, device=device)
        device.ledger.budget_bytes = device.ledger.level_bytes + 30_000
        with pytest.raises(CpuOutOfMemoryError):
            train(case, model, training)
        training.close()
        assert _get_current_dispatch_mode_stack() == []
        level = device.ledger.level_bytes
        kept = torch.ones(100_000)
        assert device.ledger.level_bytes == level
        del kept


def test_training_closed_on_another_thread(case: Case) -> None:
    model = case.build()
    facts = ordinary_facts(model)
    training = start(case, model)
    loss = case.loss(model, case.batches[0])
    del loss
    thread = threading.Thread(target=training.close)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    # The mode of this thread's stack lies there still, asleep; nothing is watched.
    for mode in _get_current_dispatch_mode_stack():
        mode.__exit__(None, None, None)
    check_ordinary(model, facts)
    torch.manual_seed(SEED)
    case.loss(model, case.batches[0]).backward()


# -- modes of the user's own -----------------------------------------------------------------------------------------


PARTS = ("forward", "backward", "step")


@some_quick("around", [("forward",), ("backward",), ("backward", "step"), PARTS], quick=2)
def test_a_mode_of_ones_own_around_any_part_of_a_step(case: Case, around: tuple[str, ...]) -> None:
    """It overlaps with the ledger's, which begins within the forward and ends within the step."""

    def counted_flops(model: nn.Module, step: Callable[[], Any]) -> list[int]:
        counted = []
        for batch in case.batches:
            losses: list[torch.Tensor] = []
            calls = {
                "forward": lambda batch=batch, losses=losses: losses.append(case.loss(model, batch)),
                "backward": lambda losses=losses: losses.pop().backward(),
                "step": step,
            }
            for part in PARTS[: PARTS.index(around[0])]:
                calls[part]()
            with FlopCounterMode(display=False) as counter:
                for part in around:
                    calls[part]()
            for part in PARTS[PARTS.index(around[-1]) + 1 :]:
                calls[part]()
            counted.append(counter.get_total_flops())
        return counted

    # The counter lets some operations run in pieces, so the plain loop has it too.
    plain = uncached(case.build())
    optimizer = case.make_optimizer(case.groups(plain))
    expected = counted_flops(plain, lambda: (optimizer.step(), optimizer.zero_grad()))
    plan = plan_for(case.workload).model_copy(update={"n_checkpoint": 0})
    peaks = []
    for is_counted in (True, False):
        model = case.build()
        with ends_in_time(), carry_out(model, plan, case.workload, optimizer=case.make_optimizer) as training:
            found = counted_flops(model, training.step) if is_counted else train(case, model, training)
        peaks.append(training.peak_device_bytes)
        assert _get_current_dispatch_mode_stack() == []
        assert not is_in_torch_dispatch_mode()
        if is_counted:
            assert found == expected
            assert differences(model, snapshot(plain)) == []
    # A curve that missed backward would be lower by activations and gradients.
    assert peaks[0] == pytest.approx(peaks[1], rel=0.1)
