"""Processes that search side by side: begun without hearing Ctrl-C, ended with their parent."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import parent_process
from threading import Thread


@contextmanager
def interruptions_held() -> Iterator[None]:
    """Let Ctrl-C wait.  Processes that are started meanwhile never hear it, not even while they begin.

    It reaches every process of a terminal, and the parent ends the others.
    """
    import signal

    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_with_parent() -> None:
    """Make a searching process end with its parent.

    A parent that is killed cannot end it, and it would wait for ever for work that never comes.
    """
    parent = parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    Thread(target=follow, daemon=True).start()
