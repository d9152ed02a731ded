"""What ranks tell each other of a failure, and what the rank that fails lets go of.

[Note: Groups that an error holds]
gloo closes a group, and so ends the collectives of other ranks in it, when the last reference to it goes.  An error
that comes in the middle of a collective, as Ctrl-C does, holds the frames that it has passed, and these the group:
other ranks would wait until their timeout while somebody here keeps the error, as a notebook does.
"""

from __future__ import annotations

import traceback
from contextlib import suppress
from datetime import timedelta
from types import FrameType
from typing import Final

from torch.distributed.distributed_c10d import Store

from ...shared.basics.errors import RanksError

FAILURE_KEY: Final = "failure"
"""Where in the ranks' store the first rank that fails says why."""
_PATIENCE: Final = timedelta(seconds=5)
_HOLDERS: Final = ("torch.distributed", __name__.rpartition(".")[0])
"""The packages whose functions have groups in their variables."""


def tell_failure(store: Store, rank: int, error: BaseException) -> None:
    """Let the other ranks know what has ended training on this one."""
    if isinstance(error, RanksError):
        # It was another rank's.
        return
    with suppress(RuntimeError):
        store.compare_set(FAILURE_KEY, "", f"rank {rank}: {type(error).__name__}: {error}")


def first_failure(store: Store) -> str | None:
    """What the first rank that has failed has said; None if none has within moments."""
    try:
        store.wait([FAILURE_KEY], _PATIENCE)
        return f"training was ended by {store.get(FAILURE_KEY).decode()}"
    except RuntimeError:
        # Nothing was said, or whoever keeps what is said is gone.
        return None


def let_go_of_groups(error: BaseException | None) -> None:
    """Clear the variables of ended functions that ``error`` has passed: see [Note: Groups that an error holds]."""
    seen: set[int] = set()
    found = [error]
    while found:
        each = found.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        found += [each.__cause__, each.__context__]
        for frame, _ in traceback.walk_tb(each.__traceback__):
            if _holds_groups(frame):
                with suppress(RuntimeError):
                    # Those that still run hold on to theirs: they are ours, and let go themselves.
                    frame.clear()


def _holds_groups(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).startswith(_HOLDERS)
