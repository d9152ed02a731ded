"""What the model gave that the loop still holds when backward begins, of which a plan knows only if it was traced so.

``outputs = model(**batch)`` keeps the logits until the next forward has ended.  ``Workload.keeps_outputs`` has room for
them; without it a loop that holds them may run out of memory within the guarantee.
"""

from __future__ import annotations

import warnings
import weakref
from typing import Any, Final

import torch
from torch import nn

from ...shared.basics.units import format_bytes
from ..model.nested_tensors import tensors_in, unwrapped

_REMEDY: Final = (
    "Hold the loss alone (loss = model(**batch).loss), trace with keeps_outputs=True (--keeps-outputs) and search again"
)


class HeldOutputs:
    """Warns once of a loop that holds more than the device has room for, and says so where memory lacks."""

    def __init__(self, model: nn.Module, *, peak_bytes: int, limit_bytes: int) -> None:
        """``peak_bytes``: what the plan is guaranteed not to exceed; ``limit_bytes``: what it may take at most."""
        self._peak_bytes, self._limit_bytes = peak_bytes, limit_bytes
        self._holder: weakref.ref[Any] | None = None
        """What the model gave last, where that is more than tensors."""
        self._storages: list[weakref.ref[torch.UntypedStorage]] = []
        self._is_told = False
        self._handle = model.register_forward_hook(self._note, with_kwargs=True)

    def remove(self) -> None:
        """Look no more.  Idempotent."""
        self._handle.remove()

    def _note(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        given = {unwrapped(tensor).untyped_storage()._cdata for tensor in tensors_in((args, kwargs))}
        found = [
            unwrapped(tensor) for tensor in tensors_in(output) if tensor.numel() > 1 and tensor.grad_fn is not None
        ]
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in found}
        self._storages = [weakref.ref(storage) for key, storage in storages.items() if key not in given]
        self._holder = None
        loss = getattr(output, "loss", None)
        if isinstance(loss, torch.Tensor) and loss.requires_grad and type(output).__weakrefoffset__:
            self._holder = weakref.ref(output)
            loss.register_hook(self._begin_backward)  # type: ignore[no-untyped-call]

    @property
    def held_bytes(self) -> int:
        """Bytes of the latest output that are there: the loop holds them or, until backward has ended, autograd."""
        storages = (storage() for storage in self._storages)
        return sum(storage.nbytes() for storage in storages if storage is not None)

    @property
    def hint(self) -> str | None:
        """What to say where memory lacks, up to the last remedy; None if the loop holds nothing of the output."""
        held_bytes, is_gone = self.held_bytes, self._holder is not None and self._holder() is None
        if not held_bytes or is_gone:
            return None
        return (
            f"{format_bytes(held_bytes)} of what the model gave are still there: if the loop holds them (outputs = "
            f"model(**batch)), the plan knows nothing of them. {_REMEDY}, or"
        )

    def _begin_backward(self, _: torch.Tensor) -> None:
        if self._holder is not None and self._holder() is not None:
            self.check()

    def check(self) -> None:
        """Warn if what is there has no room: autograd holds nothing when a step ends."""
        held_bytes = self.held_bytes
        if self._is_told or not held_bytes or self._peak_bytes + held_bytes <= self._limit_bytes:
            return
        self._is_told = True
        warnings.warn(
            f"the loop holds {format_bytes(held_bytes)} of what the model gave (outputs = model(**batch)) while "
            f"backward runs. The plan knows nothing of them: with its {format_bytes(self._peak_bytes)} they are more "
            f"than the {format_bytes(self._limit_bytes)} of the device. {_REMEDY}.",
            stacklevel=2,
        )
