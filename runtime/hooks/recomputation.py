"""A block's forward for the second time, within backward, and what must not happen twice.

[Note: State of blocks]
A block may change itself when it runs: buffers that are counted up, power iterations of spectral norms, running means
of one's own, plain numbers on the module, tensors in its attributes, random generators of its own, lists and dicts that
its modules hold, perhaps with others.  Recomputation starts from what the block's forward started from, and what the
forward left is back when it ends.  So do the generators of Python and numpy; checkpointing itself puts back those of
torch.  A tensor that recomputation would leave in an attribute holds all that recomputation saves: nobody runs backward
through its graph.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from types import TracebackType
from typing import Any, Final

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from ...shared.basics.errors import ScheduleError
from ...shared.basics.units import format_bytes
from ..model.snapshot import OF_EVERY_MODULE, GeneratorStates, generators_of, put_back

_LARGEST_BYTES: Final = 64 * 2**10
"""Buffers up to this size are kept from before every forward; a larger one that changes is refused."""
_PLAIN: Final = (bool, int, float, str)
_ABSENT: Final = object()
"""In place of an attribute that was not there."""
_CONTAINERS: Final = (list, dict, set, deque, Counter, defaultdict, OrderedDict)


class BlockState:
    """What one run of a block's forward changes ([Note: State of blocks]).

    Running statistics of normalizations are ``Recomputation``'s.
    """

    def __init__(self, name: str, modules: Sequence[nn.Module], *, is_training: bool = True) -> None:
        """``is_training``: whether the result matters; a trace leaves everything as it was found anyway."""
        self._name = name
        self._is_training = is_training
        self._modules = [module for module in modules if not isinstance(module, _NormBase)]
        self._buffers: list[tuple[nn.Module, str, torch.Tensor]] = []
        """Those that the forward changed, as they were before it."""
        self._attributes: list[tuple[nn.Module, str, Any]] = []
        self._generators: list[tuple[Any, Any]] = []
        """Random generators that the forward drew from, with their states before it."""
        self._containers: list[tuple[Any, Any]] = []
        """Those whose content the forward changed, with a copy from before it."""

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note what the forward within the block changes.  Raises ScheduleError if that is too large to be kept."""
        before_all = [(module, dict(module.__dict__), self._marks(module)) for module in self._modules]
        buffers = [
            (module, name, buffer, buffer._version, self._kept(buffer))
            for module in self._modules
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        attributes = [(module, _plain_attributes(module)) for module in self._modules]
        generators = GeneratorStates(generators_of(self._modules))
        held = {id(one): one for _, values in attributes for value in values.values() for one in _containers_in(value)}
        containers = [(one, copy(one)) for one in held.values()]
        yield
        self._generators = generators.changed()
        for module, name, buffer, version, kept in buffers:
            if module._buffers.get(name) is buffer and buffer._version == version:
                continue
            if kept is None and not self._is_training:
                continue
            if kept is None:
                raise self._too_large(f"buffer {name}", buffer)
            self._buffers.append((module, name, kept))
        for module, values, marks in before_all:
            self._note_tensors(module, values, marks)
        for module, before in attributes:
            now = module.__dict__
            self._attributes += [
                (module, key, value) for key, value in before.items() if _is_other(now.get(key), value)
            ]
        self._containers += [(one, before) for one, before in containers if _has_changed(one, before)]

    def _marks(self, module: nn.Module) -> dict[str, tuple[int, torch.Tensor | None]]:
        """Versions of tensors in plain attributes, and copies of small ones, which may change in place."""
        return {
            name: (value._version, self._kept(value))
            for name, value in module.__dict__.items()
            if _is_tensor(value) and not value.is_inference()
        }

    def _note_tensors(
        self, module: nn.Module, before: dict[str, Any], marks: dict[str, tuple[int, torch.Tensor | None]]
    ) -> None:
        """``before``: attributes as they were before the forward, with their ``_marks``."""
        now = module.__dict__
        for name in (*before, *(name for name in now if name not in before)):
            was, value = before.get(name, _ABSENT), now.get(name, _ABSENT)
            if was is not value and (_is_tensor(was) or _is_tensor(value)):
                self._attributes.append((module, name, _beside_its_graph(was)))
            elif was is value and name in marks and marks[name][0] != value._version:
                kept = marks[name][1]
                if kept is not None:
                    self._attributes.append((module, name, kept))
                elif self._is_training:
                    raise self._too_large(f"attribute {name}", value)

    def _too_large(self, name: str, tensor: torch.Tensor) -> ScheduleError:
        size = format_bytes(tensor.numel() * tensor.element_size())
        return ScheduleError(
            f"block {self._name} changes its {name} ({size}) when it runs. Recomputation would change "
            f"it twice. Keep or swap this block (activation_modes, n_checkpoint)."
        )

    @staticmethod
    def _kept(buffer: torch.Tensor) -> torch.Tensor | None:
        is_small = buffer.numel() * buffer.element_size() <= _LARGEST_BYTES
        return buffer.detach().clone() if is_small else None

    @contextmanager
    def as_before(self) -> Iterator[None]:
        """Within the block, everything is as it was before the forward; afterwards, as it was found."""
        found = [(module, name, module._buffers[name]) for module, name, _ in self._buffers]
        attributes = [(module, name, module.__dict__.get(name, _ABSENT)) for module, name, _ in self._attributes]
        contents = [(one, copy(one)) for one, _ in self._containers]
        for module, name, buffer in self._buffers:
            module._buffers[name] = buffer
        for module, name, value in self._attributes:
            _put(module, name, value)
        for one, before in self._containers:
            _fill(one, before)
        try:
            with put_back(self._generators):
                yield
        finally:
            for one, left in contents:
                _fill(one, left)
            for module, name, current in found:
                module._buffers[name] = current
            for module, name, value in attributes:
                _put(module, name, value)
            self._buffers.clear()
            self._attributes.clear()
            self._containers.clear()


class Recomputation:
    """The context of one recomputation: tells when it has ended, and lets running statistics stand still.

    A normalization that keeps running statistics would count the batch twice.  Its momentum is 0 meanwhile: the same
    operations run and save the same tensors, which checkpointing insists on, but the statistics keep their values.
    """

    def __init__(self, block: nn.Module, state: BlockState, on_end: Callable[[], None]) -> None:
        """``state`` is what the block's forward has changed, which starts anew."""
        self._block = block
        self._state = state.as_before()
        self._on_end = on_end
        self._stilled: list[tuple[_NormBase, float | None, torch.Tensor | None]] = []

    def __enter__(self) -> None:
        self._state.__enter__()
        for module in self._block.modules():
            if isinstance(module, _NormBase) and module.training and module.track_running_stats:
                counted = module.num_batches_tracked
                before = counted.clone() if counted is not None else None
                self._stilled.append((module, module.momentum, before))
                module.momentum = 0.0

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for module, momentum, counted in self._stilled:
            module.momentum = momentum
            if counted is not None and module.num_batches_tracked is not None:
                module.num_batches_tracked.copy_(counted)
        self._stilled.clear()
        self._state.__exit__(None, None, None)
        # Within autocast that goes on through backward, casts of weights would stay in its cache until the next
        # forward; where autocast goes around forward alone, that of the recomputation ends here and drops them too.
        torch.clear_autocast_cache()
        # Early stop leaves recomputation by an exception of its own; the backward proper follows in any case.
        self._on_end()


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter)


def _beside_its_graph(value: Any) -> Any:
    """A tensor without the graph of the iteration that made it, of which nobody can need more than values."""
    if isinstance(value, torch.Tensor) and value.grad_fn is not None:
        return value.detach().requires_grad_()
    return value


def _put(module: nn.Module, name: str, value: Any) -> None:
    """Let a module have this attribute, or none of that name."""
    if value is _ABSENT:
        module.__dict__.pop(name, None)
    else:
        module.__dict__[name] = value


def _plain_attributes(module: nn.Module) -> dict[str, Any]:
    return {
        key: value
        for key, value in module.__dict__.items()
        if type(value) in _PLAIN or (type(value) in _CONTAINERS and key not in OF_EVERY_MODULE)
    }


def _containers_in(value: Any) -> Iterator[Any]:
    """``value`` if it is a container, and those within it, the outer one first."""
    found, seen = [value], set()
    while found:
        one = found.pop()
        if type(one) in _CONTAINERS and id(one) not in seen:
            seen.add(id(one))
            yield one
            found += one.values() if isinstance(one, dict) else one


def _is_other(now: Any, before: Any) -> bool:
    """Whether an attribute is another number, text or container, or one of another type."""
    return now is not before if type(before) in _CONTAINERS else type(now) is not type(before) or now != before


def _has_changed(one: Any, before: Any) -> bool:
    """Whether a container holds other things, or in another order; tensors and the like are compared by identity."""
    if len(one) != len(before):
        return True
    if isinstance(one, dict):
        return any(a is not c or _differ(b, d) for (a, b), (c, d) in zip(one.items(), before.items(), strict=True))
    return one != before if isinstance(one, set) else any(map(_differ, one, before))


def _differ(one: Any, other: Any) -> bool:
    return one is not other and not (type(one) is type(other) and type(one) in _PLAIN and one == other)


def _fill(one: Any, content: Any) -> None:
    """Let a container, whoever holds it, have this content."""
    one.clear()
    if isinstance(one, list | deque):
        one.extend(content)
    else:
        dict.update(one, content) if isinstance(one, dict) else one.update(content)
