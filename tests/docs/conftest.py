"""What the programs of the documents share: one measurement of this machine."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

import protwin.runtime
from protwin.shared import Hardware


@cache
def probed() -> Hardware:
    """This machine, measured once for all programs, each of which asks for it: a measurement takes seconds."""
    from protwin.runtime.devices.probe import probe_hardware  # torch, which tests of links need not wait for

    return probe_hardware(seconds=0.5)


@pytest.fixture
def probed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """``protwin.runtime.probe_hardware`` gives what the first call measured."""

    def probe(**arguments: Any) -> Hardware:
        assert arguments.keys() <= {"seconds"}, "programs measure the default device"
        return probed()

    monkeypatch.setattr(protwin.runtime, "probe_hardware", probe)
