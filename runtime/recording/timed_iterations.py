"""Which iterations a Record takes its times from, and how many it takes until there is one.

One period needs two iterations in a row that begin as in steady state: not among the first, which warm up; not after a
pause (a save, an evaluation), since nothing was gathered ahead; not metered, since watching memory costs time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import lcm
from typing import Final

WARM_UP: Final = 3
"""Iterations at the beginning that do not count."""
LEAST_TIMED: Final = 5
"""Timed iterations from which on their times say something about a machine."""
LEAST_EVERY: Final = 3
"""Iterations between two pauses, or two metered ones, from which on there are two others in a row."""


def iterations_until_record(*, pauses: Sequence[int] = (), done: int = 0) -> int | None:
    """Iterations to train until a Record can be made; None if it never can.

    Training pauses after every n-th iteration for every n of ``pauses``, counted with the ``done`` ones of an earlier
    training.
    """

    def is_paused(iteration: int) -> bool:
        return any((done + iteration) % every == 0 for every in pauses)

    # Pauses repeat after the least common multiple.
    for first in range(WARM_UP, WARM_UP + lcm(*pauses) + 1):
        if not is_paused(first) and not is_paused(first + 1):
            return first + 2
    return None


def why_no_record(num_iterations: int, meter_every: int | None, pairs: Iterable[tuple[bool, bool]]) -> str:
    """Why no two iterations in a row count, and what helps.

    ``pairs`` says of those after the warm-up whether either was metered, and whether either followed a pause.
    """
    known = list(pairs)
    told = f"{num_iterations} iterations were recorded; a Record needs two in a row after the first {WARM_UP}"
    if not known:
        return f"{told}, which do not count. Train {WARM_UP + 2} at least."
    if meter_every is not None and meter_every < LEAST_EVERY and all(is_metered for is_metered, _ in known):
        return (
            f"{told} that nobody meters, since watching memory takes time, and meter_every is {meter_every}: there "
            f"never are any. Pass meter_every={LEAST_EVERY} or more, or leave it out."
        )
    if any(follows_pause for _, follows_pause in known):
        return (
            f"{told} without a pause before either: a save, an evaluation, weights that were read. Let "
            f"{LEAST_EVERY} iterations or more lie between two pauses."
        )
    return f"{told} that nobody meters, since watching memory takes time. Train on with batches of a shape seen before."
