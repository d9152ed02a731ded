"""Rows of a JSON Lines file: one training document each, as text, as prompt and completion, or as a conversation."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from ...shared.basics.errors import FileError


class Form(StrEnum):
    """Which columns of a row are trained on; the first form counts whose columns a row has."""

    CHAT = "messages"
    """``messages``: a list of ``{"role": ..., "content": ...}``."""
    COMPLETION = "prompt and completion"
    """``prompt`` and ``completion``: text, of which the second is learned."""
    TEXT = "text"
    """``text``, all of it."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that it needs."""
        return {Form.CHAT: ("messages",), Form.COMPLETION: ("prompt", "completion"), Form.TEXT: ("text",)}[self]


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a file."""

    form: Form
    columns: Mapping[str, Any]
    origin: str
    """File and line, for messages."""


def read_rows(path: Path) -> list[Row]:
    """The rows of a file in order; blank lines are none.

    Raises FileError, which names the line, if one is no JSON object or lacks columns, and if there are no rows.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error.strerror or error}.") from error
    rows = list(_rows(path, content))
    if not rows:
        raise FileError(f'{path} holds no rows. Write one JSON object a line, such as {{"text": "..."}}.')
    return rows


def _rows(path: Path, content: bytes) -> Iterator[Row]:
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line.strip():
            continue
        origin = f"{path}, line {number}"
        try:
            columns = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
        except UnicodeDecodeError as error:
            raise FileError(f"{origin} is no UTF-8 text ({error.reason}). Save the file as UTF-8.") from error
        except json.JSONDecodeError as error:
            raise FileError(f"{origin} is no JSON: {error.msg} at column {error.colno}. Correct the line.") from error
        except RecursionError:
            raise FileError(f"{origin} is nested too deeply to be read. Correct the line.") from None
        if not isinstance(columns, dict):
            raise FileError(f'{origin} is a JSON {_kind(columns)}, and no object. Write {{"text": "..."}}.')
        yield row_of(columns, origin)


def row_of(columns: Mapping[str, Any], origin: str) -> Row:
    """The row of these columns.  Raises FileError, which names ``origin``, if they are of no form."""
    form = next((form for form in Form if all(column in columns for column in form.columns)), None)
    if form is None:
        named = ", ".join(map(repr, columns)) or "none"
        raise FileError(
            f"{origin} has the columns {named:.200}. A row needs 'text', or 'prompt' and 'completion', or 'messages'."
        )
    if form is Form.CHAT:
        _check_messages(columns["messages"], origin)
    else:
        for column in form.columns:
            if not isinstance(columns[column], str):
                raise FileError(f"{origin} has a {_kind(columns[column])} in column {column!r}. Write text there.")
    return Row(form, {column: columns[column] for column in form.columns}, origin)


def _check_messages(messages: Any, origin: str) -> None:
    if not isinstance(messages, list) or not messages:
        raise FileError(f"{origin} has no list of messages in column 'messages'. Write one message at least.")
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            raise FileError(
                f"{origin}: message {number} is no object with a role and content. Write "
                f'{{"role": "user", "content": "..."}}.'
            )


def _kind(value: Any) -> str:
    names = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")
