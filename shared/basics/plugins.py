"""What one folder lends to another that may not import it: named in an entry-point group, imported when asked for."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any


def plugin(group: str, name: str) -> Any:
    """What the entry point ``name`` of ``group`` names.  Raises ModuleNotFoundError if it needs a missing extra."""
    found = entry_points(group=group, name=name)
    assert found, f"this package names {name} in {group}; install it again if its entry points are out of date"
    return next(iter(found)).load()
