"""A Record's peak belongs to the iterations that its times come from."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
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
        # Its operations come after its beginning, however much of its time is taken off as watching.
        model.model.layers[3].input_layernorm.register_forward_pre_hook(lambda *_: time.sleep(0.01))
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
        watched_bytes = level_at(there.times_s, there.levels_bytes, watched.spans[fourth.task].start)  # type: ignore[index]
        assert training.peak_device_bytes >= record.peak_device_bytes
    curve = curve_of(record)
    assert curve.peak_bytes <= record.guaranteed_peak_device_bytes
    assert curve.peak_bytes == max(curve.levels_bytes) == sum(held.size_bytes for held in curve.alive_at_peak)
    # At the beginning of the last block's forward, those of the three before it; the third's may have gone there.
    each = case.workload.profile_of(0).swappable_bytes
    timed_bytes = level_at(np.array(curve.times_s), curve.levels_bytes, fourth.start_s + 1e-6)
    assert timed_bytes - watched_bytes in (2 * each, 3 * each)


@pytest.mark.parametrize("pace", [0.0, 1e-6, 0.3, 1.0, 20.0])
def test_a_peak_that_operations_alone_decide_is_the_same_at_every_pace(
    trained: tuple[CountedMemory, int], pace: float
) -> None:
    """The ledger has counted it as the operations ran."""
    memory, ledgers_bytes = trained
    assert not memory.changes
    stretches = [replace(stretch, begin_s=pace * stretch.begin_s) for stretch in memory.stretches]
    found = CountedMemory(stretches, pace * memory.end_s, memory.named, ()).over_time()
    assert found.peak_bytes == max(found.levels_bytes) == sum(held.size_bytes for held in found.alive) == ledgers_bytes


@pytest.fixture(scope="module")
def trained() -> tuple[CountedMemory, int]:
    """The memory of an iteration that nobody watched, everything persistent, and the ledger's peak of a watched one."""
    case, device = cases()["llama"], CpuDevice()
    model, ledger = case.build(), device.ledger
    layout = build_layout(case.workload.parameters, num_blocks=case.workload.num_blocks, chunk_bytes=9_000)
    plan = Plan(workload_id=case.workload.identity, chunk_bytes=9_000, n_persist=len(layout.chunks), n_buffer=0)
    with ends_in_time(), carry_out(model, plan, case.workload, device=device) as training:
        for number in range(METERED_ITERATIONS + 1):
            case.loss(model, case.batches[0]).backward()
            training.step()
            if number == METERED_ITERATIONS - 1:
                watched_bytes = ledger.peak_bytes
        log = training._recorder.logs[-1]
    assert not log.is_metered
    assert isinstance(log.memory, CountedMemory)
    return log.memory, watched_bytes


# -- in order --------------------------------------------------------------------------------------------------------

TICK_S = 0.125
"""Times of the cases below are multiples of it, so that many of them are equal."""
_SIZES = st.integers(-5, 5).map(lambda size: size * MIB)


@st.composite
def watched_stretches(draw: st.DrawFn) -> WatchedStretch:
    """Changes may share a moment, with one another and with the beginning, never with the end."""
    at, number, changes = 0, 0, []
    for ticks, operations, size_bytes in draw(
        st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), _SIZES), max_size=6)
    ):
        at, number = at + ticks, number + operations
        changes.append((TICK_S * at, number, None, size_bytes))
    return WatchedStretch(
        {None: 100 * MIB, Content.SWAPPED: draw(st.integers(0, 5)) * MIB},
        left_bytes=0,
        seconds=TICK_S * (at + draw(st.integers(1, 3))),
        num_operations=number + draw(st.integers(0, 2)),
        changes=tuple(changes),
    )


@st.composite
def iterations(draw: st.DrawFn) -> tuple[list[Stretch], float]:
    """Stretches of any length, and when the last one ends."""
    at, stretches = 0, []
    for place, watched in enumerate(draw(st.lists(watched_stretches(), min_size=1, max_size=4))):
        stretches.append(Stretch(TICK_S * at, f"task {place}", watched))
        at += draw(st.integers(0, 12))
    return stretches, TICK_S * at


def moments_of(watched: WatchedStretch) -> list[tuple[float, int]]:
    """(seconds, level) at the beginning and after all changes of each later moment, one change after another."""
    level = sum(watched.held.values())
    found = {0.0: level}
    for at_s, _, _, more_bytes in watched.changes:
        level += more_bytes
        found[at_s] = level
    return list(found.items())


@given(iteration=iterations())
def test_every_level_that_was_watched_is_reached_in_its_order(iteration: tuple[list[Stretch], float]) -> None:
    stretches, end_s = iteration
    named_bytes = 7 * MIB
    levels = [level + named_bytes for stretch in stretches for _, level in moments_of(stretch.watched)]
    found = CountedMemory(stretches, end_s, {Content.PARAMETERS: named_bytes}, ()).over_time()
    assert found.levels_bytes.tolist() == levels
    assert found.peak_bytes == max(levels) == sum(held.size_bytes for held in found.alive)
    assert np.all(np.diff(found.times_s) >= 0)
    assert stretches[0].begin_s <= found.times_s[0]
    assert found.times_s[-1] <= end_s


def played(stretches: Sequence[Stretch], end_s: float, changes: Sequence[MemoryChange]) -> list[tuple[float, int]]:
    """(time, level), one event after another: what is over at a time, named changes at that time, and the rest."""
    events: list[tuple[float, int, int, int]] = [(change.at_s, 1, 0, change.more_bytes) for change in changes]
    for stretch, until_s in zip(stretches, [*(other.begin_s for other in stretches[1:]), end_s], strict=True):
        laid_s = (stretch.begin_s + stretch.watched.times_s(until_s - stretch.begin_s)).tolist()
        for at_s, (_, level) in zip(laid_s, moments_of(stretch.watched), strict=True):
            events.append((min(at_s, until_s), 0 if at_s >= until_s else 2, level, 0))
    events.sort(key=lambda event: event[:2])
    made_bytes = named_bytes = 0
    found = []
    for event, following in zip(events, [*events[1:], None], strict=True):
        at_s, rank, level, more_bytes = event
        made_bytes, named_bytes = made_bytes if rank == 1 else level, named_bytes + more_bytes
        if rank != 1 or following is None or following[0] > at_s:
            found.append((at_s, made_bytes + named_bytes))
    return found


@settings(max_examples=100)
@given(data=st.data(), iteration=iterations())
def test_named_changes_have_their_place_among_what_operations_do(
    data: st.DataObject, iteration: tuple[list[Stretch], float]
) -> None:
    """Half of them at times at which a task begins or ends."""
    stretches, end_s = iteration
    marks_s = st.sampled_from([*(stretch.begin_s for stretch in stretches), end_s])
    times_s = marks_s | st.integers(0, round(end_s / TICK_S)).map(lambda ticks: ticks * TICK_S)
    noted = data.draw(st.lists(st.tuples(times_s, _SIZES.map(abs)), max_size=6).map(sorted))
    changes = [MemoryChange(at_s, Content.GRADIENTS, size_bytes, True, 0) for at_s, size_bytes in noted]
    found = CountedMemory(stretches, end_s, {}, changes).over_time()
    expected = played(stretches, end_s, changes)
    assert list(zip(found.times_s.tolist(), found.levels_bytes.tolist(), strict=True)) == expected
    assert found.peak_bytes == max(found.levels_bytes) == sum(held.size_bytes for held in found.alive)


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


def test_what_leaves_a_task_that_took_no_time_is_counted_once() -> None:
    """Operations made 7 MiB, and at the moment when their task ends they become a named allocation."""
    task = WatchedStretch({}, left_bytes=0, seconds=4.0, num_operations=2, changes=((3.5, 2, None, 7 * MIB),))
    after = WatchedStretch({}, left_bytes=0, seconds=1.0, num_operations=0)
    for task_s in (0.0, 1.0, 4.0, 9.0):
        memory = CountedMemory(
            [Stretch(1.0, "forward 0", task), Stretch(1.0 + task_s, "forward 0", after)],
            end_s=11.0,
            named={},
            changes=[MemoryChange(1.0 + task_s, Content.SWAPPED, 7 * MIB, True, 0)],
        ).over_time()
        assert memory.levels_bytes.tolist() == [0, 7 * MIB, 7 * MIB]
