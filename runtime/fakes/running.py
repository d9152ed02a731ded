"""How a fake model is run: all that fake tensors need around them, in one place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ...shared.basics.errors import WorkloadError
from ...shared.phases.packing import Packing
from .cuda_autocast import autocast_as_on_cuda
from .kernels import FakeGroupedProducts, kernels_of_cuda
from .known_values import values_known
from .models import plain_batches
from .recalled_results import RecalledResults


@contextmanager
def running_fakes(
    mode: FakeTensorMode, *, with_values: bool = False, packing: Packing | None = None, is_cuda: bool = False
) -> Iterator[None]:
    """Within the block models and batches of ``mode`` run.

    ``with_values``: as far as they are known (``known_values.py``).  ``packing``: how samples lie in the batch's rows.
    ``is_cuda``: by the kernels and casts of CUDA.
    """
    with (
        values_known(mode) if with_values else mode,
        FakeGroupedProducts(None if with_values else RecalledResults(mode)),
        kernels_of_cuda() if is_cuda else nullcontext(),
        autocast_as_on_cuda() if is_cuda else nullcontext(),
        plain_batches(packing),
        _unchanged_stay(),
        _strays_named(),
    ):
        yield


@contextmanager
def _unchanged_stay() -> Iterator[None]:
    """``Module.to`` in a forward leaves a parameter that it does not change as it is.

    It does so with real ones; fake ones it would swap for their like, which torch refuses once somebody has used them.
    """
    swap = torch.utils.swap_tensors

    def swap_changed(old: torch.Tensor, new: torch.Tensor) -> None:
        is_changed = old.untyped_storage()._cdata != new.untyped_storage()._cdata or old.dtype is not new.dtype
        if is_changed:
            swap(old, new)  # type: ignore[no-untyped-call]

    torch.utils.swap_tensors = swap_changed
    try:
        yield
    finally:
        torch.utils.swap_tensors = swap


@contextmanager
def _strays_named() -> Iterator[None]:
    """Tensors of the meta device that nobody made fake are neither of the model nor of the batch."""
    try:
        yield
    except RuntimeError as error:
        if "two devices" not in str(error) or "meta" not in str(error):
            raise
        raise WorkloadError(
            "the model or its loss uses a tensor on the meta device that is no parameter, no buffer and not in the "
            "batch. Make it a buffer (register_buffer), hand it over in the batch, or make it on the CPU."
        ) from error
