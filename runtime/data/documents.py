"""Rows as tokens: the documents that sequences are packed from, and which of their tokens are learned."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ...shared.basics.errors import FileError
from ..model.configurations import quiet
from .json_lines import Form, Row

Tokens = npt.NDArray[np.int32]
Flags = npt.NDArray[np.bool_]
_GENERATION: Final = ("{% generation", "{%- generation")
"""How a chat template marks what the assistant says."""


@dataclass(frozen=True, slots=True)
class Document:
    """The tokens of one row, with the token that ends it."""

    tokens: Tokens
    """(n,)."""
    is_learned: Flags
    """(n,): whether predicting this token counts in the loss; never the first, which nothing within comes before."""
    origin: str


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of transformers that lies in ``folder``.

    Raises FileError if there is none, or if it has no token that ends a document.
    """
    from transformers import AutoTokenizer

    try:
        with quiet():
            # No code of its own runs: without a word on that, transformers would ask the terminal.
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # what tokenizers raise has no common base
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise FileError(
            f"{folder} holds no tokenizer that transformers can read: {reason[0]:.200} Name the folder that has "
            f"tokenizer.json (--tokenizer FOLDER)."
        ) from error
    if tokenizer.eos_token_id is None:
        raise FileError(f"the tokenizer in {folder} has no eos_token, which ends every document. Set it there.")
    return tokenizer


def check_vocabulary(tokenizer: Any, num_embedded: int, folder: Path) -> None:
    """Raise FileError if ``tokenizer``, of ``folder``, has tokens that a model with so many rows does not embed."""
    # Some tokenizers count no tokens that were added beyond gaps in their numbers.
    num_tokens = max(len(tokenizer), 1 + max(tokenizer.get_vocab().values(), default=-1))
    if num_tokens > num_embedded:
        raise FileError(
            f"the tokenizer in {folder} has {num_tokens:,} tokens, but the model embeds {num_embedded:,}. Name the "
            f"model's own tokenizer (--tokenizer FOLDER), or give the model more rows (resize_token_embeddings) and "
            f"save it."
        )


class RowTokenizer:
    """Makes documents of rows."""

    def __init__(self, tokenizer: Any, folder: Path) -> None:
        self._tokenizer = tokenizer
        self._folder = folder
        self._end = int(tokenizer.eos_token_id)
        template = getattr(tokenizer, "chat_template", None)
        named = template.get("default") if isinstance(template, dict) else template
        self.has_template = isinstance(named, str)
        self.marks_assistant = (
            isinstance(named, str) and tokenizer.is_fast and any(mark in named for mark in _GENERATION)
        )
        """Whether conversations are learned on the assistant's turns alone; else on all of their tokens."""

    def documents(self, rows: Iterable[Row]) -> list[Document]:
        """The documents of ``rows``, in order.  Raises FileError if the tokenizer refuses one."""
        with quiet():
            return [self._document(row) for row in rows]

    def _document(self, row: Row) -> Document:
        make = {Form.CHAT: self._chat, Form.COMPLETION: self._completion, Form.TEXT: self._text}
        try:
            tokens, is_learned = make[row.form](row)
        except FileError:
            raise
        except Exception as error:  # templates raise what they like
            reason = str(error).strip().splitlines() or [type(error).__name__]
            what = "chat template" if row.form is Form.CHAT else "tokenizer"
            raise FileError(f"the {what} in {self._folder} refuses {row.origin}: {reason[0]:.200}.") from error
        return self._ended(tokens, is_learned, row.origin)

    def _text(self, row: Row) -> tuple[list[int], list[bool]]:
        tokens = self._tokens(row.columns["text"])
        return tokens, [True] * len(tokens)

    def _completion(self, row: Row) -> tuple[list[int], list[bool]]:
        prompt = self._tokens(row.columns["prompt"])
        if prompt[-1:] == [self._end]:
            prompt.pop()
        completion = self._tokens(row.columns["completion"], add_special_tokens=False)
        return prompt + completion, [False] * len(prompt) + [True] * len(completion)

    def _tokens(self, text: str, **options: Any) -> list[int]:
        return list(self._tokenizer(text, verbose=False, **options)["input_ids"])

    def _chat(self, row: Row) -> tuple[list[int], list[bool]]:
        if not self.has_template:
            raise FileError(
                f"{row.origin} holds messages, but the tokenizer in {self._folder} has no chat template. Name a folder "
                f"whose tokenizer has one (--tokenizer FOLDER), or write the conversations out as text."
            )
        messages = row.columns["messages"]
        if self.marks_assistant:
            made = self._tokenizer.apply_chat_template(
                messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
            )
            return list(made["input_ids"]), [bool(mask) for mask in made["assistant_masks"]]
        tokens = list(self._tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"])
        return tokens, [True] * len(tokens)

    def _ended(self, tokens: list[int], is_learned: list[bool], origin: str) -> Document:
        """With the token that ends a document, which is learned if what comes before it is."""
        if tokens[-1:] != [self._end]:
            is_learned = [*is_learned, not is_learned or is_learned[-1]]
            tokens = [*tokens, self._end]
        flags = np.array(is_learned, dtype=np.bool_)
        flags[0] = False
        return Document(np.array(tokens, dtype=np.int32), flags, origin)


def check_lengths(documents: Iterable[Document], sequence_length: int) -> None:
    """Raise FileError if a document is longer than a sequence: none is cut in two."""
    too_long = [document for document in documents if len(document.tokens) > sequence_length]
    if too_long:
        longest = max(len(document.tokens) for document in too_long)
        others = f", and so are {len(too_long) - 1:,} other rows" if len(too_long) > 1 else ""
        raise FileError(
            f"{too_long[0].origin} has {len(too_long[0].tokens):,} tokens, which is more than the {sequence_length:,} "
            f"of the plan's sequences{others}. Split such rows, or search a plan with --sequence-length {longest}."
        )
