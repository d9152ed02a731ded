"""Settings of a process that torch runs in: threads for compute, segments of its allocator.

For programs that own their process, such as the commands; a library does not decide this for its caller.

[Note: A core for the lanes]
An operation that is spread over all cores ends when its slowest thread does.  While a copy or CPU Adam runs on one of
the cores, or another process does, the other threads of every operation wait for the one that shares it: measured on a
shared machine of two cores, iterations of one and the same plan then differed by a factor of five from one moment to
the next.  With one core left to the lanes, compute no longer waits for them.

[Note: Expandable segments]
A plan that fills its device fits by what it allocates; segments that were cut for one size leave up to a quarter of
that unused beside it, and expandable segments do not (docs/memory.md).  The older of the two variables is set: every
release reads it, while some take the newer one for other devices only (2.9.1: pytorch/pytorch issue 183387).
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Final

from .machine import num_cores

VARIABLES: Final = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Where PyTorch reads the settings of its allocator."""
EXPANDABLE: Final = "expandable_segments:True"


def prefer_expandable_segments(environment: MutableMapping[str, str]) -> None:
    """Ask for expandable segments unless the user has set any of the ``VARIABLES``, be it to nothing.

    Read when CUDA starts, so to be called before torch is imported.
    """
    if not any(name in environment for name in VARIABLES):
        environment[VARIABLES[0]] = EXPANDABLE


def leave_a_core_for_lanes(num_processes: int = 1) -> int:
    """Let operations of this process use all cores but one (at least one); gives the number of threads.

    The cores are shared by ``num_processes`` that train on this machine, each with lanes of its own.

    See [Note: A core for the lanes].
    """
    # prefer_expandable_segments() has to be imported before torch is.
    import torch

    threads = max(1, num_cores() // num_processes - 1)
    torch.set_num_threads(threads)
    return threads
