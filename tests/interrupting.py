"""Ctrl-C that is heard, however slow the machine is.

[Note: Signals that nobody hears]
Python looks for signals between its instructions, and when the system cuts a call short for one.  A signal that comes
after the last look and before the call begins is heard when the call ends, which may be never.  So a signal is sent
again until it has been taken; and not once more, since a second one would strike what the first one led to.
"""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

AGAIN_S = 0.2
PATIENCE_S = 300.0
"""Nothing that these tests start takes so long to end on any machine."""


def is_asleep(process: int) -> bool:
    """Whether the main thread of the process waits in a call that a signal cuts short."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "S"
    except FileNotFoundError:
        return False


def wait_until_asleep(process: int) -> None:
    """Return when the main thread of the process waits for something."""
    deadline = time.monotonic() + PATIENCE_S
    while not is_asleep(process):
        assert time.monotonic() < deadline, "it is never idle"
        time.sleep(0.01)


def interrupt(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Send Ctrl-C to a process that has one thread and waits, until it has ended; gives its output and errors.

    Whenever it sleeps: nothing that it does after an interruption waits for anything.
    """
    deadline = time.monotonic() + PATIENCE_S
    while process.poll() is None:
        assert time.monotonic() < deadline, "it does not end"
        if is_asleep(process.pid):
            process.send_signal(signal.SIGINT)
        time.sleep(AGAIN_S)
    return process.communicate()


@contextmanager
def interruption() -> Iterator[Callable[[float], None]]:
    """What interrupts the main thread, which enters the block, after so many seconds, from a thread of its own.

    Nothing is sent any more when the block has ended.
    """
    main, threads = threading.main_thread(), list[threading.Thread]()
    is_taken = is_over = False
    assert threading.current_thread() is main
    assert main.ident is not None

    def take(number: int, frame: FrameType | None) -> None:
        nonlocal is_taken
        is_taken = True
        raise KeyboardInterrupt

    def send(delay_s: float) -> None:
        time.sleep(delay_s)
        while not (is_taken or is_over):
            signal.pthread_kill(main.ident, signal.SIGINT)  # type: ignore[arg-type]
            time.sleep(AGAIN_S)

    def begin(delay_s: float = 0.0) -> None:
        threads.append(threading.Thread(target=send, args=(delay_s,), daemon=True))
        threads[-1].start()

    before = signal.signal(signal.SIGINT, take)
    try:
        yield begin
    finally:
        is_over = True
        for thread in threads:
            thread.join()
        signal.signal(signal.SIGINT, before)
