"""Distillations under autocast: the bits of blocks that learn alone under autocast, within the guaranteed memory."""

from __future__ import annotations

from functools import lru_cache, partial
from tempfile import TemporaryDirectory

import pytest
import torch

from protwin.runtime import CpuDevice, distil, trace_distillation
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.schema.workload import Workload
from protwin.shared.verify.guaranteed_peak import guaranteed_device_peak
from tests.runtime.distillation.cases import adamw, mse, quiet, steps_of, unlike
from tests.runtime.distillation.distilling import plan_in
from tests.runtime.distillation.families import families
from tests.runtime.distillation.reference import learn_alone, seen_by_teacher
from tests.runtime.equality import FAST_FOLDER

STEPS, MICRO_BATCHES = 2, 2
NARROW = partial(torch.autocast, "cpu", dtype=torch.bfloat16)


@lru_cache
def traced(name: str) -> Workload:
    family = families()[name]
    with quiet(), NARROW():
        return trace_distillation(family.teacher(), family.student(), family.batches(1)[0], mse, repeats=0)


@pytest.mark.parametrize(("name", "residency"), [("llama", "offloaded"), ("gpt2", "mixed")])
def test_blocks_learn_what_each_learns_alone(name: str, residency: str) -> None:
    family, workload = families()[name], traced(name)
    steps = steps_of(family, MICRO_BATCHES, STEPS)
    with quiet(), NARROW():
        seen = [[seen_by_teacher(family.teacher(), family.blocks, batch) for batch in step] for step in steps]
    learnt = learn_alone(family.student(), family.blocks, seen, mse, adamw, around=NARROW)
    plan = plan_in(name, residency, micro_batches=MICRO_BATCHES).model_copy(update={"workload_id": workload.identity})
    device = CpuDevice(guaranteed_device_peak(compile_schedule(plan, workload)).size_bytes)
    teacher, student, losses = family.teacher(), family.student(), []
    with TemporaryDirectory(dir=FAST_FOLDER) as disk, quiet():
        options = {"optimizer": adamw, "device": device, "disk_folder": disk}
        with distil(teacher, student, plan, workload, mse, **options) as training, NARROW():  # type: ignore[arg-type]
            for batches in steps:
                losses.append([training(**batch).tolist() for batch in batches])
                training.step()
            with training.evaluation():
                (batch,) = family.batches(1)
                found = student(**batch).logits
    with NARROW(), torch.no_grad(), quiet():
        student.config.use_cache = False
        assert torch.equal(found, student.eval()(**batch).logits)
    for index, (block, alone) in enumerate(zip(family.blocks, learnt, strict=True)):
        assert [[of_pairs[index] for of_pairs in step] for step in losses] == alone.losses
        assert unlike(alone, student.get_submodule(block)) == []
