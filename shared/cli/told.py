"""What a command warns of, on standard error and in the reports that it writes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

from ..basics.errors import shortened

_WARNINGS: Final = ContextVar[tuple[str, ...]]("_WARNINGS", default=())


def warn(message: str) -> None:
    """Print a warning on standard error; the command goes on, and a report that it writes says it too."""
    _WARNINGS.set((*_WARNINGS.get(), message))
    sys.stderr.write(f"warning: {shortened(message)}\n")


def warnings_so_far() -> tuple[str, ...]:
    """What the running command has warned of, in order, each once."""
    return tuple(dict.fromkeys(_WARNINGS.get()))


@contextmanager
def warnings_apart() -> Iterator[None]:
    """While a command runs: it knows of its own warnings alone."""
    before = _WARNINGS.set(())
    try:
        yield
    finally:
        _WARNINGS.reset(before)
