"""Where a running model is: hooks that announce each section of forward and backward as it begins.

[Note: How sections are found]
Forward: the root's and the blocks' forward pre-hooks.  Backward: a hook on a block's output fires when the operation
that made it is about to run backward; the first of the block's outputs to do so begins the block's backward, and the
first of the tensors that entered the first block begins the prologue's.  The engine runs nodes of later forward
operations first and accumulates leaf gradients as soon as they are ready, so when a section's backward begins, the
parameters of all later sections have their final gradients.  (For that reason hooks on leaves would tell nothing: they
fire while later sections still run.)  Recomputation runs inside the context manager that non-reentrant checkpointing
takes for it.

Sections follow each other without a gap: one ends when the next is announced.  A section that has no backward, since
nothing before it needs gradients, is announced where its place is, so that a walker always tells the whole program.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ...shared.basics.errors import ScheduleError
from ...shared.phases.activation_modes import KeptResults
from ...shared.schema.plan import ActivationMode, Plan
from ...shared.schema.schedule import OuterSection, Section, TaskKind
from ...shared.schema.workload import BlockId, Workload
from ..model.blocks import NamedBlock, places_of
from ..model.nested_tensors import containers_as_they_are, tensors_in
from .offloaded_inputs import HandedOn, OffloadedInput, as_given
from .recomputation import BlockState, Recomputation
from .refusals import (
    by_the_back_door,
    earlier_graph,
    gradients_within_forward,
    missing_block,
    other_block,
    refuse_kept_graph,
    refuse_second_graph,
    refuse_transforms,
    second_backward,
    unreached_block,
)
from .selective import selecting


class SectionListener(Protocol):
    """Who wants to know where the model is."""

    def begin(self, kind: TaskKind, section: Section) -> None:
        """``kind`` of ``section`` begins; what was announced before has ended."""

    def end_backward(self) -> None:
        """Backward has ended."""


class RunsForward(Protocol):
    """What runs a block's forward its own way."""

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``forward(*args, **kwargs)``."""


@dataclass(frozen=True, slots=True)
class Recomputing:
    """What recomputed blocks begin from beside what autograd keeps for them."""

    inputs: Mapping[int, OffloadedInput] = field(default_factory=dict)
    """Those of blocks in mode OFFLOAD_INPUT."""
    product_stride: int = 1
    """Of the products of blocks in mode SELECTIVE, the first of every so many is kept."""
    changed: Mapping[int, Collection[int]] = field(default_factory=dict)
    """By block in mode SELECTIVE, ``SelectiveRecomputation.changed``."""

    @classmethod
    def of(cls, inputs: Mapping[int, OffloadedInput], plan: Plan, workload: Workload) -> Recomputing:
        """What blocks begin from by ``plan``."""
        return cls(
            inputs,
            plan.product_stride,
            {
                block: of.changed
                for block, mode in enumerate(plan.modes(workload.num_blocks))
                if mode is ActivationMode.SELECTIVE
                for of in workload.profile_of(block).selective
                if of.product_stride == plan.product_stride
            },
        )

    def kept_results(self, block: int) -> KeptResults:
        """Of one forward of a block in mode SELECTIVE."""
        return KeptResults(self.product_stride, self.changed.get(block, ()))


class SectionWalker:
    """Hooks on one model; ``remove`` takes all of them off again.

    ``swapping`` runs the forwards of blocks in mode SWAP, ``recomputing`` says what recomputed ones begin from.
    ``is_training``: whether results matter, as in no trace.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[NamedBlock],
        modes: Sequence[ActivationMode],
        listener: SectionListener,
        swapping: Mapping[int, RunsForward] | None = None,
        *,
        recomputing: Recomputing | None = None,
        is_training: bool = False,
    ) -> None:
        self._recomputing = recomputing or Recomputing()
        self._inputs = self._recomputing.inputs
        self._handed_on = {index: HandedOn(model, blocks[index - 1].module) for index in self._inputs}
        """By block whose input travels, what the block before hands on."""
        self._is_training = is_training
        self._listener = listener
        self._modes = tuple(modes)
        self._names = tuple(block.name for block in blocks)
        self._handles = [model.register_forward_pre_hook(self._enter_model, prepend=True, with_kwargs=True)]
        self._handles.append(model.register_forward_hook(self._leave_model, always_call=False))
        self._wrapped: list[tuple[nn.Module, Callable[..., Any]]] = []
        self._next_block = 0
        self._has_backward = [False] * len(blocks)
        self._backward_place: int | None = None
        self._is_backward_over = False
        self._is_active = False
        self._forward = 0
        """The number of the latest forward: hooks of an earlier one's graph tell nothing any more."""
        for module, places in places_of(blocks):
            enter, leave = self._enter_block(places), self._leave_block(places)
            self._handles.append(module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True))
            self._handles.append(module.register_forward_hook(leave))
            self._wrap(module, places, swapping or {})
        self._program = self._backward_program()
        self._place_of = {announced: place for place, announced in enumerate(self._program)}

    def remove(self) -> None:
        """Take every hook and wrapper off; afterwards the model is as it was.  Idempotent."""
        self.forget()
        # A forward that failed may have left casts of weights behind whose bytes are elsewhere.
        torch.clear_autocast_cache()
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

    def forget(self) -> None:
        """The forward or backward that is under way has been given up; its graph must not be run any more."""
        self._is_active = False
        self._forward += 1

    # -- forward -----------------------------------------------------------------------------------------------------

    def _enter_model(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        refuse_transforms()
        self._is_active = torch.is_grad_enabled()
        if not self._is_active:
            return
        self._forward += 1
        self._next_block = 0
        self._backward_place = None
        self._is_backward_over = False
        self._has_backward = [False] * len(self._names)
        self._listener.begin(TaskKind.FORWARD, OuterSection.PROLOGUE)

    def _enter_block(self, places: Sequence[int]) -> Callable[..., None]:
        name = self._names[places[0]]

        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not self._is_active:
                if torch.is_grad_enabled():
                    raise ScheduleError(
                        f"block {name} runs outside a forward of the whole model, where the schedule expects nothing. "
                        f"Call the model that was traced, and let nothing else checkpoint its blocks."
                    )
                return
            block = BlockId(self._next_block)
            if block not in places:
                raise other_block(name, self._names[block] if block < len(self._names) else "no further block")
            self._next_block += 1
            self._listener.begin(TaskKind.FORWARD, block)
            if (handed_on := self._handed_on.get(block + 1)) is not None:
                handed_on.enter((args, kwargs))
            if block == 0:
                self._announce_at((args, kwargs), TaskKind.BACKWARD, OuterSection.PROLOGUE)

        return enter

    def _leave_block(self, places: Sequence[int]) -> Callable[..., None]:
        def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if not self._is_active:
                return
            block = self._latest(places)
            if next(tensors_in(output), None) is None:
                raise ScheduleError(
                    f"block {self._names[block]} returns {type(output).__name__}, in which no tensor was found: its "
                    f"backward could not be followed. Name other blocks with blocks=..."
                )
            if (handed_on := self._handed_on.get(block + 1)) is not None:
                handed_on.leave(output)
            self._has_backward[block] = self._announce_at(output, self._first_backward_kind(block), block)
            if block == len(self._names) - 1:
                self._listener.begin(TaskKind.FORWARD, OuterSection.EPILOGUE)

        return leave

    def _latest(self, places: Sequence[int]) -> BlockId:
        """The one of ``places`` that runs, or has run last."""
        return BlockId(max((place for place in places if place < self._next_block), default=places[0]))

    def _leave_model(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not self._is_active:
            return
        self._is_active = False
        if self._next_block != len(self._names):
            raise missing_block(self._names[self._next_block])
        self._announce_at(output, TaskKind.BACKWARD, OuterSection.EPILOGUE)

    # -- backward ----------------------------------------------------------------------------------------------------

    def _announce_at(self, tensors: Any, kind: TaskKind, section: Section) -> bool:
        """Announce (kind, section) when backward reaches the first of ``tensors``; says whether it can reach any."""
        found = [tensor for tensor in tensors_in(tensors) if tensor.requires_grad and not tensor.is_leaf]
        forward = self._forward
        for tensor in found:
            tensor.register_hook(lambda _: self._reached(forward, kind, section))  # type: ignore[no-untyped-call]
        return bool(found)

    def _reached(self, forward: int, kind: TaskKind, section: Section) -> None:
        """Backward has reached a tensor of the forward of that number."""
        if forward != self._forward:
            raise earlier_graph()
        if self._is_active:
            raise gradients_within_forward()
        refuse_second_graph()
        if self._is_training and self._backward_place is None:
            refuse_kept_graph()
        self._advance(kind, section)

    def _first_backward_kind(self, block: int) -> TaskKind:
        return TaskKind.RECOMPUTE if self._modes[block].is_recomputed else TaskKind.BACKWARD

    def _backward_program(self) -> list[tuple[TaskKind, Section]]:
        program: list[tuple[TaskKind, Section]] = [(TaskKind.BACKWARD, OuterSection.EPILOGUE)]
        for index in reversed(range(len(self._names))):
            if self._modes[index].is_recomputed:
                program.append((TaskKind.RECOMPUTE, BlockId(index)))
            program.append((TaskKind.BACKWARD, BlockId(index)))
        program.append((TaskKind.BACKWARD, OuterSection.PROLOGUE))
        return program

    def _advance(self, kind: TaskKind, section: Section) -> None:
        """Announce everything of the backward program up to and including (kind, section), once."""
        if self._is_backward_over:
            raise second_backward()
        if self._backward_place is None:
            self._backward_place = 0
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        place = self._place_of[kind, section]
        while self._backward_place <= place:
            announced, of = self._program[self._backward_place]
            is_here = self._backward_place == place
            if not is_here and announced is not TaskKind.BACKWARD and self._has_backward[_index(of)]:
                name = self._names[_index(of)]
                at = f"block {self._names[section]}" if isinstance(section, int) else f"the {section}"
                raise by_the_back_door(name) if of == section else unreached_block(name, at)
            self._backward_place += 1
            self._listener.begin(announced, of)

    def _end_backward(self) -> None:
        self._advance(TaskKind.BACKWARD, OuterSection.PROLOGUE)
        self._is_backward_over = True
        self._listener.end_backward()

    # -- recomputation -----------------------------------------------------------------------------------------------

    def _wrap(self, module: nn.Module, places: Sequence[int], swapping: Mapping[int, RunsForward]) -> None:
        """Let the forward of a module be what the mode of the block that runs asks for."""
        original = module.forward
        runs: dict[int, Callable[..., Any]] = {}
        for place in places:
            if self._modes[place].is_recomputed:
                runs[place] = self._checkpointed(module, original, BlockId(place))
            elif place in swapping:
                runs[place] = _swapped(swapping[place], original)
        if not runs:
            return
        self._wrapped.append((module, original))

        def forward(*args: Any, **kwargs: Any) -> Any:
            run = runs.get(self._latest(places), original) if torch.is_grad_enabled() else original
            return run(*args, **kwargs)

        module.forward = forward

    def _checkpointed(self, module: nn.Module, original: Callable[..., Any], block: BlockId) -> Callable[..., Any]:
        modules = list(module.modules())

        def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
            state = BlockState(self._names[block], modules, is_training=self._is_training)
            again = Recomputation(module, state, lambda: self._advance(TaskKind.BACKWARD, block))
            if self._modes[block] is ActivationMode.SELECTIVE:
                return selecting(self._names[block], self._recomputing.kept_results(block), state.noting(), again)
            return state.noting(), again

        def forward(*args: Any, **kwargs: Any) -> Any:
            if (offloaded := self._inputs.get(block)) is not None:
                return self._keep_no_input(offloaded, block, original, contexts, (args, kwargs))
            named = tensor_only_by_name(args, kwargs)
            given = containers_as_they_are((args, kwargs))
            is_first = True

            def run(_: Any, *args: Any, **kwargs: Any) -> Any:
                nonlocal is_first
                if not is_first and self._is_active:
                    raise gradients_within_forward()
                if not is_first:
                    # A list that the block appends to would be appended to twice: it starts from what it was.
                    args, kwargs = containers_as_they_are(given)
                is_first = False
                return original(*args, **kwargs)

            return checkpoint(run, named, *args, use_reentrant=False, context_fn=contexts, **kwargs)

        return forward

    def _keep_no_input(
        self,
        offloaded: OffloadedInput,
        block: BlockId,
        original: Callable[..., Any],
        contexts: Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]],
        given: tuple[tuple[Any, ...], dict[str, Any]],
    ) -> Any:
        """The forward of a block whose input travels: see [Note: Inputs that travel] in ``offloaded_inputs``."""
        packed = offloaded.packed(given, self._handed_on[block].storages)
        on_cuda = next((tensor for tensor in tensors_in(given) if tensor.is_cuda), None)
        # It tells checkpointing the device whose random state to keep, and holds nothing.
        empty = None if on_cuda is None else on_cuda.new_empty(0)
        first = [given]

        def run(_: Any) -> Any:
            if first:
                args, kwargs = first.pop()
            elif self._is_active:
                raise gradients_within_forward()
            else:
                args, kwargs = as_given(packed)
            return original(*args, **kwargs)

        return checkpoint(run, empty, use_reentrant=False, context_fn=contexts)


def _swapped(block: RunsForward, original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        return block.run(original, args, kwargs)

    return forward


def tensor_only_by_name(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """A CUDA tensor among the keyword arguments if there is none among the others, else None.

    Checkpointing keeps the random states of the devices of positional arguments alone; without them the dropout of a
    block that is given its tensors by name would be another one when it is recomputed.
    """
    if any(tensor.is_cuda for tensor in tensors_in(args)):
        return None
    return next((tensor for tensor in tensors_in(kwargs) if tensor.is_cuda), None)


def _index(section: Section) -> int:
    assert isinstance(section, int)
    return section
