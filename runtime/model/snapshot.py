"""What a measurement must leave as it found it: gradients, buffers, random state, settings of the model."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from ctypes import string_at
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from .strides import without_repeats

_GENERATORS: Final = frozenset((torch.Generator, random.Random, np.random.Generator, np.random.RandomState))
"""Looked up among the bases of a type: asking an object whether it is a torch.Generator takes as long as an operation.
"""
OF_EVERY_MODULE: Final = frozenset(nn.Module().__dict__)
"""Attributes in which torch keeps parts, hooks and the like."""
_OF_PROCESS: Final = (random.seed.__self__, np.random.mtrand._rand)  # type: ignore[attr-defined]
"""What the functions of ``random`` and of ``numpy.random`` draw from."""


def generators_of(modules: Iterable[nn.Module]) -> list[Any]:
    """Random generators that ``modules`` have in attributes, or in lists, tuples and dicts there."""
    found: dict[int, Any] = {}
    for module in modules:
        for name, value in module.__dict__.items():
            if name in OF_EVERY_MODULE:
                continue
            kind = type(value)
            parts = value.values() if kind is dict else value if kind in (list, tuple) else (value,)
            found.update((id(part), part) for part in parts if not _GENERATORS.isdisjoint(type(part).__mro__))
    return list(found.values())


class GeneratorStates:
    """Where random generators are: those that are given, and those of Python and numpy.

    torch's own are not among them.
    """

    def __init__(self, generators: Iterable[Any]) -> None:
        self._states = [(one, _state_of(one)) for one in (*_OF_PROCESS, *generators)]

    def changed(self) -> list[tuple[Any, Any]]:
        """Those that are elsewhere by now, with the states that they were in."""
        return [(one, state) for one, state in self._states if _state_of(one) != state]


@contextmanager
def put_back(states: Iterable[tuple[Any, Any]]) -> Iterator[None]:
    """Within the block generators are in these states, and afterwards where they were found."""
    found = [(one, _state_of(one), state) for one, state in states]
    for one, _, state in found:
        _set_state(one, state)
    try:
        yield
    finally:
        for one, state, _ in found:
            _set_state(one, state)


def _frozen(generator: np.random.RandomState) -> tuple[Any, ...]:
    """Name, words, place among them, whether a normal number is left over, and that one."""
    found: Any = generator.get_state(legacy=True)
    kind, key, *rest = found
    return kind, key.tobytes(), *rest


class _OfNumpy:
    """The state of numpy's own generator, which is asked for it only where somebody has drawn: that takes 30 µs.

    A draw changes its words or their place, unless a normal number is left over from the one before.
    """

    def __init__(self) -> None:
        self._seen: tuple[Any, bytes] | None = None
        self._state: tuple[Any, ...] = ()

    def state(self) -> tuple[Any, ...]:
        """``_frozen``."""
        bits = np.random.get_bit_generator()  # type: ignore[attr-defined]
        if not isinstance(bits, np.random.MT19937):
            return _frozen(_OF_PROCESS[1])
        seen = (bits, string_at(bits.ctypes.state_address, _MT19937_BYTES))
        if seen != self._seen:
            self._state = _frozen(_OF_PROCESS[1])
            has_left_over = self._state[3]
            self._seen = None if has_left_over else seen
        return self._state


_MT19937_BYTES: Final = 625 * 4
"""Of 624 words and the place of the next one (numpy, random/src/mt19937/mt19937.h)."""
_of_numpy: Final = _OfNumpy()


def _state_of(generator: Any) -> Any:
    """Where it is: something that is equal to another state where the two are the same."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    if generator is _OF_PROCESS[1]:
        return _of_numpy.state()
    if isinstance(generator, np.random.RandomState):
        return _frozen(generator)
    if isinstance(generator, np.random.Generator):
        return pickle.dumps(generator.bit_generator.state)
    return generator.get_state().numpy().tobytes()


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.RandomState):
        kind, key, *rest = state
        generator.set_state((kind, np.frombuffer(key, dtype=np.uint32), *rest))
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = pickle.loads(state)
    else:
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


@contextmanager
def random_states_kept() -> Iterator[None]:
    """After the block the random generators of Python, numpy and torch are where they were before it."""
    python_state, numpy_state, state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    of_devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else None
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(state)
        if of_devices is not None:
            torch.cuda.set_rng_state_all(of_devices)


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """After the block the model's buffers are the same tensors, or None, and hold what they held before."""
    found = [
        (module, name, buffer, None if buffer is None else without_repeats(buffer.detach()).clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for module, name, buffer, value in found:
                if buffer is not None and value is not None:
                    buffer.copy_(value)
                module._buffers[name] = buffer


@contextmanager
def left_as_found(model: nn.Module) -> Iterator[None]:
    """Run measurements on ``model`` in training mode and leave it as it was, whether or not they raise.

    Gradients, buffers, training flags, ``use_cache`` and the states of the random generators of Python, numpy, torch
    and the model's modules are bit for bit what they were.
    """
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    flags = [(module, module.training) for module in model.modules()]
    of_modules = [(generator, _state_of(generator)) for generator in generators_of(model.modules())]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        with random_states_kept(), buffers_kept(model), without_cache(model):
            model.train()
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for generator, state in of_modules:
            _set_state(generator, state)
        for module, flag in flags:
            module.training = flag


@contextmanager
def without_cache(model: nn.Module) -> Iterator[None]:
    """Turn ``use_cache`` of a transformers model off: a key-value cache grows in training and breaks recomputation."""
    found: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    configs = [config for config in found if getattr(config, "use_cache", False) is True]
    for config in configs:
        config.use_cache = False
    try:
        yield
    finally:
        for config in configs:
            config.use_cache = True
