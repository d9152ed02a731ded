"""Whether a calibration's factors are of the figures that a machine is described by now.

A factor is measured over modelled seconds.  So it holds beside the figures that the seconds were modelled by: a machine
that is probed again, under another load perhaps, has others, and the old factors on top of them count its load twice or
not at all.  Figures that a question changes (``--set``) are meant to differ.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Final

from ..basics.errors import CalibrationError
from ..schema.calibration import Calibration
from ..schema.hardware import Hardware

_NO_SECONDS: Final = frozenset(
    {
        "name",
        "source",
        "memory_bytes",
        "reserved_bytes",
        "capacity_bytes",
        "num_memory_channels",
        "power_w",
        "power_limit_w",
        "price_usd_per_hour",
        "overrides",
    }
)
"""Fields of a description that no modelled seconds follow from."""
_DIRECTIONS: Final = ("host_to_device", "device_to_host")
_NEARLY: Final = 1e-9
"""Files may write figures with fewer digits than they were computed with."""


def check_figures(calibration: Calibration, hardware: Hardware) -> None:
    """Raise CalibrationError if the factors of ``calibration`` are of other figures than ``hardware`` has.

    Calibrations that do not know their figures, as older files, pass.
    """
    before = calibration.hardware
    if before is None or before == hardware:
        return
    changed = _parts_changed(before, hardware)
    then, now = (dict(_figures(one.model_dump(mode="json"))) for one in (before, hardware))
    for place in {**then, **now}:
        if place[0] not in changed and not _is_same(then.get(place), now.get(place)):
            figure, is_now = (one.get(place, "not stated") for one in (then, now))
            raise CalibrationError(
                f"the calibration was made with other figures of {hardware.name}: {'.'.join(place)} was {figure}, "
                f"and is {is_now}. Factors hold beside the figures that they were fitted with: give the file of then, "
                f"or calibrate anew with this one. To ask about a changed machine, use --set."
            )


def _parts_changed(before: Hardware, hardware: Hardware) -> set[str]:
    """Parts of the machine that differ by intention, or that nothing was measured of."""
    absent = {name for name in ("disk", "node", "network", "collectives") if not getattr(before, name)}
    asked = {override.partition("=")[0].partition(".")[0] for override in {*before.overrides} ^ {*hardware.overrides}}
    if not asked:
        return absent
    # A change of any part may drop measured collectives.
    return absent | asked | {"collectives"} | (set(_DIRECTIONS) if "link" in asked else set())


def _figures(content: Any, place: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every figure of a description that seconds follow from, with its place."""
    items = content.items() if isinstance(content, dict) else enumerate(content)
    for name, value in items:
        if name in _NO_SECONDS:
            continue
        here = (*place, str(name))
        if isinstance(value, dict | list):
            yield from _figures(value, here)
        elif value is not None:
            yield here, value


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, int | float):
        return math.isclose(one, other, rel_tol=_NEARLY)
    return bool(one == other)
