"""Optimizers by the names that plans have: what makes each, and why it cannot be made here."""

from __future__ import annotations

import importlib
import logging
import warnings
from functools import partial
from types import ModuleType
from typing import Any, Final

import torch

from ...shared.basics.errors import PlanError
from ...shared.basics.extras import install_command
from ...shared.schema.optimizer import Optimizer
from .chunk_optimizer import MakeOptimizer

_LIBRARY: Final = "bitsandbytes"
_OF_TORCH: Final[dict[Optimizer, MakeOptimizer]] = {
    Optimizer.ADAMW: partial(torch.optim.AdamW, fused=True),
    Optimizer.ADAMW_BF16: partial(torch.optim.AdamW, fused=True),
    Optimizer.ADAM: partial(torch.optim.Adam, fused=True),
    Optimizer.SGD: partial(torch.optim.SGD, momentum=0.9, fused=True),
    Optimizer.ADAFACTOR: partial(torch.optim.Adafactor, foreach=False),
}
_CLASSES: Final[dict[Optimizer, str]] = {
    Optimizer.LION: "Lion",
    Optimizer.ADAMW_8BIT: "AdamW8bit",
    Optimizer.PAGED_ADAMW_8BIT: "PagedAdamW8bit",
}
"""Of ``bitsandbytes.optim``."""


def named_optimizer(optimizer: Optimizer, **options: Any) -> MakeOptimizer:
    """What makes ``optimizer`` from parameter groups, with its own defaults but for ``options``, such as ``lr``.

    SGD has a momentum of 0.9 unless given; without momentum it would keep nothing.  Raises PlanError if the library
    that it comes from is not there.
    """
    made = _OF_TORCH.get(optimizer)
    if made is None:
        made = getattr(_bitsandbytes(optimizer).optim, _CLASSES[optimizer])
    return partial(made, **options) if options else made


def on_host(optimizer: Optimizer, make: MakeOptimizer) -> MakeOptimizer:
    """What makes the optimizer of a chunk that is stepped on the host, where nothing is paged."""
    if optimizer is not Optimizer.PAGED_ADAMW_8BIT or not isinstance(make, partial | type):
        return make
    options = make.keywords if isinstance(make, partial) else {}
    return named_optimizer(Optimizer.ADAMW_8BIT, **options)


def check_runs_on(optimizer: Optimizer, device: torch.device) -> None:
    """Raise PlanError if ``optimizer`` cannot step what lies on ``device``."""
    if optimizer.is_of_bitsandbytes:
        _bitsandbytes(optimizer)
    if optimizer is Optimizer.PAGED_ADAMW_8BIT and device.type != "cuda":
        raise PlanError(
            f"the optimizer {optimizer} pages its state between a CUDA device and its host, but the device is "
            f"{device.type}. Choose {Optimizer.ADAMW_8BIT}, which computes the same, and search its plan."
        )


def check_made(optimizer: Optimizer, made: torch.optim.Optimizer) -> None:
    """Raise PlanError if ``made``, by a user's own ``optimizer=``, is not what the plan accounts for.

    A plan for AdamW is carried out with any optimizer that keeps no more per scalar, as far as that is known.
    """
    named = _name_of(made)
    if optimizer is Optimizer.ADAMW:
        return
    # The two differ in what the plan steps them on, not in their class.
    accounted = Optimizer.ADAMW if optimizer is Optimizer.ADAMW_BF16 else optimizer
    paged = {Optimizer.PAGED_ADAMW_8BIT: (Optimizer.ADAMW_8BIT,)}.get(optimizer, ())
    if named is not accounted and named not in paged:
        raise PlanError(
            f"the plan accounts for the optimizer {optimizer}, but optimizer= makes {type(made).__name__}. Leave "
            f"optimizer= out, pass named_optimizer(Optimizer.{optimizer.name}, lr=...), or search a plan for another."
        )


def _name_of(made: torch.optim.Optimizer) -> Optimizer | None:
    """The name of an optimizer's own class; None for one that no plan knows."""
    known = {
        torch.optim.AdamW: Optimizer.ADAMW,
        torch.optim.Adam: Optimizer.ADAM,
        torch.optim.SGD: Optimizer.SGD,
        torch.optim.Adafactor: Optimizer.ADAFACTOR,
    }
    if type(made).__module__.partition(".")[0] == _LIBRARY:
        return next((name for name, of_class in _CLASSES.items() if of_class == type(made).__name__), None)
    return known.get(type(made))


def _bitsandbytes(optimizer: Optimizer) -> ModuleType:
    # It warns of what it would need for other things than optimizers.
    told = logging.getLogger(f"{_LIBRARY}.backends")
    level = told.level
    try:
        told.setLevel(logging.CRITICAL)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(_LIBRARY)
    except ImportError as error:
        raise PlanError(
            f"the optimizer {optimizer} is one of bitsandbytes, which cannot be imported ({error}). Install it "
            f"({install_command('bitsandbytes')}), or choose an optimizer of torch: "
            f"{', '.join(name for name in Optimizer if not name.is_of_bitsandbytes)}."
        ) from error
    finally:
        told.setLevel(level)
