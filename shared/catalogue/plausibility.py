"""Figures that no machine has: most often a quantity whose unit was forgotten."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from pydantic import BaseModel

from ..basics.errors import HardwareError
from ..schema.hardware import Hardware


@dataclass(frozen=True, slots=True)
class _Range:
    low: float
    high: float
    unit: str
    example: str


_MEMORY: Final = _Range(2**18, 2**50, " B", "24GiB; a bare number is bytes")
_BANDWIDTH: Final = _Range(1e5, 1e15, " B/s", "25GB/s; a bare number is bytes per second")
_RATE: Final = _Range(1e6, 1e19, " FLOP/s", "71e12 for 71 TFLOP/s")
_SECONDS: Final = _Range(0, 1, " s", "5e-6 for 5 µs")
_DEVICES: Final = _Range(1, 2**12, "", "8")
_RANGES: Final[Mapping[str, _Range]] = {
    "memory_bytes": _MEMORY,
    "capacity_bytes": _MEMORY,
    "read_bytes_per_s": _BANDWIDTH,
    "write_bytes_per_s": _BANDWIDTH,
    "memory_bandwidth_bytes_per_s": _BANDWIDTH,
    "bandwidth_bytes_per_s": _BANDWIDTH,
    "root_bandwidth_bytes_per_s": _BANDWIDTH,
    "adam_bytes_per_s": _BANDWIDTH,
    "peak_flop_per_s": _RATE,
    "vector_flop_per_s": _RATE,
    "matrix_flop_per_s": _RATE,
    "launch_overhead_s": _SECONDS,
    "clock_hz": _Range(1e6, 1e12, " Hz", "1.41e9 for 1,410 MHz"),
    "latency_s": _SECONDS,
    "optimizer_s_per_scalar": _Range(1e-15, 1e-3, " s", "2e-11 for 20 ps"),
    "num_cores": _Range(1, 2**16, "", "64"),
    "num_memory_channels": _DEVICES,
    "num_devices": _DEVICES,
    "adapters_per_node": _DEVICES,
    "num_nodes": _Range(1, 2**20, "", "4"),
    "power_w": _Range(0.1, 1e5, " W", "700 for 700 W"),
    "power_limit_w": _Range(0.1, 1e5, " W", "500 for 500 W"),
    "price_usd_per_hour": _Range(1e-4, 1e7, " USD/h", "2.5 for 2.50 US dollars an hour"),
}
"""By the name of a field, in whichever part of a machine it stands."""


def price_range() -> tuple[float, float]:
    """The lowest and the highest rent of a machine, in US dollars per hour."""
    found = _RANGES["price_usd_per_hour"]
    return found.low, found.high


def check_plausible(hardware: Hardware, *, origin: str) -> None:
    """Raise HardwareError if a figure is beyond any machine; the message names the field, its value and its range.

    Sizes lie from 256 KiB to 1 PiB, bandwidths from 0.1 MB/s to 1 PB/s, rates from 1 MFLOP/s to 10 EFLOP/s, latencies
    up to 1 s.  ``origin`` names the description in messages.  Hardware itself takes any figure: in machines that are
    worked out by hand a link copies one byte a second.
    """
    for field, value, bounds in _figures(hardware, ""):
        if not bounds.low <= value <= bounds.high:
            raise HardwareError(
                f"{origin}: {field} is {value:.6g}{bounds.unit}, outside {bounds.low:g} to {bounds.high:g}{bounds.unit}"
                f". Write it as {bounds.example}."
            )


def _figures(part: BaseModel, prefix: str) -> Iterator[tuple[str, float, _Range]]:
    """Every field that has a range, its value and the range, those of parts within included."""
    for name, value in part:
        if isinstance(value, BaseModel):
            yield from _figures(value, f"{prefix}{name}.")
        elif name in _RANGES and isinstance(value, dict):
            yield from ((f"{prefix}{name}.{key}", figure, _RANGES[name]) for key, figure in value.items())
        elif name in _RANGES and value is not None:
            yield f"{prefix}{name}", value, _RANGES[name]
