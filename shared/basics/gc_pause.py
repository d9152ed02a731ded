"""Work that only builds up, without garbage collection.

Importing a framework, tracing a model and searching a plan make a million objects that stay, and hardly a cycle: a
collection finds nothing, and looks through all of them each time.  It takes a tenth of such a command.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    """Suspend the collection of cycles; it goes on afterwards if it was on before."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
