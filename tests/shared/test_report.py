"""The report: parsed as HTML, held against the records, and its drawing rules one by one."""

from __future__ import annotations

import math
import re
from base64 import b64encode
from dataclasses import dataclass, field
from hashlib import sha256
from html.parser import HTMLParser
from importlib.resources import files
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protwin.shared import report_svg
from protwin.shared.comparison import Comparison, compare_records
from protwin.shared.errors import ProtwinError
from protwin.shared.record import Record, TaskTiming
from protwin.shared.report import html_report
from protwin.shared.report_bars import KIND_COLOURS, merged
from protwin.shared.report_losses import agreement
from protwin.shared.report_memory import CONTENT_COLOURS, thinned
from protwin.shared.report_patterns import STROKES
from protwin.shared.report_svg import Scale, Unit, spread, ticks
from protwin.shared.report_timeline import lane_charts, telling_stretch_s
from protwin.shared.report_waits import waits_of
from protwin.shared.schedule import Content, Lane, Memory, TaskKind
from protwin.shared.units import format_bytes, format_seconds
from tests.shared.laid_out import LaidOut, laid_out

VOID = {"meta", "wbr"}
PAGE_CSS = files("protwin.shared").joinpath("report.css").read_text(encoding="utf-8")
FIGURES_CSS = files("protwin.shared").joinpath("report_figures.css").read_text(encoding="utf-8")
CSS = PAGE_CSS + FIGURES_CSS
LOSSES = [5.0 * math.exp(-step / 10) + 2.0 for step in range(30)]


@dataclass
class Element:
    tag: str
    attributes: dict[str, str | None]
    words: str = ""


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
            element.words += data

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
    """Nothing that loads, no references but to the page's own patterns, and no script but the one of the policy."""
    forbidden = {"link", "img", "iframe", "object", "embed", "base", "form", "image", "use", "foreignobject"}
    assert not forbidden & {element.tag for element in page.elements}
    for element in page.elements:
        for name, value in element.attributes.items():
            assert name not in {"src", "href", "xlink:href", "srcset", "action", "background", "data"}
            assert not name.startswith("on")
            assert "url(" not in (value or "")
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


@pytest.fixture(scope="module")
def example() -> LaidOut:
    return laid_out(8, noise_frac=0.2)


@pytest.fixture(scope="module")
def comparison(example: LaidOut) -> Comparison:
    return compare_records(example.predicted, example.measured)


def full_report(example: LaidOut, comparison: Comparison | None, **changes: object) -> str:
    arguments: dict[str, object] = {
        "title": "A demonstration",
        "predicted": example.predicted,
        "measured": example.measured,
        "budget_bytes": example.predicted.peak_device_bytes + 2**20,
        "losses": {"plain": LOSSES, "planned": LOSSES},
        "plain_peak_bytes": 2 * example.predicted.peak_device_bytes,
        "comparison": comparison,
        "notes": ["One thing to know."],
        "schedule": example.schedule,
    }
    return html_report(**(arguments | changes))  # type: ignore[arg-type]


# -- the page --------------------------------------------------------------------------------------------------------


def test_the_page_is_whole_and_needs_nothing_else(example: LaidOut, comparison: Comparison) -> None:
    html = full_report(example, comparison)
    page = parse(html)
    check_self_contained(page)
    assert "http" not in html.replace("http-equiv", "")


def test_the_headline_figures_appear(example: LaidOut, comparison: Comparison) -> None:
    words = parse(full_report(example, comparison)).words
    for record in (example.predicted, example.measured):
        assert format_seconds(record.iteration_s) in words
        assert format_bytes(record.peak_device_bytes) in words
    assert format_bytes(example.predicted.peak_device_bytes + 2**20) in words
    assert format_bytes(2 * example.predicted.peak_device_bytes) in words
    assert format_bytes(example.predicted.guaranteed_peak_device_bytes) in words
    error = example.predicted.iteration_s / example.measured.iteration_s - 1
    assert f"{error * 100:+.1f} %".replace("-", "−") in words
    assert f"± {example.measured.iteration_noise_frac * 100:.1f} %" in words
    assert "bit for bit in all 30 steps" in words
    for name in ("chunk_bytes", "n_persist", "n_buffer", "prefetch_depth", "n_checkpoint"):
        assert name in words
    assert "One thing to know." in words
    assert "device budget on host memory" in words


def test_every_task_can_be_pointed_at(example: LaidOut, comparison: Comparison) -> None:
    titles = [element.words for element in parse(full_report(example, comparison)).named("title")]
    for record in (example.predicted, example.measured):
        for timing in record.tasks:
            span = f"{format_seconds(timing.start_s)} to {format_seconds(timing.end_s)}"
            assert any(span in title for title in titles), timing.name
    gather = next(task for task in example.schedule.tasks if task.kind is TaskKind.GATHER)
    moved = f"{format_bytes(gather.moved_bytes)} moved"
    assert any(title.startswith(f"gather chunk {gather.chunk}\n") and moved in title for title in titles)


def chart_bars(html: str) -> list[list[Element]]:
    """The bars of every lane chart that shows what tasks wait for."""
    charts, page = [], parse(html)
    for element in page.elements:
        if element.tag == "svg" and "lanes" in (element.attributes.get("class") or ""):
            charts.append([])
        elif "bar" in (element.attributes.get("class") or "").split() and charts:
            charts[-1].append(element)
    return charts


def test_bars_name_what_their_tasks_wait_for(example: LaidOut) -> None:
    """Every edge of the schedule, read back from the page by the names of the bars."""
    html = html_report(title="t", predicted=example.predicted, schedule=example.schedule)
    (bars,) = chart_bars(html)
    assert len(bars) == len(example.schedule.tasks), "nothing is thinned"
    kind_words = {"gradient_offload": "gradient offload", "cpu_adam": "CPU Adam", "device_adam": "device Adam"}

    def shown(name: str) -> str:
        kind, *rest = name.split(" ")
        return " ".join([kind_words.get(kind, kind), *rest])

    names = [bar.words.split("\n")[0] for bar in bars]
    assert sorted(names) == sorted(shown(task.name) for task in example.schedule.tasks)
    for attribute, edges_of in (("data-after", lambda t: t.after), ("data-earlier", lambda t: t.after_previous)):
        drawn = {
            (name, names[int(place)])
            for name, bar in zip(names, bars, strict=True)
            for place in (bar.attributes.get(attribute) or "").split()
        }
        assert drawn == {
            (shown(task.name), shown(example.schedule.tasks[other].name))
            for task in example.schedule.tasks
            for other in edges_of(task)
        }


def test_a_task_names_what_held_it_up(example: LaidOut) -> None:
    """The records' tasks start as soon as they may, so that what holds one up ends when it starts."""
    waits, ends_s = waits_of(example.predicted, example.schedule), {}
    for timing in example.predicted.tasks:
        ends_s[timing.task] = timing.end_s
    for timing in example.predicted.tasks:
        held_by = waits[timing.task].held_up_by
        if held_by is None:
            continue
        earlier = held_by in waits[timing.task].earlier and ends_s[held_by] > timing.start_s + 1e-9
        ended_s = ends_s[held_by] - (example.predicted.iteration_s if earlier else 0.0)
        assert ended_s == pytest.approx(timing.start_s, abs=1e-9) or ended_s < timing.start_s


@pytest.mark.parametrize("num_tasks", [300, 3000])
def test_what_is_thinned_is_counted(example: LaidOut, num_tasks: int) -> None:
    """Single bars and the counts of joint ones make up all tasks, and the caption says how many are not drawn."""
    figure = lane_charts([crowded(example.predicted, num_tasks)], None)[0]
    titles = re.findall(r"<title>(.*?)\n", figure.drawing)
    joint = [int(found[1]) for title in titles if (found := re.match(r"(\d+) tasks: ", title))]
    single = [title for title in titles if not re.match(r"(\d+) tasks: |still at work", title)]
    assert sum(joint) + len(single) == 4 * num_tasks
    assert f"{sum(joint):,} of {4 * num_tasks:,} tasks are too short" in figure.caption[1]
    assert f"drawn as {len(joint):,} joint bars" in figure.caption[1]


def test_a_closer_look_tells_tasks_apart(example: LaidOut) -> None:
    record = crowded(example.predicted, 2000)
    overview, closer = lane_charts([record], None)
    low, high = telling_stretch_s(record)
    within = [t for t in record.tasks if t.end_s > low and t.start_s < high]
    assert closer.drawing.count('class="bar ') == len(within) > 24
    assert "joint bar" not in closer.caption[1]
    assert "joint bar" in overview.caption[1]


def test_figures_have_words_for_those_who_cannot_see_them(example: LaidOut, comparison: Comparison) -> None:
    page = parse(full_report(example, comparison))
    for drawing in page.named("svg"):
        if drawing.attributes.get("aria-hidden") != "true":
            assert drawing.attributes["role"] == "img"
            assert drawing.attributes["aria-label"]
    assert all(cell.attributes.get("scope") for cell in page.named("th"))
    identifiers = [e.attributes["id"] for e in page.elements if "id" in e.attributes]
    assert len(identifiers) == len(set(identifiers))
    headings = {heading.attributes["id"] for heading in page.named("h2")}
    assert {s.attributes["aria-labelledby"] for s in page.named("section")} == headings
    assert next(iter(page.named("html"))).attributes["lang"] == "en"


def test_every_class_has_a_look(example: LaidOut, comparison: Comparison) -> None:
    page = parse(full_report(example, comparison))
    used = {name for e in page.elements for name in (e.attributes.get("class") or "").split()}
    styled = set(re.findall(r"\.([a-z][a-z-]*)", re.sub(r"/\*.*?\*/", "", CSS, flags=re.DOTALL)))
    assert used - styled - {"cards", "card"} == set()
    palette = {*KIND_COLOURS.values(), *CONTENT_COLOURS.values()}
    assert {f"{part}-{colour}" for part in ("fill", "on") for colour in palette} <= styled


def test_a_prediction_alone_makes_a_report(example: LaidOut) -> None:
    html = html_report(title="Planned", predicted=example.predicted)
    page = parse(html)
    check_self_contained(page)
    assert "measured" not in page.words.lower()
    assert "nan" not in page.words.lower()


def test_records_without_tasks_or_memory_make_a_report(example: LaidOut) -> None:
    bare = example.predicted.model_copy(update={"tasks": (), "memory": (), "lanes": ()})
    page = parse(html_report(title="Bare", predicted=bare, budget_bytes=2**20, losses={"one": [], "two": []}))
    assert "Device memory" not in [heading.words for heading in page.named("h2")]
    assert "Losses" not in [heading.words for heading in page.named("h2")]


def test_a_peak_above_the_budget_is_said(example: LaidOut) -> None:
    peak_bytes = example.predicted.peak_device_bytes
    page = parse(html_report(title="Over", predicted=example.predicted, budget_bytes=peak_bytes - 2**20))
    assert "exceeded by 1 MiB" in page.words


def test_an_unmeasured_peak_is_not_taken_for_zero(example: LaidOut) -> None:
    measured = example.measured.model_copy(update={"memory": ()})
    budget_bytes = example.predicted.peak_device_bytes + 2**20
    html = html_report(title="t", predicted=example.predicted, measured=measured, budget_bytes=budget_bytes)
    assert "1 MiB to spare" in parse(html).words


def test_equal_input_gives_equal_bytes(comparison: Comparison, example: LaidOut) -> None:
    assert full_report(example, comparison) == full_report(laid_out(8, noise_frac=0.2), comparison)


def test_what_belongs_to_another_plan_is_refused(example: LaidOut, comparison: Comparison) -> None:
    other = example.measured.model_copy(update={"plan_id": "another"})
    with pytest.raises(ProtwinError, match="measured one another"):
        full_report(example, None, measured=other)
    with pytest.raises(ProtwinError, match="comparison is of plan another"):
        full_report(example, comparison.model_copy(update={"plan_id": "another"}))
    with pytest.raises(ProtwinError, match="schedule is that of plan"):
        full_report(example, None, schedule=laid_out(3).schedule)


# -- hostile names ---------------------------------------------------------------------------------------------------

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


def hostile_report(example: LaidOut) -> str:
    predicted, measured = hostile(example.predicted), hostile(example.measured)
    return html_report(
        title=HOSTILE,
        predicted=predicted,
        measured=measured,
        budget_bytes=2**40,
        losses={HOSTILE: LOSSES, f"{HOSTILE}2": LOSSES},
        plain_peak_bytes=2**41,
        comparison=compare_records(predicted, measured),
        notes=[HOSTILE],
    )


def test_hostile_names_stay_words(example: LaidOut) -> None:
    page = parse(hostile_report(example))
    check_self_contained(page)
    for place in ("h1", "code", "figcaption", "caption", "li", "p", "title"):
        assert any("alert(1)" in element.words for element in page.named(place)) or place == "figcaption"


def test_the_check_notices_a_name_that_is_not_escaped(example: LaidOut, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every module that escapes, one at a time, is given a version that does not."""
    import protwin.shared.report
    import protwin.shared.report_bars
    import protwin.shared.report_memory
    import protwin.shared.report_page
    import protwin.shared.report_tables

    modules = (
        protwin.shared.report,
        protwin.shared.report_memory,
        protwin.shared.report_page,
        protwin.shared.report_tables,
        protwin.shared.report_bars,
        report_svg,
    )
    for module in modules:
        with monkeypatch.context() as patch:
            patch.setattr(module, "escape", lambda words, quote=True: words)
            html = hostile_report(example)
            with pytest.raises(AssertionError):
                check_self_contained(parse(html))


# -- thousands of tasks ----------------------------------------------------------------------------------------------


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
        for place, (kind, lane) in enumerate(zip(kinds, Lane, strict=True))
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


@pytest.mark.parametrize("num_tasks", [300, 470, 3000])
def test_thousands_of_tasks_stay_below_two_megabytes(example: LaidOut, num_tasks: int) -> None:
    predicted, measured = crowded(example.predicted, num_tasks), crowded(example.measured, num_tasks)
    html = html_report(
        title="Crowded",
        predicted=predicted,
        measured=measured,
        losses={"plain": LOSSES * 300, "planned": LOSSES * 300},
        comparison=compare_records(predicted, measured),
    )
    parse(html)
    assert len(html.encode()) < 2 * 10**6


@st.composite
def lanes_of_tasks(draw: st.DrawFn) -> list[TaskTiming]:
    """Tasks of one lane, one after another, of any width and with any gaps."""
    at_s, timings = draw(st.floats(-2, 2)), []
    for task, (gap_s, long_s, kind) in enumerate(
        draw(
            st.lists(
                st.tuples(
                    st.sampled_from((0.0, 0.01, 0.5, 3.0)),
                    st.sampled_from((0.0, 0.01, 0.3, 1.9, 2.1, 40.0)),
                    st.sampled_from((TaskKind.FORWARD, TaskKind.BACKWARD)),
                ),
                max_size=60,
            )
        )
    ):
        at_s += gap_s
        timings.append(
            TaskTiming(
                task=task,
                name=f"{kind} {task}",
                kind=kind,
                lane=Lane.COMPUTE,
                start_s=at_s,
                end_s=at_s + long_s,
                duration_s=long_s,
            )
        )
        at_s += long_s
    return timings


@given(timings=lanes_of_tasks())
def test_merging_loses_no_task_and_merges_only_narrow_ones(timings: list[TaskTiming]) -> None:
    """One second is one pixel."""
    bars = list(merged(timings[::-1], per_px=1.0))
    assert [timing.task for bar in bars for timing in bar.timings] == [timing.task for timing in timings]
    for bar in bars:
        if len(bar.timings) > 1:
            assert all(timing.end_s - timing.start_s < 2.0 for timing in bar.timings)
            assert bar.end_s - bar.start_s <= 6.0
            assert 0 <= bar.busy_frac <= 1
    if bars:
        span_s = bars[-1].end_s - bars[0].start_s
        assert len(bars) <= span_s + 2, "more bars than pixels"


@given(
    steps=st.lists(st.tuples(st.sampled_from((0.0, 0.01, 0.4, 2.0)), st.integers(0, 1000)), min_size=1, max_size=200)
)
def test_thinning_keeps_the_extremes_of_every_pixel(steps: list[tuple[float, int]]) -> None:
    times_s, levels, at_s = [], [], 0.0
    for wait_s, level in steps:
        at_s += wait_s
        times_s.append(at_s)
        levels.append(level)
    kept = thinned(times_s, levels, per_px=1.0)
    assert [at for at, _ in kept] == sorted(at for at, _ in kept)
    assert kept[-1] == (times_s[-1], levels[-1])
    held = [
        (at, level)
        for place, (at, level) in enumerate(zip(times_s, levels, strict=True))
        if place + 1 == len(times_s) or times_s[place + 1] > at
    ]
    assert set(kept) <= set(held)
    for column in {int(at - times_s[0]) for at, _ in held}:
        before = [level for at, level in held if int(at - times_s[0]) == column]
        after = [level for at, level in kept if int(at - times_s[0]) == column]
        assert (min(after), max(after), after[-1]) == (min(before), max(before), before[-1])
        assert len(after) <= 4


# -- drawing rules ---------------------------------------------------------------------------------------------------


@given(low=st.floats(-1e6, 1e6), span=st.floats(1e-6, 1e6), at_most=st.integers(2, 15))
def test_ticks_are_round_evenly_spaced_and_few(low: float, span: float, at_most: int) -> None:
    found = ticks(low, low + span, Unit(1.0, ""), at_most=at_most)
    assert len(found) <= at_most + 1
    if len(found) > 1:
        step = found[1].value - found[0].value
        digits = step / 10 ** math.floor(math.log10(step * 1.000001))
        assert min(abs(digits - factor) for factor in (1, 2, 5)) < 1e-3
        for tick in found:
            assert low - 1e-6 * span <= tick.value <= low + span * (1 + 1e-6)
            assert float(tick.label.replace("−", "-")) == pytest.approx(tick.value, abs=step * 1e-3)


@pytest.mark.parametrize(
    ("low", "high", "unit", "labels"),
    [
        (0.0, 0.012, Unit(1e-3, "ms"), ["0", "2", "4", "6", "8", "10", "12"]),
        (-0.5, 0.5, Unit(1.0, "s"), ["−0.4", "−0.2", "0.0", "0.2", "0.4"]),
        (0.0, 3 * 2**30, Unit(2.0**30, "GiB"), ["0.0", "0.5", "1.0", "1.5", "2.0", "2.5", "3.0"]),
        (1.0, 1.0, Unit(1.0, ""), ["1"]),
    ],
)
def test_ticks_by_example(low: float, high: float, unit: Unit, labels: list[str]) -> None:
    assert [tick.label for tick in ticks(low, high, unit, at_most=7)] == labels


@given(positions=st.lists(st.floats(0, 300), max_size=6))
def test_labels_do_not_overlap(positions: list[float]) -> None:
    placed = spread(positions, gap=16.0)
    assert all(after >= before for before, after in zip(positions, placed, strict=True))
    ordered = sorted(placed)
    assert all(b - a >= 16.0 - 1e-9 for a, b in pairwise(ordered))


def test_a_scale_runs_either_way_and_survives_a_point() -> None:
    assert Scale(0, 10, 100, 0)(2.5) == 75
    assert Scale(3, 3, 0, 50)(3) == 0


@pytest.mark.parametrize(
    ("other", "headline", "detail"),
    [
        (LOSSES, "identical", "bit for bit in all 30 steps"),
        ([*LOSSES[:29], LOSSES[29] + 0.25], "different", "from step 29 on, by at most 0.25"),
        ([math.nextafter(LOSSES[0], 0), *LOSSES[1:]], "different", "from step 0 on, by at most"),
        (LOSSES[:10], "different", "runs of 30, 10 steps"),
        ([math.nan] * 30, "different", "not finite"),
    ],
)
def test_losses_are_identical_only_bit_for_bit(other: list[float], headline: str, detail: str) -> None:
    found = agreement({"plain": LOSSES, "planned": other})
    assert found is not None
    assert found.headline == headline
    assert detail in found.detail


def test_a_loss_that_is_not_finite_breaks_the_line(example: LaidOut) -> None:
    broken = [*LOSSES[:10], math.nan, math.inf, *LOSSES[12:]]
    page = parse(full_report(example, None, losses={"plain": broken, "planned": broken}))
    for element in page.elements:
        for name, value in element.attributes.items():
            if name != "aria-label" and element.tag != "meta":
                assert not re.search(r"\b(nan|inf)\b", value or "")
    curves = [p for p in page.named("path") if "broad" in (p.attributes.get("class") or "")]
    assert [curve.attributes["d"].count("M") for curve in curves if curve.attributes["d"]] == [2]


def test_identical_losses_show_both_a_band_and_rings(example: LaidOut) -> None:
    page = parse(full_report(example, None))
    assert any("broad" in (p.attributes.get("class") or "") for p in page.named("path"))
    rings = [c for c in page.named("circle") if "ring stroke-orange" in (c.attributes.get("class") or "")]
    assert len(rings) >= len(LOSSES)


# -- colours ---------------------------------------------------------------------------------------------------------


def palettes() -> list[dict[str, str]]:
    """The colour variables in light, and in dark where they replace the light ones."""
    light, dark = (
        dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6});", part)) for part in CSS.split("prefers-color-scheme: dark")[:2]
    )
    assert light.keys() == dark.keys()
    return [light, dark]


def luminance(colour: str) -> float:
    """Relative luminance, WCAG 2.2."""
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    """Contrast ratio, WCAG 2.2."""
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("palette", palettes(), ids=["light", "dark"])
def test_words_and_marks_stand_out(palette: dict[str, str]) -> None:
    """WCAG 2.2: 4.5 for words, 3 for what a figure needs to be understood."""
    for ink in ("ink", "quiet", "limit"):
        for ground in ("page", "panel"):
            assert contrast(palette[ink], palette[ground]) >= 4.5
    for colour in {*KIND_COLOURS.values(), *CONTENT_COLOURS.values()}:
        assert contrast(palette[colour], palette["page"]) >= 3, colour
        assert contrast(palette[f"on-{colour}"], palette[colour]) >= 4.5, colour


def test_both_themes_define_every_colour_in_use() -> None:
    used = set(re.findall(r"var\(--([a-z-]+)\)", CSS))
    assert "blue" in used
    for palette in palettes():
        assert used <= palette.keys()
    assert not re.search(r"#[0-9a-f]{3,8}\b", re.sub(r"--[a-z-]+: #[0-9a-f]{6};", "", CSS).replace("#pattern-", ""))


def test_areas_stay_apart_without_colour() -> None:
    """Every area is filled with a pattern, and every pattern is another texture."""
    assert len(set(STROKES.values())) == len(STROKES)
    assert {*KIND_COLOURS.values(), *CONTENT_COLOURS.values()} < STROKES.keys()
    for colour in STROKES:
        assert f".fill-{colour} {{ fill: url(#pattern-{colour}); }}" in FIGURES_CSS


def test_every_kind_and_content_has_a_colour_of_its_own() -> None:
    assert len(set(KIND_COLOURS.values())) == len(TaskKind) == len(KIND_COLOURS)
    assert len(set(CONTENT_COLOURS.values())) == len(Content) + 1 == len(CONTENT_COLOURS)
