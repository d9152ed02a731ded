"""Importing transformers without what building a model has no use for.

[Note: What transformers imports needlessly]
Two things take a tenth of the time from a configuration to its workload.  Its losses import scipy's optimizers, of
which those of detection models call one function: a stand-in gives them one that imports scipy when it is called.  And
the folders of its models are read twice, first for the package and then for the package within, since the cache in
between is too small; what was found the first time is handed on.  Both are undone when the import has ended, and where
another release does neither, nothing happens.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Final

_OPTIMIZERS: Final = "scipy.optimize"
_MODELS: Final = "transformers.models"
_READER: Final = "create_import_structure_from_path"


def import_transformers() -> ModuleType:
    """The package, ready to build models from configurations.  Raises ImportError if it is not installed."""
    transformers = importlib.import_module("transformers")
    if _MODELS not in sys.modules:
        with _folders_read_once(transformers):
            importlib.import_module(_MODELS)
    return transformers


@contextmanager
def without_optimizers() -> Iterator[None]:
    """Let modules that are imported meanwhile have ``scipy.optimize.linear_sum_assignment`` without importing scipy's.

    Whatever else they ask of the module imports it.
    """
    if _OPTIMIZERS in sys.modules:
        yield
        return
    stand_in = _Optimizers(_OPTIMIZERS)
    sys.modules[_OPTIMIZERS] = stand_in
    try:
        yield
    finally:
        stand_in.leave()


class _Optimizers(ModuleType):
    """Stands for ``scipy.optimize`` until something but its assignment is asked for."""

    def leave(self) -> None:
        """Make way for the module itself."""
        if sys.modules.get(_OPTIMIZERS) is self:
            del sys.modules[_OPTIMIZERS]

    @staticmethod
    def linear_sum_assignment(*arguments: Any, **options: Any) -> Any:
        """The function of that name, imported when it is called."""
        return importlib.import_module(_OPTIMIZERS).linear_sum_assignment(*arguments, **options)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self.leave()
        return getattr(importlib.import_module(_OPTIMIZERS), name)


@contextmanager
def _folders_read_once(transformers: ModuleType) -> Iterator[None]:
    """Answer ``transformers.models``, which asks what its folders hold, with what the package has found there."""
    readers = sys.modules.get("transformers.utils.import_utils")
    read = getattr(readers, _READER, None)
    if readers is None or read is None or transformers.__file__ is None:
        yield
        return
    folder = Path(transformers.__file__).parent / "models"

    def read_once(path: Any) -> Any:
        # It asks by its own file, which stands for the folder.
        is_own = os.fspath(path) == str(folder / "__init__.py")
        return read(folder if is_own else path)

    setattr(readers, _READER, read_once)
    try:
        yield
    finally:
        setattr(readers, _READER, read)
