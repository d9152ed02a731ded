"""In an evaluation both whole models give what plain copies give, and training goes on as if nothing had been."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from protwin.runtime import CpuDevice, trace_distillation
from protwin.runtime.distillation import ends as ends_module
from protwin.runtime.distillation.distil import Distilling
from protwin.runtime.distillation.validation import language_model_loss, validation_losses
from protwin.runtime.training.evaluation import Evaluation
from protwin.shared.basics.errors import DeviceOutOfMemoryError, ScheduleError, WorkloadError
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.schedule import Content, Memory
from protwin.shared.schema.workload import Workload
from protwin.shared.verify.guaranteed_peak import guaranteed_device_peak
from tests.proof_size import examples, some_quick
from tests.runtime.distillation.cases import expected, mse, quiet, snapshot, steps_of, unlike
from tests.runtime.distillation.distilling import beginning, is_offloading, plan_in, random_bypass_plans, workload_of
from tests.runtime.distillation.families import COMMON, NARROW, VOCABULARY, Family, build, families

STEPS = 2


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


def plain_models(name: str, steps: int, max_norm: float | None = None) -> tuple[nn.Module, nn.Module]:
    """Teacher and student as plain copies, the student's blocks as each has learnt alone in so many steps."""
    family = families()[name]
    teacher, student = family.teacher(), family.student()
    of_blocks = expected(name, 1, steps, max_norm).learnt if steps else ()
    for block, learnt in zip(family.blocks, of_blocks, strict=steps > 0):
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
    """What training needs, or what stays with a block that runs on more tokens than were traced."""
    schedule = compile_schedule(plan, workload_of(name))
    return 60_000 + max(guaranteed_device_peak(schedule).size_bytes, schedule.static_bytes(Memory.DEVICE) + 190_000)


def check(name: str, plan: Plan) -> None:
    """Evaluate both models before every step, and in the end."""
    family = families()[name]
    teacher, student = family.teacher(), family.student()
    device, steps, before = CpuDevice(room_for(name, plan)), steps_of(family, 1, STEPS), snapshot(teacher)
    with beginning(teacher, student, plan, workload_of(name), device) as training:
        for step in range(STEPS + 1):
            plain = plain_models(name, step, plan.max_gradient_norm)
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
    for block, learnt in zip(family.blocks, expected(name, 1, STEPS, plan.max_gradient_norm).learnt, strict=True):
        assert unlike(learnt, student.get_submodule(block)) == []
    assert all(torch.equal(tensor, before[key]) for key, tensor in teacher.state_dict().items())


@some_quick("name", families(), quick=["dicts"])
def test_both_models_are_what_plain_copies_are(name: str) -> None:
    chosen = [p for p in random_bypass_plans(name, 12, seed=5) if p.micro_batches == 1 and is_offloading(name, p)]
    for plan in chosen[: examples(6, 1)]:
        check(name, plan)


def nothing_is_copied(self: Any, path: str) -> None:
    self._device.ledger.allocate(self.size_bytes, path, Content.PARAMETERS)
    self._home = self.parameter.data
    self.parameter.data = torch.zeros_like(self._home)


@pytest.mark.parametrize(
    "variant",
    [
        (Evaluation, "_gather", lambda self, chunk: chunk.make_room()),
        (ends_module._Place, "_copy", nothing_is_copied),
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
    assert found.perplexities == pytest.approx([math.exp(found.teacher), math.exp(found.student)])


# -- memory ----------------------------------------------------------------------------------------------------------


def levels_within(plan: Plan) -> None:
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
            # Buffers, the batch and what the models make of positions, but no home of an end.
            assert device.ledger.watched_bytes < 1_000
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
    monkeypatch.setattr(ends_module._Place, "release", lambda self: None)
    with pytest.raises(AssertionError):
        levels_within(plan_in("llama", "offloaded"))


@lru_cache
def wide_workload() -> Workload:
    teacher, student = wide_models()
    with quiet():
        return trace_distillation(teacher, student, families()["llama"].batches(1)[0], mse, repeats=0)


def wide_models() -> tuple[nn.Module, nn.Module]:
    """Heads of 1.2 MiB, larger than all blocks."""
    wide = COMMON | {"vocab_size": 10_000}
    llama = transformers.LlamaForCausalLM, transformers.LlamaConfig
    return build(*llama, wide, 0), build(*llama, wide | NARROW, 1)


def wide_plan(n_persist: int) -> Plan:
    return plan_in("llama", "offloaded").model_copy(
        update={"workload_id": wide_workload().identity, "chunk_bytes": 2**21, "n_buffer": 4, "n_persist": n_persist}
    )


def distilling(budget_bytes: int, n_persist: int = 0) -> tuple[nn.Module, nn.Module, Any]:
    teacher, student = wide_models()
    return teacher, student, beginning(teacher, student, wide_plan(n_persist), wide_workload(), CpuDevice(budget_bytes))


def needed_bytes(n_persist: int) -> tuple[int, int]:
    """What stays on the device, and what training needs."""
    schedule = compile_schedule(wide_plan(n_persist), wide_workload())
    return schedule.static_bytes(Memory.DEVICE), guaranteed_device_peak(schedule).size_bytes


def test_an_end_that_fits_nowhere_is_refused_before_anything_moves() -> None:
    """The teacher's embedding stays on the device; a head as large comes beside it."""
    head_bytes, tokens = 10_000 * 32 * 4, torch.arange(12)[None]
    static_bytes, peak_bytes = needed_bytes(n_persist=1)
    assert static_bytes > head_bytes
    assert peak_bytes < static_bytes + head_bytes
    messages = []
    for budget_bytes in (peak_bytes, static_bytes + head_bytes - 1):
        teacher, student, began = distilling(budget_bytes, n_persist=1)
        with began as training:
            with pytest.raises(DeviceOutOfMemoryError, match=r"needs 1\.221 MiB .*(lm_head|embed)") as caught:
                training.evaluation().__enter__()
            messages.append(str(caught.value))
            training(input_ids=tokens)
            training.step()
    assert "n_persist" in messages[0]
    teacher, student, began = distilling(static_bytes + head_bytes + 60_000 + 10_000 * 4, n_persist=1)
    with began as training, training.evaluation():
        output_of(teacher, {"input_ids": tokens[:, :1]})
        output_of(student, {"input_ids": tokens[:, :1]})


def test_a_batch_that_is_too_large_for_the_head_is_refused_before_it_runs() -> None:
    head_bytes, tokens = 10_000 * 32 * 4, torch.arange(12)[None]
    room_bytes = max(needed_bytes(0)[1], head_bytes + 12 * 10_000 * 4) + 60_000
    teacher, student, began = distilling(room_bytes)
    alone = wide_models()[0]
    with began as training:
        for _ in range(2):
            for model in (teacher, student):
                with (
                    training.evaluation(),
                    pytest.raises(DeviceOutOfMemoryError, match=r"lm_head needs 1\.221 MiB .* 9\.155 MiB for what it"),
                ):
                    output_of(model, {"input_ids": tokens.repeat(20, 1)})
                assert not training.device.ledger.is_metering
            with training.evaluation():
                assert torch.equal(output_of(teacher, {"input_ids": tokens}), output_of(alone, {"input_ids": tokens}))
            training(input_ids=tokens)
            training.step()


# -- what it is not for ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        (lambda training, batch: training(**batch), "Call the teacher or the student"),
        (lambda training, batch: torch.enable_grad()(training.student)(**batch), "forward with gradients within"),
        (lambda training, batch: torch.enable_grad()(training.teacher)(**batch), "forward with gradients within"),
        (lambda training, batch: training.step(), r"step\(\) without a forward"),
        (lambda training, batch: training.evaluation().__enter__(), "Leave the outer block first"),
    ],
)
def test_what_evaluation_is_not_for(attempt: Callable[[Distilling, Any], Any], message: str) -> None:
    reference = expected("llama", 1, STEPS)
    teacher, student = reference.family.teacher(), reference.family.student()
    with beginning(teacher, student, plan_in("llama", "mixed"), workload_of("llama"), CpuDevice()) as training:
        for (batch,) in reference.steps:
            with pytest.raises(ScheduleError, match=message), training.evaluation():
                attempt(training, batch)
            training(**batch)
            training.step()
    for block, alone in zip(reference.family.blocks, reference.learnt, strict=True):
        assert unlike(alone, student.get_submodule(block)) == []


def test_what_the_teacher_collects_and_a_close_within() -> None:
    family = families()["mixtral"]
    teacher, student = family.teacher(), family.student()
    teacher.config.output_hidden_states = True
    batch = family.batches(1)[0]
    with beginning(teacher, student, plan_in("mixtral", "mixed"), workload_of("mixtral"), CpuDevice()) as training:
        with quiet(), training.evaluation():
            assert len(teacher(**batch).hidden_states) == 4
            assert student(**batch).hidden_states is None
        assert not teacher.config.output_hidden_states
        with training.evaluation():
            training.close()
    assert teacher.config.output_hidden_states
    for model in (teacher, student):
        hooks = [h for m in model.modules() for h in (*m._forward_hooks.values(), *m._forward_pre_hooks.values())]
        assert not [hook for hook in hooks if hook.__module__.startswith("protwin")]
        assert model.config.use_cache


def test_casts_of_weights_do_not_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autocast keeps a cast of every trainable weight; one block's at most is on the device."""

    def peak_bytes() -> int:
        family, device = families()["llama"], CpuDevice()
        teacher, student = family.teacher(), family.student()
        plan = plan_in("llama", "offloaded")
        with beginning(teacher, student, plan, workload_of("llama"), device) as training:
            device.ledger.reset_peak()
            with training.evaluation(), torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad(), quiet():
                student(**family.batches(1)[0])
            return device.ledger.peak_bytes

    right = peak_bytes()
    monkeypatch.setattr(torch, "clear_autocast_cache", lambda: None)
    assert peak_bytes() > right
