"""R7: the longest sequence that one device trains, with everything against length that plans have."""

from __future__ import annotations

from typing import Final

from ...shared.basics.errors import InfeasibleError
from ...shared.catalogue.machines import machine
from ...shared.schema.workload import Workload
from ...shared.workloads.source import load_workload
from ...sim.searching.request import SearchRequest
from ...sim.searching.search import search
from ...sim.space.space import SearchSpace
from .runs import LONGEST_ON_ONE_H100, Prediction, Quantity

_MODEL: Final = "llama-3.1-8b"
_MACHINE: Final = "h100-80gb"
_TILES: Final = 256
"""Of MLPs and of the loss: more of them save nothing beside a block's attention and norms."""
_STEP: Final = 1024
"""Lengths are multiples of it."""
_FEWEST, _MOST = 256, 768
"""Steps at which it fits, and at which it is far from that."""


def longest_predictions() -> list[Prediction]:
    """Tokens of the longest sample that fits on one device, its parameters and block inputs on the host."""
    device = machine(_MACHINE).device
    usable_bytes = device.memory_bytes - device.reserved_bytes
    readings = [_longest(size) for size in (device.memory_bytes, usable_bytes, usable_bytes * 95 // 100)]
    how = (
        f"{_MODEL}, MLPs and loss in {_TILES} tiles, every block recomputed from an input on the host; lengths by "
        f"{_STEP}; the device whole, without what a driver reserves (favourable), and with 5 % left free (unfavourable)"
    )
    return [Prediction.of(case=LONGEST_ON_ONE_H100, row="R7", quantity=Quantity.LONGEST, readings=readings, how=how)]


def _longest(budget_bytes: int) -> int:
    """Bisected: memory grows with every token."""
    fits, fails = _FEWEST, _MOST
    while fails - fits > 1:
        middle = (fits + fails) // 2
        fits, fails = (middle, fails) if _fits(middle * _STEP, budget_bytes) else (fits, middle)
    return fits * _STEP


def _fits(num_tokens: int, budget_bytes: int) -> bool:
    workload: Workload = load_workload(
        _MODEL, batch_size=1, sequence_length=num_tokens, mlp_tiles=(_TILES,), loss_tiles=(_TILES,)
    )
    blocks = len(workload.blocks)
    space = SearchSpace.model_validate(
        {"mlp_tiles": _TILES, "loss_tiles": _TILES, "n_checkpoint": blocks, "n_offload_input": blocks}
    )
    request = SearchRequest(
        workload=workload,
        hardware=machine(_MACHINE),
        space=space,
        device_budget_bytes=budget_bytes,
        margin_frac=0.0,
    )
    try:
        search(request)
    except InfeasibleError:
        return False
    return True
