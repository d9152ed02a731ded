"""The report: parsed as HTML, held against the records, and its names never taken for markup."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protwin.shared.basics.errors import ProtwinError
from protwin.shared.basics.units import format_bytes, format_seconds
from protwin.shared.records.period import folded
from protwin.shared.records.waits import waits_of
from protwin.shared.report.bars import KIND_COLOURS
from protwin.shared.report.memory import CONTENT_COLOURS
from protwin.shared.schema.record import Factorisation, TaskTiming
from protwin.shared.schema.schedule import Lane, TaskKind
from protwin.shared.tables.labels import LANE_NAMES
from protwin.shared.tables.record import factorisation_sentence
from tests.shared.laid_out import LaidOut, laid_out
from tests.shared.report_pages import (
    HOSTILE,
    LOSSES,
    chart_bars,
    check_self_contained,
    full_report,
    hostile,
    html_report,
    listed_tasks,
    parse,
)


@pytest.fixture(scope="module")
def example() -> LaidOut:
    return laid_out(8, noise_frac=0.2)


def test_the_page_is_whole_and_needs_nothing_else(example: LaidOut) -> None:
    html = full_report(example)
    page = parse(html)
    check_self_contained(page)
    assert "http" not in html.replace("http-equiv", "")


def test_the_headline_figures_appear(example: LaidOut) -> None:
    words = parse(full_report(example)).words
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


def test_every_task_can_be_pointed_at(example: LaidOut) -> None:
    titles = [element.words for element in parse(full_report(example)).named("title")]
    for record in (example.predicted, example.measured):
        for timing in record.tasks:
            span = f"{format_seconds(timing.start_s)} to {format_seconds(timing.end_s)}"
            assert any(span in title for title in titles), timing.name
    gather = next(task for task in example.schedule.tasks if task.kind is TaskKind.GATHER)
    moved = f"{format_bytes(gather.moved_bytes)} moved"
    assert any(title.startswith(f"gather chunk {gather.chunk}\n") and moved in title for title in titles)


def shown_name(name: str) -> str:
    """A task's name as a page has it."""
    kind, *rest = name.split(" ")
    words = {"gradient_offload": "gradient offload", "cpu_adam": "CPU Adam", "device_adam": "device Adam"}
    return " ".join([words.get(kind, kind), *rest])


def test_the_list_has_every_task_with_what_it_waits_for(example: LaidOut) -> None:
    """Every task and every edge of the schedule, read back from the page; both charts' bars stand for all of them."""
    html = full_report(example)
    lists = listed_tasks(html)
    assert len(lists) == 2
    for record, listed, bars in zip((example.predicted, example.measured), lists, chart_bars(html), strict=True):
        assert set(listed) == {task.id for task in example.schedule.tasks}
        for timing in record.tasks:
            line, task = listed[timing.task], example.schedule.tasks[timing.task]
            assert line.name == shown_name(task.name)
            assert line.lane == LANE_NAMES[task.lane]
            assert line.start_s == pytest.approx(timing.start_s, abs=1e-6 * record.iteration_s)
            assert line.duration_s == pytest.approx(timing.end_s - timing.start_s, abs=1e-6 * record.iteration_s)
            assert set(line.after) == set(task.after)
            assert set(line.earlier) == set(task.after_previous)
            held = waits_of(record, example.schedule)[timing.task].held_up_by
            assert line.held.split(", ")[0] == ("" if held is None else str(held))
        drawn = {int(task) for bar in bars for task in (bar.attributes["data-tasks"] or "").split()}
        assert drawn == set(listed)


@given(
    spans=st.lists(
        st.tuples(st.floats(-3, 5), st.one_of(st.just(0.0), st.floats(0, 3))).map(lambda t: (t[0], t[0] + t[1]))
    )
)
def test_what_lies_beyond_the_iteration_is_folded_into_it(spans: list[tuple[float, float]]) -> None:
    """At every instant of one period, as many pieces as there are tasks at this instant of any period."""
    timings = [
        TaskTiming(
            task=place,
            name="gather chunk 0",
            kind=TaskKind.GATHER,
            lane=Lane.H2D,
            start_s=start_s,
            end_s=end_s,
            duration_s=end_s - start_s,
        )
        for place, (start_s, end_s) in enumerate(spans)
    ]
    pieces = list(folded(timings, 1.0))
    assert all(-1e-9 <= piece.start_s <= piece.end_s <= 1.0 for piece in pieces)
    assert {piece.timing.task for piece in pieces} == set(range(len(spans)))
    ends = sorted({0.0, 1.0, *(at % 1.0 for span in spans for at in span)})
    for low, high in pairwise(ends):
        if high - low < 1e-6:
            continue
        at_s = (low + high) / 2
        for task, (start_s, end_s) in enumerate(spans):
            runs = [shift for shift in range(-6, 7) if start_s <= at_s + shift <= end_s]
            found = [p for p in pieces if p.timing.task == task and p.start_s <= at_s <= p.end_s]
            assert bool(runs) == bool(found)
            if end_s - start_s < 1.0:
                assert [-shift for shift in runs] == [piece.iteration for piece in found]


def test_time_axes_end_with_the_iteration_and_stand_below_each_other(example: LaidOut) -> None:
    """Tasks and curves of a record that runs past its end stay on the axis; all charts over time have the same one."""
    beyond_s = 0.3 * example.measured.iteration_s
    late = tuple(
        t
        if t.lane is Lane.COMPUTE
        else t.model_copy(update={"start_s": t.start_s + beyond_s, "end_s": t.end_s + beyond_s})
        for t in example.measured.tasks
    )
    assert max(t.end_s for t in late) > example.measured.iteration_s
    html = full_report(example, measured=example.measured.model_copy(update={"tasks": late}))
    page = parse(html)
    axes = [e.attributes for e in page.named("g") if e.attributes.get("data-group") == "time"]
    assert len(axes) == 4
    assert len({(a["data-low"], a["data-high"], a["data-worth"]) for a in axes}) == 1
    longest_s = max(example.predicted.iteration_s, example.measured.iteration_s)
    assert float(axes[0]["data-low"] or "") == 0
    assert float(axes[0]["data-high"] or "") * float(axes[0]["data-worth"] or "") == pytest.approx(longest_s)
    for bar in (bar for bars in chart_bars(html) for bar in bars):
        left, width = (float((bar.attributes[name] or "").removesuffix("%")) for name in ("x", "width"))
        assert left >= 0
        assert left + width <= 100 + 0.2, "but for the narrowest bar there is"
    assert any("of the previous iteration" in bar.words for bars in chart_bars(html) for bar in bars)


def test_warnings_stand_on_the_page(example: LaidOut) -> None:
    page = parse(html_report(title="t", predicted=example.predicted, warnings=("Mind the gap.", HOSTILE)))
    (told,) = page.named("aside")
    assert "Mind the gap." in told.words
    assert HOSTILE in told.words
    assert not parse(html_report(title="t", predicted=example.predicted)).named("aside")


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


def test_figures_have_words_for_those_who_cannot_see_them(example: LaidOut) -> None:
    page = parse(full_report(example))
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


def test_every_class_has_a_look(example: LaidOut) -> None:
    page = parse(full_report(example))
    used = {name for e in page.elements for name in (e.attributes.get("class") or "").split()}
    styled = set(
        re.findall(r"\.([a-z][a-z-]*)", re.sub(r"/\*.*?\*/", "", page.named("style")[0].words, flags=re.DOTALL))
    )
    found_by_the_script = {"bars", "heights", "levels", "plot", "ticks"}
    assert used - styled - {"cards", "card"} == found_by_the_script
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


def test_a_measured_peak_is_not_denied(example: LaidOut) -> None:
    """A plan's own most bounds what the plan takes; what a loop holds besides is said to be that."""
    most_bytes = example.measured.peak_device_bytes - 2**20
    predicted = example.predicted.model_copy(update={"guaranteed_peak_device_bytes": most_bytes})
    words = parse(html_report(title="t", predicted=predicted, measured=example.measured)).words
    assert "never above" not in words
    assert "1 MiB above the plan's own most, which the training loop holds besides" in words
    within = parse(full_report(example)).words
    assert f"never above {format_bytes(example.predicted.guaranteed_peak_device_bytes)}, whatever the timing" in within


def test_an_unmeasured_peak_is_not_taken_for_zero(example: LaidOut) -> None:
    measured = example.measured.model_copy(update={"memory": ()})
    budget_bytes = example.predicted.peak_device_bytes + 2**20
    html = html_report(title="t", predicted=example.predicted, measured=measured, budget_bytes=budget_bytes)
    assert "1 MiB to spare" in parse(html).words


def test_equal_input_gives_equal_bytes(example: LaidOut) -> None:
    assert full_report(example) == full_report(laid_out(8, noise_frac=0.2))


def test_what_belongs_to_another_plan_is_refused(example: LaidOut) -> None:
    other = example.measured.model_copy(update={"plan_id": "another"})
    with pytest.raises(ProtwinError, match="measured one another"):
        full_report(example, measured=other)
    with pytest.raises(ProtwinError, match="schedule is that of plan"):
        full_report(example, schedule=laid_out(3).schedule)


# -- hostile names ---------------------------------------------------------------------------------------------------


def hostile_report(example: LaidOut) -> str:
    predicted, measured = hostile(example.predicted), hostile(example.measured)
    return html_report(
        title=HOSTILE,
        predicted=predicted,
        measured=measured,
        budget_bytes=2**40,
        losses={HOSTILE: LOSSES, f"{HOSTILE}2": LOSSES},
        plain_peak_bytes=2**41,
        notes=[HOSTILE],
    )


def test_hostile_names_stay_words(example: LaidOut) -> None:
    page = parse(hostile_report(example))
    check_self_contained(page)
    for place in ("h1", "code", "figcaption", "caption", "li", "p", "title"):
        assert any("alert(1)" in element.words for element in page.named(place)) or place == "figcaption"


def test_the_check_notices_a_name_that_is_not_escaped(example: LaidOut, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong variants: elements of drawings that do not escape, and a page that does not."""
    import protwin.shared.report.page
    import protwin.shared.report.svg

    with monkeypatch.context() as patch:
        patch.setattr(protwin.shared.report.svg, "escape", lambda words: words)
        with pytest.raises(AssertionError):
            check_self_contained(parse(hostile_report(example)))
    template = protwin.shared.report.page._template
    with monkeypatch.context() as patch:
        patch.setattr(template().environment, "autoescape", False)
        bare = template().environment.from_string(protwin.shared.report.page._file("page.html"))
        patch.setattr(protwin.shared.report.page, "_template", lambda: bare)
        with pytest.raises(AssertionError):
            check_self_contained(parse(hostile_report(example)))


def test_what_comes_before_the_first_step_is_told(example: LaidOut) -> None:
    before = Factorisation(num_weights=7, flops=10**9, host_s=123.0, working_bytes=2**20)
    factorised = example.predicted.model_copy(update={"factorisation": before})
    assert "Before the first step" not in parse(html_report(title="t", predicted=example.predicted)).words
    words = parse(html_report(title="t", predicted=factorised)).words
    assert factorisation_sentence(before) in words
