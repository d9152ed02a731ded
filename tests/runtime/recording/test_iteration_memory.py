"""A Record's peak belongs to the iterations that its times come from."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from transformers import LlamaForCausalLM

from protwin.runtime import CpuDevice, carry_out
from protwin.runtime.devices.ledger import MemoryChange
from protwin.runtime.hooks.swapping import SwappedBlock
from protwin.runtime.recording.iteration_memory import CountedMemory, Stretch, WatchedStretch
from protwin.runtime.recording.metering import METERED_ITERATIONS
from protwin.shared.layout.layout import build_layout
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.record import Record
from protwin.shared.schema.schedule import Content, Memory
from tests.runtime.models import Case, cases
from tests.runtime.optimizing import CASE, single_plans
from tests.runtime.watchdog import ends_in_time

STEPS = METERED_ITERATIONS + 4
MIB = 2**20


def all_swapped(case: Case, prefetch_depth: int) -> Plan:
    """Every block's activations travel, and forward may go on before any of them is gone."""
    layout = build_layout(case.workload.parameters, num_blocks=case.workload.num_blocks, chunk_bytes=9_000)
    return Plan(
        workload_id=case.workload.identity,
        chunk_bytes=9_000,
        n_persist=len(layout.chunks),
        n_buffer=0,
        prefetch_depth=prefetch_depth,
        n_swap=case.workload.num_blocks,
    )


def curve_of(record: Record) -> Any:
    curve = record.curve(Memory.DEVICE)
    assert curve is not None
    return curve


@settings(max_examples=8)
@given(plan=single_plans(CASE.workload))
def test_where_every_iteration_is_watched_the_curves_peak_is_the_ledgers(plan: Plan) -> None:
    """The ledger takes the highest level as operations run, and knows nothing of tasks."""
    model = CASE.build()
    with ends_in_time(), carry_out(model, plan, CASE.workload, meter_every=1) as training:
        for batch in CASE.batches:
            CASE.loss(model, batch).backward()
            training.step()
        found = [log.memory.over_time(lambda _: (0.0, 0.0)) for log in training._recorder.logs if log.memory]
        assert len(found) == len(CASE.batches)
        assert max(memory.peak_bytes for memory in found) == training.peak_device_bytes
    for memory in found:
        assert memory.peak_bytes == memory.levels_bytes.max() == sum(held.size_bytes for held in memory.alive)
        assert np.all(np.diff(memory.times_s) > 0)


def wait_until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(1e-4)


def level_at(times_s: Any, levels_bytes: Any, at_s: float) -> int:
    return int(levels_bytes[np.searchsorted(times_s, at_s, side="right") - 1])


def test_slow_transfers_of_timed_iterations_show_in_the_curve(monkeypatch: pytest.MonkeyPatch) -> None:
    """Swapped activations go at once where operations are watched, and stay as long as they may where nobody does."""
    case, device, may_go = cases()["llama"], CpuDevice(), threading.Event()
    offload = SwappedBlock.offload

    def held_back(block: SwappedBlock) -> int:
        assert may_go.wait(timeout=30)
        return offload(block)

    monkeypatch.setattr(SwappedBlock, "offload", held_back)
    model = case.build()
    ledger = device.ledger
    assert isinstance(model, LlamaForCausalLM)
    with ends_in_time(), carry_out(model, all_swapped(case, 3), case.workload, device=device) as training:

        def in_third(*_: Any) -> None:
            if may_go.is_set():
                wait_until(lambda: ledger.named.get(Content.SWAPPED, 0) == 0)

        model.model.layers[2].mlp.register_forward_hook(in_third)
        model.model.layers[3].mlp.register_forward_hook(lambda *_: may_go.set())
        for number in range(STEPS):
            if number < METERED_ITERATIONS:
                may_go.set()
            else:
                may_go.clear()
            case.loss(model, case.batches[0]).backward()
            training.step()
        watched = next(log for log in training._recorder.logs if log.index == METERED_ITERATIONS - 1)
        assert watched.is_metered
        assert watched.memory is not None
        record = training.record()
        fourth = next(task for task in record.tasks if task.name == "forward 3")
        there = watched.memory.over_time(lambda _: (0.0, 0.0))
        watched_bytes = level_at(there.times_s, there.levels_bytes, watched.spans[fourth.task].start)
        assert training.peak_device_bytes >= record.peak_device_bytes
    curve = curve_of(record)
    assert curve.peak_bytes <= record.guaranteed_peak_device_bytes
    assert curve.peak_bytes == max(curve.levels_bytes) == sum(held.size_bytes for held in curve.alive_at_peak)
    # At the beginning of the last block's forward, those of the three before it; the third's may have gone there.
    each = case.workload.profile_of(0).swappable_bytes
    timed_bytes = level_at(np.array(curve.times_s), curve.levels_bytes, fourth.start_s + 1e-6)
    assert timed_bytes - watched_bytes in (2 * each, 3 * each)


# -- by hand ---------------------------------------------------------------------------------------------------------


def test_a_watched_task_is_laid_over_a_faster_one() -> None:
    """Ten operations of 1 s each where they were watched, of which 0.5 s was the watching."""
    changes = tuple((float(n), n, None, 100 if n % 2 else -100) for n in range(1, 10))
    watched = WatchedStretch({None: 50}, left_bytes=50, seconds=10.0, num_operations=10, changes=changes)
    assert watched.times_s(5.0).tolist() == [n / 2 for n in range(10)]
    assert watched.times_s(20.0).tolist() == [2.0 * n for n in range(10)]
    assert watched.levels_bytes.tolist() == [50, *[150, 50] * 4, 150]
    assert watched.held_after(1) == {None: 150}


def test_quick_operations_keep_their_order_where_watching_is_taken_off() -> None:
    """A slow operation, then quick ones that took no longer than the watching is reckoned at."""
    changes = ((8.0, 1, None, 1), (8.5, 2, None, 1), (9.0, 3, None, 1), (10.0, 4, None, 1))
    watched = WatchedStretch({}, left_bytes=0, seconds=10.0, num_operations=4, changes=changes)
    assert watched.times_s(6.0).tolist() == [0.0, 6.0, 6.0, 6.0, 6.0]
    assert watched.times_s(0.0).tolist() == [0.0] * 5


def test_what_changes_hands_at_one_moment_is_counted_once() -> None:
    """Named bytes go at the moment when a task begins that holds them."""
    before = WatchedStretch({None: 10 * MIB}, left_bytes=10 * MIB, seconds=1.0, num_operations=1)
    task = WatchedStretch(
        {None: 10 * MIB, Content.SWAPPED: 7 * MIB}, left_bytes=10 * MIB, seconds=1.0, num_operations=1
    )
    memory = CountedMemory(
        [Stretch(0.0, "forward 1", before), Stretch(2.0, "backward 1", task)],
        end_s=3.0,
        named={Content.PARAMETERS: 5 * MIB},
        changes=[
            MemoryChange(1.0, Content.SWAPPED, 7 * MIB, True, 0),
            MemoryChange(2.0, Content.SWAPPED, -7 * MIB, True, 0),
            MemoryChange(2.5, Content.PARAMETERS, MIB, True, 0),
        ],
    ).over_time()
    assert memory.times_s.tolist() == [0.0, 1.0, 2.0, 2.5]
    assert memory.levels_bytes.tolist() == [15 * MIB, 22 * MIB, 22 * MIB, 23 * MIB]
    assert memory.peak_at == "backward 1"
    assert {held.content: held.size_bytes for held in memory.alive} == {
        Content.PARAMETERS: 6 * MIB,
        Content.SWAPPED: 7 * MIB,
        Content.ACTIVATIONS: 10 * MIB,
    }
