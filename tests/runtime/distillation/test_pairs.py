"""Teacher and student stitched together learn, bit for bit, what every block learns alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from protwin.runtime.distillation import pairs as pairs_module
from protwin.runtime.distillation.pairs import Pairs
from protwin.shared.basics.errors import ScheduleError, WorkloadError
from protwin.shared.schema.schedule import OuterSection, Section, TaskKind
from tests.proof_size import some_quick
from tests.runtime.distillation.cases import adamw, changed, expected, mse, quiet, snapshot, steps_of, unlike
from tests.runtime.distillation.families import DictModel, causal, families
from tests.runtime.distillation.reference import Learnt, learn_alone, seen_by_teacher


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with quiet():
        yield


def learn(pairs: Pairs, steps: Any, around: Callable[[], AbstractContextManager[Any]] = nullcontext) -> list[Learnt]:
    """Train all blocks of a stitched student, each with a plain optimizer of its own; calls run within ``around``."""
    blocks = [block.module for block in pairs.blocks[1::2]]
    found = [Learnt() for _ in blocks]
    trained = [[p for p in block.parameters() if p.requires_grad] for block in blocks]
    optimizers = [adamw([{"params": own}]) for own in trained if own]
    with pairs.learning():
        for batches in steps:
            losses = []
            for batch in batches:
                with around():
                    losses.append(pairs(**batch).tolist())
            for index, (learnt, block) in enumerate(zip(found, blocks, strict=True)):
                learnt.losses.append([of_pairs[index] for of_pairs in losses])
                learnt.gradients.append({n: p.grad.clone() for n, p in block.named_parameters() if p.grad is not None})
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return found


def stitched(name: str, micro_batches: int = 1) -> Pairs:
    family = families()[name]
    return Pairs(family.teacher(), family.student(), mse, micro_batches=micro_batches)


def is_same(name: str, pairs: Pairs, micro_batches: int) -> bool:
    """Whether the blocks of ``pairs`` learn what they learn alone."""
    reference = expected(name, micro_batches, 10 if micro_batches == 1 else 3)
    return is_alike(learn(pairs, reference.steps), reference.learnt, pairs)


def is_alike(found: Sequence[Learnt], alone: Sequence[Learnt], pairs: Pairs) -> bool:
    """Whether losses, gradients of every step and weights are the same bits."""
    return all(
        ours.losses == theirs.losses
        and all(
            one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in other)
            for one, other in zip(ours.gradients, theirs.gradients, strict=True)
        )
        and not unlike(theirs, block.module)
        for ours, theirs, block in zip(found, alone, pairs.blocks[1::2], strict=True)
    )


@some_quick(("name", "micro_batches"), product(families(), [1, 3]), quick=6)
def test_stitched_blocks_learn_what_each_learns_alone(name: str, micro_batches: int) -> None:
    pairs = stitched(name, micro_batches)
    teacher, flags = snapshot(pairs.teacher), [p.requires_grad for p in pairs.parameters()]
    assert is_same(name, pairs, micro_batches)
    assert changed(pairs.teacher, teacher) == []
    assert all(parameter.grad is None for parameter in pairs.teacher.parameters())
    assert [p.requires_grad for p in pairs.parameters()] == flags
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in pairs.modules())


def wide_product(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A loss that computes a matrix product in float32 whatever autocast says."""
    with torch.autocast("cpu", enabled=False):
        error = (output - target).float().flatten(0, -2)
        return (error @ error.T).square().mean().sqrt()


@pytest.mark.parametrize("is_for_all", [False, True])
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_blocks_under_autocast_learn_what_each_learns_alone(name: str, is_for_all: bool) -> None:
    """Around every call, or around the whole loop, steps among it.

    No cast of a weight outlives its step, and a backward runs in the types of its forward.
    """
    family, around = families()[name], partial(torch.autocast, "cpu", dtype=torch.bfloat16)
    steps = steps_of(family, 2, 3)
    teacher, student = family.teacher(), family.student()
    with around():
        seen = [[seen_by_teacher(teacher, family.blocks, batch) for batch in step] for step in steps]
    alone = learn_alone(student, family.blocks, seen, wide_product, adamw, around)
    pairs, plain = (Pairs(family.teacher(), family.student(), wide_product, micro_batches=2) for _ in range(2))
    with around() if is_for_all else nullcontext():
        found = learn(pairs, steps, nullcontext if is_for_all else around)
    assert is_alike(found, alone, pairs)
    assert not is_alike(learn(plain, steps), alone, plain)


# -- wrong variants --------------------------------------------------------------------------------------------------


class ReadsItsOwn(pairs_module._Stitch):
    """A student's block reads the output of the student's block before it."""

    def _learn(self, index: int, given: Any, target: torch.Tensor) -> None:
        if index:
            args, kwargs = given
            block = self._pairs.student_blocks[index - 1].module
            with torch.no_grad():
                own = pairs_module.first_tensor(block(*self._before[0], **self._before[1]), "")
            given_instead = ((own, *args[1:]), kwargs) if args else ((), {**kwargs, "hidden_states": own})
        else:
            given_instead = given
        self._before = given
        super()._learn(index, given_instead, target)

    def _check_unwritten(self, given: Any, who: str) -> None:
        pass


class LearnsFromTheWrongPair(pairs_module._Stitch):
    """The target of a pair is the output of the pair before."""

    def _learn(self, index: int, given: Any, target: torch.Tensor) -> None:
        super()._learn(index, given, pairs_module.first_tensor(given, ""))


class ForgetsGradients(pairs_module._Stitch):
    """Gradients of a micro-batch take the place of those of the one before."""

    def _learn(self, index: int, given: Any, target: torch.Tensor) -> None:
        self._pairs.student_blocks[index].module.zero_grad()
        super()._learn(index, given, target)


@pytest.mark.parametrize("wrong", [ReadsItsOwn, LearnsFromTheWrongPair, ForgetsGradients])
@pytest.mark.parametrize("name", ["llama", "dicts"])
def test_wrong_stitches_are_noticed(wrong: type, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs_module, "_Stitch", wrong)
    assert not is_same(name, stitched(name, 3), 3)


def test_an_unscaled_sum_of_micro_batches_is_noticed() -> None:
    assert not is_same("dicts", stitched("dicts", 1), 3)


# -- independence ----------------------------------------------------------------------------------------------------


def test_changing_a_block_of_the_student_changes_no_other() -> None:
    reference = expected("llama")
    pairs = stitched("llama")
    with torch.no_grad():
        for parameter in pairs.blocks[3].module.parameters():
            parameter.add_(0.25)
    found = learn(pairs, reference.steps)
    same = [ours.losses == alone.losses for ours, alone in zip(found, reference.learnt, strict=True)]
    assert same == [True, False, True]
    assert [bool(unlike(a, b.module)) for a, b in zip(reference.learnt, pairs.blocks[1::2], strict=True)] == [
        False,
        True,
        False,
    ]


# -- what is announced, and where the teacher ends -------------------------------------------------------------------


class Told:
    """Notes what is announced."""

    def __init__(self) -> None:
        self.told: list[tuple[TaskKind, Section] | None] = []

    def begin(self, kind: TaskKind, section: Section) -> None:
        self.told.append((kind, section))

    def end_backward(self) -> None:
        self.told.append(None)


def test_every_section_is_announced_in_order_and_the_head_does_not_run() -> None:
    pairs = stitched("qwen3")
    ran: list[str] = []
    for name in ("model.norm", "lm_head"):
        pairs.teacher.get_submodule(name).register_forward_hook(lambda *_, name=name: ran.append(name))
    pairs.listener = told = Told()
    with pairs.learning():
        pairs(**families()["qwen3"].batches(1)[0])
    expected_order: list[tuple[TaskKind, Section] | None] = [(TaskKind.TEACHER_FORWARD, OuterSection.PROLOGUE)]
    for pair in range(3):
        expected_order.append((TaskKind.TEACHER_FORWARD, 2 * pair))
        expected_order += [(kind, 2 * pair + 1) for kind in (TaskKind.FORWARD, TaskKind.LOSS, TaskKind.BACKWARD)]
    assert told.told == [*expected_order, None]
    assert ran == []


def test_a_teacher_stays_in_evaluation_mode() -> None:
    pairs = stitched("gpt2")
    pairs.teacher.train()
    with pairs.learning():
        pairs.train()
        assert not any(module.training for module in pairs.teacher.modules())
        assert all(module.training for module in pairs.student.modules())
    assert all(module.training for module in pairs.teacher.modules())


# -- refusals --------------------------------------------------------------------------------------------------------


def dicts(change: Callable[[DictModel], None] = lambda _: None) -> DictModel:
    model = families()["dicts"].student()
    assert isinstance(model, DictModel)
    change(model)
    return model


def _shorten(model: DictModel) -> None:
    del model.stack[2]


def _lengthen(model: DictModel) -> None:
    model.stack.append(model.stack[0])


def _tie(model: DictModel) -> None:
    model.stack[2].up.weight = model.stack[0].up.weight


def _freeze(model: DictModel) -> None:
    model.stack.requires_grad_(False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_shorten, "the student has 2 blocks where the teacher has 3"),
        (_lengthen, "the student has 4 blocks where the teacher has 3"),
        (_tie, r"stack.2.up.weight and stack.0.up.weight of the student are one tensor"),
        (_freeze, "no block of the student .* has a trainable parameter"),
    ],
)
def test_students_that_do_not_belong_to_their_teacher(change: Callable[[DictModel], None], message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        Pairs(families()["dicts"].teacher(), dicts(change), mse)


def test_a_student_that_would_learn_the_teachers_tensor_is_refused() -> None:
    teacher, student = families()["dicts"].teacher(), dicts()
    student.stack[1].norm.weight = teacher.stack[1].norm.weight
    with pytest.raises(WorkloadError, match=r"stack.1.norm.weight of the student is the teacher's own tensor"):
        Pairs(teacher, student, mse)


def test_attention_of_two_kinds_is_refused() -> None:
    """An eager student would be given no mask by a fused teacher, and look ahead."""
    import transformers

    family = causal(transformers.LlamaForCausalLM, transformers.LlamaConfig)
    student = family.student()
    student.config._attn_implementation = "eager"
    with pytest.raises(WorkloadError, match="the teacher's attention is sdpa, the student's eager"):
        Pairs(family.teacher(), student, mse)


class Wider(nn.Module):
    def forward(self, hidden: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
        return torch.cat([hidden, hidden], dim=-1)


class Writes(nn.Module):
    def forward(self, hidden: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
        return hidden.add_(1)


class Nothing(nn.Module):
    def forward(self, hidden: torch.Tensor, *, scale: torch.Tensor) -> None:
        return None


@pytest.mark.parametrize(
    ("model", "block", "message"),
    [
        ("student", Wider, r"shape \[6, 48\] in the student and \[6, 24\] in the teacher"),
        ("student", Writes, "the student's block stack.1 writes into a tensor that it is given"),
        ("teacher", Writes, "the teacher's block stack.1 writes into a tensor that it is given"),
        ("student", Nothing, "block stack.1 returns NoneType, in which no tensor was found"),
    ],
)
def test_blocks_that_do_not_fit_are_refused_when_they_run(model: str, block: type, message: str) -> None:
    models = {"teacher": families()["dicts"].teacher(), "student": dicts()}
    models[model].stack[1] = block()
    pairs = Pairs(models["teacher"], models["student"], mse, blocks="stack")
    with pairs.learning(), pytest.raises(ScheduleError, match=message):
        pairs(**families()["dicts"].batches(1)[0])


class SkipsABlock(DictModel):
    def forward(self, points: torch.Tensor) -> torch.Tensor:
        hidden, scale = self.entry(points), self.scale * points.shape[0]
        for block in (self.stack[0], self.stack[2]):
            hidden = block(hidden, scale=scale)["hidden"]
        return hidden


def test_a_teacher_that_skips_a_block_is_refused() -> None:
    pairs = Pairs(SkipsABlock(40), dicts(), mse)
    with pairs.learning(), pytest.raises(ScheduleError, match=r"runs block stack.2 where the schedule expects stack.1"):
        pairs(**families()["dicts"].batches(1)[0])
