"""The data files that come with the package."""

from __future__ import annotations

import json
import re
import tomllib
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any


def data_folder(name: str) -> Traversable:
    """One folder of the data that come with the package: ``machines``, ``models`` or ``workloads``."""
    return files(__package__) / "data" / name


@cache
def model_file_names() -> tuple[str, ...]:
    """Names of the models that have a file, sorted."""
    entries = (entry.name for entry in data_folder("models").iterdir())
    return tuple(sorted(name.removesuffix(".json") for name in entries if name.endswith(".json")))


def read_model_file(name: str) -> dict[str, Any]:
    """The content of one model's file."""
    content = json.loads((data_folder("models") / f"{name}.json").read_text(encoding="utf-8"))
    assert isinstance(content, dict)
    return content


@cache
def machine_sections(name: str) -> dict[str, str]:
    """The text of every table of one of the files in the folder of machines, by name; nothing of it is parsed."""
    text = (data_folder("machines") / f"{name}.toml").read_text(encoding="utf-8")
    heads = list(re.finditer(r"^\[([^\].]+)\]$", text, re.MULTILINE))
    ends = [head.start() for head in heads[1:]] + [len(text)]
    return {head[1]: text[head.start() : end] for head, end in zip(heads, ends, strict=True)}


def read_machine_table(file: str, name: str) -> dict[str, Any]:
    """One table of a file in the folder of machines.  A whole file takes twenty times as long to parse."""
    table: dict[str, Any] = tomllib.loads(machine_sections(file)[name])[name]
    return table
