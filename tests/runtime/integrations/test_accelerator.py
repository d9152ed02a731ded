"""Accelerate's loop by a plan is the loop without one, bit for bit, and its checkpoints go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from accelerate import Accelerator
from transformers import Trainer

from protwin.runtime import planned_accelerator, planned_lightning, planned_trainer, trace
from protwin.shared.basics.errors import PlanError, ScheduleError
from protwin.shared.catalogue.machines import load_hardware
from protwin.shared.schema.plan import ParallelMode
from protwin.shared.schema.workload import Workload
from tests.runtime.integrations.loops import loop
from tests.runtime.integrations.trainers import LIMIT, MICRO_BATCHES, wishes_for
from tests.runtime.models import adamw, differences, gpt2, llama, token_batches
from tests.runtime.watchdog import ends_in_time, lanes_alive


@pytest.fixture(scope="module")
def workload() -> Workload:
    return trace(llama(), token_batches(1)[0], repeats=0)


def silent(_: str) -> None:
    """Hears what is done."""


def test_the_loop_with_a_searched_plan_and_a_resume_under_another(tmp_path: Path) -> None:
    """Dropout, an uneven last step of each epoch, clipping and a scheduler; resumed within another budget."""
    plain = gpt2()
    expected = loop(Accelerator, plain, steps=2)
    wishes: dict[str, Any] = {"hardware": load_hardware("rtx-3090"), "max_gradient_norm": LIMIT, "tell": silent}
    model = gpt2()
    with ends_in_time():
        kind = planned_accelerator(Accelerator, budget_bytes="300KiB", **wishes)
        found = loop(kind, model, steps=2, save=tmp_path / "state")
        run = found.accelerator.protwin
        assert run.training is not None
        found.accelerator.end_training()
    assert found.seen == expected.seen
    assert [name for name, value in expected.weights.items() if not torch.equal(value, found.weights[name])] == []
    assert differences(model, plain.state_dict()) == []
    assert run.counts.num_iterations == 6
    assert run.counts.num_cpu_adam_steps > 0
    assert run.counts.bytes_host_to_device > run.counts.bytes_device_to_host > 0
    assert lanes_alive() == []
    model = gpt2()
    with ends_in_time():
        kind = planned_accelerator(Accelerator, budget_bytes="400KiB", **wishes)
        again = loop(kind, model, steps=2, resume=tmp_path / "state")
        again.accelerator.end_training()
    assert again.accelerator.protwin.plan != run.plan
    assert again.seen == expected.seen[len(expected.seen) // 2 :]
    assert differences(model, plain.state_dict()) == []


def test_in_bfloat16(workload: Workload) -> None:
    plain, model = llama(), llama()
    expected = loop(Accelerator, plain, steps=MICRO_BATCHES, mixed_precision="bf16")
    kind = planned_accelerator(Accelerator, tell=silent, **wishes_for(workload))
    with ends_in_time():
        # Accelerate enters autocast within the model's forward; this workload was traced without it.
        with pytest.warns(UserWarning, match="forwards run under torch.autocast to bfloat16"):
            found = loop(kind, model, steps=MICRO_BATCHES, mixed_precision="bf16")
        found.accelerator.end_training()
    assert found.seen == expected.seen
    assert differences(model, plain.state_dict()) == []


def prepared(kind: Any, *extra: Any, **options: Any) -> Any:
    model = llama()
    optimizer = adamw([{"params": list(model.parameters())}])
    return kind(cpu=True, **options).prepare(model, optimizer, *extra)


def test_ranks_that_share_sequences_are_refused(workload: Workload) -> None:
    """The loops would give each of them other sequences."""
    shared = wishes_for(workload, parallel=ParallelMode.SHARDED, num_ranks=2, sequence_ranks=2)
    for wishes in (shared, {"workload": workload, "knobs": {"sequence_ranks": 2}}):
        for made, of, whose in (
            (planned_trainer, Trainer, "a Trainer"),
            (planned_accelerator, Accelerator, "an Accelerator"),
            (planned_lightning, pl.Trainer, "a Lightning Trainer"),
        ):
            with pytest.raises(PlanError, match=f"2 ranks are to share each sequence .* the loop of {whose} gives"):
                made(of, **wishes)


def test_what_contradicts_the_plan(workload: Workload) -> None:
    kind = planned_accelerator(Accelerator, tell=silent, **wishes_for(workload))
    with pytest.raises(PlanError, match="gradient_accumulation_steps of the accelerator is 3, but the plan has 2"):
        prepared(kind, gradient_accumulation_steps=3)
    with pytest.raises(PlanError, match="prepare\\(\\) was given no DataLoader"):
        prepared(planned_accelerator(Accelerator, tell=silent))
    with pytest.raises(PlanError, match="1 models and 0 optimizers"):
        kind(cpu=True).prepare(llama())
    with pytest.raises(PlanError, match="micro_batches of an Accelerator's plan is gradient_accumulation_steps"):
        planned_accelerator(Accelerator, micro_batches=2)
    with pytest.raises(PlanError, match="buget_bytes is nothing that a plan is searched with"):
        planned_accelerator(Accelerator, buget_bytes="1GiB")


def test_a_limit_that_the_plan_does_not_know(workload: Workload) -> None:
    kind = planned_accelerator(Accelerator, tell=silent, **wishes_for(workload, max_gradient_norm=None))
    accelerator = kind(cpu=True, gradient_accumulation_steps=MICRO_BATCHES)
    model = llama()
    model, _ = accelerator.prepare(model, adamw([{"params": list(model.parameters())}]))
    with pytest.raises(ScheduleError, match=r"to limit the norm to 0\.5, but the plan limits none. Pass max_gradient"):
        accelerator.clip_grad_norm_(model.parameters(), LIMIT)
    accelerator.end_training()
    assert differences(model, llama().state_dict()) == []


@pytest.mark.parametrize(
    ("variable", "message"),
    [
        ("ACCELERATE_USE_FSDP", "FSDP .*a plan decides alone"),
        ("ACCELERATE_USE_DEEPSPEED", "DeepSpeed .*a plan decides alone"),
        ("ACCELERATE_DYNAMO_BACKEND", "compiled model"),
    ],
)
def test_what_accelerate_launch_was_told(
    variable: str, message: str, workload: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before Accelerate itself begins with it."""
    monkeypatch.setenv(variable, "INDUCTOR" if "DYNAMO" in variable else "true")
    with pytest.raises(PlanError, match=message):
        planned_accelerator(Accelerator, tell=silent, **wishes_for(workload))(cpu=True)
