"""Options that several commands take, declared once: a command has one parameter for a whole group of them.

[Note: Groups of options]
Typer reads options off a function's signature.  A group is a frozen dataclass whose fields are such parameters, or
groups again; what Typer sees of a command in its place is one parameter for each field, and what the command gets is
the group.  A field of a group that no option is declared for keeps its default: a subclass may declare one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from inspect import Parameter
from typing import Annotated, Any, get_origin, get_type_hints


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """``command`` as Typer reads it; see [Note: Groups of options].  A default of a group's field is the option's."""
    types = get_type_hints(command, include_extras=True)
    groups: dict[str, type[Any]] = {}
    parameters: list[Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        of = types[name]
        if _is_group(of):
            groups[name] = of
            parameters += _options(of)
        else:
            parameters.append(parameter.replace(kind=Parameter.KEYWORD_ONLY, annotation=of))
    # What has to be said comes first, whichever group it is of.
    parameters.sort(key=lambda parameter: parameter.default is not Parameter.empty)

    @wraps(command)
    def spread(**given: Any) -> None:
        own = {name: _filled(of, given) for name, of in groups.items()}
        command(**given, **own)

    spread.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    spread.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return spread


def _options(group: type[Any]) -> Iterator[Parameter]:
    """The options of a group and of the groups in it, in order."""
    types = get_type_hints(group, include_extras=True)
    for field in fields(group):
        of = types[field.name]
        if _is_group(of):
            yield from _options(of)
        elif get_origin(of) is Annotated:
            default = Parameter.empty if field.default is MISSING else field.default
            yield Parameter(field.name, Parameter.KEYWORD_ONLY, annotation=of, default=default)


def _filled(group: type[Any], given: dict[str, Any]) -> Any:
    """The group with the values of its options, which are taken out of ``given``."""
    types = get_type_hints(group, include_extras=True)
    own = [field.name for field in fields(group) if field.name in given or _is_group(types[field.name])]
    return group(**{name: _filled(types[name], given) if _is_group(types[name]) else given.pop(name) for name in own})


def _is_group(of: Any) -> bool:
    return isinstance(of, type) and is_dataclass(of)
