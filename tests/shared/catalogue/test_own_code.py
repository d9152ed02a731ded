"""Code of a model's own: which files a configuration names, and what is refused before anything runs."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protwin.shared.basics.errors import FileError
from protwin.shared.catalogue.own_code import OwnCode, own_code, trusted_code

NAMES = ("one", "two", "three", "four", "five")


def written(folder: Path, files: dict[str, str]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


def opened(folder: Path, named: Any) -> OwnCode | None:
    return own_code(folder, {"model_type": "mine", "auto_map": named})


@given(data=st.data())
def test_the_files_are_those_that_are_named_and_those_that_transformers_would_load_with_them(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Random files that import each other in all ways in which Python and transformers' patterns may disagree."""
    from transformers.dynamic_module_utils import get_relative_import_files

    lines = [
        "from .{} import thing",
        "    from  .{} import (a, b)",
        "import .{}",
        '"from .{} import a word"',
        "# from .{} import x",
    ]
    files = {
        f"{name}.py": "\n".join(
            line.format(data.draw(st.sampled_from(NAMES))) for line in data.draw(st.lists(st.sampled_from(lines)))
        )
        for name in NAMES
    }
    folder = written(tmp_path_factory.mktemp("own"), files)
    named = data.draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=3))
    found = opened(folder, {f"Auto{number}": f"{name}.Thing" for number, name in enumerate(named)})
    assert found is not None
    expected = {folder / f"{name}.py" for name in named}
    expected |= {Path(path) for name in named for path in get_relative_import_files(folder / f"{name}.py")}
    assert {folder / name for name in found.files} == expected


@pytest.mark.parametrize(
    "named",
    [
        "../evil.Thing",
        "somebody/model--evil.Thing",
        "somebody--evil.Thing",
        "/tmp/evil.Thing",
        "sub/evil.Thing",
        "evil",
        "evil.py.Thing",
        ".evil.Thing",
        "evil.Thing\n",
        3,
        ["evil.Thing", "../evil.Thing"],
        {"a": "evil.Thing"},
    ],
)
def test_what_is_no_class_of_a_file_in_the_folder_is_refused_whatever_the_user_says(tmp_path: Path, named: Any) -> None:
    written(tmp_path, {"evil.py": "", "other.py": ""})
    folder = written(tmp_path / "model", {"evil.py": "", "other.py": ""})
    for is_trusted in (False, True):
        with pytest.raises(FileError, match="which is no class of a file in that folder"):
            trusted_code(folder, {"auto_map": {"AutoModel": "other.Thing", "AutoConfig": named}}, is_trusted=is_trusted)


@pytest.mark.parametrize("imported", [".evil", "sub.evil", "/../evil", "./evil", "evil/../../evil"])
def test_imports_that_leave_the_folder_are_refused(tmp_path: Path, imported: str) -> None:
    folder = written(tmp_path / "model", {"mine.py": f'"""\nfrom .{imported} import thing\n"""\n'})
    with pytest.raises(FileError, match="which is no file in its own folder"):
        opened(folder, {"AutoModel": "mine.Thing"})


def test_code_is_refused_unless_it_is_trusted_and_its_files_are_named(tmp_path: Path) -> None:
    folder = written(tmp_path, {"mine.py": "from .other import thing", "other.py": "", "third.py": ""})
    configuration = {"auto_map": {"AutoModel": "mine.Thing", "AutoTokenizer": [None, "mine.Other"]}}
    with pytest.raises(
        FileError, match=r"code of its own: mine\.py, other\.py\. It did not run\..*--trust-remote-code"
    ):
        trusted_code(folder, configuration, is_trusted=False)
    code = trusted_code(folder, configuration, is_trusted=True)
    assert code is not None
    assert (code.class_for("AutoModel"), code.class_for("AutoConfig")) == ("mine.Thing", None)
    plain: dict[str, Any]
    for plain in ({}, {"auto_map": None}, {"auto_map": {}}):
        assert trusted_code(folder, plain, is_trusted=False) is None
    (folder / "other.py").unlink()
    with pytest.raises(FileError, match=r"names other\.py, which cannot be read"):
        trusted_code(folder, configuration, is_trusted=True)


def test_the_fingerprint_changes_with_the_classes_and_the_files_and_nothing_else(tmp_path: Path) -> None:
    files = {"mine.py": "from .other import thing", "other.py": "thing = 1", "third.py": ""}
    named = {"AutoModel": "mine.Thing"}

    def fingerprint(place: str, named: dict[str, str], **changed: str) -> str:
        content = files | {f"{name}.py": text for name, text in changed.items()}
        found = opened(written(tmp_path / place, dict(random.Random(place).sample(list(content.items()), 3))), named)
        assert found is not None
        return found.fingerprint

    own = fingerprint("a", named)
    assert fingerprint("b", named, third="more") == own
    others = [
        fingerprint("c", named, other="thing = 2"),
        fingerprint("d", named, mine="from .other import  thing"),
        fingerprint("e", {"AutoModel": "mine.Other"}),
        fingerprint("f", named | {"AutoConfig": "third.Config"}),
    ]
    assert len({own, *others}) == 5
