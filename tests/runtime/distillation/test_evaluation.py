"""Within ``evaluation()`` both whole models give what plain copies give, and training goes on as if nothing had been."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from protwin.runtime import CpuDevice
from protwin.runtime.distillation import ends as ends_module
from protwin.runtime.distillation.distil import Distilling
from protwin.runtime.distillation.validation import language_model_loss, validation_losses
from protwin.runtime.training.evaluation import Evaluation
from protwin.shared.basics.errors import DeviceOutOfMemoryError, ScheduleError, WorkloadError
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.schedule import Memory
from protwin.shared.verify.guaranteed_peak import guaranteed_device_peak
from tests.proof_size import examples
from tests.runtime.distillation.cases import expected, quiet, snapshot, steps_of, unlike
from tests.runtime.distillation.distilling import beginning, is_offloading, plan_in, random_bypass_plans, workload_of
from tests.runtime.distillation.families import VOCABULARY, Family, families

STEPS = 2
TEXT = [name for name in families() if name != "dicts"]


def other_batches(family: Family) -> list[dict[str, torch.Tensor]]:
    """Of shapes that nobody has traced."""
    generator = torch.Generator().manual_seed(7)
    if family.makes_points:
        return [{"points": torch.randn(rows, 5, generator=generator)} for rows in (6, 1)]
    tokens = [torch.randint(0, VOCABULARY, shape, generator=generator) for shape in ((2, 12), (3, 20))]
    return [
        {"input_ids": tokens[0]},
        {"input_ids": tokens[1], "attention_mask": (torch.arange(20) < torch.tensor([[20], [9], [14]])).long()},
    ]


def plain_models(name: str, steps: int) -> tuple[nn.Module, nn.Module]:
    """Teacher and student as plain copies, the student's blocks as each has learnt alone in so many steps."""
    family = families()[name]
    teacher, student = family.teacher(), family.student()
    for block, learnt in zip(family.blocks, expected(name, 1, steps).learnt if steps else (), strict=steps > 0):
        student.get_submodule(block).load_state_dict(learnt.weights)
    for model in (teacher, student):
        if hasattr(model, "config"):
            model.config.use_cache = False
    return teacher, student


def output_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    with quiet(), torch.no_grad():
        output = model(**batch)
    return output if isinstance(output, torch.Tensor) else output.logits


def room_for(name: str, plan: Plan) -> int:
    """What training needs, and if it is more: what stays, the largest block or end with its batch."""
    schedule = compile_schedule(plan, workload_of(name))
    return max(guaranteed_device_peak(schedule).size_bytes, schedule.static_bytes(Memory.DEVICE) + 120_000)


def check(name: str, plan: Plan) -> None:
    """Evaluate both models before every step, and in the end."""
    family = families()[name]
    teacher, student = family.teacher(), family.student()
    device, steps, before = CpuDevice(room_for(name, plan)), steps_of(family, 1, STEPS), snapshot(teacher)
    with beginning(teacher, student, plan, workload_of(name), device) as training:
        for step in range(STEPS + 1):
            plain = plain_models(name, step)
            with training.evaluation():
                student.eval()
                for batch in other_batches(family):
                    for model, copy in zip((teacher, student), plain, strict=True):
                        assert torch.equal(output_of(model, batch), output_of(copy, batch)), (step, plan)
                student.train()
            if not family.makes_points:
                with quiet():
                    found = validation_losses(training, other_batches(family))
                    losses = [language_model_loss(copy, other_batches(family)) for copy in plain]
                assert [found.teacher, found.student] == losses
            if step < STEPS:
                training(**steps[step][0])
                training.step()
    for block, learnt in zip(family.blocks, expected(name, 1, STEPS).learnt, strict=True):
        assert unlike(learnt, student.get_submodule(block)) == []
    assert all(torch.equal(tensor, before[key]) for key, tensor in teacher.state_dict().items())


@pytest.mark.parametrize("name", families())
def test_both_models_are_what_plain_copies_are(name: str) -> None:
    chosen = [p for p in random_bypass_plans(name, 12, seed=5) if p.micro_batches == 1 and is_offloading(name, p)]
    for plan in chosen[: examples(6, 1)]:
        check(name, plan)


def nothing_is_copied(self: Any, path: str, parameter: nn.Parameter) -> None:
    home = parameter.data
    self.held[parameter] = ends_module._Place(torch.empty(home.nbytes, dtype=torch.uint8), home)
    self.device.ledger.allocate(home.nbytes, path)
    parameter.data = torch.zeros_like(home)


@pytest.mark.parametrize(
    "variant",
    [
        (Evaluation, "_gather", lambda self, chunk: chunk.make_room()),
        (ends_module._Places, "_copy", nothing_is_copied),
        (Evaluation, "_holders", lambda self: iter(())),
    ],
    ids=["blocks are not copied", "ends are not copied", "a tied head does not come"],
)
def test_wrong_variants_show(variant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*variant)
    with pytest.raises((AssertionError, ScheduleError)):
        check("gpt2", plan_in("gpt2", "offloaded"))


def test_the_losses_are_those_of_transformers() -> None:
    name, batch = "llama", {"input_ids": other_batches(families()["llama"])[0]["input_ids"]}
    teacher, student = families()[name].teacher(), families()[name].student()
    with beginning(teacher, student, plan_in(name, "offloaded"), workload_of(name), CpuDevice()) as training:
        found = validation_losses(training, [batch])
        assert student.training
        labelled = validation_losses(training, [batch | {"labels": batch["input_ids"].clone().fill_(3)}])
        with pytest.raises(WorkloadError, match="no token to predict"):
            validation_losses(training, [batch | {"labels": torch.full_like(batch["input_ids"], -100)}])
    for model, loss in zip(plain_models(name, 0), (found.teacher, found.student), strict=True):
        with torch.no_grad():
            theirs = model(**batch, labels=batch["input_ids"]).loss.item()
        assert loss == pytest.approx(theirs, rel=1e-6)
    assert labelled != found
    assert found.perplexities == pytest.approx((torch.tensor(found.teacher).exp(), torch.tensor(found.student).exp()))


# -- memory ----------------------------------------------------------------------------------------------------------


def levels_within(plan: Plan, monkeypatch: pytest.MonkeyPatch | None = None) -> None:
    """One end at a time is on the device, one block, and what stays."""
    family = families()["llama"]
    teacher, student, device = family.teacher(), family.student(), CpuDevice()
    with beginning(teacher, student, plan, workload_of("llama"), device) as training:
        persistent_bytes = sum(chunk.device_bytes for chunk in training._placed.chunks if chunk.has_place)
        levels: dict[str, int] = {}
        with training.evaluation():
            for model, who in ((teacher, "teacher"), (student, "student")):
                for path in ("model.embed_tokens", "model.norm", "lm_head"):
                    noted = f"{who}.{path}"
                    model.get_submodule(path).register_forward_hook(
                        lambda *_, noted=noted: levels.__setitem__(noted, device.ledger.named_bytes - persistent_bytes),
                        prepend=True,
                    )
                output_of(model, family.batches(1)[0])
            assert device.ledger.named_bytes == persistent_bytes
    matrix, norm = VOCABULARY * 32 * 4, 32 * 4
    assert {key: value for key, value in levels.items() if key != "teacher.model.embed_tokens"} == {
        "teacher.model.norm": norm,
        "teacher.lm_head": matrix,
        "student.model.embed_tokens": matrix,
        "student.model.norm": norm,
        "student.lm_head": matrix,
    }
    del training, model, teacher, student
    gc.collect()
    assert device.ledger.named_bytes == 0


def test_one_end_at_a_time_is_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    levels_within(plan_in("llama", "offloaded"))
    levels_within(plan_in("llama", "mixed"))
    monkeypatch.setattr(ends_module._Places, "release", lambda self, parameters: None)
    with pytest.raises(AssertionError):
        levels_within(plan_in("llama", "offloaded"))


def large_vocabulary(vocabulary: int) -> tuple[nn.Module, nn.Module, Any]:
    """A teacher with a large head, its student, and the workload."""
    import transformers

    from protwin.runtime import trace_distillation
    from tests.runtime.distillation.cases import mse
    from tests.runtime.distillation.families import COMMON, NARROW

    make, config = transformers.LlamaForCausalLM, transformers.LlamaConfig
    torch.manual_seed(0)
    wide = COMMON | {"vocab_size": vocabulary}
    teacher, student = make(config(**wide)).eval(), make(config(**wide, **{}) if False else config(**(wide | NARROW)))
    for model in (teacher, student):
        model.lm_head.weight.requires_grad_(True)
    batch = {"input_ids": torch.zeros(1, 4, dtype=torch.long)}
    return teacher, student, trace_distillation(teacher, student, batch, mse, repeats=0)
