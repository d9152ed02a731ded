"""The ``protwin`` command: what a mistake, an interruption or a closed pipe looks like from outside.

Nothing but the standard library is imported until ``main`` runs, so that Ctrl-C during start-up leaves no traceback
either.
"""

from __future__ import annotations

import gc
import io
import os
import sys
from typing import TYPE_CHECKING, Final

from .exits import discard_output, report_interruption

if TYPE_CHECKING:
    from sys import UnraisableHookArgs


_AGAIN_S: Final = 0.05
"""Seconds until an interruption that was lost is tried again."""


def main() -> None:
    """Run ``protwin`` with the arguments of this process; never returns normally."""
    sys.unraisablehook = _interrupt_again
    _write_all_of_it()
    # Start-up only builds up; the root lets collections go on once a command has been loaded.
    was_collecting = gc.isenabled()
    gc.disable()
    # pydantic looks through all installed packages for plugins of its own, none of which has business here.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    try:
        from .root import root_command
        from .streams import show_plain_characters

        show_plain_characters()
        root_command()(prog_name="protwin")
    except KeyboardInterrupt:
        sys.exit(report_interruption())
    except BrokenPipeError:
        sys.exit(discard_output())
    finally:
        # At its end Python looks for cycles among all objects that were made, a tenth of a search: none need to go.
        gc.freeze()
        if was_collecting:
            gc.enable()


def _write_all_of_it() -> None:
    """Give standard output a buffer where it has none (PYTHONUNBUFFERED).

    Without one, Python drops what a disk that fills up did not take of a long text, and raises nothing.
    """
    stream = sys.__stdout__
    raw = getattr(stream, "buffer", None)
    if stream is not None and sys.stdout is stream and isinstance(raw, io.RawIOBase):
        sys.stdout = io.TextIOWrapper(
            io.BufferedWriter(raw), encoding=stream.encoding, errors=stream.errors, line_buffering=True
        )


def _interrupt_again(unraisable: UnraisableHookArgs) -> None:
    """Interrupt once more where an interruption was lost.

    [Note: Lost interruptions]
    Ctrl-C raises KeyboardInterrupt wherever the main thread happens to be.  In a destructor, or in what runs when an
    object dies, Python prints it and goes on, and the command would train to its end.  The hook for such errors cannot
    raise either, so a thread sends the signal anew when the hook has returned.
    """
    if unraisable.exc_type is not KeyboardInterrupt:
        sys.__unraisablehook__(unraisable)
        return
    import signal
    import threading

    main_thread = threading.main_thread()
    assert main_thread.ident is not None
    again = threading.Timer(_AGAIN_S, signal.pthread_kill, (main_thread.ident, signal.SIGINT))
    again.daemon = True
    again.start()
