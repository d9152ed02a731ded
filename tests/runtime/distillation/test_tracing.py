"""The workload of a distillation: what runs, what it holds, and that nothing of it is left behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import transformers
from torch import nn

from protwin.runtime.distillation.pairs import Pairs, name_of_loss
from protwin.runtime.distillation.tracing import trace_distillation
from protwin.shared.basics.errors import WorkloadError
from protwin.shared.phases.distillation import KeyToLearn
from protwin.shared.schema.hardware import DeviceKind
from protwin.shared.schema.workload import OuterSection, Phase, Workload
from tests.proof_size import some_quick
from tests.runtime.distillation.cases import changed, expected, mse, quiet, snapshot
from tests.runtime.distillation.distilling import workload_of
from tests.runtime.distillation.families import COMMON, NARROW, DictModel, Family, build, families


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with quiet():
        yield


def traced(family: Family, *, repeats: int = 0) -> Workload:
    return trace_distillation(family.teacher(), family.student(), family.batches(1)[0], mse, repeats=repeats)


def faked(family: Family) -> Workload:
    with torch.device("meta"):
        teacher, student = family.teacher(), family.student()
    batch = {name: tensor.to("meta") for name, tensor in family.batches(1)[0].items()}
    return trace_distillation(teacher, student, batch, mse, device_kind=DeviceKind.CPU)


def phases(workload: Workload) -> list[Phase]:
    """In the order in which they run."""
    assert workload.distillation is not None
    found = [workload.prologue_forward]
    for index, block in enumerate(workload.blocks):
        profile = workload.profile_of(index)
        found.append(profile.forward)
        if index % 2:
            found += [workload.distillation.losses[block.profile], profile.backward]
    return found


def memory(workload: Workload) -> list[tuple[int, int, int]]:
    return [(phase.net_bytes, phase.peak_bytes, phase.stated_gradient_bytes) for phase in phases(workload)]


def learnt_bytes(name: str) -> list[int]:
    """Gradients that a backward leaves, by block: those that the reference has."""
    return [sum(gradient.nbytes for gradient in learnt.gradients[0].values()) for learnt in expected(name, 1, 1).learnt]


@some_quick("name", families(), quick=2)
def test_the_workload_of_a_family(name: str) -> None:
    family = families()[name]
    workload = workload_of(name)
    assert workload.distillation is not None
    assert [block.name for block in workload.blocks] == [
        f"{model}.{block}" for block in family.blocks for model in ("teacher", "student")
    ]
    hidden_bytes = 6 * 24 * 4 if family.makes_points else 2 * 12 * 32 * 4
    profiles = [workload.profile_of(block) for block in range(workload.num_blocks)]
    assert [p.forward.net_bytes for p in profiles[::2]] == [p.output_bytes for p in profiles[::2]]
    assert all(profile.output_bytes >= hidden_bytes for profile in profiles)
    assert all(profile.backward == Phase() for profile in profiles[::2])
    assert [profile.backward.gradient_bytes for profile in profiles[1::2]] == learnt_bytes(name)
    # Whatever else comes in an iteration goes in it.
    assert sum(phase.net_bytes for phase in phases(workload)) == sum(learnt_bytes(name))
    assert all(loss.net_bytes >= 0 for loss in workload.distillation.losses)
    assert 0 <= workload.distillation.passing_bytes <= workload.prologue_forward.net_bytes
    check_parameters(workload, family)
    made_up = faked(family)
    assert (made_up.identity, made_up.traced_with) == (workload.identity, "fake")
    assert memory(made_up) == memory(workload)
    assert made_up.distillation is not None
    assert made_up.distillation.passing_bytes == workload.distillation.passing_bytes


@some_quick("frozen", [(), (2, 3)], quick=1)
def test_few_pairs_stand_for_many_equal_ones(frozen: tuple[int, ...]) -> None:
    """Nine pairs on fake tensors beside all nine on real ones."""
    deep = {"num_hidden_layers": 9}

    def built(layers: dict[str, int], seed: int) -> nn.Module:
        model = build(transformers.LlamaForCausalLM, transformers.LlamaConfig, COMMON | deep | layers, seed)
        for layer in frozen if layers else ():
            model.model.layers[layer].requires_grad_(False)
        return model

    family = Family(partial(built, {}, 0), partial(built, NARROW, 1), ())
    real, made_up = traced(family), faked(family)
    assert made_up.identity == real.identity
    assert memory(made_up) == memory(real)
    assert [p.model_dump() for p in made_up.parameters] == [p.model_dump() for p in real.parameters]


def check_parameters(workload: Workload, family: Family) -> None:
    """Those of the blocks of both, and what the teacher's prologue reads; of these the student's alone are learnt."""
    by_name = {parameter.name: parameter for parameter in workload.parameters}
    wanted = {}
    for model, module in (("teacher", family.teacher()), ("student", family.student())):
        for index, block in enumerate(family.blocks):
            for name, parameter in module.get_submodule(block).named_parameters():
                is_learnt = model == "student" and parameter.requires_grad
                wanted[f"{model}.{block}.{name}"] = (2 * index + (model == "student"), is_learnt)
    outside = {name: parameter for name, parameter in by_name.items() if name not in wanted}
    assert {name: (p.block, p.trainable) for name, p in by_name.items() if name in wanted} == wanted
    prologue = {
        "transformer.wte.weight",
        "transformer.wpe.weight",
        "model.embed_tokens.weight",
        "entry.weight",
        "entry.bias",
    }
    assert {name.removeprefix("teacher.") for name in outside} <= prologue
    for parameter in outside.values():
        assert parameter.uses is not None
        assert (parameter.uses.forward, parameter.uses.backward) == ((OuterSection.PROLOGUE,), ())
        assert not parameter.trainable


def test_both_models_are_left_as_they_were() -> None:
    family = families()["llama"]
    teacher, student = family.teacher().train(), family.student()
    before = snapshot(teacher), snapshot(student)
    flags = [p.requires_grad for model in (teacher, student) for p in model.parameters()]
    modes = [module.training for model in (teacher, student) for module in model.modules()]
    state = torch.get_rng_state()
    trace_distillation(teacher, student, family.batches(1)[0], mse, repeats=1)
    assert changed(teacher, before[0]) == changed(student, before[1]) == []
    assert [p.requires_grad for model in (teacher, student) for p in model.parameters()] == flags
    assert [module.training for model in (teacher, student) for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    for model in (teacher, student):
        assert model.config.use_cache
        assert all(parameter.grad is None for parameter in model.parameters())
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_teacher_collects_nothing_on_the_way() -> None:
    """Its hidden states and router logits, which a model can be told to collect, would pile up."""
    family = families()["mixtral"]
    teacher = family.teacher()
    teacher.config.output_hidden_states = teacher.config.output_router_logits = True
    workload = trace_distillation(teacher, family.student(), family.batches(1)[0], mse, repeats=0)
    assert memory(workload) == memory(workload_of("mixtral"))
    assert workload.resident_bytes == workload_of("mixtral").resident_bytes
    assert teacher.config.output_hidden_states
    assert teacher.config.output_router_logits


class Collects(DictModel):
    """Keeps what its blocks give beside their output until the end."""

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        hidden, scale, found = self.entry(points), self.scale * points.shape[0], []
        for block in self.stack:
            output = block(hidden, scale=scale)
            hidden = output["hidden"]
            found.append(output["inner"])
        return self.exit(hidden), found


def test_what_a_teacher_collects_all_the_same_is_resident() -> None:
    family = families()["dicts"]
    collects = Collects(40)
    workload = trace_distillation(collects, family.student(), family.batches(1)[0], mse, repeats=0)
    # Of the first block; that of the second goes with the last pair, as its output does.
    assert workload.resident_bytes - workload_of("dicts").resident_bytes == 6 * 40 * 4


def test_every_phase_that_runs_is_timed() -> None:
    workload = traced(families()["dicts"], repeats=1)
    assert workload.measured_on is not None
    assert all(phase.measured_s is not None for phase in phases(workload))


def test_the_identity_follows_what_is_learnt_and_by_which_loss() -> None:
    family = families()["dicts"]
    teacher, batch = family.teacher(), family.batches(1)[0]
    workload = workload_of("dicts")
    frozen = family.student()
    frozen.stack[0].requires_grad_(False)

    def cosine(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return 1 - nn.functional.cosine_similarity(output, target, dim=-1).mean()

    others = [
        trace_distillation(teacher, frozen, batch, mse, repeats=0),
        trace_distillation(teacher, family.student(), batch, cosine, repeats=0),
        trace_distillation(teacher, family.student(), batch, mse, keys_to_learn=[KeyToLearn.SUBBLOCK_FFN], repeats=0),
    ]
    assert len({workload.identity, *(other.identity for other in others)}) == 4


def test_a_teacher_that_checkpoints_is_refused() -> None:
    family = families()["llama"]
    teacher = family.teacher()
    teacher.model.layers[0].gradient_checkpointing = True
    with pytest.raises(WorkloadError, match="LlamaForCausalLM checkpoints activations itself"):
        trace_distillation(teacher, family.student(), family.batches(1)[0], mse)


def test_a_student_in_another_element_type_is_refused() -> None:
    family = families()["llama"]
    teacher, student = family.teacher(), family.student().to(torch.bfloat16)
    with pytest.raises(WorkloadError, match=r"cannot run on the batch.*in the same element type or under autocast"):
        trace_distillation(teacher, student, family.batches(1)[0], mse, repeats=0)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in teacher.modules())


def test_a_loss_is_called_as_its_function_with_what_it_is_given() -> None:
    def scaled(output: torch.Tensor, target: torch.Tensor, *, by: float) -> torch.Tensor:
        return by * mse(output, target)

    names = [name_of_loss(loss) for loss in (mse, partial(scaled, by=0.5), partial(scaled, by=2), nn.MSELoss())]
    assert names == ["mse", "scaled(by=0.5)", "scaled(by=2)", "MSELoss"]


def test_a_frozen_tensor_that_both_share_is_listed_once() -> None:
    family = families()["dicts"]
    teacher, student = family.teacher(), family.student()
    student.stack[1].norm = teacher.stack[1].norm
    student.stack[1].norm.requires_grad_(False)
    workload = trace_distillation(teacher, student, family.batches(1)[0], mse, repeats=0)
    found = next(p for p in workload.parameters if p.name == "teacher.stack.1.norm.weight")
    assert found.aliases == ("student.stack.1.norm.weight",)
    assert found.uses is not None
    assert found.uses.forward == (2, 3)
    assert Pairs(teacher, student, mse).num_pairs == 3


TYPES = [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)]


@pytest.mark.parametrize(("of_teacher", "of_student"), TYPES, ids=["narrower student", "wider student"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "dicts"])
def test_unlike_element_types_are_refused_where_kernels_refuse_them(
    name: str, of_teacher: torch.dtype, of_student: torch.dtype
) -> None:
    """Also of fake tensors, which let all of them pass."""
    family, told = families()[name], []
    (batch,) = family.batches(1)
    given = {key: value.to(of_teacher) if value.is_floating_point() else value for key, value in batch.items()}
    for device in ("cpu", "meta"):
        teacher, student = family.teacher().to(of_teacher), family.student().to(of_student)
        # Llama's norms give what their weights are.
        runs = name == "llama" and of_student is torch.float32
        refused = pytest.raises(WorkloadError, match="in the same element type or under autocast")
        with quiet(), nullcontext() if runs else refused:
            told.append(trace_distillation(teacher.to(device), student.to(device), given, mse, repeats=0).identity)
    assert len(set(told)) == len(told) // 2
