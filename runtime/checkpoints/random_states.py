"""The states of the random generators that a training draws from: Python's, numpy's, torch's."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def random_states(device: torch.device) -> dict[str, Any]:
    """The states of all generators, in types that torch reads back without unpickling code.

    Of CUDA devices ``device`` alone is asked.
    """
    name, keys, position, has_gauss, cached_gaussian = np.random.get_state()
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached_gaussian),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_random_states(states: dict[str, Any], device: torch.device) -> None:
    """Let all generators go on from ``states``; a CUDA device's is set if they were taken with one."""
    name, keys, position, has_gauss, cached_gaussian = states["numpy"]
    random.setstate(states["python"])
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached_gaussian))
    torch.set_rng_state(states["torch"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


def check_random_states(states: dict[str, Any]) -> None:
    """Try ``states`` on generators of its own.  Raises ValueError, TypeError, KeyError or RuntimeError."""
    name, keys, position, has_gauss, cached_gaussian = states["numpy"]
    random.Random().setstate(states["python"])
    np.random.RandomState().set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached_gaussian))
    torch.Generator().set_state(states["torch"])
