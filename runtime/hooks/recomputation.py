"""A block's forward for the second time, within backward, and what must not happen twice.

[Note: State of blocks]
A block may change itself when it runs: buffers that are counted up, power iterations of spectral norms, running means
of one's own, plain numbers on the module, random generators of its own.  Recomputation starts from what the block's
forward started from, and what the forward left is back when it ends.  So do the generators of Python and numpy;
checkpointing itself puts back those of torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Final

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from ...shared.basics.errors import ScheduleError
from ...shared.basics.units import format_bytes
from ..model.snapshot import GeneratorStates, generators_of, put_back

_LARGEST_BYTES: Final = 64 * 2**10
"""Buffers up to this size are kept from before every forward; a larger one that changes is refused."""
_PLAIN: Final = (bool, int, float, str)


class BlockState:
    """What one run of a block's forward changes ([Note: State of blocks]).

    Running statistics of normalizations are ``Recomputation``'s.
    """

    def __init__(self, name: str, modules: Sequence[nn.Module], *, is_training: bool = True) -> None:
        """``is_training``: whether the result matters; a trace leaves everything as it was found anyway."""
        self._name = name
        self._is_training = is_training
        self._modules = [module for module in modules if not isinstance(module, _NormBase)]
        self._buffers: list[tuple[nn.Module, str, torch.Tensor]] = []
        """Those that the forward changed, as they were before it."""
        self._attributes: list[tuple[nn.Module, str, Any]] = []
        self._generators: list[tuple[Any, bytes]] = []
        """Random generators that the forward drew from, with their states before it."""

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
        generators = GeneratorStates(generators_of(self._modules))
        yield
        self._generators = generators.changed()
        for module, name, buffer, version, kept in buffers:
            if module._buffers.get(name) is buffer and buffer._version == version:
                continue
            if kept is None and not self._is_training:
                continue
            if kept is None:
                size = format_bytes(buffer.numel() * buffer.element_size())
                raise ScheduleError(
                    f"block {self._name} changes its buffer {name} ({size}) when it runs. Recomputation would change "
                    f"it twice. Keep or swap this block (activation_modes, n_checkpoint)."
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
            with put_back(self._generators):
                yield
        finally:
            for module, name, current in found:
                module._buffers[name] = current
            for module, name, value in attributes:
                module.__dict__[name] = value
            self._buffers.clear()


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


def _plain_attributes(module: nn.Module) -> dict[str, Any]:
    return {key: value for key, value in module.__dict__.items() if type(value) in _PLAIN}
