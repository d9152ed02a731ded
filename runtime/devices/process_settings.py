"""How many threads compute may have where the CPU is the device.

[Note: A core for the lanes]
An operation that is spread over all cores ends when its slowest thread does.  While a copy or CPU Adam runs on one of
the cores, or another process does, the other threads of every operation wait for the one that shares it: measured on a
shared machine of two cores, iterations of one and the same plan then differed by a factor of five from one moment to
the next.  With one core left to the lanes, compute no longer waits for them.
"""

from __future__ import annotations

import torch

from ..model.identity import num_cores


def leave_a_core_for_lanes() -> int:
    """Let operations of this process use all cores but one (at least one); gives the number of threads.

    For programs that own their process, such as the commands; a library does not decide this for its caller.
    """
    threads = max(1, num_cores() - 1)
    torch.set_num_threads(threads)
    return threads
