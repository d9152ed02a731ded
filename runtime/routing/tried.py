"""What a model's blocks take with other values than those of the traced batch."""

from __future__ import annotations

from collections.abc import Callable

from ...shared.schema.workload import Workload
from ..model.batches import Batch
from .forced_choices import ForcedChoices, Routing
from .other_batches import other_batches
from .value_dependence import ValueWatch, joined
from .worst_memory import with_worst_memory

Again = Callable[[Batch, ForcedChoices | None], tuple[Workload, ValueWatch]]
"""Traces a batch once more, with forced choices or without, and says which blocks' memory may depend on values."""


def with_other_values(found: Workload, watch: ValueWatch, batch: Batch, again: Again) -> Workload:
    """``found``, traced on ``batch``, with the worst memory of blocks in which ``watch`` noted something.

    Their choices are forced to the worst routings ([Note: Worst routings]).  Blocks in which sizes depend on values and
    nothing is chosen are run on other batches.
    """
    if not watch.blocks:
        return found
    of_values, forced = set(watch.blocks), set[int]()
    runs: list[Workload] = []
    for routing in Routing:
        choices = ForcedChoices(routing, of_values.__contains__)
        workload, seen = again(batch, choices)
        runs.append(workload)
        watch = joined((watch, seen))
        forced |= choices.forced
        if not forced:
            runs.clear()
            break
    others = watch.sized_by_values - forced
    if others:
        runs += [again(values, None)[0] for values in other_batches(batch)]
    if not runs:
        return found
    return with_worst_memory([found, *runs], forced | others, forced)
