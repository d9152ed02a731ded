"""Processes that search side by side: begun without hearing Ctrl-C, ended with their parent."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context, parent_process
from threading import Thread

from ...shared.basics.errors import ProtwinError


@contextmanager
def searching_processes(number: int, *, advice: str = "") -> Iterator[ProcessPoolExecutor]:
    """So many processes, which end with the block, whatever ends it.

    Raises ProtwinError, with ``advice`` as its last words, if one of them ends by itself.
    """
    pool = ProcessPoolExecutor(number, mp_context=get_context("spawn"), initializer=end_with_parent)
    try:
        yield pool
    except BrokenExecutor as error:
        raise ProtwinError(
            f"one of {number} processes that search ended by itself: out of memory, most likely. Ask again with "
            f"--processes {max(1, number // 2)}{advice}."
        ) from error
    except BaseException:
        for process in list((pool._processes or {}).values()):
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


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
