"""Which metering a device has."""

from __future__ import annotations

from torch import nn

from ..devices.device import TrainingDevice
from ..model.kept_tensors import kept_tensors
from .allocator_metering import AllocatorMetering
from .ledger_metering import LedgerMetering
from .metering import Metering


def metering_of(device: TrainingDevice, meter_every: int | None, model: nn.Module) -> Metering:
    """The metering of a device: its ledger, or its allocator."""
    if device.ledger is not None:
        return LedgerMetering(device.ledger, meter_every, lambda: kept_tensors(model.modules()))
    return AllocatorMetering(device, meter_every)
