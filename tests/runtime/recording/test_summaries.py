"""Lines about a running training, and Records of single iterations."""

from __future__ import annotations

import time
from itertools import pairwise
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from protwin.runtime import StepSummary, carry_out
from protwin.runtime.recording import summaries
from protwin.shared.basics.errors import ProtwinError
from protwin.shared.basics.units import format_seconds
from protwin.shared.schema.record import Record
from protwin.shared.schema.schedule import Lane
from tests.runtime.models import SEED, cases
from tests.runtime.optimizing import half_offloaded

SLOW_S = 0.005
"""More than what other lanes do of a block, so that compute is the busiest on a machine that is busy too."""


def summaries_of(
    every: int, num_steps: int, predicted: Record | None = None
) -> tuple[list[StepSummary], list[float], Record]:
    """Summaries of a training, when they looked at the clock, and the record of its fifth iteration."""
    case = cases()["llama"]
    plan = half_offloaded(case.workload).model_copy(update={"micro_batches": 2})
    model, found, looked_s = case.build(), list[StepSummary](), list[float]()
    for layer in model.model.layers:  # type: ignore[union-attr]
        layer.register_forward_pre_hook(lambda *_: time.sleep(SLOW_S))

    def look() -> float:
        looked_s.append(time.perf_counter())
        return looked_s[-1]

    torch.manual_seed(SEED)
    with (
        mock.patch.object(summaries, "time", SimpleNamespace(perf_counter=look)),
        carry_out(model, plan, case.workload, optimizer=case.make_optimizer) as training,
    ):
        training.report_every(every, to=found.append, predicted=predicted)
        for step in range(num_steps):
            for _ in range(2):
                case.loss(model, case.batches[0]).backward()
            before_s = time.perf_counter()
            training.step()
            assert len(found) == (step + 1) // every == len(looked_s) - 1
            assert (before_s <= looked_s[-1]) == ((step + 1) % every == 0), "with the last of its steps"
        peak_bytes = training.peak_device_bytes
        record = training.record(since=4, until=5)
    assert [summary.peak_device_bytes for summary in found][-1] == peak_bytes
    return found, looked_s, record


def test_a_summary_follows_every_so_many_steps_and_agrees_with_the_clock() -> None:
    found, looked_s, record = summaries_of(3, 9)
    assert [(summary.step, summary.num_steps) for summary in found] == [(3, 3), (6, 3), (9, 3)]
    for summary, (begin_s, end_s) in zip(found, pairwise(looked_s), strict=True):
        assert summary.step_s * summary.num_steps == pytest.approx(end_s - begin_s)
        assert summary.samples_per_s * summary.step_s == pytest.approx(2 * cases()["llama"].workload.num_samples)
        assert summary.tokens_per_s * summary.step_s == pytest.approx(2 * cases()["llama"].workload.num_tokens)
        assert set(summary.busy_frac) == {Lane.COMPUTE, Lane.H2D, Lane.D2H, Lane.CPU_OPTIM}
        assert all(0 < share <= 1.001 for share in summary.busy_frac.values())
        assert max(summary.busy_frac, key=lambda lane: summary.busy_frac[lane]) is Lane.COMPUTE

    assert record.waits is not None
    waiting_s = sum(wait.seconds for wait in record.waits)
    assert record.lane(Lane.COMPUTE).busy_s + waiting_s == pytest.approx(record.iteration_s), "computing and waiting"
    assert waiting_s > 0


def test_a_summary_is_one_line_with_what_was_predicted() -> None:
    _, _, predicted = summaries_of(2, 6)
    found, _, _ = summaries_of(1, 6, predicted)
    lines = [str(summary) for summary in found]
    assert not any("\n" in line for line in lines)
    assert all(f"({format_seconds(predicted.iteration_s)} predicted)" in line for line in lines)
    assert lines[0].startswith("step 1: ")
    assert "busy" not in lines[0]
    assert "busy: compute" in lines[-1]


def test_one_iteration_has_a_record_of_its_own() -> None:
    _, _, record = summaries_of(2, 8)
    assert record.num_iterations == 1
    assert record.iteration_noise_frac == 0


@pytest.mark.parametrize("every", [0, -1])
def test_a_summary_every_no_step_is_refused(every: int) -> None:
    case = cases()["llama"]
    with (
        carry_out(case.build(), half_offloaded(case.workload), case.workload) as training,
        pytest.raises(ProtwinError, match="at least 1"),
    ):
        training.report_every(every)
