"""Points in time of a CUDA stream, in seconds of the host's clock.

[Note: Anchors]
CUDA tells the milliseconds between two events as a float32: after a quarter of an hour, to 61 microseconds at best.
And the device's clock is not the host's: over hours they drift apart.  So every stamp belongs to an *anchor*, an event
on a stream that does nothing else, whose time on the host's clock is known, and every few seconds there is a new one.
An anchor has passed before any stamp that belongs to it is recorded, so the time between them is never negative.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Any, Final

import torch

_ANCHOR_S: Final = 5.0
"""Age at which an anchor gets a successor."""
_TRIES: Final = 3


@dataclass(frozen=True, slots=True)
class _Anchor:
    event: Any
    at_s: float


@dataclass(frozen=True, slots=True)
class Stamp:
    """A point in time of a stream."""

    event: Any
    anchor: _Anchor

    @property
    def has_passed(self) -> bool:
        """Whether its stream has come so far."""
        return bool(self.event.query())


class StreamClock:
    """Stamps of the streams of one device.  Thread-safe."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._lock = threading.Lock()
        self._anchor = self._make_anchor()

    def stamp(self) -> Stamp:
        """The end of what is queued on the current stream."""
        anchor = self._anchor
        if time.perf_counter() - anchor.at_s > _ANCHOR_S:
            with self._lock:
                if self._anchor is anchor:
                    self._anchor = self._make_anchor()
                anchor = self._anchor
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return Stamp(event, anchor)

    def seconds(self, stamp: Stamp) -> float:
        """``time.perf_counter`` at the stamp; waits until its stream has come so far."""
        stamp.event.synchronize()
        return stamp.anchor.at_s + float(stamp.anchor.event.elapsed_time(stamp.event)) * 1e-3

    def _make_anchor(self) -> _Anchor:
        """The host's time of an event on an idle stream lies between asking for it and hearing that it has passed."""
        best: tuple[float, _Anchor] | None = None
        for _ in range(_TRIES):
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            before_s = time.perf_counter()
            event.record(self._stream)
            event.synchronize()
            after_s = time.perf_counter()
            if best is None or after_s - before_s < best[0]:
                best = after_s - before_s, _Anchor(event, (before_s + after_s) / 2)
        assert best is not None
        return best[1]
