"""PyTorch's profiler shows the tasks of all lanes by their names."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from protwin.runtime import carry_out
from tests.runtime.hooks.test_swapping import CHECKPOINT, KEEP, SWAP, plan_of
from tests.runtime.models import cases


@pytest.mark.filterwarnings("ignore")
def test_every_task_besides_the_models_own_is_labelled() -> None:
    case = cases()["llama"]
    plan, model = plan_of(case, (SWAP, CHECKPOINT, KEEP, KEEP), is_offloaded=True), case.build()
    # By default torch follows the thread that asks alone.
    everywhere = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with (
        carry_out(model, plan, case.workload, optimizer=case.make_optimizer) as training,
        profile(activities=[ProfilerActivity.CPU], experimental_config=everywhere) as profiler,
    ):
        for batch in case.batches[:2]:
            case.loss(model, batch).backward()
            training.step()
        training.synchronize()
    names = {event.name for event in profiler.events()}
    expected = {f"protwin::{task.name}" for task in training.schedule.tasks if task.lane != "compute"}
    assert len(expected) > 10
    assert expected | {"protwin::device_adam"} <= names
