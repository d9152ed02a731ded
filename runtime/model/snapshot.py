"""What a measurement must leave as it found it: gradients, buffers, random state, settings of the model."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from .strides import without_repeats


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
    """After the block the model's buffers hold what they held before."""
    values = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in values:
                buffer.copy_(value)


@contextmanager
def left_as_found(model: nn.Module) -> Iterator[None]:
    """Run measurements on ``model`` in training mode and leave it as it was, whether or not they raise.

    Gradients, buffers, training flags, ``use_cache`` and the states of the random generators of Python, numpy and torch
    are bit for bit what they were.
    """
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    buffers = [
        (module, name, buffer, without_repeats(buffer.detach()).clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    flags = [(module, module.training) for module in model.modules()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        with random_states_kept(), without_cache(model):
            model.train()
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for module, name, buffer, value in buffers:
                buffer.copy_(value)
                module._buffers[name] = buffer
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
