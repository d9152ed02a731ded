"""The plan of the house: every module has a room, a room is small and has one purpose, faces are what users import."""

from __future__ import annotations

import ast
import re
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("shared", "sim", "runtime", "calibration")
ROOMS = sorted(path.parent for folder in FOLDERS for path in (ROOT / folder).glob("*/__init__.py"))
MOST_MODULES = 15
LONGEST_FILE = 500
LONGEST_FUNCTION = 60
MOST_PARAMETERS = 8
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def modules(room: Path) -> list[Path]:
    return sorted(path for path in room.glob("*.py") if path.name != "__init__.py")


def sentences(text: str) -> list[str]:
    return re.split(r"(?<=[.!?])\s+(?=[A-Z])", text.strip())


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("room", ROOMS, ids=name_of)
def test_a_room_is_small_and_says_in_one_sentence_what_it_is_for(room: Path) -> None:
    assert 1 < len(modules(room)) <= MOST_MODULES
    tree = ast.parse((room / "__init__.py").read_text())
    docstring = " ".join((ast.get_docstring(tree) or "").split())
    assert docstring, "the room says what it is for"
    assert len(tree.body) == 1, "importing a room imports nothing else"
    assert len(sentences(docstring)) == 1, docstring


def test_the_plan_of_the_house_has_every_room_once_with_its_sentence() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    docstrings = {name_of(room): ast.get_docstring(ast.parse((room / "__init__.py").read_text())) for room in ROOMS}
    listed = re.findall(r"^\| `(\w+/\w+)/` \| (.+) \|$", text, re.MULTILINE)
    assert sorted(listed) == sorted((room, " ".join((told or "").split())) for room, told in docstrings.items())


def test_two_sentences_are_two() -> None:
    assert len(sentences("One thing. Another thing.")) == 2
    assert len(sentences("One thing: e.g. this, in 2.5 s.")) == 1


def test_every_module_is_in_a_room() -> None:
    for folder in FOLDERS:
        assert [path.name for path in (ROOT / folder).glob("*.py")] == ["__init__.py"]
        within = [path for path in (ROOT / folder).glob("*/*/__init__.py") if path.parent.name != "namespace"]
        assert not within, "rooms have no rooms within; protwin itself is no room"


def test_every_room_is_installed_and_stands_on_a_floor() -> None:
    rooms = {f"protwin.{room.parent.name}.{room.name}" for room in ROOMS}
    faces = {"protwin", *(f"protwin.{folder}" for folder in FOLDERS)}
    assert set(PYPROJECT["tool"]["setuptools"]["packages"]) == rooms | faces
    contracts = [one for one in PYPROJECT["tool"]["importlinter"]["contracts"] if one["type"] == "layers"]
    floors = {
        f"{contract['containers'][0]}.{room.strip()}"
        for contract in contracts
        for floor in contract["layers"]
        for room in re.split(r"[|:]", floor)
    }
    assert floors == rooms


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_face_gives_what_type_checkers_see(folder: str) -> None:
    """Names for type checkers and homes for imports are two lists; they must not part."""
    seen = {
        alias.name: node.module
        for node in ast.walk(ast.parse((ROOT / folder / "__init__.py").read_text()))
        if isinstance(node, ast.ImportFrom) and node.level == 1
        for alias in node.names
        if alias.asname == alias.name
    }
    face = import_module(f"protwin.{folder}")
    assert seen == face._HOMES
    assert sorted(seen) == face.__all__ == dir(face)
    for name, home in seen.items():
        assert getattr(face, name) is getattr(import_module(f"protwin.{folder}.{home}"), name)
    with pytest.raises(AttributeError, match="no_such_name"):
        face.no_such_name  # noqa: B018


Size = tuple[int, int]
"""Lines and parameters of a function."""


def exceptions() -> dict[str, Size]:
    """Functions that are longer or wider than the others; each has its reason beside it."""
    text = (ROOT / "docs" / "exceptions.md").read_text()
    rows = re.findall(r"^\| `([\w./:]+)` \| (\d+) \| (\d+) \| .+ \|$", text, re.MULTILINE)
    return {name: (int(num_lines), int(num_parameters)) for name, num_lines, num_parameters in rows}


def long_or_wide_functions() -> dict[str, Size]:
    found = {}
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    assert node.end_lineno is not None
                    num_lines = node.end_lineno - node.lineno + 1
                    arguments = node.args
                    num_parameters = len(arguments.posonlyargs + arguments.args + arguments.kwonlyargs)
                    if num_lines > LONGEST_FUNCTION or num_parameters > MOST_PARAMETERS:
                        found[f"{path.relative_to(ROOT)}:{node.name}"] = (num_lines, num_parameters)
    return found


def test_long_and_wide_functions_are_listed_with_their_reasons() -> None:
    assert exceptions() == long_or_wide_functions()


def test_no_file_is_long() -> None:
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            assert len(path.read_text().splitlines()) <= LONGEST_FILE, path
