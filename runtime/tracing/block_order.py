"""In which order a model's blocks run, and which of them its loss depends on.

The module tree tells where blocks are and not when they run: models of text and image list the text first and begin
with the image, and take features of an inner layer, whose later ones then learn nothing.  So where blocks in the order
of the tree are refused, one iteration on fake tensors tells, and one of the model itself where it needs values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ..fakes.known_values import with_values_if_wanted
from ..fakes.models import fake_batch, fake_model
from ..fakes.running import running_fakes
from ..model.batches import Batch, BatchRefusedError, Loss, loss_of
from ..model.blocks import NamedBlock, find_blocks, places_of
from ..model.nested_tensors import tensors_in
from ..model.snapshot import left_as_found


def blocks_as_run(model: nn.Module, batch: Batch, loss: Loss | None, blocks: Sequence[NamedBlock]) -> list[str] | None:
    """Names of the blocks that the loss depends on, in the order in which they run.

    A list none of whose blocks runs is no part of them: the batch has no images, say, for the blocks that see them.
    One that runs several times stands there as often ([Note: Runs of blocks] in ``hooks/block_runs.py``).  None if this
    is the order of ``blocks``, and where no order is right: if some do not run, or gradients end between them.
    """
    names = [block.name for block in blocks]
    try:
        ran, reached = with_values_if_wanted(
            batch, lambda with_values: _run_fake(model, batch, loss, names, with_values)
        )
    except (RuntimeError, BatchRefusedError):
        if any(parameter.is_meta for parameter in model.parameters()):
            raise
        with left_as_found(model):
            ran, reached = _run(model, batch, loss, names)
    lists_run = {name.rpartition(".")[0] for name in ran}
    if any(name not in ran for name in names if name.rpartition(".")[0] in lists_run):
        return None
    order = [name for name in ran if name in reached]
    return order if order and order != names and not _has_gap(ran, reached) else None


def _has_gap(ran: Sequence[str], reached: set[str]) -> bool:
    """Whether a block that learns nothing is followed by one of its own list that learns.

    Features of an inner layer leave out a list's end.  Gradients that end within a list are a mistake, or are said
    with ``requires_grad_(False)``.
    """
    lists_reached: set[str] = set()
    for name in reversed(ran):
        parent = name.rpartition(".")[0]
        if name in reached:
            lists_reached.add(parent)
        elif parent in lists_reached:
            return True
    return False


def _run_fake(
    model: nn.Module, batch: Batch, loss: Loss | None, names: Sequence[str], with_values: bool
) -> tuple[list[str], set[str]]:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    twin = fake_model(model, mode)
    with running_fakes(mode, with_values=with_values):
        return _run(twin, fake_batch(batch, mode, with_values=with_values), loss, names)


def _run(model: nn.Module, batch: Batch, loss: Loss | None, names: Sequence[str]) -> tuple[list[str], set[str]]:
    """The blocks as they ran in one iteration, and those whose output backward came by, or never can."""
    ran: list[str] = []
    reached: set[str] = set()

    def leave(name: str) -> Callable[..., None]:
        def left(module: nn.Module, args: Any, output: Any) -> None:
            ran.append(name)
            learning = [t for t in tensors_in(output) if t.requires_grad and not t.is_leaf]
            for tensor in learning:
                tensor.register_hook(lambda _: reached.add(name))  # type: ignore[no-untyped-call]
            if not learning:
                reached.add(name)

        return left

    blocks = find_blocks(model, list(names))
    handles = [module.register_forward_hook(leave(blocks[places[0]].name)) for module, places in places_of(blocks)]
    try:
        torch.autograd.backward(loss_of(model, batch, loss))
    finally:
        for handle in handles:
            handle.remove()
    return ran, reached
