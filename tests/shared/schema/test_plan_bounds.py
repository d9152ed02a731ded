"""Numbers in plans, of any size: an answer, or one message with the bound."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protwin.shared.basics.errors import FileError, ProtwinError
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.records.phase_times import phase_times_s
from protwin.shared.schema.plan import MOST_MICRO_BATCHES, MOST_RANKS, Plan
from protwin.shared.schema.schedule import Schedule, TaskKind
from tests.cli.saved import decoder

KNOBS = ("chunk_bytes", "n_persist", "n_shard", "n_buffer", "prefetch_depth", "n_swap", "n_checkpoint")
WORKLOAD = decoder()
PLAN = Plan(workload_id=WORKLOAD.identity, chunk_bytes=2**26, n_persist=2, n_buffer=4)


@pytest.mark.parametrize(
    ("knob", "value", "bound"),
    [
        ("micro_batches", 10**30, "4096 are the most. Train on fewer and larger ones"),
        ("micro_batches", MOST_MICRO_BATCHES + 1, "4096 are the most"),
        ("num_ranks", 10**30, "more than 1,000,000 devices"),
        ("num_ranks", MOST_RANKS + 1, "more than 1,000,000 devices"),
    ],
)
def test_what_would_take_for_ever_is_refused_with_its_bound(knob: str, value: int, bound: str, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps(json.loads(PLAN.to_json()) | {"parallel": "ddp", knob: value}))
    with pytest.raises(FileError, match=f"{knob}: .*{bound}"):
        Plan.load(tmp_path / "plan.json")


@settings(max_examples=60, deadline=10_000)
@given(st.dictionaries(st.sampled_from(KNOBS), st.one_of(st.integers(0, 40), st.integers(2**31, 10**40)), min_size=1))
def test_any_numbers_compile_or_are_refused(knobs: dict[str, int]) -> None:
    """Nothing but a ProtwinError; pydantic's own becomes one where a plan is read."""
    with suppress(ProtwinError):
        compile_schedule(Plan.from_mapping(json.loads(PLAN.to_json()) | knobs, origin="plan.json"), WORKLOAD)


def plain_phase_times(schedule: Schedule, ends_s: list[float]) -> tuple[float, float]:
    """As the definition has it, task by task."""
    spent = {TaskKind.FORWARD: 0.0, TaskKind.BACKWARD: 0.0}
    at_s = 0.0
    for micro_batch in range(schedule.micro_batches):
        for kind in spent:
            ends = [ends_s[t.id] for t in schedule.tasks if t.kind is kind and t.micro_batch == micro_batch]
            spent[kind] += max(at_s, *ends) - at_s
            at_s = max(at_s, *ends)
    return spent[TaskKind.FORWARD], spent[TaskKind.BACKWARD]


@pytest.mark.parametrize("micro_batches", [1, 2, 5])
def test_phase_times_are_as_defined(micro_batches: int) -> None:
    schedule = compile_schedule(PLAN.model_copy(update={"micro_batches": micro_batches}), WORKLOAD)
    # Ends that go back and forth, as those of lanes side by side do.
    ends_s = [task.id + 40 * ((task.id * 7919) % 5) / 5 for task in schedule.tasks]
    assert phase_times_s(schedule, ends_s) == pytest.approx(plain_phase_times(schedule, ends_s))


def test_compiling_takes_as_long_per_micro_batch_however_many_there_are() -> None:
    """Ten times as many took thirty times as long."""

    def seconds(micro_batches: int) -> float:
        plan = PLAN.model_copy(update={"micro_batches": micro_batches})
        begin_s = time.process_time()
        schedule = compile_schedule(plan, WORKLOAD)
        phase_times_s(schedule, [float(task.id) for task in schedule.tasks])
        return time.process_time() - begin_s

    seconds(10)
    # Whatever else the machine does makes some of these longer, and none shorter.
    few_s = min(seconds(60) for _ in range(5))
    assert any(seconds(600) < 20 * few_s for _ in range(5))
