"""Accounts of activations: what sections leave on the device for their backward."""

from __future__ import annotations

from collections.abc import Collection

from ..schema.schedule import AllocationId, Content, Memory, OuterSection, Section
from ..schema.workload import BlockId, Phase
from .builder import ScheduleBuilder


class Activations:
    """Outputs, saved activations and the incoming gradient ([Note: Memory of compute tasks] in ``compile.py``)."""

    def __init__(self, builder: ScheduleBuilder) -> None:
        self.builder = builder
        self.level_bytes = 0
        """What phases have left so far by their net bytes, without the gradients of blocks."""
        self.incoming: AllocationId | None = None
        """What the latest backward handed on."""
        self.left_over: list[AllocationId] = []
        """What the backwards of all micro-batches have left in the end: gradients outside every block."""
        self._left_over_bytes = 0
        self._outputs: dict[Section, AllocationId] = {}
        self._saved: dict[Section, AllocationId] = {}
        self._swapped_bytes: dict[Section, int] = {}

    def run_phase(self, phase: Phase) -> None:
        """Count what a forward or recomputation leaves."""
        self.level_bytes += phase.net_bytes

    def make_output(self, section: Section, size_bytes: int) -> AllocationId:
        """A new buffer for a section's output."""
        self._outputs[section] = self.builder.buffer(Content.OUTPUT, Memory.DEVICE, max(0, size_bytes), section=section)
        return self._outputs[section]

    def save(self, section: Section, size_bytes: int, *, swapped_bytes: int = 0) -> AllocationId:
        """A new buffer for what a section saves for its backward and keeps on the device.

        The accounts count ``swapped_bytes`` as there too until its backward: they follow what phases leave, and a phase
        does not know what becomes of it.
        """
        self._saved[section] = self.builder.buffer(
            Content.ACTIVATIONS, Memory.DEVICE, max(0, size_bytes - swapped_bytes), section=section
        )
        self._swapped_bytes[section] = swapped_bytes
        return self._saved[section]

    def input_of(self, block: BlockId) -> AllocationId:
        """The output of the section before ``block``."""
        return self._outputs[BlockId(block - 1) if block > 0 else OuterSection.PROLOGUE]

    def output_of(self, section: Section) -> AllocationId:
        """The output of ``section``."""
        return self._outputs[section]

    def saved_by(self, section: Section) -> AllocationId:
        """What ``section`` saved."""
        return self._saved[section]

    def end_micro_batch(self) -> None:
        """The prologue's backward has run: what it left stays until the step."""
        assert self.incoming is not None
        self.left_over.append(self.incoming)
        self._left_over_bytes += self.builder.buffers[self.incoming].size_bytes
        self.incoming = None

    def hand_over(
        self, section: Section, phase: Phase, *, drops: Collection[AllocationId], gradient_bytes: int = 0
    ) -> AllocationId:
        """The INCOMING_GRADIENT buffer that the backward of ``section`` leaves for the one before it.

        It is what the measured level exceeds the other buffers by, once the backward has dropped ``drops``.
        ``gradient_bytes`` of what the phase leaves lie elsewhere: in gradients that have buffers of their own, or that
        were added to ones of an earlier micro-batch.
        """
        self.level_bytes += phase.net_bytes - gradient_bytes
        for table in (self._outputs, self._saved):
            for key in [key for key, buffer in table.items() if buffer in drops]:
                del table[key]
        self._swapped_bytes = {key: size for key, size in self._swapped_bytes.items() if key in self._saved}
        others = (*self._outputs.values(), *self._saved.values())
        others_bytes = sum(self.builder.buffers[buffer].size_bytes for buffer in others)
        others_bytes += sum(self._swapped_bytes.values())
        others_bytes += self._left_over_bytes
        self.incoming = self.builder.buffer(
            Content.INCOMING_GRADIENT, Memory.DEVICE, max(0, self.level_bytes - others_bytes), section=section
        )
        return self.incoming
