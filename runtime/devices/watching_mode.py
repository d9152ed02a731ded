"""The dispatch mode that shows somebody every operation of one thread.

[Note: Modes that overlap]
torch keeps the dispatch modes of a thread on a stack, and whoever leaves one takes the topmost off, whichever that is.
Metering begins within a forward and ends within a step, so a mode that a user enters around the forward alone
(``with FlopCounterMode(): loss = model(...)``) overlaps with it: each would take the other off, the ledger would not
see backward, and the user's mode would stay for ever.  So what is to outlast the call that enters it goes beneath all
modes of users, and leaves from there; theirs then are the topmost when they are left.  Operations reach it last, as the
user's modes let them through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from ..quantized.spelled_out import parts_of

_DEVICE: Final = torch.ops.prim.device.default
"""A question of autograd's to fake tensors, and no operation."""


class Watcher(Protocol):
    """Who wants to see operations."""

    before_operation: Callable[[], None] | None

    def watch_result(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """An operation has run."""


class WatchingMode(TorchDispatchMode):
    """Shows ``watcher`` every operation of one thread, from entering until ``end``."""

    def __init__(self, watcher: Watcher) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watcher: Watcher | None = watcher

    def enter_beneath_others(self) -> None:
        """Enter beneath all modes of users (Note: Modes that overlap); torch's own lie lower still."""
        with _lifted(_of_users()):
            self.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> None:
        """Watch no more, and leave this thread's stack of modes.

        On another thread the mode cannot leave: then it stays, and does nothing.
        """
        self._watcher = None
        modes = _of_users()
        if self in modes:
            with _lifted(modes[modes.index(self) + 1 :]):
                self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """The operation itself."""
        kwargs = kwargs or {}
        if func is _DEVICE:
            return func(*args, **kwargs)
        parts = parts_of(func) if self._watcher is not None else None
        if parts is not None:
            with self:
                return parts(*args, **kwargs)
        if self._watcher is not None and self._watcher.before_operation is not None:
            self._watcher.before_operation()
        result = func(*args, **kwargs)
        if self._watcher is not None:
            self._watcher.watch_result(func, args, kwargs, result)
        return result


def _of_users() -> list[TorchDispatchMode]:
    """The modes of this thread, the topmost last, without those that torch keeps in places of their own."""
    return [mode for mode in _get_current_dispatch_mode_stack() if getattr(mode, "_mode_key", None) is None]


@contextmanager
def _lifted(modes: list[TorchDispatchMode]) -> Iterator[None]:
    """Within the block ``modes``, the topmost ones, are off the stack.

    By torch's own way of entering and leaving, which also keeps flags for torch.compile; what modes do themselves when
    they are entered, such as setting a count to zero, they must not do again.
    """
    for mode in reversed(modes):
        TorchDispatchMode.__exit__(mode, None, None, None)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for mode in modes:
            TorchDispatchMode.__enter__(mode)  # type: ignore[no-untyped-call]
