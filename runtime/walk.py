"""Where a running model is: hooks that announce each section of forward and backward as it begins.

[Note: How sections are found]
Forward: the root's and the blocks' forward pre-hooks.  Backward: a hook on a block's output fires when the gradient of
that output is complete, which is when the block's backward begins; the hook on the tensor that enters the first block
begins the prologue's.  The engine runs nodes of later forward operations first and accumulates leaf gradients as soon
as they are ready, so when a section's backward begins, the parameters of all later sections have their final
gradients.  Recomputation runs inside the context manager that non-reentrant checkpointing takes for it.

Sections follow each other without a gap: one ends when the next is announced.  A section that has no backward, since
nothing before it needs gradients, is announced where its place is, so that a walker always tells the whole program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ..shared.errors import ScheduleError
from ..shared.plan import ActivationMode
from ..shared.schedule import Part, Section, TaskKind
from ..shared.workload import BlockId
from .blocks import NamedBlock
from .recomputation import Recomputation
from .tensors import tensors_in


class SectionListener(Protocol):
    """Who wants to know where the model is."""

    def begin(self, kind: TaskKind, section: Section) -> None:
        """``kind`` of ``section`` begins; what was announced before has ended."""

    def end_backward(self) -> None:
        """Backward has ended."""


class SectionWalker:
    """Hooks on one model; ``remove`` takes all of them off again."""

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[NamedBlock],
        modes: Sequence[ActivationMode],
        listener: SectionListener,
    ) -> None:
        self._listener = listener
        self._modes = tuple(modes)
        self._names = tuple(block.name for block in blocks)
        self._handles = [model.register_forward_pre_hook(self._enter_model, prepend=True, with_kwargs=True)]
        self._handles.append(model.register_forward_hook(self._leave_model, always_call=False))
        self._wrapped: list[tuple[nn.Module, Callable[..., Any]]] = []
        self._next_block = 0
        self._has_backward = [False] * len(blocks)
        self._announced: list[tuple[TaskKind, Section]] = []
        self._backward_place: int | None = None
        self._is_active = False
        for index, block in enumerate(blocks):
            enter, leave = self._enter_block(BlockId(index)), self._leave_block(BlockId(index))
            self._handles.append(block.module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True))
            self._handles.append(block.module.register_forward_hook(leave))
            if self._modes[index] is ActivationMode.CHECKPOINT:
                self._checkpoint(block.module, BlockId(index))
        self._program = self._backward_program()

    def remove(self) -> None:
        """Take every hook and wrapper off; afterwards the model is as it was.  Idempotent."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for module, original in self._wrapped:
            # The wrapper is an instance attribute that shadows the class's method, unless one stood there before.
            if getattr(original, "__func__", None) is type(module).forward:
                del module.forward
            else:
                module.forward = original
        self._wrapped.clear()

    # -- forward -----------------------------------------------------------------------------------------------------

    def _enter_model(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._is_active = torch.is_grad_enabled()
        if not self._is_active:
            return
        self._next_block = 0
        self._backward_place = None
        self._has_backward = [False] * len(self._names)
        self._listener.begin(TaskKind.FORWARD, Part.PROLOGUE)

    def _enter_block(self, block: BlockId) -> Callable[..., None]:
        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not self._is_active:
                return
            if block != self._next_block:
                expected = self._names[self._next_block] if self._next_block < len(self._names) else "no further block"
                raise ScheduleError(
                    f"the model runs block {self._names[block]} where the schedule expects {expected}. "
                    f"Every block must run once per forward, in order; name other blocks with blocks=..."
                )
            self._next_block += 1
            self._listener.begin(TaskKind.FORWARD, block)
            if block == 0:
                for tensor in tensors_in((args, kwargs)):
                    if tensor.requires_grad and tensor.is_floating_point():
                        tensor.register_hook(lambda _: self._advance(TaskKind.BACKWARD, Part.PROLOGUE))  # type: ignore[no-untyped-call]
                        break

        return enter

    def _leave_block(self, block: BlockId) -> Callable[..., None]:
        def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if not self._is_active:
                return
            first = next((t for t in tensors_in(output) if t.requires_grad), None)
            if first is not None:
                self._has_backward[block] = True
                kind = self._first_backward_kind(block)
                first.register_hook(lambda _: self._advance(kind, block))  # type: ignore[no-untyped-call]
            if block == len(self._names) - 1:
                self._listener.begin(TaskKind.FORWARD, Part.EPILOGUE)

        return leave

    def _leave_model(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not self._is_active:
            return
        self._is_active = False
        if self._next_block != len(self._names):
            raise ScheduleError(
                f"the model's forward ended before block {self._names[self._next_block]}, which the schedule expects. "
                f"Every block must run once per forward; name other blocks with blocks=..."
            )
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(lambda _: self._advance(TaskKind.BACKWARD, Part.EPILOGUE))  # type: ignore[no-untyped-call]

    # -- backward ----------------------------------------------------------------------------------------------------

    def _first_backward_kind(self, block: int) -> TaskKind:
        return TaskKind.RECOMPUTE if self._modes[block] is ActivationMode.CHECKPOINT else TaskKind.BACKWARD

    def _backward_program(self) -> list[tuple[TaskKind, Section]]:
        program: list[tuple[TaskKind, Section]] = [(TaskKind.BACKWARD, Part.EPILOGUE)]
        for index in reversed(range(len(self._names))):
            if self._modes[index] is ActivationMode.CHECKPOINT:
                program.append((TaskKind.RECOMPUTE, BlockId(index)))
            program.append((TaskKind.BACKWARD, BlockId(index)))
        program.append((TaskKind.BACKWARD, Part.PROLOGUE))
        return program

    def _advance(self, kind: TaskKind, section: Section) -> None:
        """Announce everything of the backward program up to and including (kind, section), once."""
        if self._backward_place is None:
            self._backward_place = 0
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        place = self._program.index((kind, section))
        while self._backward_place <= place:
            announced, of = self._program[self._backward_place]
            is_here = self._backward_place == place
            if not is_here and announced is not TaskKind.BACKWARD and self._has_backward[_index(of)]:
                raise ScheduleError(
                    f"backward reached {section} before block {self._names[_index(of)]}, which the schedule expects "
                    f"first."
                )
            self._backward_place += 1
            self._listener.begin(announced, of)

    def _end_backward(self) -> None:
        self._advance(TaskKind.BACKWARD, Part.PROLOGUE)
        self._listener.end_backward()

    # -- recomputation -----------------------------------------------------------------------------------------------

    def _checkpoint(self, module: nn.Module, block: BlockId) -> None:
        original = module.forward
        self._wrapped.append((module, original))

        def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
            return nullcontext(), Recomputation(module, lambda: self._advance(TaskKind.BACKWARD, block))

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return original(*args, **kwargs)
            return checkpoint(original, *args, use_reentrant=False, context_fn=contexts, **kwargs)

        module.forward = forward


def _index(section: Section) -> int:
    assert isinstance(section, int)
    return section
