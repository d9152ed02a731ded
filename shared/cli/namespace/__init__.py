"""Ask how to train a model that does not fit, then train it: ``protwin.plan`` and ``protwin.train``.

Importing it costs nothing: each name is loaded when it is first used, and torch with what needs it alone.  The rest is
in ``protwin.shared``, ``protwin.sim``, ``protwin.runtime`` and ``protwin.calibration``.

Type checkers read ``__init__.pyi``: this file lies in shared, which imports no other folder.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

# The four folders are packages by themselves, as in a namespace: whoever reads their imports (import-linter) asks this.
assert __spec__ is not None
__spec__.has_location = False

_HOMES = {"Trained": "protwin.calibration", "plan": "protwin.calibration", "train": "protwin.calibration"}
_FOLDERS = ("calibration", "runtime", "shared", "sim")

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    # Written out, since lazy_face would import protwin.shared, and the command starts with the standard library alone.
    if name in _FOLDERS:
        return import_module(f"protwin.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'protwin' has no attribute {name!r}")
    found = getattr(import_module(_HOMES[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted([*_HOMES, *_FOLDERS])
