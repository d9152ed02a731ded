"""How data shows itself in Python: one line to a programmer, a screenful of words to a reader, tables in a notebook.

What a document says in words is the matter of the tables, which stand on a higher floor and take time to import.  A
class names its tables' function; it is imported when an object is first printed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Set
from enum import Enum
from importlib import import_module
from typing import Any, ClassVar, Final

_MOST_ELEMENTS: Final = 4
_LONGEST_TEXT: Final = 60


class Shown:
    """Data that is never printed whole: a record has thousands of tasks."""

    __slots__ = ()

    TABLES: ClassVar[str] = ""
    """``module:function`` within ``protwin.shared``: gives the object's tables and sentences.  Empty for data that has
    none, which prints as its ``repr``."""

    def __repr__(self) -> str:
        """The fields that are not as they are by default, in one line; long ones are counted, and data is named."""
        told = (f"{name}={_brief(value)}" for name, value in _fields(self))
        return f"{type(self).__name__}({', '.join(told)})"

    def __str__(self) -> str:
        """What the object says, in words and tables of a screenful."""
        if not self.TABLES:
            return repr(self)
        text: str = _tables("screenful")(_parts(self))
        return text

    def _repr_html_(self) -> str | None:
        """The same as HTML, and all of it; notebooks ask for it.  None for data without tables."""
        if not self.TABLES:
            return None
        html: str = _tables("as_html")(_parts(self))
        return html


def _tables(name: str) -> Any:
    return getattr(import_module("..tables.shown", __package__), name)


def _parts(shown: Shown) -> Any:
    module, _, function = shown.TABLES.partition(":")
    return getattr(import_module(f"..{module}", __package__), function)(shown)


def _fields(shown: Shown) -> Iterator[tuple[str, Any]]:
    """Names and values of the fields that differ from their defaults."""
    kind: Any = type(shown)
    if dataclasses.is_dataclass(kind):
        defaults = {field.name: field.default for field in dataclasses.fields(kind)}
    else:
        defaults = {name: field.get_default() for name, field in kind.model_fields.items()}
    for name, default in defaults.items():
        value = getattr(shown, name)
        if type(value) is not type(default) or value != default:
            yield name, value


def _brief(value: Any) -> str:
    if isinstance(value, Shown):
        return f"{type(value).__name__}(…)"
    if isinstance(value, Enum):
        return repr(value.value)
    if isinstance(value, str):
        return repr(value if len(value) <= _LONGEST_TEXT else f"{value[:_LONGEST_TEXT]}…")
    if isinstance(value, Mapping | Set | tuple | list) and len(value) > _MOST_ELEMENTS:
        return f"<{len(value):,} entries>"
    if isinstance(value, tuple):
        told = [_brief(one) for one in value]
        return f"({told[0]},)" if len(told) == 1 else f"({', '.join(told)})"
    if isinstance(value, list):
        return f"[{', '.join(map(_brief, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_brief(key)}: {_brief(one)}' for key, one in value.items())}}}"
    return repr(value)
