"""What every section of an iteration does: its operations and its memory, seen by the ledger."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ...shared.basics.errors import WorkloadError
from ...shared.basics.units import format_bytes
from ...shared.observed.alike_passes import AlikePasses, Held
from ...shared.observed.observation import Observation
from ...shared.observed.observed_inputs import PhaseKey
from ...shared.schema.plan import ActivationMode
from ...shared.schema.schedule import OuterSection, Section, TaskKind
from ...shared.schema.workload import BlockId
from ..devices.ledger import MemoryLedger
from ..hooks.block_runs import OutputSizes
from ..hooks.row_reads import RowReads
from ..hooks.section_walker import SectionWalker
from ..hooks.square_tensors import SquareTensors
from ..hooks.swapping import SwappableTally
from ..model.batches import Batch, Loss, batch_tensors, loss_of
from ..model.blocks import NamedBlock, run_again
from ..model.kept_tensors import kept_tensors
from ..model.nested_tensors import storage_bytes, tensors_in, unwrapped
from ..model.parameters import SeenUses, asks_for_facts
from ..routing.forced_choices import ForcedChoices
from ..routing.value_dependence import ValueWatch
from ..sequences.exchange import exchanges_heard
from ..tiles.loss_function import beneath_tiles
from ..tiles.passes import passes_heard
from .block_inputs import GivenTensor, GivenTensors
from .expensive_results import ExpensiveResults
from .held_tensors import MadeStorage, MadeStorages
from .operations import observe_call

_FORWARDS: Final = frozenset({TaskKind.FORWARD, TaskKind.TEACHER_FORWARD})
_MOST_PASSES: Final = 6
"""Iterations after which what a model keeps is taken as it is."""


class GivenParameters(TorchFunctionMode):
    """Notes what functions of torch are given, before autocast puts a cast that it has kept in a weight's place."""

    def __init__(self, observer: SectionObserver) -> None:
        super().__init__()
        self._observer = observer

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """``function`` itself."""
        if not asks_for_facts(function):
            self._observer.note_uses(function, args, kwargs or {})
        return function(*args, **(kwargs or {}))


class SectionObserver:
    """Splits a metered iteration into sections.

    A section's memory ends, and the next one's begins, with the next operation after the announcement: what the caller
    of a block holds until the block has returned, its input above all, goes with the block.
    """

    def __init__(self, ledger: MemoryLedger, model: nn.Module, batch: Sequence[torch.Tensor] = ()) -> None:
        self._ledger = ledger
        self._squares = SquareTensors(model, batch)
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.uses = {name: SeenUses() for name, _ in model.named_parameters()}
        """By the name of the parameter; of all iterations."""
        self.row_reads = RowReads(model)
        self._uses_of_storage = {
            parameter.untyped_storage()._cdata: self.uses[name] for name, parameter in model.named_parameters()
        }
        self._uses_of_gradient = {id(parameter): self.uses[name] for name, parameter in model.named_parameters()}
        self.sections: dict[PhaseKey, Observation] = {}
        self._current: Observation | None = None
        self._key: PhaseKey | None = None
        """Of ``_current``."""
        self._next: PhaseKey | None = None
        self._announced_bytes = 0
        """Level when ``_next`` was."""
        self._with_gradient: set[int] = set()
        self._heard: list[int | None] = []
        """Of loops over tiles, since the last operation."""
        self._passes = AlikePasses()
        """Of the loop over tiles that runs."""
        self.outlived_bytes: dict[int, int] = {}
        """By block: what its forward made that lived until the forward of the epilogue, and no longer."""
        self.made = MadeStorages()
        """What forwards of blocks made beyond their section."""
        self._results = ExpensiveResults()
        self.given: GivenTensors | None = None
        """Who wants to know what operations read."""
        self.values = ValueWatch()
        """Which blocks' memory may depend on values."""
        self._handles: list[Any] = [
            parameter.register_post_accumulate_grad_hook(self._accumulated)  # type: ignore[no-untyped-call]
            for parameter in self._parameters
        ]
        ledger.before_operation = self._settle
        ledger.on_operation = self._operation
        ledger.on_forget = self._forgotten

    @property
    def lookups(self) -> tuple[str, ...]:
        """``RowReads.lookups``."""
        return self.row_reads.lookups

    def place(self) -> PhaseKey | None:
        """Where the model is; what goes now goes there."""
        return self._key if self._current is not None else None

    def begin(self, kind: TaskKind, section: Section) -> None:
        """What was announced before has ended."""
        self._settle()
        self._next = kind, section
        self._announced_bytes = self._ledger.watched_bytes

    def end_backward(self) -> None:
        """The iteration's last section has ended."""
        self._settle()
        self._end()

    def restart(self) -> None:
        """Forget what was seen: the next iteration counts."""
        self.sections.clear()
        self.row_reads.restart()
        self.outlived_bytes.clear()
        self.made.restart()
        self._with_gradient.clear()
        self._heard.clear()
        self._passes.end()
        self._results.forget()
        self._current = self._next = None

    def remove(self) -> None:
        """Take the hooks off the parameters."""
        for handle in self._handles:
            handle.remove()
        for parameter in self._parameters:
            # An empty table of hooks stays behind, which a parameter that never had any lacks.
            if not parameter._post_accumulate_grad_hooks:
                parameter._post_accumulate_grad_hooks = None  # type: ignore[assignment]

    def _settle(self) -> None:
        """Begin the section that was announced."""
        key, self._next = self._next, None
        if key is not None:
            self._end()
            self._key = key
            self._current = self.sections[key] = Observation(self._ledger.watched_bytes)
            self._current.lingering_bytes = self._announced_bytes - self._current.start_bytes
            self._current.gradient_bytes = -self._gradient_bytes()
            self._current.square_bytes = -self._squares.total_bytes

    def _end(self) -> None:
        current, self._current = self._current, None
        if current is not None:
            if self._heard[:1] == [None]:
                current.passes.append((len(current.operations), self._heard.pop(0)))
            current.end_bytes = self._ledger.watched_bytes
            current.gradient_bytes += self._gradient_bytes()
            current.square_bytes += self._squares.total_bytes

    def _gradient_bytes(self) -> int:
        return storage_bytes(parameter.grad for parameter in self._parameters)

    def _operation(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        current = self._current
        if current is None:
            return
        self._note_heard(current)
        self._squares.note(operator, (args, kwargs), result)
        self.note_uses(operator, args, kwargs)
        self.values.note(self._key, operator, args)
        if self.given is not None:
            self.given.note(args, kwargs)
        self.made.note(self.place(), args, kwargs)
        call = observe_call(operator, args, kwargs, result)
        if call is not None:
            current.calls.append(call)
            self._results.note(current, call, operator, args, kwargs, result)
            current.operations.append(call.operation())
            # Until its end, square_bytes is minus what there was at its start.
            more_bytes = current.square_bytes + self._squares.total_bytes
            current.square_peak_bytes = max(current.square_peak_bytes, more_bytes)
            level = self._ledger.watched_bytes - current.start_bytes
            current.levels.append(level)
            current.adding_levels.append(level - current.final_bytes)

    def heard(self, num_tokens: int | None) -> None:
        """A pass over a tile of so many tokens begins, or a loop has ended (None), with the next operation."""
        self._heard.append(num_tokens)
        if num_tokens is None:
            self._passes.end()
        else:
            self._passes.begin(num_tokens, self._held())

    def have_settled(self) -> bool:
        """Whether another pass of as many tokens would do the same."""
        return self._passes.have_settled(self._held())

    def repeat(self, num_passes: int) -> None:
        """So many more passes like the latest are left out."""
        self._passes.repeat(num_passes)

    def _held(self) -> Held:
        seen = self._current if self._next is None else None
        return Held(seen, self._ledger.watched_bytes, self._squares.total_bytes)

    def exchanged(self, sent_bytes: int) -> None:
        """This rank gives so much into an all-to-all among those that share its sequences."""
        assert self._current is not None
        self._current.exchanges.append(sent_bytes)

    def _note_heard(self, current: Observation) -> None:
        current.passes += ((len(current.operations), num_tokens) for num_tokens in self._heard)
        self._heard.clear()

    def note_uses(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the parameters that somebody is given, views of them included: whoever has a view may read it."""
        announced = self._next or self._key
        if announced is None:
            return
        self.row_reads.note(announced, function, args, kwargs)
        self.values.note_function(announced, function)
        kind, section = announced
        # Classes of tensors are not asked: a look is no use.
        with torch._C.DisableTorchFunctionSubclass():
            storages = [unwrapped(tensor).untyped_storage()._cdata for tensor in tensors_in((args, kwargs))]
        for storage in storages:
            seen = self._uses_of_storage.get(storage)
            if seen is not None:
                (seen.forward if kind in _FORWARDS else seen.backward).add(section)

    def _forgotten(self, key: int, made_in: Hashable, size_bytes: int) -> None:
        gone, is_given = self.place(), self.given is not None and self.given.was_given(key)
        self.made.forgotten(key, made_in, size_bytes, gone, is_given=is_given)
        if gone == (TaskKind.FORWARD, OuterSection.EPILOGUE) and isinstance(made_in, tuple):
            kind, section = made_in
            if kind is TaskKind.FORWARD and isinstance(section, int):
                self.outlived_bytes[section] = self.outlived_bytes.get(section, 0) + size_bytes

    def _accumulated(self, parameter: torch.Tensor) -> None:
        """A gradient is final.  Were it added to another, both would be there until now, and then one of them."""
        # The section that was announced last: it is there even if it has done nothing yet.
        announced = self._next or self._key
        assert announced is not None
        self._uses_of_gradient[id(parameter)].gradient.add(announced[1])
        current = self._current
        if current is None or id(parameter) in self._with_gradient:
            return
        self._with_gradient.add(id(parameter))
        if current.adding_levels:
            level = self._ledger.watched_bytes - current.start_bytes - current.final_bytes
            current.adding_levels[-1] = max(current.adding_levels[-1], level)
        current.final_bytes += storage_bytes([parameter.grad])


def observe_sections(
    model: nn.Module,
    batch: Batch,
    loss: Loss | None,
    blocks: Sequence[NamedBlock],
    mode: ActivationMode,
    on_iteration: Callable[[], None],
    *,
    passes: int,
    held: Sequence[torch.Tensor] = (),
    forced: ForcedChoices | None = None,
    keeps_outputs: bool = False,
) -> SeenIterations:
    """Metered iterations with every block in ``mode``; the last one counts.

    At least ``passes``, and as many more as the model needs until it keeps no more at the end of an iteration than at
    its beginning: a first one may fill caches.  A model that keeps more and more is warned of.  ``held``: what the
    caller holds of the model's attributes, as nobody does in training.  ``forced``: how choices within blocks are made;
    None: as the model makes them.  ``keeps_outputs``: whether the loop's variable holds the model's output.
    """
    ledger = MemoryLedger(device_type=next(model.parameters()).device.type)
    lasting = [*model.parameters(), *model.buffers(), *batch_tensors(batch).values()]
    ledger.adopt(lasting)
    ledger.adopt(kept_tensors(model.modules()))
    buffers = _Buffers(model)
    observer = SectionObserver(ledger, model, list(batch_tensors(batch).values()))
    ledger.place = observer.place
    if forced is not None:
        forced.place = observer.place
    is_kept = mode is ActivationMode.KEEP
    tallies = _tallies(model, blocks) if is_kept else {}
    modes = [ActivationMode.SWAP if index in tallies else mode for index in range(len(blocks))]
    walker = SectionWalker(model, blocks, modes, observer, tallies)
    outputs = OutputSizes(model, blocks)
    given = GivenTensors(model, blocks, ledger, lasting, observer.place)
    observer.given = given
    # Of the iteration before: a loop's variable for its loss holds it until the next loss takes its place.
    graph: list[Any] = []
    kept: list[Any] | None = [] if keeps_outputs else None
    try:
        for number in count(1):
            observer.restart()
            given.restart()
            before_bytes = ledger.watched_bytes
            with (
                forced or nullcontext(),
                ledger.metering(),
                GivenParameters(observer),
                passes_heard(observer),
                exchanges_heard(observer.exchanged),
                _blocks_run_again(model, mode),
            ):
                value = loss_of(model, batch, loss, kept=kept)
                graph = beneath_tiles(value.grad_fn)
                value.backward()  # type: ignore[no-untyped-call]
                del value
            for parameter in model.parameters():
                parameter.grad = None
            if number <= passes:
                on_iteration()
            if number >= passes and has_settled(ledger, model, before_bytes, number):
                break
        found, made = given.found, observer.made.found
        outlived_bytes = dict(observer.outlived_bytes)
        kept_bytes = kept_beside(ledger, [*lasting, *buffers.there(), *_dropped(model, held)], blocks)
    finally:
        del graph, kept
        buffers.empty()
        given.remove()
        walker.remove()
        observer.remove()
        outputs.remove()
    _note_blocks(observer, blocks, outputs, tallies)
    return SeenIterations(
        observer.sections, found, kept_bytes, outlived_bytes, observer.uses, observer.lookups, observer.values, made
    )


def _tallies(model: nn.Module, blocks: Sequence[NamedBlock]) -> dict[int, SwappableTally]:
    again = run_again(blocks)
    return {index: SwappableTally(model, block.module, runs_again=index in again) for index, block in enumerate(blocks)}


class _Buffers:
    """Tells module buffers that take what they took when the trace began from those that a forward fills."""

    def __init__(self, model: nn.Module) -> None:
        self._found = [
            (module, name, None if buffer is None else buffer.nbytes)
            for module in model.modules()
            for name, buffer in module._buffers.items()
        ]

    def there(self) -> list[torch.Tensor]:
        """Those that have not grown."""
        now = ((module._buffers.get(name), size_bytes) for module, name, size_bytes in self._found)
        return [buffer for buffer, size_bytes in now if buffer is not None and buffer.nbytes <= (size_bytes or 0)]

    def empty(self) -> None:
        """Those that were None are None again, for the next mode to fill them."""
        for module, name, size_bytes in self._found:
            if size_bytes is None and name in module._buffers:
                module._buffers[name] = None


@contextmanager
def _blocks_run_again(model: nn.Module, mode: ActivationMode) -> Iterator[None]:
    """Within the block, an iteration in ``mode`` runs, that in mode KEEP before all others.

    Raises WorkloadError if the model fails in others alone: then it is a recomputation that fails.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, LookupError, ValueError, TypeError) as error:
        if mode is ActivationMode.KEEP:
            raise
        said = str(error).partition("\n")[0]
        raise WorkloadError(
            f"blocks of {type(model).__name__} cannot run a second time, as plans have them when they recompute: they "
            f"change in place what they are given, or a cache or another object that they share ({said:.200}). Let "
            f"blocks leave what they are given as it is, or name others (trace(..., blocks=...))."
        ) from error


def _note_blocks(
    observer: SectionObserver,
    blocks: Sequence[NamedBlock],
    outputs: OutputSizes,
    tallies: Mapping[int, SwappableTally],
) -> None:
    """Note what the forwards of blocks hand on and save."""
    for index, size_bytes in enumerate(outputs.sizes):
        observation = observer.sections.get((TaskKind.FORWARD, BlockId(index)))
        if observation is None:
            raise WorkloadError(f"block {blocks[index].name} did not run in the model's forward. Name other blocks.")
        observation.output_bytes = size_bytes
        if index in tallies:
            observation.saved_bytes = tallies[index].sizes_bytes


def has_settled(ledger: MemoryLedger, model: nn.Module, before_bytes: int, number: int) -> bool:
    """Whether iteration ``number`` has left what was there before it, or so many have left more that all will."""
    if ledger.watched_bytes == before_bytes:
        return True
    gc.collect()  # what only cycles hold is kept by nobody
    more_bytes = ledger.watched_bytes - before_bytes
    if number < _MOST_PASSES:
        return more_bytes == 0
    if more_bytes > 0:
        warnings.warn(
            f"{type(model).__name__} keeps {format_bytes(more_bytes)} more on the device after every iteration (seen "
            f"in {number} of them). A plan accounts for what there is now, so that training will exceed it sooner or "
            f"later. Let the model drop what it kept in earlier iterations.",
            stacklevel=2,
        )
    return True


def _dropped(model: nn.Module, held: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Those of ``held`` that no attribute of the model holds any more."""
    kept = {tensor.untyped_storage()._cdata for tensor in kept_tensors(model.modules())}
    return [tensor for tensor in held if tensor.untyped_storage()._cdata not in kept]


def kept_beside(
    ledger: MemoryLedger, lasting: Sequence[torch.Tensor], blocks: Sequence[NamedBlock]
) -> dict[int | None, int]:
    """Bytes that live on after an iteration beside ``lasting``, by the block that keeps them; None: nobody or several.

    A block keeps what lies in attributes of its modules, and what was made in it if no attribute holds it.
    """
    keepers: dict[int, set[int]] = {}
    for index, block in enumerate(blocks):
        for tensor in kept_tensors(block.module.modules()):
            keepers.setdefault(tensor.untyped_storage()._cdata, set()).add(index)
    found: dict[int | None, int] = {}
    for storage in ledger.alive_beside(lasting):
        held_by = keepers.get(storage.key, set())
        made_in = storage.place[1] if isinstance(storage.place, tuple) and not held_by else None
        keeper = min(held_by) if len(held_by) == 1 else int(made_in) if isinstance(made_in, int) else None
        found[keeper] = found.get(keeper, 0) + storage.size_bytes
    return found


@dataclass(frozen=True, slots=True)
class SeenIterations:
    """What metered iterations in one mode have shown."""

    sections: dict[PhaseKey, Observation]
    given: list[GivenTensor]
    """What the blocks were given."""
    kept_bytes: dict[int | None, int]
    """What lives on from one iteration to the next beside parameters, buffers and the batch: by the observed block
    that keeps it; None outside of every block."""
    outlived_bytes: dict[int, int]
    """By block: what its forward made that lived until the forward of the epilogue, and no longer."""
    uses: dict[str, SeenUses]
    """By the name of each parameter: who used it."""
    row_lookups: tuple[str, ...] = ()
    """``RowReads.lookups``"""
    values: ValueWatch = field(default_factory=ValueWatch)
    """Which blocks' memory may depend on values."""
    made: list[MadeStorage] = field(default_factory=list)
    """What blocks made that no block was given, and that lived beyond its section."""

    @property
    def output_bytes(self) -> list[int]:
        """Of every block that was observed."""
        return [
            seen.output_bytes
            for (kind, section), seen in self.sections.items()
            if kind is TaskKind.FORWARD and isinstance(section, int)
        ]


def most_kept_bytes(seen: Collection[SeenIterations], stands_for: Sequence[int]) -> int:
    """What lives on from one iteration to the next beside parameters, buffers and the batch.

    Of every block as much as in the mode in which it keeps more: a recomputation may leave its graph behind.
    """
    keepers = {keeper for iterations in seen for keeper in iterations.kept_bytes}
    most = {keeper: max(iterations.kept_bytes.get(keeper, 0) for iterations in seen) for keeper in keepers}
    return most.get(None, 0) + sum(most.get(block, 0) for block in stands_for)
