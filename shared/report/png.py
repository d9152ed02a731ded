"""Figures of a report as pictures: PNG, drawn by resvg, which the extra ``protwin[png]`` brings.

A picture has the light colours, whatever the reader's screen; its caption stands above the drawing and its legend
below, as on the page.
"""

from __future__ import annotations

import re
from functools import cache
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ..basics.documents import write_atomically
from ..basics.errors import ProtwinError
from .page import Report, stylesheet
from .svg import LEGEND_MARK_PX, Figure, tag
from .svg_patterns import pattern_markup

if TYPE_CHECKING:
    from types import ModuleType

_MARGIN: Final = 20.0
_CAPTION_HEIGHT: Final = 30.0
_LEGEND_PITCH: Final = 24.0
_CHARACTER_PX: Final = 7.1
"""Of a legend's words, wide enough for the fonts in use."""
_SCALE: Final = 2.0
_FONTS: Final = "Noto Sans, DejaVu Sans, Liberation Sans, Arial, Helvetica, sans-serif"
_NAMESPACE: Final = "http://www.w3.org/2000/svg"


def write_pictures(report: Report, folder: Path) -> tuple[Path, ...]:
    """Write every figure of the report as ``<folder>/<name>.png``; gives the paths.

    Raises ProtwinError if resvg is not installed, or finds no font to write words with, and FileError if the folder
    cannot be written.
    """
    drawer = _drawer()
    written = []
    for figure in report.figures:
        path = folder / f"{figure.name}.png"
        write_atomically(path, _png(drawer, standalone_svg(figure)))
        written.append(path)
    return tuple(written)


def check_pictures_can_be_drawn() -> None:
    """Raise ProtwinError now rather than after the work if ``write_pictures`` would for want of resvg or a font."""
    _drawer()


def standalone_svg(figure: Figure) -> str:
    """The figure with its caption and legend as an SVG document that needs nothing else."""
    stressed, plain = figure.caption
    top = _MARGIN + (_CAPTION_HEIGHT if stressed or plain else 0.0)
    legend, legend_height = _legend(figure, top + figure.height + 8)
    width, height = figure.width + 2 * _MARGIN, top + figure.height + 8 + legend_height + _MARGIN / 2
    words = tag("tspan", escape(stressed), class_="strong") + tag("tspan", escape(plain))
    content = [
        tag("style", _style()),
        pattern_markup(),
        tag("rect", width=width, height=height, class_="paper"),
        tag("text", words, x=_MARGIN, y=_MARGIN + 12, class_="caption") if stressed or plain else "",
        tag("g", figure.drawing, transform=f"translate({_MARGIN:g} {top:g})"),
        legend,
    ]
    view = f"0 0 {width:g} {height:g}"
    return tag("svg", *content, xmlns=_NAMESPACE, font_family=_FONTS, width=width, height=height, viewBox=view)


def _legend(figure: Figure, top: float) -> tuple[str, float]:
    """The legend's marks and words in as many rows as they need; and its height."""
    drawn, x, row = [], _MARGIN, 0
    for mark, words in figure.legend:
        width = LEGEND_MARK_PX + 8 + len(words) * _CHARACTER_PX + 22
        if x > _MARGIN and x + width > figure.width + _MARGIN:
            x, row = _MARGIN, row + 1
        y = top + row * _LEGEND_PITCH
        drawn.append(tag("g", mark, transform=f"translate({x:g} {y + 4:g})"))
        drawn.append(tag("text", escape(words), x=x + LEGEND_MARK_PX + 8, y=y + 14, class_="entry"))
        x += width
    return "".join(drawn), (row + 1) * _LEGEND_PITCH + 4 if figure.legend else 0.0


@cache
def _style() -> str:
    """The stylesheet of the figures with the light colours in the place of their names."""
    sheet = re.sub(r"/\*.*?\*/", "", stylesheet("report_figures.css"), flags=re.DOTALL)
    sheet = re.sub(r"@media[^{]*\{(?:[^{}]*\{[^{}]*\})*[^{}]*\}", "", sheet)
    colours = dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6});", sheet))
    sheet = re.sub(r":root \{[^}]*\}", "", sheet)
    sheet = re.sub(r"var\(--([a-z-]+)\)", lambda match: colours[match[1]], sheet)
    own = (
        f".paper {{ fill: {colours['page']}; }} .caption {{ font-size: 14px; }} "
        f"tspan.strong {{ fill: {colours['ink']}; font-weight: 600; }} text.entry {{ fill: {colours['ink']}; }}"
    )
    return f"{sheet}\n{own}"


@cache
def _drawer() -> ModuleType:
    """resvg, once it is sure that it draws words.  Raises ProtwinError."""
    try:
        import resvg_py
    except ImportError as error:
        raise ProtwinError(
            "pictures need resvg, which is not installed. Install it with pip install 'protwin[png]', or leave out "
            "--png."
        ) from error
    probe = f'<svg xmlns="{_NAMESPACE}" width="40" height="20" font-family="{_FONTS}">%s</svg>'
    if _png(resvg_py, probe % '<text x="4" y="16">A</text>') == _png(resvg_py, probe % ""):
        raise ProtwinError(
            "pictures need a font to write words with, and none is installed. Install one, for example DejaVu Sans, "
            "or leave out --png."
        )
    return resvg_py


def _png(drawer: ModuleType, svg: str) -> bytes:
    return bytes(drawer.svg_to_bytes(svg_string=svg, zoom=_SCALE))
