"""Arguments of Python calls: what cannot be meant is refused with its name, before anything is done with it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from operator import index
from typing import Any, TypeVar

from .errors import CatalogueError, PlanError
from .suggestions import did_you_mean
from .units import as_bytes

_Choice = TypeVar("_Choice", bound=StrEnum)


def wrong(name: str, value: object, words: str) -> PlanError:
    """The error that says what ``name`` must be."""
    return PlanError(f"{name} is {shown(value)}; it must be {words}.")


def wrong_name(value: object, words: str) -> CatalogueError:
    """The error that says what ``name_or_path`` must name: an entry of the catalogue or a file, as text or a path."""
    return CatalogueError(f"name_or_path is {shown(value)}; it must be the name of {words}.")


def shown(value: object) -> str:
    """``value`` as code has it, cut short, with its type where code does not tell that."""
    text = repr(value)
    is_told = value is None or isinstance(value, bool | int | float | str | tuple | list | dict)
    text = text if len(text) <= 60 else f"{text[:60]}..."
    return text if is_told else f"{text} of type {type(value).__name__}"


def check_kind(name: str, value: object, kinds: type | tuple[type, ...], words: str) -> None:
    """Raise PlanError unless ``value`` is of one of ``kinds``, which ``words`` name."""
    if not isinstance(value, kinds):
        raise wrong(name, value, words)


def as_whole(name: str, value: object, least: int | None = None) -> int:
    """A whole number that is not below ``least``, also one of NumPy's.  Raises PlanError."""
    words = "a whole number" if least is None else f"a whole number from {least} up"
    try:
        number = index(value)  # type: ignore[arg-type]
    except TypeError:
        raise wrong(name, value, words) from None
    if isinstance(value, bool) or (least is not None and number < least):
        raise wrong(name, value, words)
    return number


def as_wholes(name: str, value: object) -> tuple[int, ...]:
    """Several whole numbers; one alone counts as a list of it.  Raises PlanError."""
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        return (as_whole(name, value),)
    return tuple(as_whole(name, one) for one in value)


def as_number(name: str, value: object) -> float:
    """A number, also one of NumPy's.  Raises PlanError; of text too, and of what is neither true nor a number."""
    if isinstance(value, bool | str | bytes) or not hasattr(value, "__float__"):
        raise wrong(name, value, "a number")
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise wrong(name, value, "a number") from None
    return value if isinstance(value, int | float) else number


def as_size(name: str, value: object) -> int:
    """Bytes, as a number or as text such as ``"10GiB"``.  Raises PlanError, and what ``as_bytes`` raises."""
    if isinstance(value, str):
        return as_bytes(value)
    is_whole = isinstance(value, float) and value.is_integer()
    try:
        return as_whole(name, int(value) if is_whole else value)  # type: ignore[call-overload]
    except PlanError:
        raise wrong(name, value, 'a whole number of bytes, or text such as "10GiB"') from None


def as_choice(name: str, value: object, known: type[_Choice]) -> _Choice:
    """A member of ``known``, or its name.  Raises PlanError, which names those that resemble it."""
    if isinstance(value, known):
        return value
    if isinstance(value, str):
        try:
            return known(value)
        except ValueError:
            raise PlanError(f"{name} is {shown(value)}. {did_you_mean(value, known)}") from None
    raise wrong(name, value, f"one of {', '.join(known)}")


def as_choices(name: str, value: Any, known: type[_Choice]) -> tuple[_Choice, ...]:
    """Several members of ``known``; one alone counts as a list of it.  Raises PlanError."""
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        return (as_choice(name, value, known),)
    return tuple(as_choice(name, one, known) for one in value)
