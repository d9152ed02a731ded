"""The states of random generators: Python's, numpy's, torch's."""

from __future__ import annotations

import hashlib
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


def derived_states(of_rank_0: dict[str, Any], rank: int) -> dict[str, Any]:
    """The states of a rank that has saved none: seeded from torch's seed on rank 0 and the rank's number.

    The same in every resumption, and other than any other rank's.  CUDA's is seeded alike.
    """
    generator = torch.Generator()
    generator.set_state(of_rank_0["torch"])
    digest = hashlib.sha256(f"{generator.initial_seed()} {rank}".encode()).digest()
    seed = int.from_bytes(digest[:8])
    name, keys, position, has_gauss, cached_gaussian = np.random.RandomState(seed % 2**32).get_state(legacy=True)
    states = {
        "python": random.Random(seed).getstate(),
        "numpy": (name, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached_gaussian),
        "torch": torch.Generator().manual_seed(seed).get_state(),
    }
    if "cuda" in of_rank_0:
        # The seed, and no number drawn yet: 16 bytes, as torch.cuda.get_rng_state() has them.
        states["cuda"] = torch.frombuffer(bytearray(seed.to_bytes(8, "little") + bytes(8)), dtype=torch.uint8)
    return states
