"""Fake tensors whose values are known: integers of the batch, and all that follows from them and from constants.

Some models look at their input: for the place of images in text, for the ends of samples, for how many tokens each
expert gets.  A fake tensor has no values to look at, but it can carry a real twin along (``FakeTensor.constant``).
torch computes with such twins by itself as long as all tensors of an operation have one, yet keeps only those of a
single element, and none of what is made from nothing (``torch.arange``).  Within ``KnownValues`` it keeps them.
Weights, images and activations never have one, so nothing that takes time is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from typing import Any, ClassVar, Final, TypeVar

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ..devices.time_limit import check_time_before
from ..model.batches import batch_tensors

_LIMIT: Final = "CONSTANT_NUMEL_LIMIT"
_MADE: Final = frozenset({"arange", "zeros", "ones", "full", "scalar_tensor", "eye", "tril_indices", "triu_indices"})
_ALIKE: Final = {"zeros_like": 0, "ones_like": 1, "new_zeros": 0, "new_ones": 1}
_FILLED: Final = frozenset({"full_like", "new_full"})


T = TypeVar("T")


@contextmanager
def values_known(mode: FakeTensorMode) -> Iterator[None]:
    """``mode``, in which torch keeps the values of tensors of up to ``KnownValues.MOST`` elements."""
    before = getattr(fake_tensor, _LIMIT)
    setattr(fake_tensor, _LIMIT, KnownValues.MOST)
    try:
        with mode, KnownValues(mode), _KnownElements():
            yield
    finally:
        setattr(fake_tensor, _LIMIT, before)


def with_values_if_wanted(batch: Any, run: Callable[[bool], T]) -> T:
    """``run(False)``, or ``run(True)`` if a model looked at values meanwhile and ``batch`` holds some."""
    try:
        return run(False)
    except Exception as error:
        tensors = batch_tensors(batch).values()
        if not looks_at_values(error) or all(tensor.is_meta or tensor.is_floating_point() for tensor in tensors):
            raise
    return run(True)


class KnownValues(TorchDispatchMode):
    """Gives integers that an operation makes from nothing their values; enter it within ``mode``."""

    MOST: ClassVar[int] = 2**22
    """Elements of a tensor whose values are kept."""

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._mode = mode

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """What the operation gives, with its values if it makes integers."""
        check_time_before(func)
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not isinstance(result, FakeTensor) or result.constant is not None or not _is_small_integer(result):
            return result
        name = func.overloadpacket.__name__
        real: torch.Tensor | None = None
        with unset_fake_temporarily():
            if name in _MADE and not any(isinstance(a, torch.Tensor) for a in pytree.tree_leaves((args, kwargs))):
                real = func(*args, **kwargs | ({"device": "cpu"} if "device" in kwargs else {}))
            elif name in _ALIKE:
                real = torch.full(result.shape, _ALIKE[name], dtype=result.dtype)
            elif name in _FILLED and not isinstance(args[-1], torch.Tensor):
                real = torch.full(result.shape, args[-1], dtype=result.dtype)
        return result if real is None else known(real, self._mode)


class _KnownElements(TorchFunctionMode):
    """Makes tensors of lists that hold known ones, which ``torch.tensor`` would read off memory that is not there."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.tensor and args and not isinstance(args[0], torch.Tensor):
            args = (pytree.tree_map_only(FakeTensor, lambda element: element.tolist(), args[0]), *args[1:])
        return func(*args, **(kwargs or {}))


def known(real: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    """The fake tensor of ``mode`` that carries ``real`` along.

    Of a view torch makes a view of a fake base, which carries nothing along: the twin of a copy is made instead.
    """
    if real._is_view():
        with unset_fake_temporarily():
            real = real.clone()
    return mode.fake_tensor_converter.from_real_tensor(mode, real, make_constant=True)


def _is_small_integer(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex() and prod(tensor.shape) <= KnownValues.MOST


def looks_at_values(error: BaseException | None) -> bool:
    """Whether an error, or one that led to it, is a fake tensor's whose values somebody wanted."""
    wanted = (fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException)
    while error is not None:
        if isinstance(error, wanted):
            return True
        error = error.__cause__ or error.__context__
    return False
