"""The batch that a plan is made for: the largest that training is expected to meet."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any, Final

import torch
import torch.distributed as dist

from ...shared.basics.errors import WorkloadError

MOST_BATCHES: Final = 256
"""Of those that a data loader begins with, looked at; a dataset of fewer is looked through."""


@contextmanager
def generators_kept(loader: Any) -> Iterator[None]:
    """After the block the loader begins where it would have begun: its own generators, and the number of its epoch."""
    found: dict[int, torch.Generator] = {}
    seen, waiting = set[int](), [loader]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        for name in ("generator", "synchronized_generator"):
            if isinstance(made := getattr(one, name, None), torch.Generator):
                found[id(made)] = made
        waiting += [getattr(one, name, None) for name in ("sampler", "batch_sampler", "base_dataloader")]
    states = [(generator, generator.get_state()) for generator in found.values()]
    iteration = getattr(loader, "iteration", None)
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)
        if iteration is not None:
            loader.set_epoch(iteration)


def largest_batch(loader: Any) -> tuple[Any, int, bool]:
    """The largest of the first batches of ``loader``, how many were looked at, and whether these were all.

    The loader is Accelerate's or torch's, made for this alone.  Raises WorkloadError if it has no batch.
    """
    largest, number = None, 0
    batches = iter(loader)
    try:
        for batch in islice(batches, MOST_BATCHES):
            number += 1
            if largest is None or size_of(batch) > size_of(largest):
                largest = copy.copy(batch)
        is_all = next(batches, None) is None
    finally:
        noted = getattr(loader, "gradient_state", None)
        if noted is not None and loader in noted.dataloader_references:
            # What Accelerate notes of a loader that is being gone through is for training to note.
            loader.end()
    largest = _of_all_ranks(largest)
    if largest is None:
        raise WorkloadError("the training data have no batch, so that there is nothing to plan for.")
    return largest, number, is_all


def _of_all_ranks(own: Any) -> Any:
    """The largest batch of all ranks, which Accelerate's loader has divided the data among."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return own
    sizes: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(sizes, size_of(own))
    found = [own]
    dist.broadcast_object_list(found, src=sizes.index(max(sizes)))
    return found[0]


def size_of(batch: Any) -> int:
    """Scalars in the batch, of all its tensors, within mappings, lists and tuples too."""
    if isinstance(batch, Mapping):
        return sum(size_of(part) for part in batch.values())
    if isinstance(batch, list | tuple):
        return sum(size_of(part) for part in batch)
    return batch.numel() if isinstance(batch, torch.Tensor) else 0
