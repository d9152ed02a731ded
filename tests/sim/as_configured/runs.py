"""Runs that files of other tools ask for, and what they are as plans."""

from __future__ import annotations

from typing import Any

from protwin.shared.catalogue.machines import machine
from protwin.shared.foreign.asked_run import AskedRun, Precision, Reading, Tool
from protwin.shared.schema.optimizer import Optimizer
from protwin.shared.schema.workload import Workload
from protwin.sim.as_configured.configured_plan import ConfiguredPlan, configured_plan
from protwin.sim.as_configured.question import Said, Settled, settle, workload_of

GOOD: dict[str, Any] = {
    "model": "qwen2.5-0.5b",
    "batch_size": 1,
    "sequence_length": 256,
    "optimizer": Optimizer.ADAMW,
    "precision": Precision.MIXED_BFLOAT16,
    "max_gradient_norm": 1.0,
}


def never(message: str) -> None:
    raise AssertionError(message)


def settled_of(said: Said | None = None, *, on: str = "a100-80gb-x8", **changes: Any) -> Settled:
    run = AskedRun.model_validate({name: value for name, value in (GOOD | changes).items() if value is not None})
    return settle(Reading(tool=Tool.DEEPSPEED, run=run), said or Said(), machine(on), file="file.json")


def planned(tool: Tool = Tool.DEEPSPEED, **changes: Any) -> tuple[ConfiguredPlan, Workload, Settled]:
    settled = settled_of(**changes)
    workload, settled = workload_of(settled, cache=None, warn=never)
    return configured_plan(settled, workload, tool), workload, settled
