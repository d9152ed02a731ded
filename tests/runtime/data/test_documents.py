"""Rows as documents: which tokens, and which of them are learned; by hand from the tokenizer alone."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from protwin.runtime.data.documents import Document, RowTokenizer, check_lengths, load_tokenizer
from protwin.runtime.data.json_lines import Form, Row, read_rows
from protwin.shared.basics.errors import FileError
from tests.runtime.small_language import MARKED_TEMPLATE, PLAIN_TEMPLATE, make_tokenizer, write_rows

FOLDER = Path("base")
TURNS = [
    {"role": "user", "content": "what runs once?"},
    {"role": "assistant", "content": "every block runs once in a step"},
    {"role": "user", "content": "and then?"},
    {"role": "assistant", "content": "the loss falls"},
]


def document(row: dict[str, object], template: str | None = MARKED_TEMPLATE) -> tuple[str, str]:
    """The text of a row's document, and of its learned tokens, a bar between two that do not follow each other."""
    form = next(form for form in Form if all(column in row for column in form.columns))
    tokenizer = make_tokenizer(template)
    (made,) = RowTokenizer(tokenizer, FOLDER).documents([Row(form, row, "here")])
    learned, previous = "", None
    for place, (token, is_learned) in enumerate(zip(made.tokens.tolist(), made.is_learned.tolist(), strict=True)):
        if is_learned:
            learned += ("|" if previous is not None and place > previous + 1 else "") + tokenizer.decode([token])
            previous = place
    return tokenizer.decode(made.tokens.tolist()), learned


def test_text_is_learned_but_for_its_first_token() -> None:
    text, learned = document({"text": "the loss falls"})
    assert text == "the loss falls<|end|>"
    assert text.endswith(learned)
    assert 0 < len(text) - len(learned) <= len("the")


def test_a_completion_is_learned_and_its_prompt_is_not() -> None:
    found = document({"prompt": "the loss", "completion": " falls when"})
    assert found == ("the loss falls when<|end|>", " falls when<|end|>")


def test_of_a_conversation_the_assistants_turns_are_learned() -> None:
    whole = "".join(f"<|{turn['role']}|>{turn['content']}\n" for turn in TURNS) + "<|end|>"
    assert document({"messages": TURNS}) == (whole, "every block runs once in a step|the loss falls")
    assert document({"messages": TURNS}, PLAIN_TEMPLATE) == (whole, whole.removeprefix("<|user|>"))


def test_a_document_ends_once() -> None:
    assert document({"text": "the loss falls<|end|>"})[0] == "the loss falls<|end|>"
    assert document({"text": ""}) == ("<|end|>", "")


def test_what_a_template_refuses_names_the_row() -> None:
    refusing = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(FileError, match=r"the chat template in base refuses here: roles must alternate"):
        document({"messages": TURNS}, refusing)
    with pytest.raises(FileError, match="no chat template"):
        document({"messages": TURNS}, None)


def test_the_longest_row_is_named(tmp_path: Path) -> None:
    rows = read_rows(write_rows(tmp_path / "rows.jsonl", [{"text": "a" * n} for n in (3, 30, 40)]))
    documents: list[Document] = RowTokenizer(make_tokenizer(), FOLDER).documents(rows)
    check_lengths(documents, 41)
    with pytest.raises(FileError, match=r"rows.jsonl, line 2 has 31 tokens.* 16 of .*1 other.* --sequence-length 41"):
        check_lengths(documents, 16)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "a"}\n{"text": \n', r"line 2 is no JSON: .* column"),
        ('{"text": "a"}\n\n["b"]\n', r"line 3 is a JSON array"),
        ('{"body": "a", "id": 3}\n', r"line 1 has the columns 'body', 'id'\. A row needs 'text'"),
        ('{"prompt": "a"}\n', r"line 1 has the columns 'prompt'"),
        ('{"text": 3}\n', r"line 1 has a number in column 'text'"),
        ('{"prompt": "a", "completion": null}\n', r"line 1 has a null in column 'completion'"),
        ('{"messages": []}\n', r"line 1 has no list of messages"),
        ('{"messages": [{"role": "user", "content": "a"}, {"content": "b"}]}\n', r"line 1: message 2 is no object"),
        ("\n \n", r"holds no rows"),
        ("", r"holds no rows"),
        ('{"text": "' + "[" * 9 + '"}\n' + "[" * 100_000, r"line 2 is nested too deeply|line 2 is no JSON"),
        (b'{"text": "\xff"}\n', r"line 1 is no UTF-8 text"),
    ],
)
def test_damaged_files_name_the_line(tmp_path: Path, content: str | bytes, message: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(FileError, match=re.escape(str(path)) + ".*" + message):
        read_rows(path)


def test_forms_are_told_apart_by_row(tmp_path: Path) -> None:
    rows = [{"text": "a"}, {"prompt": "a", "completion": "b", "text": "c"}, {"messages": TURNS, "prompt": "p"}]
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(map(json.dumps, rows)).encode())
    assert [row.form for row in read_rows(path)] == [Form.TEXT, Form.COMPLETION, Form.CHAT]


def test_folders_without_a_tokenizer_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="holds no tokenizer"):
        load_tokenizer(tmp_path)
    endless = make_tokenizer()
    endless.eos_token = None
    endless.save_pretrained(tmp_path)
    with pytest.raises(FileError, match="no eos_token"):
        load_tokenizer(tmp_path)


def test_code_of_a_tokenizer_does_not_run_and_nobody_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Left to itself, transformers asks the terminal, here somebody who says yes to everything."""
    folder, trace = tmp_path / "tokens", tmp_path / "it-ran"
    folder.mkdir()
    named = {"AutoTokenizer": ["tokenization_mine.MineTokenizer", None]}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "MineTokenizer", "auto_map": named}))
    (folder / "tokenization_mine.py").write_text(f"open({str(trace)!r}, 'w').close()\n")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    with pytest.raises(FileError, match="holds no tokenizer that transformers can read"):
        load_tokenizer(folder)
    assert not trace.exists()
    with pytest.raises(Exception, match="MineTokenizer"):
        AutoTokenizer.from_pretrained(folder, local_files_only=True)
    assert trace.exists()
