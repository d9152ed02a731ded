"""``protwin hardware probe`` on several ranks.  torch is imported where it is needed alone."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import typer

from ...shared.basics.progress import progress_bar
from ...shared.schema.hardware import Hardware
from .run_ranks import in_one_voice, rank_at_hand, ranks_to_measure, start_ranks


@in_one_voice
def probe_as_ranks(asked: int | None, *, seconds: float, disk_folder: Path | None) -> Hardware | None:
    """The machine as ranks reach it, on the one that is to tell it; None on the others.

    Where none were started, ``asked`` processes with the arguments of this one are, and this one ends as they do.
    """
    num_ranks, starts = ranks_to_measure(asked, os.environ)
    if starts:
        raise typer.Exit(start_ranks(num_ranks, sys.argv[1:]))
    from ..devices.probe import probe_hardware
    from ..ranks.rank_probe import probe_ranks

    speaks = rank_at_hand(os.environ).speaks
    shown: AbstractContextManager[Callable[[int, int], None] | None]
    shown = progress_bar("measuring this machine") if speaks else nullcontext()
    with shown as on_progress:
        if num_ranks == 1:
            return probe_hardware(seconds=seconds, on_progress=on_progress, leaves_a_core=True, disk_folder=disk_folder)
        found = probe_ranks(
            num_ranks, seconds=seconds, on_progress=on_progress, leaves_a_core=True, disk_folder=disk_folder
        )
    return found if speaks else None
