"""Forward without gradients in the middle of a training: every section's chunks come when it runs, and go after it.

No lane runs meanwhile.  Gathers happen on the compute thread, one section after the other, into what the plan's buffers
leave free, so at no time is more of the model on the device than a plan's fewest buffers hold.  A part of the model may
also run alone, as encoders do when text is generated: what it needs outside the blocks comes with the module that holds
it, and goes with the next section.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ...shared.basics.errors import ScheduleError
from ..chunks.chunk import ChunkState, DeviceChunk
from ..chunks.row_lookups import LookedUpRows
from ..chunks.sharded_chunk import ShardedChunk
from ..devices.device import TrainingDevice
from ..hooks.block_runs import BlockRuns
from ..hooks.refusals import refuse_transforms
from ..model.blocks import NamedBlock
from ..model.nested_tensors import tensors_in


def refuse_other_gradient_mode(*, is_evaluating: bool) -> None:
    """Raise ScheduleError if the model is called without gradients in training, or with them in evaluation."""
    if torch.is_grad_enabled() != is_evaluating:
        return
    if is_evaluating:
        raise ScheduleError(
            "forward with gradients within evaluation(), where nothing is trained. Leave its block first."
        )
    raise ScheduleError(
        "forward without gradients while a plan is being carried out: offloaded chunks are not resident. Evaluate "
        "within 'with training.evaluation():', between step() and the next forward, or after close()."
    )


@dataclass(frozen=True, slots=True)
class EvaluatedModel:
    """A model that is called in an evaluation: the training's own, or one of those that it consists of."""

    module: nn.Module
    blocks: Sequence[tuple[int, NamedBlock]]
    """In the order of execution, with the numbers of their sections."""
    prologue: int | None
    """The number of the section that begins with a call; None: the schedule has none for it."""
    epilogue: int
    """The number of the section behind the last block."""


def whole_model(model: nn.Module, blocks: Sequence[NamedBlock]) -> EvaluatedModel:
    """``model`` as it is trained."""
    return EvaluatedModel(model, tuple(enumerate(blocks, start=1)), 0, 1 + len(blocks))


class Evaluation:
    """Brings chunks to models that run forward alone."""

    def __init__(
        self,
        models: Sequence[EvaluatedModel],
        chunks: Iterable[DeviceChunk],
        device: TrainingDevice,
        rows: LookedUpRows,
    ) -> None:
        self._models = tuple(models)
        self._chunks = [chunk for chunk in chunks if not chunk.is_persistent]
        self._device = device
        self._rows = rows
        self._claim_before_bytes: int | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Within the block the models run forward.  Every chunk is away before and after it, and no lane runs."""
        handles: list[RemovableHandle | BlockRuns] = []
        for model in self._models:
            enter = self._entering_model(model)
            handles.append(model.module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True))
            handles.append(model.module.register_forward_hook(self._leave_model, always_call=True))
            handles.append(self._following_blocks(model))
        for module, held in self._holders():
            handles.append(module.register_forward_pre_hook(self._bringing(held), prepend=True))
        self._rows.is_evaluating = True
        if (ledger := self._device.ledger) is not None:
            ledger.is_evaluating = True
        try:
            yield
        finally:
            if ledger is not None:
                ledger.is_evaluating = False
            self._rows.is_evaluating = False
            for handle in handles:
                handle.remove()
            self._end_forward()
            for chunk in self._chunks:
                chunk.leave()
            # Copies of chunks may still be queued, and their homes are about to be stepped.
            self._device.synchronize()

    def _entering_model(self, model: EvaluatedModel) -> Any:
        needed = [] if model.prologue is None else self._needed(model.prologue)

        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            refuse_transforms()
            refuse_other_gradient_mode(is_evaluating=True)
            self._begin_forward((args, kwargs))
            self._enter(needed)

        return enter

    def _following_blocks(self, model: EvaluatedModel) -> BlockRuns:
        needed = [self._needed(section) for section, _ in model.blocks]
        last = len(needed) - 1

        def leave(place: int, given: Any, output: Any) -> None:
            if place == last:
                self._enter(self._needed(model.epilogue))

        return BlockRuns(
            model.module,
            [block for _, block in model.blocks],
            on_enter=lambda place, given: self._enter(needed[place]),
            on_leave=leave,
        )

    def _begin_forward(self, given: Any) -> None:
        ledger = self._device.ledger
        if ledger is not None and self._claim_before_bytes is None:
            self._claim_before_bytes = ledger.claim_bytes
            ledger.claim(0)
            ledger.doing = "running forward alone"
            ledger.start_metering()
            ledger.adopt_inputs(tensors_in(given))

    def _leave_model(self, module: nn.Module, args: Any, output: Any) -> None:
        self._end_forward()

    def _end_forward(self) -> None:
        ledger = self._device.ledger
        if ledger is not None and self._claim_before_bytes is not None:
            ledger.stop_metering()
            ledger.claim(self._claim_before_bytes)
            self._claim_before_bytes = None
        torch.clear_autocast_cache()
        self._keep([])

    def _needed(self, section: int) -> list[DeviceChunk]:
        """The chunks that the forward of a section needs, by its number."""
        return [chunk for chunk in self._chunks if section in chunk.chunk.forward]

    def _enter(self, needed: Sequence[DeviceChunk]) -> None:
        """Let every chunk but ``needed`` go, and bring these."""
        # A weight's cast that autocast keeps would stay on the device when the weight goes.
        torch.clear_autocast_cache()
        self._keep(needed)
        self._bring(needed)

    def _holders(self) -> Iterator[tuple[nn.Module, list[DeviceChunk]]]:
        """The modules outside the blocks that hold parameters themselves, with the chunks of these."""
        of_blocks = (block.module for model in self._models for _, block in model.blocks)
        inside = {id(part) for block in of_blocks for part in block.modules()}
        chunk_of = {id(parameter): chunk for chunk in self._chunks for parameter in chunk.parameters}
        for module in {id(part): part for model in self._models for part in model.module.modules()}.values():
            held = {id(parameter) for parameter in module.parameters(recurse=False)} & chunk_of.keys()
            if held and id(module) not in inside and not self._rows.holds_all_of(module):
                yield module, [chunk for chunk in self._chunks if any(chunk is chunk_of[key] for key in held)]

    def _bringing(self, chunks: Sequence[DeviceChunk]) -> Any:
        def enter(*_: Any) -> None:
            self._bring(chunks)

        return enter

    def _bring(self, chunks: Iterable[DeviceChunk]) -> None:
        for chunk in chunks:
            if chunk.state is ChunkState.AWAY:
                self._gather(chunk)
                chunk.show()

    def _gather(self, chunk: DeviceChunk) -> None:
        if isinstance(chunk, ShardedChunk):
            chunk.bring()
            return
        if self._device.runs_behind:
            chunk.make_room()
        if chunk.disk is None or not chunk.is_on_disk:
            chunk.gather()
            return
        # The one place that chunks on the disk pass through here: the copy before must have ended.
        self._device.synchronize()
        chunk.gather(chunk.disk.read_for_gather(None))

    def _keep(self, needed: Sequence[DeviceChunk]) -> None:
        """Let every chunk but ``needed`` go; what has a place on the device stays until the end of the evaluation."""
        for chunk in self._chunks:
            if chunk not in needed and not chunk.has_place:
                chunk.leave()
