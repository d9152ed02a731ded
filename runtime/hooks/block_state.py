"""What a block changes about itself when it runs, so that running it again for its activations changes nothing.

Buffers that are counted up, power iterations of spectral norms, running means of one's own, plain numbers on the
module: recomputation starts from what the block's forward started from, and what the forward left is back when it ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from ...shared.basics.errors import ScheduleError
from ...shared.basics.units import format_bytes

_LARGEST_BYTES: Final = 64 * 2**10
"""Buffers up to this size are kept from before every forward; a larger one that changes is refused."""
_PLAIN: Final = (bool, int, float, str)


class BlockState:
    """One run of a block's forward.  Running statistics of normalizations are ``Recomputation``'s."""

    def __init__(self, name: str, modules: Sequence[nn.Module], *, is_training: bool = True) -> None:
        """``is_training``: whether the result matters; a trace leaves everything as it was found anyway."""
        self._name = name
        self._is_training = is_training
        self._modules = [module for module in modules if not isinstance(module, _NormBase)]
        self._buffers: list[tuple[nn.Module, str, torch.Tensor]] = []
        """Those that the forward changed, as they were before it."""
        self._attributes: list[tuple[nn.Module, str, Any]] = []

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note what the forward within the block changes.  Raises ScheduleError if that is too large to be kept."""
        buffers = [
            (module, name, buffer, buffer._version, self._kept(buffer))
            for module in self._modules
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        attributes = [(module, _plain_attributes(module)) for module in self._modules]
        yield
        for module, name, buffer, version, kept in buffers:
            if module._buffers.get(name) is buffer and buffer._version == version:
                continue
            if kept is None and not self._is_training:
                continue
            if kept is None:
                size = format_bytes(buffer.numel() * buffer.element_size())
                raise ScheduleError(
                    f"block {self._name} changes its buffer {name} ({size}) when it runs. Recomputation would change "
                    f"it twice. Give this block another mode than CHECKPOINT (activation_modes, n_checkpoint)."
                )
            self._buffers.append((module, name, kept))
        for module, before in attributes:
            now = module.__dict__
            self._attributes += [(module, key, value) for key, value in before.items() if now.get(key) != value]

    @staticmethod
    def _kept(buffer: torch.Tensor) -> torch.Tensor | None:
        is_small = buffer.numel() * buffer.element_size() <= _LARGEST_BYTES
        return buffer.detach().clone() if is_small else None

    @contextmanager
    def as_before(self) -> Iterator[None]:
        """Within the block, everything is as it was before the forward; afterwards, as it was found."""
        found = [(module, name, module._buffers[name]) for module, name, _ in self._buffers]
        attributes = [(module, name, module.__dict__[name]) for module, name, _ in self._attributes]
        for module, name, buffer in self._buffers:
            module._buffers[name] = buffer
        for module, name, value in self._attributes:
            module.__dict__[name] = value
        try:
            yield
        finally:
            for module, name, current in found:
                module._buffers[name] = current
            for module, name, value in attributes:
                module.__dict__[name] = value
            self._buffers.clear()


def _plain_attributes(module: nn.Module) -> dict[str, Any]:
    return {key: value for key, value in module.__dict__.items() if type(value) in _PLAIN}
