"""What a runtime keeps otherwise than plans do: another system's account of the same schedule."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from math import prod
from typing import Final

from ..optimizers.state import Stepped, master_bytes, state_tensors, stepped_dtype
from ..schema.optimizer import Optimizer


class BucketStay(Enum):
    """How long buckets of gradients are on the device."""

    BACKWARD = "for the backward of every micro-batch"
    STEP = "from the backward of the first micro-batch to that of the last"
    GOOD = "for good"


@dataclass(frozen=True, slots=True, kw_only=True)
class Buckets:
    """Flat buffers into which gradients are copied, to be reduced together: of their size, whatever is trained."""

    num_scalars: int
    """Of one, in the element type of the first parameter that is trained."""
    number: int = 1
    """1 or 2: one is filled while the other is reduced."""
    stay: BucketStay


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeping:
    """Where what is there for good lies otherwise than plans have it; by default nowhere."""

    parts_stay: bool = False
    """Whether each device keeps its part of what the hosts step, beside the hosts."""
    parts_are_within: bool = False
    """Whether a sharded chunk's part is a view of the whole chunk, which never leaves the device."""
    gradients_are_whole: bool = False
    """Whether gradients of a sharded chunk stay whole on every device until the step."""
    parts_go: bool = False
    """Whether a rank's parts of gradients of sharded chunks come with the first micro-batch's reduce-scatters and go
    with the step, as a parameter's ``grad`` does under ``zero_grad(set_to_none=True)``."""
    moments_visit: bool = False
    """Whether the moments of what devices step lie on the host, and come to the device for the step alone."""
    num_widened: int = 0
    """Scalars whose gradients the device lays flat and widens to float32 together, where they have masters.  So many
    have their masters and moments together too, flat, from the set-up on."""
    buckets: Buckets | None = None
    """What gradients pass through on the device; None: nothing."""
    temporary_lists: int = 0
    """Lists of tensors, as large as all weights that the device steps, that one step makes where AdamW goes over lists
    (``foreach``); gradients go behind it then, not one after the other."""
    keeps_gradients: bool = False
    """Whether gradients of whole chunks that the device steps are there for good, so that every backward adds to them:
    zeroed behind a step, not dropped."""
    holds_inputs: bool = False
    """Whether inputs of recomputed blocks with frozen parameters, and the gradients of these inputs, stay until the
    micro-batch's backward has ended ([Note: Held inputs] in ``shared/compile/homes.py``)."""
    caches_keys: bool = False
    """Whether the model's output has the keys and values of all blocks ([Note: Cached keys] there)."""

    @property
    def drops_gradients(self) -> bool:
        """Whether gradients go as the device steps what they are of."""
        return not (self.keeps_gradients or self.temporary_lists)


AS_PLANNED: Final = Keeping()
OVER_LISTS: Final = (Optimizer.ADAMW, Optimizer.ADAM, Optimizer.ADAMW_BF16)
"""Optimizers of torch that may go over lists of tensors."""


def num_with_masters(together: Iterable[Stepped], optimizer: Optimizer) -> int:
    """Scalars of these parameters of which a float32 copy is stepped."""
    return sum(prod(shape) for dtype, shape in together if master_bytes(dtype, optimizer))


def list_bytes(together: Iterable[Stepped], optimizer: Optimizer) -> int:
    """Bytes of one list of tensors as large as the weights that are stepped; 0 of optimizers that have none."""
    if optimizer not in OVER_LISTS:
        return 0
    return sum(prod(shape) * stepped_dtype(dtype, optimizer).item_bytes for dtype, shape in together)


def moment_bytes(together: Iterable[Stepped], optimizer: Optimizer) -> int:
    """Bytes of the moments of these parameters, masters and scales left out."""
    return sum(
        tensor.size_bytes for stepped in together for tensor in state_tensors(stepped, optimizer) if tensor.is_moment
    )
