"""Memory beyond what a schedule allocates: what the device's allocator reserves, and what the host's process holds."""

from __future__ import annotations

from enum import StrEnum
from typing import Self

from pydantic import NonNegativeInt, PositiveInt, model_validator

from ..basics.documents import FrozenModel


class DeviceReserved(FrozenModel):
    """What PyTorch's caching allocator holds of the device, predicted by replaying the schedule through a model of it.

    It is at least what is allocated at the peak, rounded to whole segments; expected under the stated reading of what
    happens within tasks; and at most what a coarser reading of it comes to, if that is more.  The last is no proof:
    tensors that the workload does not describe may split segments worse.
    """

    at_least_bytes: NonNegativeInt
    expected_bytes: NonNegativeInt
    at_most_bytes: NonNegativeInt
    workspace_bytes: NonNegativeInt
    """Of these, workspaces of matrix libraries."""
    outside_bytes: NonNegativeInt
    """Device memory that is never the allocator's: the driver's own, and the process's context."""
    limit_bytes: PositiveInt
    """The device's memory without that: the most that the allocator can hold."""
    num_retries: NonNegativeInt | None
    """How often the replay had to give cached segments back for want of memory, until it was settled; None if even
    then it ran out of memory."""
    expandable_bytes: NonNegativeInt | None = None
    """``expected_bytes`` with expandable segments, without a limit; computed where these might help, since without them
    cached segments must go back."""
    expandable_retries: NonNegativeInt | None = None
    """``num_retries`` with expandable segments, which give memory back by pages; None if memory ran out even so, and
    where ``expandable_bytes`` is None."""
    num_iterations: PositiveInt
    """Iterations that were replayed."""
    is_settled: bool
    """Whether the last of them took nothing more from the driver."""

    @property
    def fits(self) -> bool:
        """Whether the replay stays within the limit, cached segments given back where need be."""
        return self.num_retries is not None

    @property
    def needs_expandable(self) -> bool:
        """Whether the replay stays within the limit with expandable segments alone."""
        return not self.fits and self.expandable_retries is not None

    @model_validator(mode="after")
    def _ascends(self) -> Self:
        if not self.at_least_bytes <= self.expected_bytes <= self.at_most_bytes:
            raise ValueError(
                f"at_least_bytes {self.at_least_bytes}, expected_bytes {self.expected_bytes} and at_most_bytes "
                f"{self.at_most_bytes} must ascend"
            )
        return self


class PinnedRule(StrEnum):
    """What a pinned buffer takes of the host."""

    PAGES = "pages"
    """Its size in pages."""
    POWER_OF_TWO = "power_of_two"
    """The next power of two: PyTorch's allocator of pinned memory."""


class HostMemory(FrozenModel):
    """What the process that trains holds of the host's memory.  Bytes of physical memory."""

    pinned_requested_bytes: NonNegativeInt
    """Buffers that copies read and write: offloaded parameters, the places their gradients arrive at, swapped
    activations."""
    pinned_rounded_bytes: NonNegativeInt
    """The same, each rounded up to a power of two, as PyTorch's allocator of pinned memory does."""
    pinned_rule: PinnedRule
    """Which of the two the runtime has on this device."""
    state_bytes: NonNegativeInt
    """Optimizer state of offloaded chunks: masters, moments, counts of steps."""
    device_bytes: NonNegativeInt
    """What is on the device, where the device is the host's own memory; else 0."""
    loading_bytes: NonNegativeInt
    """The most that is there while chunks are filled from files: their homes, and one chunk where the device is the
    host's own memory.  A model that lies in memory before is there besides."""
    process_bytes: NonNegativeInt
    """Python, PyTorch and the other libraries."""
    step_bytes: NonNegativeInt = 0
    """The most that the step of one chunk makes on the way: gradients in the element type of narrow parameters'
    masters, and one tensor's intermediate ones, of optimizers whose kernels are several passes."""

    @property
    def planned_bytes(self) -> int:
        """What the plan fills of the host's budget."""
        return self.pinned_requested_bytes + self.state_bytes + self.step_bytes

    @property
    def training_bytes(self) -> int:
        """The most while training, the process itself left out."""
        return self.pinned_bytes + self.state_bytes + self.device_bytes + self.step_bytes

    @property
    def pinned_bytes(self) -> int:
        """Pinned buffers as the runtime has them."""
        return self.pinned_rounded_bytes if self.pinned_rule is PinnedRule.POWER_OF_TWO else self.pinned_requested_bytes

    @property
    def total_bytes(self) -> int:
        """The most that the process holds, while loading or while training."""
        return self.process_bytes + max(self.loading_bytes, self.training_bytes)
