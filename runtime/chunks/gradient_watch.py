"""Gradients between backward and step: whether anybody changed them.

Those of offloaded chunks have left by then, so that clipping, unscaling or clearing would reach the others alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from ...shared.basics.errors import ScheduleError
from ..devices.ledger import MemoryLedger
from ..model.nested_tensors import tensors_in
from .chunk import DeviceChunk
from .gradient_stand_ins import CHANGED


def refusing_late_gradients(
    chunks: Iterable[DeviceChunk], has_left: Callable[[int], bool], *, num_ranks: int = 1
) -> list[Any]:
    """Hooks that stop before a gradient that arrives after its chunk's gradients have left (``has_left``) is lost.

    Those that stay, and are added up over several ranks, count as having left from then on.
    """
    handles = []
    for chunk in chunks:
        if chunk.is_persistent and num_ranks == 1:
            continue

        def arrived(parameter: torch.Tensor, chunk_id: int = chunk.chunk.id) -> None:
            if has_left(chunk_id):
                raise ScheduleError(
                    f"a parameter of chunk {chunk_id} got a gradient after backward had left the sections that used it "
                    f"when the model was traced. Trace the model as it is trained, and search a plan for that."
                )

        for parameter in chunk.trainable:
            handles.append(parameter.register_post_accumulate_grad_hook(arrived))  # type: ignore[no-untyped-call]
    return handles


class GradientWatch:
    """Notes gradients and tells later whether they are the same.

    torch counts changes of a tensor, but not those of a whole list of tensors at once while a dispatch mode is active;
    the ledger, which is that mode, sees these.
    """

    def __init__(self, ledger: MemoryLedger | None) -> None:
        self._ledger = ledger
        self._noted: list[tuple[nn.Parameter, torch.Tensor | None, int]] = []
        self._storages: set[int] = set()
        self._is_written = False

    def begin(self, parameters: Iterable[nn.Parameter]) -> None:
        """Note the gradients that ``parameters`` hold."""
        self._noted = [(p, p.grad, p.grad._version if p.grad is not None else 0) for p in parameters]
        self._is_written = False
        if self._ledger is not None and self._ledger.is_metering:
            self._storages = {grad.untyped_storage()._cdata for _, grad, _ in self._noted if grad is not None}
            self._ledger.on_operation = self._operation

    def check(self) -> None:
        """Raise ScheduleError if a noted gradient was changed or replaced."""
        for parameter, gradient, version in self._noted:
            is_other = parameter.grad is not gradient or (gradient is not None and gradient._version != version)
            if is_other or self._is_written:
                raise ScheduleError(CHANGED)

    def end(self) -> None:
        """Let go of the gradients.  Idempotent."""
        self._noted = []
        self._storages = set()
        if self._ledger is not None:
            self._ledger.on_operation = None

    def _operation(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        for argument, value in zip(operator._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written = {tensor.untyped_storage()._cdata for tensor in tensors_in(value)}
                self._is_written = self._is_written or not written.isdisjoint(self._storages)
