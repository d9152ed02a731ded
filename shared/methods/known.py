"""The methods that plans name."""

from __future__ import annotations

from typing import Final

from ..schema.plan import TrainingMethod
from .bypass import BYPASS
from .full_training import FULL_TRAINING
from .method import Method
from .osft import OSFT

METHODS: Final = {TrainingMethod.FULL: FULL_TRAINING, TrainingMethod.BYPASS: BYPASS, TrainingMethod.OSFT: OSFT}


def method_named(name: TrainingMethod, own: Method | None = None) -> Method:
    """The method of that name; ``own``: another one, which plans do not name, in its place."""
    return METHODS[name] if own is None else own
