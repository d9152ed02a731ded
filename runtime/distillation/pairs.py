"""Teacher and student as one module: its forward runs the teacher, and trains every student block beside it.

[Note: Pairs]
The teacher's own forward runs, whole and without gradients, so that masks, rotary tables and positions are made by who
knows how.  Hooks on its blocks see what each is given and gives.  Right after the teacher's block, the student's block
of the same place runs on the same inputs, with gradients; its loss compares what both hand on (the output itself, or
the first tensor in it), and its backward follows at once.  Nothing that a student block makes goes on to another one.
Behind the last block the teacher's forward ends: its norm and head would run for nobody.

[Note: Stages]
One stage of a pipeline has some pairs alone.  It passes over the blocks before these ([Note: Passing over] in
``passing``).  Before the code behind the last of them goes on, the teacher's activation of that place, which another
stage has made, is written into the hidden state that was handed on so far, in place.  What the stage's own last
teacher's block gives goes to the next stage.
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
from .passing import check_all_here, check_sendable, check_writable, hidden_state, passed_over

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


class StageListener(SectionListener, Protocol):
    """Who exchanges activations with other stages as well."""

    def exchange(self, kind: TaskKind, activation: torch.Tensor) -> None:
        """RECEIVE is to fill ``activation``, or SEND to send it, once what was announced before has ended."""


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
        own: range | None = None,
    ) -> None:
        """``blocks`` names the blocks of both models where they are not found.

        A step minimises the mean of the losses of its ``micro_batches``.  ``own`` are the pairs of one stage
        ([Note: Stages]); None: there is one stage.  Raises WorkloadError if the two models do not belong together.
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
        self.stage_listener: StageListener | None = None
        """The same, where there are other stages."""
        self.all_blocks = tuple(block.name for block in of_teacher)
        """The paths of the blocks of all pairs, in either model."""
        self.own = range(len(of_teacher)) if own is None else own
        """The pairs that are trained here, of all."""
        self.teacher_blocks = of_teacher[self.own.start : self.own.stop]
        """(n,) by their paths within the teacher."""
        self.student_blocks = of_student[self.own.start : self.own.stop]
        """(n,) by their paths within the student, which are the same."""
        others = [
            (model, [block for pair, block in enumerate(row) if pair not in self.own])
            for model, row in ((teacher, of_teacher), (student, of_student))
        ]
        # Behind a function, where nobody looks for tensors.
        self._others: Callable[[], list[tuple[nn.Module, list[NamedBlock]]]] = lambda: others
        self.elsewhere = tuple(
            f"{path}.{block.name}." for path, (_, row) in zip((TEACHER, STUDENT), others, strict=True) for block in row
        )
        """What the names of all that other stages have begin with."""
        self.before = [block.name for block in of_teacher[: self.own.start]]
        """The paths of the teacher's blocks of stages before."""
        self.has_next = self.own.stop < len(of_teacher)
        """Whether a stage comes behind."""
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
        """Number of blocks of either model that are trained here."""
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
        stitch = _Stitch(self, losses, list(tensors_in((args, kwargs))) if self.before else [])
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
        students = (*self.student_blocks, *self._others()[1][1])
        learnt = {id(p) for block in students for p in block.module.parameters() if p.requires_grad}
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

        The teacher collects what it did before, unless blocks of other stages make a part of that.
        """
        self._is_whole = True
        self._let_collect(True)
        try:
            yield
        finally:
            self._is_whole = False
            # Within the block ``learning`` may have ended, which leaves nothing turned off.
            self._let_collect(False)

    def _let_collect(self, is_collecting: bool) -> None:
        for config, name in [] if self.elsewhere else self._turned_off:
            setattr(config, name, is_collecting)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Within the block other stages' blocks are no part of the models; see [Note: Stages]."""
        with ExitStack() as undo:
            for model, blocks in self._others():
                undo.enter_context(passed_over(model, blocks))
            yield


class _LastBlockRan(BaseException):
    """Ends the teacher's forward; no ``except Exception`` of a model stops it."""


class _Stitch:
    """One forward of the teacher, with the student's blocks beside it."""

    def __init__(self, pairs: Pairs, losses: torch.Tensor, batch: Sequence[torch.Tensor]) -> None:
        """``batch``: what other stages' activations must not be written into."""
        self._pairs = pairs
        self._losses = losses
        self._batch = batch
        self._next = 0
        self._is_announced = False
        """Whether the block that comes next has been announced."""
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
        if self._pairs.before:
            module = self._pairs.teacher.get_submodule(self._pairs.before[-1])
            handles.append(module.register_forward_hook(self._receive, with_kwargs=True))
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
            if not self._is_announced:
                # Before anything of this block runs, and after the one before is let go of by the teacher's forward.
                self.begin(TaskKind.TEACHER_FORWARD, BlockId(2 * index))
            self._is_announced = False
            self._given = containers_as_they_are((args, kwargs))
            if self._pairs.before:
                check_all_here(self._given)
            self._versions = _versions(self._given)

        return enter

    def _leaving(self, index: int) -> Callable[..., None]:
        def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            given, self._given = self._given, None
            assert given is not None
            name = self._pairs.teacher_blocks[index].name
            self._check_unwritten(given, f"the teacher's block {name}")
            target = first_tensor(output, name)
            if index == self._pairs.num_pairs - 1 and self._pairs.has_next:
                self._send(given, target)
            with torch.enable_grad():
                self._learn(index, given, target)
            if index == self._pairs.num_pairs - 1:
                raise _LastBlockRan

        return leave

    def _receive(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Behind the last block of the stages before: their activation takes the place of what was handed on."""
        pairs, name = self._pairs, self._pairs.before[-1]
        hidden = hidden_state(args, kwargs, name)
        check_writable(hidden, (args, kwargs), [*self._batch, *pairs.parameters(), *pairs.buffers()], name)
        self._exchange(TaskKind.RECEIVE, hidden)
        # The prologue has ended; the first block begins when the activation is there.
        self.begin(TaskKind.TEACHER_FORWARD, BlockId(0))
        self._is_announced = True

    def _send(self, given: tuple[Any, Any], activation: torch.Tensor) -> None:
        """The output of the last block here goes to the next stage, whose hidden state has to be like it."""
        check_sendable(activation, given, f"{self._pairs.teacher_blocks[-1].name} of the teacher")
        self._exchange(TaskKind.SEND, activation)

    def _exchange(self, kind: TaskKind, activation: torch.Tensor) -> None:
        listener = self._pairs.stage_listener
        if listener is None:
            raise ScheduleError("pairs of one stage run within a training by a pipeline alone: pass it to distil().")
        listener.exchange(kind, activation)

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
