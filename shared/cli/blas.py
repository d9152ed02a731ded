"""numpy without threads of its own, for commands that multiply no large matrices."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_THREADS: Final = "OPENBLAS_NUM_THREADS"


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Let OpenBLAS, if it is loaded meanwhile, start no threads: each takes milliseconds, and a buffer.

    OpenBLAS reads the variable once, when it is loaded.  Afterwards it stands as it was, since torch may bring an
    OpenBLAS of its own, which trains with all cores.  A value that the user set holds.
    """
    if _THREADS in os.environ:
        yield
        return
    os.environ[_THREADS] = "1"
    try:
        yield
    finally:
        del os.environ[_THREADS]
