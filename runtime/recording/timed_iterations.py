"""Which iterations a Record takes its times from, and how many it takes until there is one.

One period needs two iterations in a row that begin as in steady state: not among the first, which warm up; not after a
pause (a save, an evaluation), since nothing was gathered ahead; not metered, since watching memory costs time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

WARM_UP: Final = 3
"""Iterations at the beginning that do not count."""
LEAST_EVERY: Final = 3
"""Iterations between two pauses, or two metered ones, from which on there are two others in a row."""


def iterations_until_record(*, pause_every: int | None, done: int = 0) -> int | None:
    """Iterations to train until a Record can be made; None if it never can.

    Training pauses after every ``pause_every``-th iteration, counted with the ``done`` ones of an earlier training.
    """
    if pause_every is None:
        return WARM_UP + 2
    if pause_every < LEAST_EVERY:
        return None
    first = WARM_UP
    while any((done + iteration) % pause_every == 0 for iteration in (first, first + 1)):
        first += 1
    return first + 2


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
