"""Where the tasks of full training stand in the program of the compute lane.

[Note: Positions]
The program of the compute lane has a place for every recomputation, whether a plan has it or not.  For n blocks, each
micro-batch has 3n + 4 positions:

    0              forward of the prologue
    1 + b          forward of block b
    n + 1, n + 2   forward and backward of the epilogue
    n + 3 + 2s     recomputation of block n - 1 - s (of no length where the block keeps its activations)
    n + 4 + 2s     backward of block n - 1 - s
    3n + 3         backward of the prologue

and the last position of the iteration is device Adam.  So plans that differ in activation modes alone have their tasks
at the same positions, and one numpy axis holds them.  A step ([Note: Steps] in ``shared/compile/compile.py``) is one
forward position, a recomputation and its backward, or both positions of the epilogue.  Sections are numbered as in
``shared/layout/uses.py``: s = 0 is the prologue, s = n + 1 the epilogue.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Positions:
    """Where tasks stand in the program of the compute lane; see [Note: Positions]."""

    num_blocks: int
    micro_batches: int = 1

    @property
    def num_steps(self) -> int:
        """Steps of one iteration."""
        return self.micro_steps * self.micro_batches

    @property
    def micro_steps(self) -> int:
        """Steps of one micro-batch."""
        return 2 * self.num_blocks + 3

    @property
    def micro_length(self) -> int:
        """Positions of one micro-batch."""
        return 3 * self.num_blocks + 4

    @property
    def length(self) -> int:
        """Positions of one iteration."""
        return self.micro_length * self.micro_batches + 1

    @property
    def device_adam(self) -> int:
        """The last position."""
        return self.length - 1

    @property
    def prologue_backward(self) -> int:
        """The position of the prologue's last backward, behind which no other section runs."""
        return self.length - 2

    @cached_property
    def step_number(self) -> IntArray:
        """(S,) the number of each step within its micro-batch."""
        return np.tile(np.arange(self.micro_steps), self.micro_batches)

    def forward_step(self, section: IntArray, micro_batch: int | IntArray = 0) -> IntArray:
        """The step of the forward of each section."""
        return self.micro_steps * micro_batch + section

    def backward_step(self, section: IntArray, micro_batch: int | IntArray = 0) -> IntArray:
        """The step of the backward of each section."""
        return self.micro_steps * (micro_batch + 1) - 1 - section

    def forward(self, section: IntArray, micro_batch: int | IntArray = 0) -> IntArray:
        """The forward of each section."""
        return self.micro_length * micro_batch + section

    def backward(self, section: IntArray, micro_batch: int | IntArray = 0) -> IntArray:
        """The backward of each section."""
        # Every block has two positions, prologue and epilogue one each.
        behind = 2 * (self.num_blocks + 1 - section) - (section == 0)
        found: IntArray = self.micro_length * micro_batch + self.num_blocks + 2 + behind
        return found

    def last_backward(self, section: IntArray) -> IntArray:
        """The backward of each section in the last micro-batch."""
        return self.backward(section, self.micro_batches - 1)

    def step_begin(self, step: IntArray) -> IntArray:
        """The first position of each step of the iteration."""
        found: IntArray = self._begins[step]
        return found

    def step_end(self, step: IntArray) -> IntArray:
        """The last position of each step of the iteration."""
        found: IntArray = self._ends[step]
        return found

    @cached_property
    def _begins(self) -> IntArray:
        sections = self._sections
        # A block's backward begins with its recomputation, the epilogue's with its forward.
        is_before = (sections > 0) & (self.step_number > self.num_blocks)
        begins: IntArray = self._ends - is_before
        return begins

    @cached_property
    def _ends(self) -> IntArray:
        micro_batch = np.arange(self.num_steps) // self.micro_steps
        is_forward = self.step_number <= self.num_blocks
        sections = self._sections
        ends: IntArray = np.where(is_forward, self.forward(sections, micro_batch), self.backward(sections, micro_batch))
        return ends

    @property
    def _sections(self) -> IntArray:
        """(S,) the section of each step."""
        sections: IntArray = np.minimum(self.step_number, self.micro_steps - 1 - self.step_number)
        return sections
