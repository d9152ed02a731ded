"""Every Python block of README and docs compiles, names only what exists, and runs."""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.documents import DOCUMENTS, ROOT, blocks_of

WITH_PYTHON = [path for path in DOCUMENTS if any(block.language == "python" for block in blocks_of(path))]


def program_of(document: Path) -> str:
    """All Python blocks of a document, one after the other, on the lines that they have in it."""
    lines: list[str] = []
    for block in blocks_of(document):
        if block.language == "python":
            lines += [""] * (block.line - len(lines)) + block.body.splitlines()
    return "\n".join(lines) + "\n"


def missing_names(program: str) -> list[str]:
    """Dotted names below imported packages that do not exist."""
    missing = []
    tree = ast.parse(program)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                importlib.import_module(alias.name)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            module = importlib.import_module(node.module)
            missing += [f"{node.module}.{alias.name}" for alias in node.names if not hasattr(module, alias.name)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (dotted := _dotted(node)) and dotted[0] == "protwin":
            found: object = importlib.import_module("protwin")
            for place, name in enumerate(dotted[1:], start=2):
                if not hasattr(found, name):
                    missing.append(".".join(dotted[:place]))
                    break
                found = getattr(found, name)
    return sorted(set(missing))


def _dotted(node: ast.expr) -> list[str] | None:
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute) and (head := _dotted(node.value)):
        return [*head, node.attr]
    return None


@pytest.mark.parametrize("document", WITH_PYTHON, ids=lambda path: str(path.relative_to(ROOT)))
def test_blocks_name_what_exists(document: Path) -> None:
    assert missing_names(program_of(document)) == []


def test_missing_names_are_seen() -> None:
    program = (
        "import protwin.shared\nfrom protwin.shared.schema.plan import Plan, Plann\n"
        "protwin.shared.no_such(protwin.other.x)"
    )
    assert missing_names(program) == ["protwin.other", "protwin.shared.no_such", "protwin.shared.schema.plan.Plann"]


@pytest.mark.slow
@pytest.mark.parametrize("document", WITH_PYTHON, ids=lambda path: str(path.relative_to(ROOT)))
def test_blocks_run(document: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(program_of(document), encoding="utf-8")
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    result = subprocess.run(
        [sys.executable, program],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
