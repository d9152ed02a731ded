"""Teacher and student as one module: its forward runs the teacher, and trains every student block beside it.

[Note: Pairs]
The teacher's own forward runs, whole and without gradients, so that masks, rotary tables and positions are made by who
knows how.  Hooks on its blocks see what each is given and gives.  Right after the teacher's block, the student's block
of the same place runs on the same inputs, with gradients; its loss compares what both hand on (the output itself, or
the first tensor in it), and its backward follows at once.  Nothing that a student block makes goes on to another one.
Behind the last block the teacher's forward ends: its norm and head would run for nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, Final, Protocol

import torch
from torch import nn

from ...shared.basics.errors import ScheduleError
from ...shared.schema.schedule import OuterSection, Section, TaskKind
from ...shared.schema.workload import BlockId
from ..hooks.refusals import missing_block, other_block, refuse_transforms
from ..model.blocks import NamedBlock, find_blocks
from ..model.nested_tensors import containers_as_they_are, tensors_in
from ..model.snapshot import without_cache
from ..optimizers.loss_scaling import BlockScalers
from .belonging import check_attention, check_learnt, collecting, same_blocks

PairLoss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(student's output, teacher's output) to a scalar."""

TEACHER: Final = "teacher"
STUDENT: Final = "student"


class SectionListener(Protocol):
    """Who wants to know where the pairs are."""

    def begin(self, kind: TaskKind, section: Section) -> None:
        """``kind`` of ``section`` begins; what was announced before has ended."""

    def end_backward(self) -> None:
        """The last pair's backward has ended."""


class Pairs(nn.Module):
    """See [Note: Pairs].  Block 2i is the teacher's block i, block 2i + 1 the student's.

    The teacher is in evaluation mode, whatever ``train`` says.
    """

    def __init__(
        self,
        teacher: nn.Module,
        student: nn.Module,
        loss: PairLoss,
        *,
        blocks: str | Sequence[str] | None = None,
        micro_batches: int = 1,
    ) -> None:
        """``blocks`` names the blocks of both models where they are not found.

        A step minimises the mean of the losses of its ``micro_batches``.  Raises WorkloadError if the two models do not
        belong together.
        """
        super().__init__()
        of_teacher = find_blocks(teacher, blocks)
        of_student = same_blocks(student, of_teacher)
        check_attention(teacher, student)
        self.teacher = teacher
        self.student = student
        self.loss = loss
        self.micro_batches = micro_batches
        self.listener: SectionListener | None = None
        """Who is told where the forward is."""
        self.scalers: BlockScalers | None = None
        """What scales the losses that backwards begin with; None: nothing does."""
        self.teacher_blocks = of_teacher
        """(n,) by their paths within the teacher."""
        self.student_blocks = of_student
        """(n,) by their paths within the student, which are the same."""
        check_learnt(teacher, student, of_student)
        self._turned_off: list[tuple[Any, str]] = []
        """Settings of the teacher that are off while it teaches; ``learning`` fills and empties it."""
        self._is_whole = False

    def train(self, mode: bool = True) -> Pairs:
        """The student's mode; the teacher's is evaluation."""
        super().train(mode)
        self.teacher.eval()
        return self

    @property
    def num_pairs(self) -> int:
        """Number of blocks of either model."""
        return len(self.teacher_blocks)

    @property
    def blocks(self) -> tuple[NamedBlock, ...]:
        """(2n,) the teacher's and the student's in turn, by their paths within this module."""
        return tuple(
            NamedBlock(f"{model}.{block.name}", block.module)
            for pair in zip(self.teacher_blocks, self.student_blocks, strict=True)
            for model, block in zip((TEACHER, STUDENT), pair, strict=True)
        )

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """(n,) the loss of every pair, float32; gradients of the student's blocks are added to what they have.

        Raises ScheduleError if the teacher does not run its blocks once each, in order, or if a block writes into what
        others read.
        """
        refuse_transforms()
        if self._is_whole:
            raise ScheduleError(
                "the pairs are to learn within evaluation(), where nothing is trained. Call the teacher or the student "
                "there, or leave its block first."
            )
        device = next((tensor.device for tensor in tensors_in((args, kwargs))), None)
        losses = torch.empty(self.num_pairs, dtype=torch.float32, device=device)
        stitch = _Stitch(self, losses)
        with stitch.hooked():
            try:
                stitch.begin(TaskKind.TEACHER_FORWARD, OuterSection.PROLOGUE)
                with torch.no_grad():
                    self.teacher(*args, **kwargs)
            except _LastBlockRan:
                pass
            else:
                raise missing_block(stitch.expected)
        # By now the teacher's forward holds nothing any more.
        if self.listener is not None:
            self.listener.end_backward()
        return losses

    @contextmanager
    def learning(self) -> Iterator[None]:
        """Within the block gradients reach the student's blocks alone; afterwards models and flags are as they were.

        Neither model has a key-value cache meanwhile: the teacher's would be another thing that its blocks hand on.
        Nor does the teacher collect outputs of its blocks, which nobody would see.
        """
        learnt = {id(p) for block in self.student_blocks for p in block.module.parameters() if p.requires_grad}
        held = [p for p in self.parameters() if p.requires_grad and id(p) not in learnt]
        modes = [(module, module.training) for module in self.modules()]
        with ExitStack() as undo:
            undo.enter_context(without_cache(self))
            self._turned_off = collecting(self.teacher)
            undo.callback(self._turned_off.clear)
            for config, name in self._turned_off:
                undo.callback(setattr, config, name, True)
                setattr(config, name, False)
            for parameter in held:
                undo.callback(parameter.requires_grad_, True)
                parameter.requires_grad_(False)
            undo.callback(_set_modes, modes)
            self.train()
            yield

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Within the block, which is within ``learning``, each model is called by itself: the pairs learn nothing.

        The teacher collects what it did before.
        """
        self._is_whole = True
        for config, name in self._turned_off:
            setattr(config, name, True)
        try:
            yield
        finally:
            self._is_whole = False
            for config, name in self._turned_off:
                setattr(config, name, False)


class _LastBlockRan(BaseException):
    """Ends the teacher's forward; no ``except Exception`` of a model stops it."""


class _Stitch:
    """One forward of the teacher, with the student's blocks beside it."""

    def __init__(self, pairs: Pairs, losses: torch.Tensor) -> None:
        self._pairs = pairs
        self._losses = losses
        self._next = 0
        self._given: tuple[Any, Any] | None = None
        """What the running teacher's block was given."""
        self._versions: list[int] = []

    @property
    def expected(self) -> str:
        """The path of the teacher's block that comes next."""
        blocks = self._pairs.teacher_blocks
        return blocks[self._next].name if self._next < len(blocks) else "no further block"

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Within the block the teacher's blocks are followed."""
        handles: list[Any] = []
        for index, block in enumerate(self._pairs.teacher_blocks):
            enter, leave = self._entering(index), self._leaving(index)
            handles.append(block.module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True))
            handles.append(block.module.register_forward_hook(leave, with_kwargs=True))
        try:
            yield
        finally:
            self._given = None
            for handle in handles:
                handle.remove()

    def begin(self, kind: TaskKind, section: Section) -> None:
        """Tell who listens."""
        if self._pairs.listener is not None:
            self._pairs.listener.begin(kind, section)

    def _entering(self, index: int) -> Callable[..., None]:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            if index != self._next:
                raise other_block(self._pairs.teacher_blocks[index].name, self.expected)
            self._next += 1
            # Before anything of this block runs, and after the one before is let go of by the teacher's forward.
            self.begin(TaskKind.TEACHER_FORWARD, BlockId(2 * index))
            self._given = containers_as_they_are((args, kwargs))
            self._versions = _versions(self._given)

        return enter

    def _leaving(self, index: int) -> Callable[..., None]:
        def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            given, self._given = self._given, None
            assert given is not None
            name = self._pairs.teacher_blocks[index].name
            self._check_unwritten(given, f"the teacher's block {name}")
            with torch.enable_grad():
                self._learn(index, given, first_tensor(output, name))
            if index == self._pairs.num_pairs - 1:
                raise _LastBlockRan

        return leave

    def _check_unwritten(self, given: Any, who: str) -> None:
        if _versions(given) != self._versions:
            raise ScheduleError(
                f"{who} writes into a tensor that it is given, which the other block of its pair reads too. Let it "
                f"write into a copy."
            )

    def _learn(self, index: int, given: tuple[Any, Any], target: torch.Tensor) -> None:
        """The student's block of a pair: forward, loss, backward."""
        pairs, section = self._pairs, BlockId(2 * index + 1)
        block = pairs.student_blocks[index]
        self.begin(TaskKind.FORWARD, section)
        args, kwargs = containers_as_they_are(given)
        target_version = target._version
        output = first_tensor(block.module(*args, **kwargs), block.name)
        # The casts of this block's weights are of no use to anybody else.
        torch.clear_autocast_cache()
        if output.shape != target.shape:
            raise ScheduleError(
                f"block {block.name} gives a tensor of shape {list(output.shape)} in the student and "
                f"{list(target.shape)} in the teacher. A student's block may be narrower inside, not at its ends."
            )
        self.begin(TaskKind.LOSS, section)
        value = pairs.loss(output, target)
        if value.numel() != 1:
            raise ScheduleError(f"the loss of a block has shape {list(value.shape)}; it must be a scalar.")
        with torch.no_grad():
            self._losses[index] = value
        del output
        self.begin(TaskKind.BACKWARD, section)
        if value.requires_grad:
            with _plain_arithmetic(value.device.type):
                scale = 1.0 if pairs.scalers is None else pairs.scalers.of(section).scale
                value.backward(torch.full_like(value, scale / pairs.micro_batches))  # type: ignore[no-untyped-call]
        self._check_unwritten(given, f"the student's block {block.name}")
        if target._version != target_version:
            raise ScheduleError(f"the student's block {block.name}, or its loss, writes into the teacher's output.")


def first_tensor(output: Any, name: str) -> torch.Tensor:
    """The tensor that a block hands on: its output, or the first in it.  Raises ScheduleError if there is none."""
    found = next(tensors_in(output), None)
    if found is None:
        raise ScheduleError(
            f"block {name} returns {type(output).__name__}, in which no tensor was found: there is nothing to compare. "
            f"Name other blocks with blocks=..."
        )
    return found


def name_of_loss(loss: PairLoss) -> str:
    """What a workload calls it: its function's name, with what ``functools.partial`` gives it."""
    if isinstance(loss, partial):
        given = [repr(value) for value in loss.args] + [f"{name}={value!r}" for name, value in loss.keywords.items()]
        return f"{name_of_loss(loss.func)}({', '.join(given)})"
    return str(getattr(loss, "__name__", type(loss).__name__))


def _plain_arithmetic(device_type: str) -> AbstractContextManager[Any]:
    """Autocast is off within: a backward runs in the types of its forward, as behind the ``with`` of a plain loop."""
    if torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


def _versions(given: Any) -> list[int]:
    """How often each tensor in ``given`` was written to."""
    return [tensor._version for tensor in tensors_in(given)]


def _set_modes(modes: Sequence[tuple[nn.Module, bool]]) -> None:
    for module, is_training in modes:
        module.training = is_training
