"""What is said of a model that asks fake tensors for values: which of its modules asks, and what to do about it."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from torch import nn

from ..model.batches import Batch, BatchRefusedError, batch_tensors
from .known_values import looks_at_values

_CHANCES: Final = ("layerdrop", "layer_drop", "mask_time_prob", "mask_feature_prob")
"""How settings end that have a model draw what it computes."""


class ValuesWantedError(BatchRefusedError):
    """A model without weights decides by values."""

    def __init__(self, model: str, reason: str) -> None:
        super().__init__(f"{model} {reason}")
        self.reason = reason
        """What it does and what to do about it, after the model's name."""


@contextmanager
def wanted_values_named(model: nn.Module, batch: Batch) -> Iterator[None]:
    """Turn what fake tensors raise where ``model`` asks them for values into ValuesWantedError."""
    try:
        yield
    except Exception as error:
        if not looks_at_values(error):
            raise
        raise ValuesWantedError(type(model).__name__, _reason(model, batch, error)) from error


def _reason(model: nn.Module, batch: Batch, error: BaseException) -> str:
    asking = _asking_module(model, error)
    wants = (
        f"decides {asking}what to compute by values that only a run with weights has, so no trace without them holds"
    )
    config = getattr(model, "config", None)
    settings = config.to_dict().items() if config is not None and hasattr(config, "to_dict") else ()
    chances = ", ".join(f"{name} {value:g}" for name, value in settings if name.endswith(_CHANCES) and value)
    if chances:
        return f"{wants}. Of its settings that draw by chance, set to 0: {chances}."
    is_unknown = any(tensor.is_meta and not tensor.is_floating_point() for tensor in batch_tensors(batch).values())
    first = " If it reads them off the batch, put the batch's tensors on the CPU." if is_unknown else ""
    otherwise = "Else trace" if is_unknown else "Trace"
    return (
        f"{wants}.{first} {otherwise} it with weights and a batch of its own in Python: "
        f"protwin.runtime.trace(model, batch)."
    )


def _asking_module(model: nn.Module, error: BaseException | None) -> str:
    """The innermost module of ``model`` that ran as ``error`` or what led to it was raised, if it is a part."""
    names = {id(module): (name, type(module).__name__) for name, module in model.named_modules()}
    found = ("", "")
    while error is not None:
        for frame, _ in traceback.walk_tb(error.__traceback__):
            found = names.get(id(frame.f_locals.get("self")), found)
        error = error.__cause__ or error.__context__
    name, kind = found
    return f"in {name} ({kind}) " if name else ""
