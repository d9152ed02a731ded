"""Pages of reports for tests: parsed, held to what every page must be, and some that are hostile or crowded."""

from __future__ import annotations

import math
import re
from base64 import b64encode
from dataclasses import dataclass, field
from hashlib import sha256
from html.parser import HTMLParser
from importlib.resources import files
from typing import Any

from protwin.shared.report.page import PageTable, Report, Section
from protwin.shared.report.report import Facts, report
from protwin.shared.schema.record import Record, TaskTiming
from protwin.shared.schema.schedule import LANES_ALONE, Memory, TaskKind
from protwin.shared.tables.table import Table
from tests.shared.laid_out import LaidOut

VOID = {"meta", "wbr"}
CSS = files("protwin.shared.report").joinpath("report.css").read_text(encoding="utf-8")
LOSSES = [5.0 * math.exp(-step / 10) + 2.0 for step in range(30)]


@dataclass
class Element:
    tag: str
    attributes: dict[str, str | None]
    pieces: list[str] = field(default_factory=list)

    @property
    def words(self) -> str:
        return "".join(self.pieces)


@dataclass
class Page(HTMLParser):
    """Every element of a page with its own words; fails where tags are not balanced."""

    elements: list[Element] = field(default_factory=list)
    open: list[Element] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), f"<{tag}> names an attribute twice"
        element = Element(tag, dict(attrs))
        self.elements.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open[-1].tag == tag, f"</{tag}> closes <{self.open[-1].tag}>"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        for element in self.open:
            element.pieces.append(data)

    def named(self, tag: str) -> list[Element]:
        return [element for element in self.elements if element.tag == tag]

    @property
    def words(self) -> str:
        return next(iter(self.named("body"))).words


def parse(html: str) -> Page:
    page = Page()
    page.feed(html)
    page.close()
    assert not page.open, f"<{page.open[-1].tag}> is never closed"
    return page


def check_self_contained(page: Page) -> None:
    """Nothing that loads, no references but to the page's own parts, and no script but the one of the policy."""
    forbidden = {"link", "img", "iframe", "object", "embed", "base", "form", "image", "use", "foreignobject"}
    assert not forbidden & {element.tag for element in page.elements}
    cuts = {f"url(#{element.attributes['id']})" for element in page.named("clippath")}
    for element in page.elements:
        for name, value in element.attributes.items():
            assert name not in {"src", "href", "xlink:href", "srcset", "action", "background", "data"}
            assert not name.startswith("on")
            assert "url(" not in (value or "") or (name == "clip-path" and value in cuts)
    style = "".join(element.words for element in page.named("style"))
    patterns = {element.attributes["id"] for element in page.named("pattern")}
    assert set(re.findall(r"url\(([^)]*)\)", style)) <= {f"#{name}" for name in patterns}
    assert "@import" not in style
    (script,) = page.named("script")
    policy = next(m for m in page.named("meta") if m.attributes.get("http-equiv") == "Content-Security-Policy")
    digest = b64encode(sha256(script.words.encode()).digest()).decode()
    assert policy.attributes["content"] == (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    )


def html_report(*, title: str, **facts: Any) -> str:
    return report(title, Facts(**facts)).html


def html_table(table: Table) -> str:
    """A page with this table alone."""
    return Report("t", "", (), (Section("s", (PageTable(table),)),)).html


def full_report(example: LaidOut, **changes: object) -> str:
    facts: dict[str, Any] = {
        "title": "A demonstration",
        "predicted": example.predicted,
        "measured": example.measured,
        "budget_bytes": example.predicted.peak_device_bytes + 2**20,
        "losses": {"plain": LOSSES, "planned": LOSSES},
        "plain_peak_bytes": 2 * example.predicted.peak_device_bytes,
        "notes": ["One thing to know."],
        "schedule": example.schedule,
    }
    return html_report(**(facts | changes))


def chart_bars(html: str) -> list[list[Element]]:
    """The bars of every lane chart."""
    charts: list[list[Element]] = []
    page = parse(html)
    for element in page.elements:
        if element.tag == "svg" and "lanes" in (element.attributes.get("class") or ""):
            charts.append([])
        elif "bar" in (element.attributes.get("class") or "").split() and charts:
            charts[-1].append(element)
    return charts


def row_bars(drawing: str) -> dict[str, list[tuple[float, float, str]]]:
    """Per row of bars, by the name in its title, the left end and width of every bar as shares, and its colour."""
    bar = r'<rect x="([\d.]+)%" y="6" width="([\d.]+)%" height="18" class="fill-(\w+)">'
    return {
        name: [(float(x) / 100, float(width) / 100, colour) for x, width, colour in re.findall(bar, row)]
        for name, row in re.findall(r"<g><title>([^<]*?): [^<]*</title>(.*?)</g>", drawing, re.DOTALL)
    }


@dataclass(frozen=True)
class ListedTask:
    """One line of a page's list of tasks."""

    lane: str
    number: int
    name: str
    start_s: float
    duration_s: float
    after: tuple[int, ...] = ()
    earlier: tuple[int, ...] = ()
    held: str = ""


def listed_tasks(html: str) -> list[dict[int, ListedTask]]:
    """Every list of tasks on a page, by the tasks' numbers."""
    lists = []
    for pre in parse(html).named("pre"):
        worth, lane, tasks = float(pre.attributes["data-worth"] or ""), "", {}
        for line in pre.words.split("\n")[1:]:
            if "\t" not in line:
                lane = line
                continue
            number, name, start, duration, *waits = line.split("\t")
            after, earlier, held = waits or ("", "", "")
            tasks[int(number)] = ListedTask(
                lane,
                int(number),
                name,
                float(start) * worth,
                float(duration) * worth,
                tuple(map(int, after.split())),
                tuple(map(int, earlier.split())),
                held,
            )
        lists.append(tasks)
    return lists


HOSTILE = "<script>alert(1)</script>\"'&<img src=x onerror=y>"


def hostile(record: Record) -> Record:
    tasks = tuple(t.model_copy(update={"name": f"{t.kind} {HOSTILE}"}) for t in record.tasks)
    memory = tuple(curve.model_copy(update={"peak_at": HOSTILE}) for curve in record.memory)
    return record.model_copy(
        update={
            "model_name": HOSTILE,
            "hardware_name": HOSTILE,
            "machine": HOSTILE,
            "software": {HOSTILE: HOSTILE},
            "emulated": (HOSTILE,),
            "plan_id": HOSTILE,
            "tasks": tasks,
            "memory": memory,
        }
    )


def crowded(record: Record, num_tasks: int) -> Record:
    """The record with ``num_tasks`` tasks per lane and as many memory samples, evenly spread with gaps between."""
    pitch_s = record.iteration_s / num_tasks
    kinds = (TaskKind.FORWARD, TaskKind.GATHER, TaskKind.GRADIENT_OFFLOAD, TaskKind.CPU_ADAM)
    tasks = tuple(
        TaskTiming(
            task=number * len(kinds) + place,
            name=f"{kind} chunk {number}",
            kind=kind,
            lane=lane,
            start_s=number * pitch_s,
            end_s=(number + 0.4) * pitch_s,
            duration_s=0.4 * pitch_s,
        )
        for number in range(num_tasks)
        for place, (kind, lane) in enumerate(zip(kinds, LANES_ALONE, strict=True))
    )
    device = record.curve(Memory.DEVICE)
    assert device is not None
    curve = device.model_copy(
        update={
            "times_s": tuple(number * pitch_s for number in range(num_tasks)),
            "levels_bytes": tuple((number * 7919) % 2**20 for number in range(num_tasks)),
            "peak_bytes": 2**20,
        }
    )
    return record.model_copy(update={"tasks": tasks, "memory": (curve,)})
