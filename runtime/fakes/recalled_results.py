"""Results of operations on fake tensors that were seen before, without the way through torch's fake mode.

[Note: What decides a result]
The fake mode finds the shape, strides and type of what an operation gives, and makes a tensor of them.  It keeps what
it found too, but takes several times as long to look it up as to make the tensor; a trace has tens of thousands of
operations, of a few hundred kinds.  What an operator gives that writes to nothing is new, or a view of what it is
given; how it lies follows from how its tensors lie, and from its other arguments.  So that is kept here as long as one
run lasts.  All else takes torch's way: operators that change something, whose sizes follow from values, or that fall
apart; tensors whose values are known, other layouts and wrappers; and results that are not as those that are made of
their strides.
"""

from __future__ import annotations

from functools import cache
from types import NoneType
from typing import Any, Final, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

_PLAIN: Final = frozenset(
    {bool, int, float, str, NoneType, torch.dtype, torch.device, torch.layout, torch.memory_format}
)
"""Types of arguments that are no tensors, and do the same where they are equal."""
_CPU: Final = torch.device("cpu")
_OF_VALUES: Final = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view})


class _Look(NamedTuple):
    """How a tensor lies that an operation gives."""

    size: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    source: int | None
    """The tensor among those that are given whose storage it has; None: it has a new one."""
    offset: int


class _Known(NamedTuple):
    """What an operation gives."""

    is_several: bool
    looks: tuple[_Look | None, ...]


class RecalledResults:
    """What operations on tensors of one fake mode gave ([Note: What decides a result])."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._known: dict[Any, _Known | None] = {}
        """By operator and arguments; None: by torch's way."""

    def run(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What ``operator`` gives."""
        if not _writes_nothing(operator):
            return operator(*args, **kwargs)
        given: list[FakeTensor] = []
        key: list[Any] = [operator, torch.get_default_dtype(), torch.is_inference_mode_enabled(), *kwargs]
        if not self._add(args, key, given) or not self._add(tuple(kwargs.values()), key, given) or not given:
            return operator(*args, **kwargs)
        place = tuple(key)
        if place not in self._known:
            result = operator(*args, **kwargs)
            self._known[place] = self._seen(result, given)
            return result
        known = self._known[place]
        if known is None:
            return operator(*args, **kwargs)
        made = [None if look is None else self._made(look, given) for look in known.looks]
        return tuple(made) if known.is_several else made[0]

    def _add(self, values: Any, key: list[Any], given: list[FakeTensor]) -> bool:
        """Add ``values`` to a key and their tensors to ``given``; whether nothing else decides."""
        key.append(len(values))
        for value in values:
            kind = type(value)
            if kind is FakeTensor:
                if not self._is_usual(value):
                    return False
                key.append((value.shape, value.stride(), value.dtype, value.storage_offset(), value.requires_grad))
                given.append(value)
            elif kind in _PLAIN:
                key.append((kind, value))
            elif kind is list or kind is tuple or kind is torch.Size:
                if not self._add(value, key, given):
                    return False
            else:
                return False
        return True

    def _is_usual(self, tensor: FakeTensor) -> bool:
        return (
            tensor.fake_mode is self._mode
            and tensor.constant is None
            and tensor.fake_device == _CPU
            and tensor.layout is torch.strided
            and not tensor.dtype.is_complex
            and not tensor.is_neg()
            and not tensor._is_zerotensor()
        )

    def _made(self, look: _Look, given: list[FakeTensor]) -> FakeTensor:
        with torch._C._DisableTorchDispatch():
            empty = torch.empty_strided(look.size, look.strides, dtype=look.dtype, device="meta")
            if look.source is not None:
                empty.set_(given[look.source].untyped_storage(), look.offset, look.size, look.strides)
            return FakeTensor(self._mode, empty, _CPU)

    def _seen(self, result: Any, given: list[FakeTensor]) -> _Known | None:
        """What ``result`` is; None if another one like it would not be the same."""
        results = result if isinstance(result, tuple) else (result,)
        looks = tuple(None if one is None else self._look(one, given) for one in results)
        made = [
            one.untyped_storage()._cdata
            for one, look in zip(results, looks, strict=True)
            if look and look.source is None
        ]
        is_like = all((one is None) == (look is None) for one, look in zip(results, looks, strict=True))
        if not is_like or len(set(made)) < len(made):
            return None
        return _Known(isinstance(result, tuple), looks)

    def _look(self, tensor: Any, given: list[FakeTensor]) -> _Look | None:
        """How ``tensor`` lies; None if one that is made so would not be the same."""
        if type(tensor) is not FakeTensor or any(tensor is one for one in given) or not self._is_usual(tensor):
            return None
        storage = tensor.untyped_storage()
        sources = (place for place, one in enumerate(given) if one.untyped_storage()._cdata == storage._cdata)
        look = _Look(tensor.shape, tensor.stride(), tensor.dtype, next(sources, None), int(tensor.storage_offset()))
        again = self._made(look, given)
        is_same = (
            not tensor.requires_grad
            and again.storage_offset() == tensor.storage_offset()
            and again.untyped_storage().nbytes() == storage.nbytes()
            and torch._C._dispatch_key_set(again) == torch._C._dispatch_key_set(tensor)
        )
        return look if is_same else None


@cache
def _writes_nothing(operator: Any) -> bool:
    """Whether an operator of torch's own gives tensors, and only reads what it is given, and runs as a whole."""
    schema = operator._schema
    return bool(
        operator.namespace == "aten"
        and schema.returns
        and all(str(one.type) in ("Tensor", "Optional[Tensor]") for one in schema.returns)
        and not any(one.alias_info is not None and one.alias_info.is_write for one in schema.arguments)
        and not _OF_VALUES.intersection(operator.tags)
        and not operator.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
    )
