"""The documentation builds as a site without a warning, and the site needs no network."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.documents import DOCUMENTS, ROOT

pytest.importorskip("mkdocs", reason="the extra docs is not installed")
pytest.importorskip("material", reason="the extra docs is not installed")
pytest.importorskip("mkdocstrings_handlers.python", reason="the extra docs is not installed")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return folder


def fetched(page: str) -> list[str]:
    """Addresses that a browser fetches when it shows ``page``; links that a reader follows are not among them."""
    tags = re.findall(r"<(?:script|img|link|iframe|source)\b[^>]*>", page)
    found = [re.search(r"\b(?:src|href)=\"?((?:https?:)?//[^\"\s>]+)", one) for one in tags]
    canonical = [one for one in tags if 'rel="canonical"' in one]
    assert not canonical
    return [one[1] for one in found if one is not None] + re.findall(r"@import[^;]*https?://[^;]+", page)


@pytest.mark.slow
def test_every_page_is_built_and_fetches_nothing(site: Path) -> None:
    for document in DOCUMENTS:
        if not document.is_relative_to(ROOT / "docs"):
            continue
        name = document.relative_to(ROOT / "docs").with_suffix(".html")
        path = site / (name.with_name("index.html") if name.name == "README.html" else name)
        assert path.exists(), document
        assert fetched(path.read_text(encoding="utf-8")) == [], document
    for style in site.rglob("*.css"):
        assert not re.search(r"url\([\"']?https?://", style.read_text(encoding="utf-8")), style


@pytest.mark.slow
def test_every_name_of_a_face_has_its_docstring_on_the_site(site: Path) -> None:
    from importlib import import_module

    for face in ("shared", "sim", "runtime", "calibration"):
        page = (site / "python" / f"{face}.html").read_text(encoding="utf-8")
        for name in import_module(f"protwin.{face}").__all__:
            assert re.search(rf'id="protwin\.{face}\.{name}"', page), name
    from protwin.sim import search

    opening = re.split(r"[`,;.]", search.__doc__ or "")[0]
    assert len(opening) > 10
    assert opening in (site / "python" / "sim.html").read_text(encoding="utf-8")


def test_fetched_addresses_are_seen() -> None:
    page = '<a href="https://a.org">a</a><script src="https://b.org/x.js"></script><link href="//c.org/y.css">'
    assert fetched(page) == ["https://b.org/x.js", "//c.org/y.css"]
