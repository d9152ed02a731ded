"""Every link of README and docs leads somewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.documents import DOCUMENTS, ROOT, anchors_of, links_of


def dead_links(document: Path) -> list[str]:
    """Links that lead to no file, or to no heading of it."""
    dead = []
    for target in links_of(document):
        if target.startswith(("https://", "http://", "mailto:")):
            continue
        name, _, anchor = target.partition("#")
        path = document.parent / name if name else document
        if not path.exists() or (anchor and anchor not in anchors_of(path)):
            dead.append(target)
    return dead


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    assert dead_links(document) == []


def test_dead_links_are_seen(tmp_path: Path) -> None:
    document = tmp_path / "page.md"
    (tmp_path / "there.md").write_text("# A heading, with: signs\n")
    document.write_text(
        '# Page\n[a](there.md) [b](gone.md) ![c](gone.png "title") [d](#page) [e](#nowhere)\n'
        "[f](there.md#a-heading-with-signs) [g](there.md#none) [h](https://example.org)\n"
        "```text\n[i](not-a-link.md)\n```\n"
    )
    assert dead_links(document) == ["gone.md", "gone.png", "#nowhere", "there.md#none"]
