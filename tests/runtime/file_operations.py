"""Every operation on files that a save consists of, so that a test can stop it at each."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from protwin.runtime.checkpoints.checkpoints import CheckpointContent, read_checkpoint, write_checkpoint
from protwin.runtime.checkpoints.random_states import random_states

OPERATIONS = ("fsync", "mkdir", "open", "rename", "rmdir", "unlink", "listdir")


_opening: list[Callable[[Any], None]] = []
"""What is called before a file is opened, now."""


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if event == "open":
        for before in tuple(_opening):
            before(args[0])


@cache
def _hear_of_opened_files() -> None:
    """Once in a process: Python never takes such a hook back, and calls each at every event, ``id()`` among them."""
    sys.addaudithook(_audit)


@contextmanager
def before_every_operation(do: Callable[[str, tuple[Any, ...]], None]) -> Iterator[None]:
    """Within the block, ``do(name, arguments)`` runs before every operation; files are opened by ``"open"`` too.

    Those outside folders named "saved" do not count.
    """
    originals = {name: getattr(os, name) for name in OPERATIONS}

    def is_ours(path: Any) -> bool:
        # A number is an open file, which is synced.
        return isinstance(path, int) or "saved" in str(path)

    def wrapped(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if name != "open" and is_ours(args[0]):
                do(name, args)
            return originals[name](*args, **kwargs)

        return call

    def opening(path: Any) -> None:
        if is_ours(path):
            do("open", (path,))

    _hear_of_opened_files()
    _opening.append(opening)
    for name in OPERATIONS:
        setattr(os, name, wrapped(name))
    try:
        yield
    finally:
        _opening.remove(opening)
        for name, original in originals.items():
            setattr(os, name, original)


def content_of(step: int) -> CheckpointContent:
    """A small checkpoint, every tensor of which holds its step."""
    tensor = torch.full((3, 5), float(step))
    return CheckpointContent("hash", "Model", step, {"weight": tensor}, {"state": tensor}, {"step": step}, "{}")


def save(step: int, folder: Any) -> None:
    """Save what ``content_of`` gives."""
    write_checkpoint(folder, content_of(step))


def loaded_step(folder: Any) -> int:
    """The step of the checkpoint that is read, the same in all of its files."""
    content = read_checkpoint(folder, model_hash="hash")
    values = {content.step, content.training["step"], *content.weights["weight"].unique().tolist()}
    (step,) = values | set(content.optimizer["state"].unique().tolist())
    return int(step)


def save_like_a_training(folder: Any, *, num_tensors: int, scalars: int) -> None:
    """A checkpoint of one rank with equal float32 parameters, each with the state of AdamW."""
    made = {f"layer.{number}": torch.full((scalars,), float(number)) for number in range(num_tensors)}
    parameters = {
        name: {"state": {"step": torch.tensor(1.0), "exp_avg": value, "exp_avg_sq": value + 1}, "master": None}
        for name, value in made.items()
    }
    optimizer = {"class": "AdamW", "groups": [{"names": list(made), "options": {}}], "parameters": parameters}
    common = {"step": 1, "step_knobs": {}, "scheduler": None, "loss_scaler": None}
    own = {"random": random_states(torch.device("cpu")), "data_position": 0, "buffers": {}, "extra": {}}
    write_checkpoint(folder, CheckpointContent("hash", "Model", 1, made, optimizer, {**common, **own}))
