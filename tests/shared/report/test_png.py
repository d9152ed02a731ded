"""Pictures of a report's figures, and what is said where they cannot be drawn."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from protwin.shared.basics.errors import FileError, ProtwinError
from protwin.shared.cli.report_options import picture_folder, writable_html, write_report
from protwin.shared.report import png as report_png
from protwin.shared.report.page import Report
from protwin.shared.report.png import standalone_svg, write_pictures
from protwin.shared.report.report import report
from tests.shared.laid_out import laid_out

PNG_HEAD = b"\x89PNG\r\n\x1a\n"
HOSTILE = "<script>alert(1)</script>\"'&"


def example(title: str = "A demonstration") -> Report:
    made = laid_out(3)
    return report(title=title, predicted=made.predicted, measured=made.measured, schedule=made.schedule)


def test_every_figure_becomes_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("resvg_py")
    made = example()
    written = write_pictures(made, tmp_path / "new")
    assert [path.name for path in written] == [f"{figure.name}.png" for figure in made.figures]
    assert {path.name for path in (tmp_path / "new").iterdir()} == {path.name for path in written}
    for path, figure in zip(written, made.figures, strict=True):
        content = path.read_bytes()
        assert content.startswith(PNG_HEAD)
        width, height = int.from_bytes(content[16:20]), int.from_bytes(content[20:24])
        assert width == round(2 * (figure.width + 40))
        assert height > 2 * figure.height


def test_a_picture_is_a_document_of_its_own() -> None:
    """Every colour has its value, every class its rule, every pattern is there, and nothing is asked for elsewhere."""
    for figure in example().figures:
        svg = standalone_svg(figure)
        root = ElementTree.fromstring(svg)
        assert "var(" not in svg
        assert "@" not in svg
        assert svg.count("http") == 1, "the name of SVG itself"
        patterns = {element.attrib["id"] for element in root.iter("{http://www.w3.org/2000/svg}pattern")}
        fills = {part.split(")")[0] for part in svg.split("url(#")[1:]}
        assert fills <= patterns


def test_hostile_names_stay_words() -> None:
    made = laid_out(3, model_name=HOSTILE)
    tasks = tuple(t.model_copy(update={"name": f"{t.kind} {HOSTILE}"}) for t in made.predicted.tasks)
    memory = tuple(curve.model_copy(update={"peak_at": HOSTILE}) for curve in made.predicted.memory)
    record = made.predicted.model_copy(update={"tasks": tasks, "memory": memory})
    for figure in report(title=HOSTILE, predicted=record).figures:
        ElementTree.fromstring(standalone_svg(figure))
        assert "<script" not in standalone_svg(figure)


def test_without_resvg_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    report_png._drawer.cache_clear()
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    with pytest.raises(ProtwinError, match=r"pip install 'protwin\[png\]'"):
        picture_folder(tmp_path)
    report_png._drawer.cache_clear()


def test_without_a_font_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A drawer without fonts leaves words out in silence."""
    pytest.importorskip("resvg_py")
    plain = report_png._png
    monkeypatch.setattr(report_png, "_png", lambda drawer, svg: plain(drawer, svg.replace(">A<", "><")))
    report_png._drawer.cache_clear()
    with pytest.raises(ProtwinError, match="need a font"):
        picture_folder(tmp_path)
    report_png._drawer.cache_clear()


def test_names_and_folders_are_checked_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match="would hold HTML"):
        writable_html(tmp_path / "report.json")
    with pytest.raises(FileError, match="is no folder"):
        picture_folder(tmp_path / "file")
    with pytest.raises(FileError, match="is no folder"):
        picture_folder(tmp_path / "file" / "inside")
    assert writable_html(tmp_path / "report.html") == tmp_path / "report.html"
    assert writable_html(None) is None
    assert picture_folder(None) is None


def test_no_report_is_made_unless_asked_for(tmp_path: Path) -> None:
    def unwanted() -> Report:
        raise AssertionError("nobody asked")

    write_report(None, None, unwanted)
    write_report(tmp_path / "report.html", None, example)
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == example().html
