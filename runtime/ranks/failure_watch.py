"""A thread that looks whether a rank has said that it has failed, where collectives would wait for it without end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from torch.distributed.distributed_c10d import Store

from .failures import FAILURE_KEY

_PAUSE_S: Final = 1.0


class FailureWatch:
    """Calls ``abort`` once, within seconds after a rank, this one perhaps, has said why it failed."""

    def __init__(self, store: Store, abort: Callable[[], object]) -> None:
        self.has_aborted = False
        """Whether what collectives have made since the failure is of no use."""
        self._store = store
        self._abort = abort
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="protwin-failure-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread.  Idempotent."""
        self._is_over.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while not self._is_over.wait(_PAUSE_S):
            if self._has_failed():
                # First: a collective that ends because it was aborted must find it.
                self.has_aborted = True
                self._abort()
                return

    def _has_failed(self) -> bool:
        try:
            return self._store.check([FAILURE_KEY])
        except RuntimeError:
            # Whoever keeps the store is gone, and with it the ranks' launcher or rank 0.
            return True
