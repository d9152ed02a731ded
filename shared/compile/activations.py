"""The books of activations: what sections leave on the device for their backward."""

from __future__ import annotations

from collections.abc import Collection

from ..schema.schedule import BufferId, Content, Memory, Part, Section
from ..schema.workload import BlockId, Phase
from .builder import Program


class Activations:
    """Outputs, saved activations and the incoming gradient ([Note: Memory of compute tasks] in ``compile.py``)."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.level_bytes = 0
        """What phases have left so far by their net bytes, without the gradients of blocks."""
        self.incoming: BufferId | None = None
        """What the latest backward handed on."""
        self.left_over: list[BufferId] = []
        """What the backwards of all micro-batches have left in the end: gradients outside every block."""
        self._outputs: dict[Section, BufferId] = {}
        self._saved: dict[Section, BufferId] = {}
        self._swapped_bytes: dict[Section, int] = {}

    def run_phase(self, phase: Phase) -> None:
        """Count what a forward or recomputation leaves."""
        self.level_bytes += phase.net_bytes

    def make_output(self, section: Section, size_bytes: int) -> BufferId:
        """A new buffer for a section's output."""
        self._outputs[section] = self.program.buffer(Content.OUTPUT, Memory.DEVICE, max(0, size_bytes), section=section)
        return self._outputs[section]

    def save(self, section: Section, size_bytes: int, *, swapped_bytes: int = 0) -> BufferId:
        """A new buffer for what a section saves for its backward and keeps on the device.

        The books count ``swapped_bytes`` as there too until its backward: they follow what phases leave, and a phase
        does not know what becomes of it.
        """
        self._saved[section] = self.program.buffer(
            Content.ACTIVATIONS, Memory.DEVICE, max(0, size_bytes - swapped_bytes), section=section
        )
        self._swapped_bytes[section] = swapped_bytes
        return self._saved[section]

    def input_of(self, block: BlockId) -> BufferId:
        """The output of the section before ``block``."""
        return self._outputs[BlockId(block - 1) if block > 0 else Part.PROLOGUE]

    def output_of(self, section: Section) -> BufferId:
        """The output of ``section``."""
        return self._outputs[section]

    def saved_by(self, section: Section) -> BufferId:
        """What ``section`` saved."""
        return self._saved[section]

    def end_micro_batch(self) -> None:
        """The prologue's backward has run: what it left stays until the step."""
        assert self.incoming is not None
        self.left_over.append(self.incoming)
        self.incoming = None

    def hand_over(
        self, section: Section, phase: Phase, *, drops: Collection[BufferId], gradient_bytes: int = 0
    ) -> BufferId:
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
        others_bytes = sum(self.program.buffers[buffer].size_bytes for buffer in others)
        others_bytes += sum(self._swapped_bytes.values())
        others_bytes += sum(self.program.buffers[buffer].size_bytes for buffer in self.left_over)
        self.incoming = self.program.buffer(
            Content.INCOMING_GRADIENT, Memory.DEVICE, max(0, self.level_bytes - others_bytes), section=section
        )
        return self.incoming
