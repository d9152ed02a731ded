"""Functions of the user's that make a model, by the places that a command names.  Needs no torch."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from ...shared.basics.errors import ProtwinError, WorkloadError

_FACTORY: Final = re.compile(r"(?P<module>.+\.py|[A-Za-z_][\w.]*):(?P<function>[A-Za-z_]\w*)")


def is_factory(model: str) -> bool:
    """Whether ``model`` names a function: ``models.py:make`` or ``package.models:make``."""
    return _FACTORY.fullmatch(model) is not None and not Path(model).exists()


def function_at(place: str) -> Callable[[], Any]:
    """The function that ``place`` names; its module is imported, or its file run.

    Raises WorkloadError if there is no such function, or if its module fails.
    """
    found = _FACTORY.fullmatch(place)
    assert found is not None
    function = getattr(_module_at(found["module"], place), found["function"], None)
    if not callable(function):
        raise WorkloadError(f"{found['module']} has no function {found['function']}, which {place} names.")
    made: Callable[[], Any] = function
    return made


def _module_at(where: str, place: str) -> ModuleType:
    try:
        if not where.endswith(".py"):
            return importlib.import_module(where)
        path = Path(where)
        if not path.is_file():
            raise WorkloadError(f"{where} does not exist, which {place} names.")
        spec = importlib.util.spec_from_file_location(path.stem, path, loader=_WithoutCache(path.stem, str(path)))
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        # What it defines may be looked up by the name of its module.
        sys.modules.setdefault(path.stem, module)
        spec.loader.exec_module(module)
    except ProtwinError:
        raise
    except Exception as error:
        raise WorkloadError(f"{place} cannot be imported: {told(error)}") from error
    return module


class _WithoutCache(SourceFileLoader):
    """Leaves no compiled module beside the user's file, as Python does of a program that it runs."""

    def set_data(self, path: str, data: Any, *, _mode: int = 0o666) -> None:
        """Write nothing."""


def told(error: Exception) -> str:
    """What somebody else's code raised, on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
