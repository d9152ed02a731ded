"""Every Python block of README and docs compiles, names only what exists, and runs."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

import protwin
from protwin.runtime.integrations.axolotl_section import PLUGIN
from tests.docs.documents import DOCUMENTS, IN_ORDER, ROOT, blocks_of

FACE_NAMES = ("shared", "sim", "runtime", "calibration")
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


FACES = {f"protwin.{face}": set(importlib.import_module(f"protwin.{face}").__all__) for face in FACE_NAMES}


def beyond_faces(text: str) -> list[str]:
    """Dotted names in ``text`` that lie in a folder of protwin, but that its face does not give.

    A file of axolotl names its plugin by the module, which axolotl imports: that name is public, and is one.
    """
    found = []
    text = re.sub(rf"{re.escape(PLUGIN)}\b", "", text)
    for face, name in re.findall(rf"\b(protwin\.(?:{'|'.join(FACE_NAMES)}))\.(\w+)", text):
        if name not in FACES[face]:
            found.append(f"{face}.{name}")
    for face, name in re.findall(rf"from (protwin\.(?:{'|'.join(FACE_NAMES)})) import (.+)", text):
        found += [f"{face}.{one.strip()}" for one in name.strip("()").split(",") if one.strip() not in FACES[face]]
    return found


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_names_come_from_faces(document: Path) -> None:
    """A reader may import whatever a document names; modules behind the faces may move."""
    assert beyond_faces(document.read_text(encoding="utf-8")) == []


def test_names_beyond_faces_are_seen() -> None:
    text = "from protwin.shared import Plan, PlanBuilder\n`protwin.sim.search`, protwin.sim.searching.search"
    assert beyond_faces(text) == ["protwin.sim.searching", "protwin.shared.PlanBuilder"]
    assert beyond_faces(f"{PLUGIN} {PLUGIN}s") == ["protwin.runtime.integrations"]


def unimported(program: str) -> set[str]:
    """Packages of protwin that ``program`` uses without importing them, which works only where others have."""
    tree = ast.parse(program)
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    dotted = [_dotted(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    used = {".".join(one[:2]) for one in dotted if one is not None and one[0] == "protwin"}
    # What the name itself gives needs no package: ``import protwin`` and ``protwin.train``.
    own = (
        {f"protwin.{name}" for name in protwin.__all__}  # type: ignore[attr-defined]
        if any(name.startswith("protwin") for name in imported)
        else set()
    )
    return used - imported - own


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # PEFT's own, of transformers
@pytest.mark.filterwarnings(
    "ignore:.*does not have many workers", "ignore:.*isinstance.treespec, LeafSpec"
)  # Lightning's
@pytest.mark.slow
@pytest.mark.usefixtures("probed_once")
@pytest.mark.parametrize(
    "document", [path for path in WITH_PYTHON if path not in IN_ORDER], ids=lambda path: str(path.relative_to(ROOT))
)
def test_blocks_run(document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, since starting one with torch takes longer than most programs."""
    program = program_of(document)
    assert unimported(program) == set()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    exec(compile(program, str(document), "exec"), {"__name__": "__main__"})


def test_unimported_packages_are_seen() -> None:
    assert unimported("import protwin.sim\nprotwin.sim.simulate(protwin.runtime.trace(x))") == {"protwin.runtime"}
    assert unimported("import protwin\nprotwin.train(m, d)\nprotwin.sim.search(w, h)") == {"protwin.sim"}
    assert unimported("protwin.train(m, d)") == {"protwin.train"}
