"""What a bypass run trains on and is validated on: files as one stream of tokens, of which a part is held out."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from ...shared.basics.errors import FileError
from ..data.byte_text import read_text
from ..data.documents import RowTokenizer, Tokens
from ..data.json_lines import Form, Row, read_rows
from ..data.sources import Batch
from ..data.token_stream import TokenStream
from ..runs.run_settings import RunSettings

Tell = Callable[[str], None]
_ROWS: Final = ".jsonl"
"""The end of a file's name that holds rows and no text."""


@dataclass(frozen=True, slots=True)
class TokenFiles:
    """Reads files as tokens."""

    tokenizer: Any | None
    """Of transformers; None: bytes are the tokens."""
    folder: Path
    """Where the tokenizer lies."""

    def read(self, paths: Sequence[Path]) -> Tokens:
        """(n,) the tokens of all files in turn, every document with the token that ends it.

        Raises FileError if a file cannot be read, or holds rows and there is no tokenizer.
        """
        return np.concatenate([self._of(path) for path in paths])

    def _of(self, path: Path) -> Tokens:
        if self.tokenizer is None:
            if path.suffix == _ROWS:
                raise FileError(f"{path} holds rows, and bytes are the tokens. Give text, or --tokenizer FOLDER.")
            return np.frombuffer(read_text(path), dtype=np.uint8).astype(np.int32)
        rows = list(read_rows(path)) if path.suffix == _ROWS else [_as_row(path)]
        documents = RowTokenizer(self.tokenizer, self.folder).documents(rows)
        return np.concatenate([document.tokens for document in documents] or [np.empty(0, dtype=np.int32)])


def _as_row(path: Path) -> Row:
    try:
        text = read_text(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise FileError(f"{path} is no UTF-8 text (byte {error.start:,}). Give text, or rows in a {_ROWS}.") from error
    return Row(Form.TEXT, {"text": text}, str(path))


@dataclass(frozen=True)
class BypassData:
    """Tokens to train on, and tokens to validate on."""

    training: Tokens
    validation: Tokens

    @classmethod
    def held_out(cls, tokens: Tokens, num_tokens: int) -> BypassData:
        """Of one stream, the last ``num_tokens`` to validate on, and the others to train on.

        Raises FileError if at most as many are left to train on.
        """
        if len(tokens) < 2 * num_tokens:
            raise FileError(
                f"the data has {len(tokens):,} tokens, of which the last {num_tokens:,} would be held out to validate "
                f"on. Give more text, name text to validate on (--validation FILE), or fewer --validation-batches."
            )
        return cls(tokens[: len(tokens) - num_tokens], tokens[len(tokens) - num_tokens :])

    def fingerprint(self, sequence_length: int) -> str:
        """Of the sequences of both, whatever their order (``RunSettings.data``).  Raises FileError if one has none."""
        streams = (TokenStream(tokens, 1, sequence_length, 0) for tokens in (self.training, self.validation))
        return hashlib.sha256(" ".join(stream.digest for stream in streams).encode()).hexdigest()

    def source(self, settings: RunSettings) -> TokenStream:
        """What a run trains on."""
        return TokenStream(self.training, settings.micro_batch_size, settings.sequence_length, settings.data_seed)

    def batches_to_validate(self, settings: RunSettings) -> list[Batch]:
        """What a run is validated on."""
        stream = TokenStream(self.validation, settings.micro_batch_size, settings.sequence_length, 0)
        return list(stream.in_order(settings.validation_batches))
