"""What a model's blocks take with other values than those of the traced batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from ...shared.basics.errors import ProtwinError
from ...shared.schema.workload import Workload
from ..model.batches import Batch, BatchRefusedError, NothingLearntError
from .forced_choices import ForcedChoices, Routing
from .other_batches import other_batches
from .value_dependence import ValueWatch, joined
from .worst_memory import with_worst_memory

Again = Callable[[Batch, ForcedChoices | None], tuple[Workload, ValueWatch]]
"""Traces a batch once more, with forced choices or without, and says which blocks' memory may depend on values."""


def with_other_values(found: Workload, watch: ValueWatch, batch: Batch, again: Again) -> Workload:
    """``found``, traced on ``batch``, with the worst memory of blocks in which ``watch`` noted something.

    Their choices are forced to the worst routings ([Note: Worst routings]).  Blocks in which sizes depend on values and
    nothing is chosen are run on other batches.  Raises NothingLearntError if all that learns is left out whatever is
    chosen.
    """
    if not watch.blocks:
        return found
    forced = set[int]()
    runs: list[Workload] = []
    for routing in Routing:
        choices = ForcedChoices(routing, watch)
        try:
            workload, seen = again(batch, choices)
        except NothingLearntError:
            # All that learns was left out: no step of the plain loop gets through that, and so it takes nothing.
            if not choices.forced or (routing is list(Routing)[-1] and not runs):
                raise
            continue
        runs.append(workload)
        watch = joined((watch, seen))  # a routing may lead where the traced batch did not
        forced |= choices.forced
        if not forced:
            runs.clear()
            break
    others = watch.sized_by_values - forced
    if others:
        tried = _accepted_of(again, other_batches(batch))
        # Tokens may say where pictures stand, whose number is given: then only what is seen and heard may be another.
        runs += tried or _accepted_of(again, other_batches(batch, has_other_tokens=False))
    if not forced | others:
        return found
    return with_worst_memory([found, *runs], forced | others, forced)


def _accepted_of(again: Again, batches: Iterable[Batch]) -> list[Workload]:
    return [run for values in batches if (run := _accepted(again, values)) is not None]


def _accepted(again: Again, values: Batch) -> Workload | None:
    """What the model does with ``values``, which were made up; None if it refuses them."""
    try:
        return again(values, None)[0]
    except BatchRefusedError:
        return None
    except (RuntimeError, ValueError, IndexError, KeyError) as error:
        if isinstance(error, (ProtwinError, torch.OutOfMemoryError)):
            raise
        return None
