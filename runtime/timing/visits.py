"""A model whose parameters come to the device with the section that needs them, and go with it.

[Note: Visits]
Nothing overlaps.  When a section is announced, the clock stands still, the parameters of the section before go, those
of the new one come, and the clock goes on: a section's time is that of its operations alone, whatever its parameters'
way costs.  Gradients go as soon as the section that completes them is over; nothing steps them.  So the device holds
one section's parameters, what blocks have saved for backward, and what the running section computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from ...shared.layout.layout import build_layout
from ...shared.layout.residencies import ChunkResidency
from ...shared.layout.uses import numbered_uses, section_number
from ...shared.observed.observed_inputs import PhaseKey
from ...shared.schema.plan import ActivationMode
from ...shared.schema.schedule import Content, Section, TaskKind
from ...shared.schema.workload import Workload
from ..chunks.chunk import ChunkState, DeviceChunk
from ..chunks.parameter_values import ParameterValues
from ..devices.device import TrainingDevice
from ..hooks.section_walker import SectionWalker
from ..model.batches import Batch, Loss, batch_tensors, loss_of
from ..model.blocks import find_blocks
from ..tracing.stopwatch import Stopwatch, stopwatch_on

_EACH_BY_ITSELF = 1
"""Bytes of a chunk, below those of any parameter."""


class VisitingModel:
    """Owns the memory of a model's parameters until ``close``; each has its home on the host.

    Of ``workload`` it takes who uses which parameter.  ``values`` says where their values come from.
    """

    def __init__(
        self, model: nn.Module, workload: Workload, device: TrainingDevice, values: ParameterValues | None = None
    ) -> None:
        """Move all parameters to the host, one after the other.

        Raises FileError if ``values`` fail; the model is then as it was.
        """
        self._model, self._workload, self._device = model, workload, device
        self._blocks = find_blocks(model, [block.name for block in workload.blocks])
        self._chunks: list[DeviceChunk] = []
        device.begin_training()
        try:
            self._move_in(values)
        except BaseException:
            self.close()
            raise
        self._completed = self._completed_parameters()

    def _move_in(self, values: ParameterValues | None) -> None:
        parameters = dict(self._model.named_parameters(remove_duplicate=False))
        # Nothing is stepped: no gradient has a place on the host, no parameter a master.
        specs = [spec.model_copy(update={"trainable": False}) for spec in self._workload.parameters]
        layout = build_layout(specs, num_blocks=self._workload.num_blocks, chunk_bytes=_EACH_BY_ITSELF)
        with torch.no_grad():
            for chunk in layout.chunks:
                own = [specs[placed.index] for placed in chunk.parameters]
                self._chunks.append(
                    DeviceChunk(
                        chunk,
                        own,
                        [parameters[spec.name] for spec in own],
                        self._device,
                        residency=ChunkResidency.OFFLOADED,
                        values=values,
                    )
                )

    def _completed_parameters(self) -> dict[int, list[nn.Parameter]]:
        """The trainable parameters by the number of the section that completes their gradients."""
        parameters = dict(self._model.named_parameters(remove_duplicate=False))
        found: dict[int, list[nn.Parameter]] = {}
        for spec in self._workload.parameters:
            if spec.trainable:
                number = numbered_uses(spec, self._workload.num_blocks).gradient
                found.setdefault(number, []).append(parameters[spec.name])
        return found

    def close(self) -> None:
        """Give every parameter a tensor of its own again, where it came from, with its value.  Idempotent."""
        self._device.end_training()
        with torch.no_grad():
            for chunk in self._chunks:
                chunk.move_out()
        self._chunks.clear()

    def run(
        self, batch: Batch, loss: Loss | None, modes: Sequence[ActivationMode], *, is_metered: bool
    ) -> dict[PhaseKey, float]:
        """Seconds of every section of one iteration in these modes.

        ``is_metered``: the ledger watches every operation and enforces the device's budget; times are then no good.
        Raises the device's out-of-memory error, and WorkloadError as ``loss_of`` does.
        """
        clock = stopwatch_on(self._device.torch_device)
        walker = SectionWalker(self._model, self._blocks, modes, _Visits(self, clock))
        try:
            with self._watched(batch, is_metered=is_metered):
                loss_of(self._model, batch, loss).backward()  # type: ignore[no-untyped-call]
        finally:
            walker.remove()
            self.leave()
        return clock.seconds()

    @contextmanager
    def _watched(self, batch: Batch, *, is_metered: bool) -> Iterator[None]:
        ledger = self._device.ledger
        if ledger is None or not is_metered:
            yield
            return
        ledger.doing = "tracing with time"
        ledger.adopt(self._model.buffers(), Content.RESIDENT)
        ledger.adopt_inputs(batch_tensors(batch).values())
        with ledger.metering():
            yield

    def bring(self, kind: TaskKind, section: Section) -> None:
        """Let every parameter go that ``kind`` of ``section`` does not need, and bring the others."""
        number = section_number(section, self._workload.num_blocks)
        needed = [
            number in (chunk.chunk.forward if kind is TaskKind.FORWARD else chunk.chunk.backward)
            for chunk in self._chunks
        ]
        # A weight's cast that autocast keeps would stay on the device when the weight goes.
        if kind is not TaskKind.FORWARD:
            torch.clear_autocast_cache()
        for chunk, is_needed in zip(self._chunks, needed, strict=True):
            if not is_needed:
                chunk.leave()
        for chunk, is_needed in zip(self._chunks, needed, strict=True):
            if is_needed and chunk.state is ChunkState.AWAY:
                if self._device.runs_behind:
                    chunk.make_room()
                chunk.gather()
                chunk.show()

    def drop_gradients(self, section: Section) -> None:
        """Drop those that the backward of ``section`` has completed."""
        for parameter in self._completed.get(section_number(section, self._workload.num_blocks), ()):
            parameter.grad = None

    def leave(self) -> None:
        """An iteration is over, or given up: gradients and parameters go."""
        torch.clear_autocast_cache()
        for parameter in self._model.parameters():
            parameter.grad = None
        self._device.synchronize()
        for chunk in self._chunks:
            chunk.leave()


class _Visits:
    """Brings parameters section by section, and times the sections in between (SectionListener)."""

    def __init__(self, model: VisitingModel, clock: Stopwatch) -> None:
        self._model, self._clock = model, clock
        self._running: PhaseKey | None = None

    def begin(self, kind: TaskKind, section: Section) -> None:
        """``kind`` of ``section`` begins; what was announced before has ended."""
        self.end_backward()
        self._model.bring(kind, section)
        self._running = kind, section
        self._clock.begin(kind, section)

    def end_backward(self) -> None:
        """What was announced last has ended."""
        self._clock.end_backward()
        if self._running is not None and self._running[0] is TaskKind.BACKWARD:
            self._model.drop_gradients(self._running[1])
        self._running = None
