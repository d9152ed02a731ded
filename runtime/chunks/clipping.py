"""Which gradients keep a limit of their norm together: those of the whole model, or of one student block each.

[Note: Held blocks]
In bypass distillation every student block has a norm of its own.  A block whose norm is not finite is held: none of its
parameters, optimizer states and step counts change in that step, and the other blocks go on.  So its gradients are not
refused as those of a whole model are (``check_gradients``).  Whether a block is held is known on the host, to the
thread that has taken its norm: the compute thread waits for no device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from ...shared.layout.uses import numbered_section
from ...shared.schema.plan import Plan, TrainingMethod
from ...shared.schema.schedule import Section
from ...shared.schema.workload import Workload
from ..optimizers.gradient_norms import ClippedNorm
from .chunk import DeviceChunk

Limited = Section | None
"""Whose gradients keep one limit together: a student block's, or (None) all."""
ClippedNorms = Mapping[Limited, ClippedNorm]
"""Of one step; empty without a limit."""


class Clipping:
    """Sorts chunks and parameters by the norm that limits their gradients."""

    def __init__(self, plan: Plan, workload: Workload) -> None:
        self.holds = plan.method is TrainingMethod.BYPASS and plan.max_gradient_norm is not None
        """Whether blocks have norms of their own, and are held where these are not finite (Note: Held blocks)."""
        self._workload = workload
        self._sections: dict[nn.Parameter, Limited] = {}

    def add(self, chunks: Iterable[DeviceChunk]) -> None:
        """Know the parameters of ``chunks``."""
        self._sections.update((p, self.section_of(chunk)) for chunk in chunks for p in chunk.trainable)

    def section_of(self, chunk: DeviceChunk) -> Limited:
        """Whose norm limits the gradients of ``chunk``."""
        number = chunk.chunk.completed_by
        if not self.holds or number is None:
            return None
        return numbered_section(number, self._workload.num_blocks)

    def members(self, parameters: Sequence[nn.Parameter], section: Limited) -> list[nn.Parameter]:
        """Those of ``parameters`` whose gradients ``section`` limits, in order."""
        return [p for p in parameters if not self.holds or self._sections[p] == section]

    def scale_blocks(self, chunks: Iterable[DeviceChunk], clipped: ClippedNorms, *, is_scaled: bool) -> None:
        """Multiply gradients that stay on the device by their block's factor; drop those of blocks that are held.

        ``is_scaled``: losses are scaled.  Narrow gradients are multiplied when they have been widened then.
        """
        for chunk in chunks:
            of_block = clipped.get(self.section_of(chunk))
            if of_block is None:
                continue
            left = {id(parameter) for parameter in chunk.narrow} if is_scaled else set()
            for parameter in chunk.trainable:
                if of_block.is_held:
                    parameter.grad = None
                elif parameter.grad is not None and id(parameter) not in left:
                    parameter.grad.mul_(of_block.factor.to(parameter.grad.device))

    def factor_of(self, parameters: Sequence[nn.Parameter], clipped: ClippedNorms) -> torch.Tensor | None:
        """What a step of one narrow parameter multiplies its widened gradient by; None where that has been done."""
        (section,) = {self._sections[parameter] for parameter in parameters}
        return clipped[section].factor if section in clipped else None

    def held_blocks(self, clipped: ClippedNorms) -> tuple[str, ...]:
        """The names of the blocks that are held, in order."""
        names = self._workload.blocks
        return tuple(
            names[section].name for section, one in clipped.items() if one.is_held and isinstance(section, int)
        )

    def clear(self) -> None:
        """Let all parameters go."""
        self._sections.clear()
