"""docs/json.md: fresh, whole, and true of documents as they are written."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import typer

from protwin.shared.basics.documents import Document
from protwin.shared.catalogue.machines import load_hardware
from protwin.shared.cli.root import COMMANDS, root_command
from protwin.shared.records.comparison import compare_records
from tests.cli.conftest import Protwin, protwin_here, variables, work
from tests.shared.laid_out import laid_out

__all__ = ["protwin_here", "variables", "work"]

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "json.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def reference() -> dict[str, Any]:
    return runpy.run_path(str(DOCS / "json_reference.py"))


def test_the_page_is_fresh(reference: dict[str, Any]) -> None:
    assert reference["page"]() == PAGE, "a model or its docstring changed: run make docs"


def test_every_document_is_on_the_page(reference: dict[str, Any]) -> None:
    """Held against the classes that Python knows once all modules with documents are there."""
    found = {document.KIND for document in reference["documents"]()}
    known = {one.KIND for one in Document.__subclasses__() if one.__module__.startswith("protwin.")}
    assert known <= found
    assert {"plan", "record", "search_result", "comparison", "calibration", "workload", "hardware"} <= found
    for kind in found:
        assert f"\n## {kind}\n" in PAGE


def sections() -> dict[str, dict[str, tuple[str, str, str]]]:
    """Per heading, the rows of its table: type, unit and meaning by field."""
    found: dict[str, dict[str, tuple[str, str, str]]] = {}
    for part in re.split(r"\n#{2,3} ", PAGE)[1:]:
        heading = part.split("\n", 1)[0]
        rows = re.findall(r"^\| `(\w+)` \| (.*?) \| (.*?) \| (.*?) \|$", part, re.M)
        found[heading] = {name: (kind, unit, words) for name, kind, unit, words in rows}
    return found


def check(value: Any, heading: str, known: dict[str, dict[str, tuple[str, str, str]]]) -> None:
    """Every field of ``value`` is on the page, and what lies in it as well."""
    for name, inner in value.items():
        if name in ("kind", "schema_version") and name not in known[heading]:
            continue
        assert name in known[heading], f"{heading} has a field {name} that the page does not tell of"
        kind = known[heading][name][0]
        links = re.findall(r"\[(\w+)\]\(#", kind)
        parts = inner if isinstance(inner, list) else list(inner.values()) if kind.startswith("object of") else [inner]
        for part in parts:
            if isinstance(part, dict):
                headings = [link for link in links if part.keys() <= known[link].keys()]
                assert headings, f"{heading}.{name} holds {sorted(part)}, which is none of {links}"
                check(part, headings[0], known)


def test_documents_have_the_fields_that_the_page_names() -> None:
    example, known = laid_out(3), sections()
    comparison = compare_records(example.predicted, example.measured)
    machine = load_hardware("h100-80gb-x8")
    for document in (example.predicted.plan, example.predicted, example.workload, comparison, machine):
        written = json.loads(document.to_json())
        check(written, written["kind"], known)
    with pytest.raises(AssertionError, match="does not tell of"):
        check({"no_such_field": 1}, "plan", known)


def test_parts_have_the_fields_that_the_page_names(protwin_here: Protwin) -> None:
    printed = protwin_here("hardware", "parts", "--json")
    assert printed.returncode == 0, printed.stderr
    listed, known = json.loads(printed.stdout), sections()
    assert list(listed) == ["hosts", "links", "disks", "nodes", "networks"]
    for kind, parts in listed.items():
        assert parts
        for part in parts:
            check(part, {"links": "LinkPair"}.get(kind, kind.removesuffix("s").capitalize()), known)


def commands(app: Any, *path: str) -> list[tuple[tuple[str, ...], Any]]:
    """Every command that does something, with its path."""
    below = getattr(app, "commands", None)
    if below is None:
        return [(path, app)]
    found = []
    for name, command in below.items():
        whole = typer.main.get_command(command.load()) if name in COMMANDS and not path else command
        found += commands(whole, *path, name)
    return found


def test_every_command_prints_json_when_asked() -> None:
    found = commands(root_command())
    assert {("search",), ("hardware", "list")} <= {path for path, _ in found}
    for path, command in found:
        assert any("--json" in option.opts for option in command.params), f"protwin {' '.join(path)} has no --json"


def test_every_link_leads_somewhere() -> None:
    headings = {heading.lower() for heading in re.findall(r"^#{2,3} (.*)$", PAGE, re.M)}
    assert set(re.findall(r"\]\(#([\w-]+)\)", PAGE)) <= {
        heading.replace(" ", "-").replace("\\_", "_") for heading in headings
    }


def reachable(headings: list[str], known: dict[str, dict[str, tuple[str, str, str]]]) -> set[str]:
    """These sections and all that their types link to."""
    found, open_ends = set(headings), list(headings)
    while open_ends:
        for kind, _, _ in known[open_ends.pop()].values():
            for link in re.findall(r"\[(\w+)\]\(#", kind):
                name = next(heading for heading in known if heading.lower() == link.lower())
                if name not in found:
                    found.add(name)
                    open_ends.append(name)
    return found


def test_every_field_of_what_commands_print_has_a_unit_or_a_meaning() -> None:
    known = sections()
    printed = [
        "plan",
        "advice",
        "sweep",
        "record",
        "search_result",
        "comparison",
        "calibration",
        "workload",
        "hardware",
    ]
    for heading in reachable(printed, known):
        for name, (kind, unit, words) in known[heading].items():
            assert unit or words, f"{heading}.{name} needs a docstring"
            if name.endswith(("_s", "_frac", "_bytes", "_flops")) and "[" not in kind:
                assert unit, f"{heading}.{name}"
