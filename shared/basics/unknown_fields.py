"""The field that a misspelt one of a document may have meant."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, get_args

from pydantic import BaseModel

from .suggestions import did_you_mean, nearest_names


def meant_field(model: type[BaseModel], place: Sequence[int | str]) -> str:
    """``" Did you mean memory_bytes?"`` of an unknown field at ``place`` within ``model``; empty if none is near.

    ``place`` is pydantic's ``loc``: names of fields, keys and indices, the unknown field last.
    """
    *above, unknown = place
    kinds: list[Any] = [model]
    for part in above:
        if isinstance(part, str):
            # A name is a field of a model, or else a key, whose value the models within the annotation describe.
            fields = [kind.model_fields[part].annotation for kind in kinds if part in kind.model_fields]
            kinds = [found for annotation in fields for found in _models_in(annotation)] if fields else kinds
    names = dict.fromkeys(name for kind in kinds for name in kind.model_fields)
    return f" {did_you_mean(str(unknown), names)}" if nearest_names(str(unknown), names) else ""


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)
