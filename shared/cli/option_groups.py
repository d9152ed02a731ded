"""Options that several commands take, declared once: a command has one parameter for a whole group of them.

[Note: Groups of options]
Typer reads options off a function's signature.  A group is a frozen dataclass whose fields are such parameters; what
Typer sees of a command in its place is one parameter for each field, and what the command gets is the group.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from inspect import Parameter
from typing import Any, get_type_hints


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """``command`` as Typer reads it; see [Note: Groups of options].  A default of a group's field is the option's."""
    types = get_type_hints(command, include_extras=True)
    groups: dict[str, type[Any]] = {}
    parameters: list[Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        of = types[name]
        if isinstance(of, type) and is_dataclass(of):
            groups[name] = of
            hints = get_type_hints(of, include_extras=True)
            parameters += (
                Parameter(
                    field.name,
                    Parameter.KEYWORD_ONLY,
                    annotation=hints[field.name],
                    default=Parameter.empty if field.default is MISSING else field.default,
                )
                for field in fields(of)
            )
        else:
            parameters.append(parameter.replace(kind=Parameter.KEYWORD_ONLY, annotation=of))
    # What has to be said comes first, whichever group it is of.
    parameters.sort(key=lambda parameter: parameter.default is not Parameter.empty)

    @wraps(command)
    def spread(**given: Any) -> None:
        own = {name: of(**{field.name: given.pop(field.name) for field in fields(of)}) for name, of in groups.items()}
        command(**given, **own)

    spread.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    spread.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return spread
