"""Reports in a real browser, where there is one: what keys, wheel, fingers and pointer do, and what is read aloud."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from protwin.shared.records.period import folded
from protwin.shared.records.waits import waits_of
from protwin.shared.report.advice import advice_report
from protwin.shared.report.axes import Unit, across, x_axis
from protwin.shared.report.page import Report, Section
from protwin.shared.report.svg import Figure
from protwin.shared.schema.schedule import Lane, Memory
from tests.browser import BROWSER, Browser, browser
from tests.shared.found import result_of
from tests.shared.laid_out import LaidOut, laid_out
from tests.shared.report.test_advice import advice, ranked
from tests.shared.report.test_report import shown_name
from tests.shared.report_pages import HOSTILE, crowded, full_report, html_report
from tests.shared.several_ranks import several_ranks

pytestmark = [pytest.mark.slow, pytest.mark.skipif(BROWSER is None, reason="no Chromium to open the page with")]

PREDICTED = "#figure-timeline-predicted .chart"
MEMORY = "#figure-memory .chart"
OUTSIDE = """[...document.querySelectorAll("main *")].filter((one) => !one.closest(".tasks, thead, clipPath, .links"))
    .map((one) => [one, one.getBoundingClientRect()])
    .filter(([one, box]) => box.width && (box.right > innerWidth + 0.5 || box.left < -0.5))
    .map(([one]) => `${one.localName} ${one.textContent.trim().slice(0, 40)}`)"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("browser")) as running:
        yield running


@pytest.fixture(scope="module")
def example() -> LaidOut:
    return laid_out(8, noise_frac=0.2)


@pytest.fixture(scope="module")
def html(example: LaidOut) -> str:
    return full_report(example, search=result_of(example), warnings=("Mind the gap.",))


def view(page: Browser, chart: str) -> tuple[float, float]:
    """Where the shown part of a chart begins, as a share of the whole, and how many times as large it is drawn."""
    x, width = page.run(
        f"[...['x', 'width'].map((key) => document.querySelector('{chart} .plot').getAttribute(key))].map(parseFloat)"
    )
    return -x / width, width / 100


def box(page: Browser, selector: str) -> dict[str, float]:
    """Where an element is once it is scrolled to."""
    found: dict[str, float] = page.run(
        f"(() => {{ const one = document.querySelector('{selector}'); one.scrollIntoView({{block: 'center'}});"
        " return one.getBoundingClientRect().toJSON(); })()"
    )
    return found


def told(page: Browser, figure: str) -> str:
    words: str = page.run(f"document.querySelector('{figure} .told').textContent")
    return words


def focus(page: Browser, chart: str) -> None:
    page.run(f"document.querySelector('{chart}').focus()")


def test_the_policy_lets_the_pages_own_script_run_and_no_other(page: Browser, html: str) -> None:
    page.open(html)
    assert page.run("document.querySelectorAll('.chart[tabindex]').length") > 5
    assert page.complaints == []
    page.open(html.replace("</main>", "<script>document.title = 'taken over'</script></main>"))
    assert page.run("document.title") != "taken over"
    assert any("Content Security Policy" in words for words in page.complaints)
    page.open(html.replace('"use strict";', '"use strict"; 1;'))
    assert page.run("document.querySelectorAll('.chart[tabindex]').length") == 0


def test_every_chart_and_button_has_a_name_and_can_be_reached_by_keys(page: Browser, html: str) -> None:
    page.open(html)
    heard = page.heard()
    images = [name for role, name in heard if role == "image"]
    labels = page.run("[...document.querySelectorAll('.chart')].map((one) => one.getAttribute('aria-label'))")
    assert images == labels
    assert all(labels)
    buttons = [name for role, name in heard if role == "button"]
    assert len(buttons) == len(set(buttons)) == 3 * len(labels)
    assert "Closer: Predicted" in buttons
    assert ("complementary", "Warnings") in heard
    headings = page.run("[...document.querySelectorAll('h1, h2')].map((one) => one.textContent)")
    assert [name for role, name in heard if role == "heading"] == headings
    reached = set()
    for _ in range(60):
        page.press("Tab")
        reached.add(page.run("document.activeElement.getAttribute('aria-label')"))
    assert set(labels) <= reached


@pytest.mark.parametrize("width", [1280, 420])
def test_nothing_lies_beyond_the_page_and_times_lie_below_each_other(page: Browser, html: str, width: int) -> None:
    machines = [ranked(f"a machine of a long name {place}", place + 1.0, 9.0 - place) for place in range(5)]
    page.open(advice_report(advice(*machines)).html, width=width, touch=width < 600)
    assert page.run(OUTSIDE) == []
    page.open(html, width=width, touch=width < 600)
    assert page.run(OUTSIDE) == []
    assert page.run("document.documentElement.scrollWidth") <= width
    sides = page.run(
        "[...document.querySelectorAll('.chart:has([data-group=time])')].map((one) => {"
        " const box = one.getBoundingClientRect(); return `${box.left} ${box.right}`; })"
    )
    assert len(sides) == 4
    assert len(set(sides)) == 1
    sizes = page.run(
        "[...document.querySelectorAll('main text')].map((one) => parseFloat(getComputedStyle(one).fontSize))"
    )
    assert min(sizes) >= 11


@pytest.mark.parametrize("width", [1280, 420])
def test_ranks_lie_within_the_page(page: Browser, width: int) -> None:
    ranks = several_ranks()
    page.open(html_report(title="t", predicted=ranks.alike, measured=ranks.measured), width=width, touch=width < 600)
    assert page.run("document.querySelectorAll('#figure-ranks-measured .row').length") > 4
    assert page.run(OUTSIDE) == []


@pytest.mark.parametrize("width", [1280, 420])
def test_labels_of_axes_have_room(page: Browser, html: str, width: int) -> None:
    axis = x_axis(across(19.0, 21.2), Unit(1.0, "GiB"), top=0, bottom=20, at_most=12)
    crowd = Figure(name="axis", drawing=axis, label="an axis of twelve labels", height=50.0)
    for opened in (html, Report("t", "", (), (Section("s", (crowd,)),)).html):
        page.open(opened, width=width)
        for _ in range(2):
            overlaps = page.run(
                "[...document.querySelectorAll('.ticks')].flatMap((group) => {"
                " const boxes = [...group.querySelectorAll('text')].map((one) => one.getBoundingClientRect());"
                " const shown = boxes.filter((one) => one.width);"
                " return shown.filter((one, place) => place && one.left < shown[place - 1].right + 2)"
                " .map((one) => one.left); })"
            )
            assert overlaps == []
            page.run("views.forEach((view) => view.show(0.21, 7))")


@pytest.mark.parametrize("width", [1280, 420])
def test_labels_stay_within_their_bars(page: Browser, html: str, width: int) -> None:
    page.open(html, width=width)
    overlong = page.run(
        "[...document.querySelectorAll('.bars .mark')].filter((one) => one.getBoundingClientRect().width >"
        " one.previousElementSibling.getBoundingClientRect().width).map((one) => one.textContent)"
    )
    assert overlong == []
    assert page.run("[...document.querySelectorAll('.bars .mark')].some((one) => one.getBoundingClientRect().width)")


def test_pointing_at_a_task_shows_what_it_waits_for(page: Browser) -> None:
    example = laid_out(4)
    page.open(html_report(title="t", predicted=example.predicted, schedule=example.schedule))
    waits = waits_of(example.predicted, example.schedule)
    task = max(example.schedule.tasks, key=lambda t: (len(waits[t.id].after) + len(waits[t.id].earlier), t.id))
    place = box(page, f'[data-tasks="{task.id}"]')
    page.mouse("mouseMoved", place["x"] + place["width"] / 2, place["y"] + place["height"] / 2)

    def lit(name: str) -> set[int]:
        bars = page.run(f"[...document.querySelectorAll('.bar.{name}')].map((one) => one.dataset.tasks)")
        return {int(number) for bar in bars for number in bar.split()}

    assert lit("chosen") == {task.id}
    assert lit("waited-for") == {*task.after, *task.after_previous}
    waiting = {other.id for other in example.schedule.tasks if task.id in {*other.after, *other.after_previous}}
    assert lit("waiting") == waiting
    words = told(page, "#figure-timeline-predicted")
    assert words.startswith(shown_name(task.name))
    assert all(shown_name(example.schedule.tasks[other].name) in words for other in task.after)
    assert page.run("document.querySelectorAll('.links path').length") == len(task.after) + sum(
        task.id in other.after for other in example.schedule.tasks
    )


def test_the_wheel_looks_closer_at_what_is_pointed_at(page: Browser, html: str) -> None:
    page.open(html)
    wheel = "new WheelEvent('wheel', {deltaY: -200, bubbles: true, cancelable: true})"
    assert page.run(f"document.querySelector('{PREDICTED} .bar').dispatchEvent({wheel})"), "the page itself scrolls"
    assert view(page, PREDICTED) == (0, 1)
    place = box(page, PREDICTED)
    at = place["x"] + 0.3 * place["width"], place["y"] + 40
    for modifiers in (2, 0):  # with Ctrl; and plainly, once the chart has the focus
        page.mouse("mouseWheel", *at, deltaX=0, deltaY=-200, modifiers=modifiers)
        begin, zoom = view(page, PREDICTED)
        assert zoom > 1.5
        assert begin + 0.3 / zoom == pytest.approx(0.3, abs=1e-3)
        assert view(page, MEMORY) == (begin, zoom), "charts over time are looked at together"
        assert view(page, "#figure-losses .chart") == (0, 1)
        page.run("document.querySelector('#figure-timeline-predicted .tools button:last-child').click()")
        assert view(page, PREDICTED) == (0, 1)
        focus(page, PREDICTED)


def test_keys_look_closer_and_walk(page: Browser, html: str, example: LaidOut) -> None:
    page.open(html)
    focus(page, PREDICTED)
    page.press("+", "+")
    assert view(page, PREDICTED) == pytest.approx((0.375, 4))
    labels = page.run(f"[...document.querySelectorAll('{PREDICTED} .ticks text')].map((one) => one.textContent)")
    low, high = (float(re.sub("[^0-9.]", "", label)) for label in (labels[0], labels[-1]))
    assert labels[-1].endswith(" ms")
    longest_ms = max(example.predicted.iteration_s, example.measured.iteration_s) * 1e3
    assert 0.375 * longest_ms <= low < high <= 0.625 * longest_ms
    page.press("-")
    assert view(page, PREDICTED)[1] == pytest.approx(2)
    page.press("0")
    assert view(page, PREDICTED) == (0, 1)
    pieces = sorted(folded(example.predicted.tasks, example.predicted.iteration_s), key=lambda p: p.start_s)
    compute = [piece.timing for piece in pieces if piece.timing.lane is Lane.COMPUTE]
    for timing in compute[:3]:
        page.press("ArrowRight")
        assert told(page, "#figure-timeline-predicted").startswith(f"{shown_name(timing.name)},")
    page.press("ArrowDown")
    copies = {shown_name(piece.timing.name) for piece in pieces if piece.timing.lane is Lane.H2D}
    assert told(page, "#figure-timeline-predicted").split(",")[0] in copies
    page.press("Escape")
    assert told(page, "#figure-timeline-predicted") == ""
    focus(page, "#figure-front .chart")
    page.press("ArrowRight")
    assert re.match(r"\d.* [GM]iB, .*s; ", told(page, "#figure-front"))


@pytest.mark.parametrize("share", [0.0, 0.31, 0.77, 1.0])
def test_levels_are_those_of_the_record(page: Browser, example: LaidOut, share: float) -> None:
    """Read off the page at a pixel; by hand from the record, anywhere within the pixels beside it."""
    page.open(html_report(title="t", predicted=example.predicted, schedule=example.schedule))
    place = box(page, MEMORY)
    x = min(place["x"] + share * place["width"], place["right"] - 0.01)
    page.mouse("mouseMoved", x, place["y"] + 100)
    found = re.fullmatch(r"at [\d.]+ \w+: predicted ([\d.]+) MiB", told(page, "#figure-memory"))
    assert found
    curve = example.predicted.curve(Memory.DEVICE)
    assert curve is not None
    at_s, pixel_s = share * example.predicted.iteration_s, example.predicted.iteration_s / place["width"]
    near = [
        level
        for begin_s, end_s, level in zip(
            curve.times_s, (*curve.times_s[1:], example.predicted.iteration_s), curve.levels_bytes, strict=True
        )
        if begin_s <= at_s + 2 * pixel_s and end_s >= at_s - 2 * pixel_s
    ]
    assert min(near) * 0.99 <= float(found[1]) * 2**20 <= max(near) * 1.01 + 2**20
    place = box(page, "#figure-memory-contents .chart")
    page.mouse("mouseMoved", x, place["y"] + 100)
    words = told(page, "#figure-memory-contents")
    *parts, together = (float(size) for size in re.findall(r"([\d.]+) MiB", words))
    assert together == pytest.approx(sum(parts), rel=0.02, abs=1)


def test_from_close_by_every_task_is_a_bar_of_its_own(page: Browser, example: LaidOut) -> None:
    record = crowded(example.predicted, 800)
    page.open(html_report(title="t", predicted=record))
    assert page.run(
        f"[...document.querySelectorAll('{PREDICTED} .bar')].some((one) => one.dataset.tasks.includes(' '))"
    )
    focus(page, PREDICTED)
    page.press("+", "+", "+", "+")
    begin, zoom = view(page, PREDICTED)
    low_s, high_s = (share * record.iteration_s for share in (begin, begin + 1 / zoom))
    bars = page.run(f"[...document.querySelectorAll('{PREDICTED} .bar')].map((one) => one.dataset.tasks)")
    edge_s = 1e-5 * record.iteration_s
    within, touched = (
        {t.task for t in record.tasks if t.end_s >= low_s + inwards_s and t.start_s <= high_s - inwards_s}
        for inwards_s in (edge_s, -edge_s)
    )
    assert within <= set(map(int, bars)) <= touched
    assert len(bars) > 100


def test_bars_of_a_closer_look_are_those_of_the_page(page: Browser, example: LaidOut) -> None:
    """What the script draws, tasks of neighbouring iterations included, lies where the page has it without a script."""
    record, ends_s = example.predicted, {Lane.H2D: 0.0}
    shifts_s = {Lane.COMPUTE: 0.0}
    for lane in (Lane.H2D, Lane.D2H, Lane.CPU_OPTIM):
        longest = max((t for t in record.tasks if t.lane is lane), key=lambda t: t.duration_s)
        shifts_s[lane] = ends_s.get(lane, record.iteration_s) - (longest.start_s + longest.end_s) / 2
    tasks = tuple(
        t.model_copy(update={"start_s": t.start_s + shifts_s[t.lane], "end_s": t.end_s + shifts_s[t.lane]})
        for t in record.tasks
    )
    page.open(html_report(title="t", predicted=record.model_copy(update={"tasks": tasks})))
    read = (
        f"[...document.querySelectorAll('{PREDICTED} .bar')].map((one) => [one.dataset.tasks,"
        " parseFloat(one.getAttribute('x')), parseFloat(one.getAttribute('width')), one.getAttribute('class'),"
        " one.nextElementSibling?.localName === 'text' ? one.nextElementSibling.textContent : ''])"
    )
    by_python = page.run(read)
    page.run("views.get('time').show(0, 1.0001)")
    by_script = page.run(read)
    assert len({tuple(bar[:2]) for bar in by_python}) > len(example.schedule.tasks), "some tasks lie at both ends"
    for one, other in zip(sorted(by_python), sorted(by_script), strict=True):
        assert one[0] == other[0]
        assert other[1:3] == pytest.approx(one[1:3], abs=0.2)
        assert other[3:] == one[3:]


def test_fingers_look_closer_and_move(page: Browser, html: str) -> None:
    page.open(html, width=420, touch=True)
    place = box(page, PREDICTED)
    x, y = place["x"] + place["width"] / 2, place["y"] + 60
    page.touch("touchStart", (x - 20, y), (x + 20, y))
    page.touch("touchMove", (x - 60, y), (x + 60, y))
    page.touch("touchEnd")
    begin, zoom = view(page, PREDICTED)
    assert zoom == pytest.approx(3, rel=0.05)
    assert begin + 0.5 / zoom == pytest.approx(0.5, abs=0.03)
    page.touch("touchStart", (x, y))
    page.touch("touchMove", (x - 30, y))
    page.touch("touchMove", (x - 60, y))
    page.touch("touchMove", (x - 90, y))
    page.touch("touchEnd")
    moved = (view(page, PREDICTED)[0] - begin) * zoom * place["width"]
    assert 55 <= moved <= 92, "all the way, but for what the browser waits for to know that it is no scroll"
    assert page.complaints == []


def test_the_list_is_a_table_that_leads_to_the_chart(page: Browser, html: str, example: LaidOut) -> None:
    page.open(html)
    page.run("document.querySelector('details').open = true")
    page.run("new Promise((done) => setTimeout(done, 50))")
    rows: list[Any] = page.run("[...document.querySelectorAll('.tasks tbody tr')].map((one) => one.cells.length)")
    assert rows.count(7) == len(example.schedule.tasks)
    last = max(example.predicted.tasks, key=lambda t: (t.lane is Lane.COMPUTE, t.start_s))
    page.run(
        "[...document.querySelectorAll('.tasks button')].find((one) =>"
        f" one.textContent === '{shown_name(last.name)}').click()"
    )
    assert told(page, "#figure-timeline-predicted").startswith(f"{shown_name(last.name)},")
    assert view(page, PREDICTED)[1] > 2
    assert page.run("document.activeElement.getAttribute('aria-label')").startswith("Timeline, Predicted")


def test_without_a_script_everything_is_there_to_read(page: Browser, html: str, example: LaidOut) -> None:
    page.ask("Emulation.setScriptExecutionDisabled", value=True)
    try:
        page.open(html, width=420)
        assert page.run("document.querySelectorAll('.tools, .told, [tabindex]').length") == 0
        assert page.run(OUTSIDE) == []
        bars = page.run(
            f"[...document.querySelectorAll('{PREDICTED} .bar')].map((one) => one.getBoundingClientRect().width)"
        )
        assert min(bars) > 0
        listed = page.run("document.querySelector('pre.tasks').textContent")
        assert all(shown_name(task.name) in listed for task in example.schedule.tasks)
    finally:
        page.ask("Emulation.setScriptExecutionDisabled", value=False)


def test_hostile_names_stay_words_on_the_live_page(page: Browser, example: LaidOut) -> None:
    """Whatever the script puts on the page from names of tasks it puts there as words."""
    tasks = tuple(t.model_copy(update={"name": f"{t.kind} {HOSTILE}"}) for t in example.predicted.tasks)
    page.open(html_report(title=HOSTILE, predicted=example.predicted.model_copy(update={"tasks": tasks})))
    page.run("document.querySelector('details').open = true")
    page.run("new Promise((done) => setTimeout(done, 50))")
    focus(page, PREDICTED)
    page.press("+", "+", "ArrowRight")
    assert "<script>alert(1)" in told(page, "#figure-timeline-predicted")
    assert page.run("document.querySelectorAll('img, script').length") == 1
    assert page.complaints == []
