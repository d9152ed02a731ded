"""A block's forward for the second time, within backward."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from .block_state import BlockState


class Recomputation:
    """The context of one recomputation: tells when it has ended, and lets running statistics stand still.

    A normalization that keeps running statistics would count the batch twice.  Its momentum is 0 meanwhile: the same
    operations run and save the same tensors, which checkpointing insists on, but the statistics keep their values.
    """

    def __init__(self, block: nn.Module, state: BlockState, on_end: Callable[[], None]) -> None:
        """``state`` is what the block's forward has changed, which starts anew."""
        self._block = block
        self._state = state.as_before()
        self._on_end = on_end
        self._stilled: list[tuple[_NormBase, float | None, torch.Tensor | None]] = []

    def __enter__(self) -> None:
        self._state.__enter__()
        for module in self._block.modules():
            if isinstance(module, _NormBase) and module.training and module.track_running_stats:
                counted = module.num_batches_tracked
                before = counted.clone() if counted is not None else None
                self._stilled.append((module, module.momentum, before))
                module.momentum = 0.0

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for module, momentum, counted in self._stilled:
            module.momentum = momentum
            if counted is not None and module.num_batches_tracked is not None:
                module.num_batches_tracked.copy_(counted)
        self._stilled.clear()
        self._state.__exit__(None, None, None)
        # Within autocast that goes on through backward, casts of weights would stay in its cache until the next
        # forward; where autocast goes around forward alone, that of the recomputation ends here and drops them too.
        torch.clear_autocast_cache()
        # Early stop leaves recomputation by an exception of its own; the backward proper follows in any case.
        self._on_end()
