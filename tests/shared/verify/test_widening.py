"""Device Adam's curve where narrow gradients are widened: neighbours go together up to a number of scalars."""

from __future__ import annotations

import pytest

from protwin.shared import load_workload
from protwin.shared.basics.errors import ScheduleError
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.layout import adam_memory
from protwin.shared.layout.layout import layout_of
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.workload import DType
from protwin.shared.verify import updates
from protwin.shared.verify.verify import verify_schedule


@pytest.mark.parametrize("scalars", [2**10, 2**16, 2**20, 2**22])
@pytest.mark.parametrize("ruled", ["both", "verifier", "compiler"])
def test_the_verifier_packs_neighbours_by_itself(monkeypatch: pytest.MonkeyPatch, scalars: int, ruled: str) -> None:
    """With all of a bfloat16 model persistent, a limit that one side alone has is found out."""
    # Of a shape of its own: what is kept of a schedule does not know of the limit.
    length = 64 + scalars.bit_length() + 32 * len(ruled)
    workload = load_workload("gpt2", batch_size=1, sequence_length=length, dtype=DType.BFLOAT16)
    layout = layout_of(workload, 2**26)
    plan = Plan(workload_id=workload.identity, chunk_bytes=2**26, n_persist=len(layout.chunks), n_buffer=0)
    if ruled != "verifier":
        monkeypatch.setattr(adam_memory, "WIDENED_SCALARS", scalars)
    schedule = compile_schedule(plan, workload, layout)
    if ruled != "compiler":
        monkeypatch.setattr(updates, "WIDENED_SCALARS", scalars)
    if ruled == "both":
        verify_schedule(schedule, plan, workload, layout)
        return
    with pytest.raises(ScheduleError, match="device_adam"):
        verify_schedule(schedule, plan, workload, layout)
