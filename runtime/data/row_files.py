"""Documents of whatever holds rows: JSON Lines, Parquet, plain text, and tables that are at hand already."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import numpy as np

from ...shared.basics.errors import FileError
from ..model.configurations import quiet
from .byte_text import read_text
from .documents import Document, RowTokenizer
from .json_lines import Row, read_rows, row_of

_JSON_LINES: Final = (".jsonl", ".json", ".ndjson")
_TEXT: Final = (".txt", ".text", ".md")
_PARQUET: Final = (".parquet",)


def documents_of_file(path: Path, tokenizer: Any, rows: RowTokenizer, sequence_length: int) -> list[Document]:
    """The documents of a file, by its suffix: rows of JSON Lines or Parquet, or a text, cut into sequences.

    Raises FileError if the file cannot be read, has a row without the columns of a form, or another suffix.
    """
    suffix = path.suffix.lower()
    if suffix in _JSON_LINES:
        return rows.documents(read_rows(path))
    if suffix in _PARQUET:
        return rows.documents(_parquet_rows(path))
    check_row_file(path)
    return _stretches(path, tokenizer, sequence_length)


def check_row_file(path: Path) -> None:
    """Raise FileError unless there is a file at ``path`` whose suffix says what it holds."""
    suffix = path.suffix.lower()
    if suffix not in (*_JSON_LINES, *_PARQUET, *_TEXT):
        raise FileError(
            f"{path} ends in {suffix or 'no suffix'}. Give rows as {', '.join((*_JSON_LINES, *_PARQUET))}, or text as "
            f"{', '.join(_TEXT)}."
        )
    if not path.exists():
        raise FileError(f"{path} does not exist.")


def rows_of_table(table: Iterable[Mapping[str, Any]], origin: str) -> list[Row]:
    """The rows of something that gives them as mappings.  Raises FileError as ``read_rows``."""
    rows = [row_of(dict(row), f"{origin}, row {number}") for number, row in enumerate(table, start=1)]
    if not rows:
        raise FileError(f"{origin} holds no rows. Give one at least.")
    return rows


def _parquet_rows(path: Path) -> Sequence[Row]:
    try:
        parquet = import_module("pyarrow.parquet")
    except ImportError as error:
        raise FileError(
            f"{path} is read by pyarrow, which is not installed. Install it (pip install pyarrow), or write the rows "
            f"as JSON Lines."
        ) from error
    try:
        table = parquet.read_table(path)
    except (OSError, ValueError) as error:  # pyarrow's errors of damaged files are both
        raise FileError(f"{path} cannot be read as Parquet: {str(error).splitlines()[0]:.200}.") from error
    return rows_of_table(table.to_pylist(), str(path))


def _stretches(path: Path, tokenizer: Any, sequence_length: int) -> list[Document]:
    """A text's tokens and the one that ends it, cut: the first token of a stretch is not learned."""
    content = read_text(path)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise FileError(f"{path} is no UTF-8 text ({error.reason}). Save the file as UTF-8.") from error
    if not text.strip():
        raise FileError(f"{path} holds no text.")
    with quiet():
        tokens = np.array([*tokenizer(text, verbose=False)["input_ids"], tokenizer.eos_token_id], dtype=np.int32)
    found = []
    for begin in range(0, len(tokens), sequence_length):
        stretch = tokens[begin : begin + sequence_length]
        flags = np.ones(len(stretch), dtype=np.bool_)
        flags[0] = False
        found.append(Document(stretch, flags, f"{path}, token {begin + 1}"))
    return found
