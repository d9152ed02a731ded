"""Two processes that ``accelerate launch`` has started: the Trainer and Accelerate's loop, by plans of two ranks.

``python -m tests.runtime.integrations.on_two_ranks FOLDER`` on each of them; what does not hold ends it by an error.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from accelerate import Accelerator

from protwin.runtime import planned_accelerator, trace
from protwin.shared.schema.plan import ParallelMode
from tests.runtime.integrations.loops import loop
from tests.runtime.integrations.trainers import Case, check_offloaded, logs_of, rows, wishes_for
from tests.runtime.models import differences, gpt2, llama, token_batches

_KNOBS: dict[ParallelMode, dict[str, Any]] = {
    mode: {"parallel": mode, "num_ranks": 2} for mode in (ParallelMode.REPLICATED, ParallelMode.SHARDED)
}


def trainers(folder: Path) -> None:
    """One micro-batch: the bits of DDP.  Several of them, and norms of parts: DDP's within float32's rounding."""
    workload = trace(gpt2(), token_batches(1)[0], repeats=0)
    data = {"train_dataset": rows(20), "eval_dataset": rows(5, seed=2)}
    once: dict[str, Any] = {"gradient_accumulation_steps": 1, "num_train_epochs": 1}
    for mode, limit in ((ParallelMode.REPLICATED, 0.5), (ParallelMode.SHARDED, 0.0)):
        case = Case(folder / f"one-{mode}", {**once, "max_grad_norm": limit}, data)
        plain = case.trained(gpt2())
        assert type(plain.model_wrapped).__name__ == "DistributedDataParallel"
        wishes = wishes_for(workload, **_KNOBS[mode], micro_batches=1, max_gradient_norm=limit or None)
        planned = case.trained(gpt2(), **wishes)
        expected = [{k: v for k, v in log.items() if limit or k != "grad_norm"} for log in logs_of(plain)]
        assert logs_of(planned) == expected, mode
        assert differences(planned.model, plain.model.state_dict()) == [], mode
        check_offloaded(planned)
    several = {"num_train_epochs": 2, "save_strategy": "steps", "save_steps": 3}
    plain = Case(folder / "plain", several, data).trained(gpt2())
    for mode in _KNOBS:
        planned = Case(folder / mode, several, data).trained(gpt2(), **wishes_for(workload, **_KNOBS[mode]))
        for found, log in zip(logs_of(planned), logs_of(plain), strict=True):
            assert found == pytest.approx(log, rel=1e-4), mode
        resumed = Case(folder / mode, several, data, resume=str(folder / mode / "checkpoint-3"))
        again = resumed.trained(gpt2(), **wishes_for(workload, **_KNOBS[mode], n_checkpoint=1))
        assert logs_of(again)[:-1] == logs_of(planned)[-len(logs_of(again)) : -1], mode
        assert differences(again.model, planned.model.state_dict()) == [], mode


def loops(folder: Path) -> None:
    """As ``trainers``."""
    workload = trace(llama(), token_batches(1)[0], repeats=0)
    for mode, limit in ((ParallelMode.REPLICATED, 0.5), (ParallelMode.SHARDED, None)):
        knobs = {**_KNOBS[mode], "micro_batches": 1, "max_gradient_norm": limit}
        plain = llama()
        expected = loop(Accelerator, plain, steps=1, num_rows=12, limit=limit)
        kind = planned_accelerator(Accelerator, tell=lambda _: None, **wishes_for(workload, **knobs))
        model = llama()
        found = loop(kind, model, steps=1, num_rows=12, limit=limit, save=folder / f"state-{mode}")
        found.accelerator.protwin.end()
        assert found.seen == expected.seen, mode
        assert differences(model, plain.state_dict()) == [], mode
        assert found.accelerator.protwin.counts.num_cpu_adam_steps > 0
        again = llama()
        resumed = loop(kind, again, steps=1, num_rows=12, limit=limit, resume=folder / f"state-{mode}")
        resumed.accelerator.protwin.end()
        assert resumed.seen == expected.seen[len(expected.seen) // 2 :], mode
        assert differences(again, plain.state_dict()) == [], mode


if __name__ == "__main__":
    trainers(Path(sys.argv[1]))
    loops(Path(sys.argv[1]))
    dist.destroy_process_group()
