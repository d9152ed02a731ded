"""What a teacher's block returns beside its output."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace

from ...shared.observed.observation import Observation
from ...shared.observed.observed_inputs import PhaseKey
from ...shared.schema.schedule import TaskKind
from ...shared.schema.workload import BlockId
from ..devices.ledger import MemoryLedger


class Beside:
    """What a teacher's block returns beside what it hands on: it goes when its pair is through.

    A pair's account has one output of the teacher's, which is there until the next pair is through.  So what goes
    before counts as saved by the student's forward, which begins at once.
    """

    def __init__(self, ledger: MemoryLedger, place: Callable[[], PhaseKey | None]) -> None:
        self._place = place
        self._bytes: dict[int, int] = {}
        """By the teacher's block."""
        self.late_bytes: dict[int, int] = {}
        """By the teacher's block: what it has made that is there for longer than until the next pair is through."""
        ledger.on_forget = self._forgotten

    def restart(self) -> None:
        """Forget what was seen: the next iteration counts."""
        self._bytes.clear()
        self.late_bytes.clear()

    def _forgotten(self, key: int, made_in: Hashable, size_bytes: int) -> None:
        now = self._place()
        if now is None or not isinstance(now[1], int) or not isinstance(made_in, tuple):
            return
        kind, block = made_in
        if kind is TaskKind.TEACHER_FORWARD and isinstance(block, int):
            if now[1] == block + 1:
                self._bytes[block] = self._bytes.get(block, 0) + size_bytes
            elif now[1] > block + 3:
                self.late_bytes[block] = self.late_bytes.get(block, 0) + size_bytes

    def counted_with_students(self, sections: dict[PhaseKey, Observation]) -> dict[PhaseKey, Observation]:
        """``sections`` so counted.  Of the last pair everything goes at once."""
        found, last = dict(sections), max(block for _, block in sections if isinstance(block, int))
        for block, size_bytes in self._bytes.items():
            if block + 1 == last:
                continue
            given, taken = (TaskKind.TEACHER_FORWARD, BlockId(block)), (TaskKind.FORWARD, BlockId(block + 1))
            teacher, student = found[given], found[taken]
            found[given] = replace(
                teacher,
                end_bytes=teacher.end_bytes - size_bytes,
                output_bytes=max(0, teacher.output_bytes - size_bytes),
            )
            found[taken] = replace(
                student,
                start_bytes=student.start_bytes - size_bytes,
                levels=[level + size_bytes for level in student.levels],
                adding_levels=[level + size_bytes for level in student.adding_levels],
            )
        return found
