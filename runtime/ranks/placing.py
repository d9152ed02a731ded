"""Equal weights to begin with: rank 0's parameters, frozen ones too, and buffers become those of all ranks."""

from __future__ import annotations

from typing import Final

import torch
import torch.distributed as dist
from torch import nn

from ...shared.basics.errors import RanksError
from .world import World

_PIECE_BYTES: Final = 16 * 2**20
"""Bytes that are sent at once, so that gloo's own buffers stay small beside any model."""


def place_rank_0(world: World, model: nn.Module) -> None:
    """Let every parameter and buffer of ``model`` be rank 0's, bit for bit; to be called on all ranks.

    Names, shapes and element types are the same on all of them (``model_hash``).  Each tensor is written in place, so
    that tied weights stay tied, and needs memory beside it only if its elements do not lie side by side: a copy.
    Raises RanksError if a rank does not come.
    """
    with torch.no_grad():
        # Each once, tied or not.
        for tensor in (*model.parameters(), *model.buffers()):
            own = _without_repeats(tensor.detach())
            sent = own.contiguous()
            _broadcast(world, sent.view(-1))
            if sent is not own:
                own.copy_(sent)


def _without_repeats(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, or one of each of its elements where a dimension repeats them (``expand``)."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _broadcast(world: World, flat: torch.Tensor) -> None:
    """Of a contiguous (n,) tensor, as bytes: gloo does not know every element type."""
    data = flat.view(torch.uint8)
    source = dist.get_global_rank(world.control_group, 0)
    for begin in range(0, data.numel(), _PIECE_BYTES):
        try:
            dist.broadcast(data[begin : begin + _PIECE_BYTES], src=source, group=world.control_group)
        except RuntimeError as error:
            raise RanksError(f"another rank ended while weights were sent: {error}.") from error
