"""How long one copy over a link takes: by latency and bandwidth, or by a measured table."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from math import exp, log

from ...shared.schema.hardware import Link


def copy_time_s(size_bytes: int, link: Link) -> float:
    """Seconds for one copy over an otherwise idle link; never less for more bytes.

    latency_s + size_bytes / bandwidth, or the link's measured table: between two points a power law (linear in the
    logarithms, since both span decades), beyond the last one its bandwidth, below the first one a line from the
    latency.  A table that dips is read as its running maximum: a larger copy never takes less time.
    """
    if not link.table:
        return link.latency_s + size_bytes / link.bandwidth_bytes_per_s
    sizes = [point.size_bytes for point in link.table]
    seconds = list(accumulate((point.seconds for point in link.table), max))
    if size_bytes >= sizes[-1]:
        return seconds[-1] * (size_bytes / sizes[-1])
    if size_bytes <= sizes[0]:
        latency_s = min(link.latency_s, seconds[0])
        return latency_s + (seconds[0] - latency_s) * (size_bytes / sizes[0])
    above = bisect_left(sizes, size_bytes)
    position = log(size_bytes / sizes[above - 1]) / log(sizes[above] / sizes[above - 1])
    return seconds[above - 1] * exp(position * log(seconds[above] / seconds[above - 1]))
