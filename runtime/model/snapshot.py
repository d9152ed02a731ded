"""What a measurement must leave as it found it: gradients, buffers, random state, settings of the model."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from .strides import without_repeats

_GENERATORS: Final = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
_STATE_OF: Final[dict[type, tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]]] = {
    torch.Generator: (torch.Generator.get_state, torch.Generator.set_state),
    random.Random: (random.Random.getstate, random.Random.setstate),
    np.random.RandomState: (np.random.RandomState.get_state, np.random.RandomState.set_state),
    np.random.Generator: (
        lambda generator: generator.bit_generator.state,
        lambda generator, state: setattr(generator.bit_generator, "state", state),
    ),
}
"""How the state of a random generator is read, and how it is set."""
_OF_PROCESS: Final = (random.seed.__self__, np.random.mtrand._rand)  # type: ignore[attr-defined]
"""What the functions of ``random`` and of ``numpy.random`` draw from."""


def generators_of(modules: Iterable[nn.Module]) -> list[Any]:
    """Random generators that ``modules`` have in attributes, or in lists, tuples and dicts there."""
    found: dict[int, Any] = {}
    for module in modules:
        for value in module.__dict__.values():
            parts = value.values() if type(value) is dict else value if type(value) in (list, tuple) else (value,)
            found.update((id(part), part) for part in parts if isinstance(part, _GENERATORS))
    return list(found.values())


class GeneratorStates:
    """Where random generators are: those that are given, and those of Python and numpy.

    torch's own are not among them.
    """

    def __init__(self, generators: Iterable[Any]) -> None:
        self._states = [(one, _state_of(one)) for one in (*_OF_PROCESS, *generators)]

    def changed(self) -> list[tuple[Any, bytes]]:
        """Those that are elsewhere by now, with the states that they were in."""
        return [(one, state) for one, state in self._states if _state_of(one) != state]


@contextmanager
def put_back(states: Iterable[tuple[Any, bytes]]) -> Iterator[None]:
    """Within the block generators are in these states, and afterwards where they were found."""
    found = [(one, _state_of(one), state) for one, state in states]
    for one, _, state in found:
        _set_state(one, state)
    try:
        yield
    finally:
        for one, state, _ in found:
            _set_state(one, state)


def _state_of(generator: Any) -> bytes:
    get, _ = _accessors(generator)
    state = get(generator)
    return pickle.dumps(state.numpy() if isinstance(state, torch.Tensor) else state)


def _set_state(generator: Any, state: bytes) -> None:
    _, put = _accessors(generator)
    value = pickle.loads(state)
    put(generator, torch.from_numpy(value) if isinstance(generator, torch.Generator) else value)


def _accessors(generator: Any) -> tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]:
    return next(found for kind, found in _STATE_OF.items() if isinstance(generator, kind))


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
