"""The data files that come with the package."""

from __future__ import annotations

import json
import tomllib
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any


def _folder(name: str) -> Traversable:
    return files(__package__) / "catalogue" / name


@cache
def model_file_names() -> tuple[str, ...]:
    """Names of the models that have a file, sorted."""
    entries = (entry.name for entry in _folder("models").iterdir())
    return tuple(sorted(name.removesuffix(".json") for name in entries if name.endswith(".json")))


def read_model_file(name: str) -> dict[str, Any]:
    """The content of one model's file."""
    content = json.loads((_folder("models") / f"{name}.json").read_text(encoding="utf-8"))
    assert isinstance(content, dict)
    return content


def read_machine_file(name: str) -> dict[str, dict[str, Any]]:
    """The tables of one of the files in the folder of machines (``devices``, ``hosts``, ...), by name."""
    return tomllib.loads((_folder("machines") / f"{name}.toml").read_text(encoding="utf-8"))
