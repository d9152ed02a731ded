"""Generations of devices, told by their names."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from ...shared.schema.hardware import Device


class Generation(StrEnum):
    """Generations of devices that libraries treat alike."""

    VOLTA = "volta"
    AMPERE = "ampere"
    ADA = "ada"
    HOPPER = "hopper"
    BLACKWELL = "blackwell"
    CDNA2 = "cdna2"
    CDNA3 = "cdna3"


_NAMES: Final[dict[Generation, tuple[str, ...]]] = {
    Generation.CDNA3: ("mi300", "mi308", "mi325", "mi350", "mi355"),
    Generation.CDNA2: ("mi210", "mi250"),
    Generation.BLACKWELL: ("b100", "b200", "b300", "rtx 50", "rtx 5090", "rtx 5080", "rtx pro 6000", "blackwell"),
    Generation.HOPPER: ("h100", "h200", "h800", "h20", "gh200", "hopper"),
    Generation.ADA: ("rtx 40", "rtx 4090", "rtx 4080", "l40", "l4", "6000 ada", "ada"),
    Generation.AMPERE: ("a100", "a800", "a40", "a30", "a10", "a6000", "rtx 30", "rtx 3090", "rtx 3080", "ampere"),
    Generation.VOLTA: ("v100", "titan v", "volta"),
}
"""Parts of the names of devices, as the catalogue and drivers write them; "gb200" and "gh200" contain shorter ones."""


def generation_of(device: Device) -> Generation | None:
    """The generation that the device's name tells; None if it does not."""
    words = device.name.lower().replace("-", " ").replace("_", " ")
    padded = f" {words} "
    for generation, names in _NAMES.items():
        for name in names:
            if f" {name}" in padded or f" g{name}" in padded:
                return generation
    return None
