"""Pairs of one stage: other blocks are passed over, and the received activation takes the hidden state's place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from protwin.runtime.distillation.pairs import Pairs
from protwin.runtime.distillation.passing import NotHere, PassedOver
from protwin.shared.basics.errors import ScheduleError
from protwin.shared.schema.schedule import OuterSection, Section, TaskKind
from tests.proof_size import some_quick
from tests.runtime.distillation.cases import mse, quiet
from tests.runtime.distillation.families import LAYERS, DictModel, Family, families


@dataclass
class Neighbours:
    """In the place of ranks: keeps what a stage sends, and gives it what it is to receive."""

    received: torch.Tensor | None = None
    sent: torch.Tensor | None = None
    begun: list[tuple[TaskKind, Section]] = field(default_factory=list)
    _waiting: torch.Tensor | None = None

    def begin(self, kind: TaskKind, section: Section) -> None:
        self.begun.append((kind, section))
        if self._waiting is not None:
            assert self.received is not None
            self._waiting.copy_(self.received)
            self._waiting = None

    def end_backward(self) -> None:
        pass

    def exchange(self, kind: TaskKind, activation: torch.Tensor) -> None:
        if kind is TaskKind.SEND:
            self.sent = activation.clone()
        else:
            # Before the prologue has ended nothing is written.
            self._waiting = activation


@contextmanager
def stage(teacher: nn.Module, student: nn.Module, own: range, received: torch.Tensor | None) -> Iterator[Pairs]:
    """Pairs of one stage beside its neighbours."""
    pairs = Pairs(teacher, student, mse, own=own)
    pairs.listener = pairs.stage_listener = Neighbours(received)
    with quiet(), pairs.learning(), pairs.alone():
        yield pairs


def gradients(student: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in student.named_parameters() if p.grad is not None}


def meta_but_own(family: Family, own: range) -> tuple[nn.Module, nn.Module]:
    """Both models; blocks of other stages have no memory."""
    models = family.teacher(), family.student()
    for model in models:
        for pair, block in enumerate(family.blocks):
            if pair not in own:
                model.get_submodule(block).to("meta")
    return models


@some_quick("name", families(), quick=4)
def test_stages_of_every_family_are_parts_of_the_whole(name: str) -> None:
    family, losses = families()[name], []
    batch = family.batches(1)[0]
    whole = Pairs(family.teacher(), family.student(), mse)
    with quiet(), whole.learning():
        expected = whole(**batch).tolist()
    wanted, found, received = gradients(whole.student), dict[str, torch.Tensor](), None
    for own in (range(1), range(1, 2), range(2, LAYERS)):
        teacher, student = meta_but_own(family, own)
        with stage(teacher, student, own, received) as pairs:
            losses += pairs(**batch).tolist()
            listener = pairs.listener
            assert isinstance(listener, Neighbours)
            assert [kind for kind, _ in listener.begun].count(TaskKind.TEACHER_FORWARD) == 1 + len(own)
            assert listener.begun[:2] == [
                (TaskKind.TEACHER_FORWARD, OuterSection.PROLOGUE),
                (TaskKind.TEACHER_FORWARD, 0),
            ]
            received = listener.sent
        assert not any(isinstance(module, PassedOver) for module in teacher.modules())
        found |= gradients(student)
    assert losses == expected
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[path], gradient) for path, gradient in wanted.items())


def test_a_stage_that_is_sent_something_else_is_noticed() -> None:
    family = families()["dicts"]
    batch = family.batches(1)[0]
    whole = Pairs(family.teacher(), family.student(), mse)
    with whole.learning():
        expected = whole(**batch).tolist()
    with stage(*meta_but_own(family, range(1)), range(1), None) as pairs:
        pairs(**batch)
        assert isinstance(pairs.listener, Neighbours)
        sent = pairs.listener.sent
    assert sent is not None
    for received, is_right in ((sent, True), (torch.randn_like(sent), False)):
        with stage(*meta_but_own(family, range(1, 3)), range(1, 3), received) as pairs:
            assert (pairs(**batch).tolist() == expected[1:]) is is_right


# -- what stages cannot do -------------------------------------------------------------------------------------------


class UsesInner(DictModel):
    """Its blocks are given more of the block before than the hidden state."""

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        hidden, scale = self.entry(points), self.scale * points.shape[0]
        for block in self.stack:
            found = block(hidden, scale=scale)
            hidden, scale = found["hidden"], found["inner"][0, 0]
        return self.exit(hidden)


class KeepsFirst(DictModel):
    """All of its blocks are given the first hidden state too."""

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        first = hidden = self.entry(points)
        for block in self.stack:
            hidden = block(hidden, scale=first[0, 0])["hidden"]
        return self.exit(hidden)


class BeginsWithTheBatch(DictModel):
    """Its first hidden state is the batch."""

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        hidden = points
        for block in self.stack:
            hidden = block(hidden, scale=self.scale)["hidden"]
        return self.exit(hidden)


class Transposes(DictModel):
    """The hidden state is not contiguous."""

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        hidden = self.entry(points).t().contiguous().t()
        for block in self.stack:
            hidden = block(hidden, scale=self.scale)["hidden"]
        return self.exit(hidden)


def chooses_by_value(model: DictModel) -> None:
    """What the first block does depends on values."""
    block = model.stack[0]
    forward = block.forward

    def choosing(hidden: torch.Tensor, *, scale: torch.Tensor) -> Any:
        return forward(hidden, scale=scale) if hidden.sum().item() > 0 else forward(hidden, scale=2 * scale)

    block.forward = choosing


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        (UsesInner, None, "hands on more than its hidden state"),
        (KeepsFirst, None, "shares memory with something else"),
        (BeginsWithTheBatch, None, "shares memory with something else"),
        (Transposes, None, "not contiguous"),
        (DictModel, chooses_by_value, "cannot be told without its weights"),
    ],
)
def test_teachers_whose_blocks_cannot_be_passed_over_are_refused(
    kind: type[DictModel], change: Callable[[DictModel], None] | None, message: str
) -> None:
    teacher, student = kind(40), DictModel(16)
    if change is not None:
        change(teacher)
    width = 24 if kind is BeginsWithTheBatch else 5
    with stage(teacher, student, range(1, 3), torch.zeros(6, 24)) as pairs, pytest.raises(ScheduleError, match=message):
        pairs(points=torch.randn(6, width))
    teacher.stack[0]._forward_hooks.clear()
    assert type(teacher.stack[0]) is not PassedOver


def test_pairs_of_a_stage_need_somebody_to_exchange_with() -> None:
    pairs = Pairs(DictModel(40), DictModel(16), mse, own=range(2))
    with pairs.learning(), pairs.alone(), pytest.raises(ScheduleError, match="within a training by a pipeline alone"):
        pairs(points=torch.randn(6, 5))


def test_what_is_not_here_says_so_whatever_is_done_with_it() -> None:
    missing: Any = NotHere("layers.3")
    for use in (
        lambda: missing + 1,
        lambda: torch.zeros(1) + missing,
        lambda: torch.relu(missing),
        lambda: missing.shape,
        lambda: missing[0],
        lambda: bool(missing),
    ):
        with pytest.raises(ScheduleError, match=r"layers\.3 hands on more"):
            use()
