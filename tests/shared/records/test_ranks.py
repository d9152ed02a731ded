"""Records of several ranks: taken apart, compared by rank, shown one by one, laid on one clock in a trace."""

from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

from protwin.shared.basics.units import format_seconds
from protwin.shared.records.chrome_trace import chrome_trace
from protwin.shared.records.comparison import Comparison, compare_records
from protwin.shared.records.ranks import name_of_rank, rank_name, ranks_shown
from protwin.shared.report.report import Facts, report
from protwin.shared.schema.record import OF_RANKS, Record
from protwin.shared.schema.schedule import Lane
from protwin.shared.tables.comparison import comparison_tables
from protwin.shared.tables.record import record_tables
from protwin.shared.tables.terminal import as_text
from tests.shared.report_pages import parse, row_bars
from tests.shared.several_ranks import SLOW, several_ranks


def test_a_rank_has_its_own_times_and_what_all_have_in_common() -> None:
    record = several_ranks().measured
    assert record.of_rank(SLOW) is record
    for one in record.ranks:
        own = record.of_rank(one.rank)
        common = Record.model_fields.keys() - set(OF_RANKS) - {"rank", "machine"}
        assert all(getattr(own, name) == getattr(record, name) for name in common)
        assert all(getattr(own, name) == getattr(one, name) for name in OF_RANKS)
    with pytest.raises(KeyError):
        record.of_rank(4)
    unlike, alike = several_ranks().unlike, several_ranks().alike
    assert [unlike.of_rank(rank).rank for rank in range(4)] == [0, 0, 0, 3], "alike ranks share one"
    assert alike.of_rank(17) is alike
    assert record.highest_peak_device_bytes == max(record.of_rank(rank).peak_device_bytes for rank in range(4))


@pytest.mark.parametrize(
    ("ranks", "rank", "words"),
    [
        ([1, 0], 1, "rank 0 follows 1 from rank 1 on"),
        ([0, 0], 0, "rank 0 follows"),
        ([0, 1], 2, "rank is 2, which is none"),
    ],
)
def test_ranks_that_contradict_are_refused(ranks: list[int], rank: int, words: str) -> None:
    content = several_ranks().measured.model_dump(mode="json")
    content |= {"ranks": [content["ranks"][0] | {"rank": number} for number in ranks], "rank": rank}
    with pytest.raises(ValidationError, match=words):
        Record.model_validate(content)


def test_every_measured_rank_is_compared_with_one_like_it() -> None:
    example = several_ranks()
    found = compare_records(example.alike, example.measured)
    assert Comparison.from_mapping(json.loads(found.to_json()), origin="here") == found
    assert [one.rank for one in found.ranks] == [0, 1, 2, 3]
    assert found.rank == SLOW
    for one in found.ranks:
        measured = example.measured.of_rank(one.rank)
        assert one.computing.predicted_s == example.alike.lane(Lane.COMPUTE).busy_s
        assert one.computing.measured_s == measured.lane(Lane.COMPUTE).busy_s
        assert one.waiting.predicted_s == 0
        assert (one.waiting.measured_s > found.ranks[SLOW].waiting.measured_s) == (one.rank != SLOW)
    slow = found.ranks[SLOW].computing
    assert slow.error_frac is not None
    assert slow.error_frac < -0.3, "it computes 1.5 times as long as predicted"
    # The prediction of three even ranks and a slow one, which is number 3 there and 2 here.
    unlike = compare_records(example.unlike, example.measured)
    assert [one.computing.error_frac == 0 for one in unlike.ranks] == [True, True, False, False]
    assert compare_records(example.unlike, example.measured.of_rank(3).model_copy(update={"ranks": ()})).ranks == ()
    text = as_text(comparison_tables(found))
    assert "Ranks; the other tables are of rank 2" in text
    assert "rank 3 (host 1)" in text


def test_tables_say_who_waits_for_whom() -> None:
    record = several_ranks().measured
    text = as_text(record_tables(record))
    lines = [line.split() for line in text.splitlines()]
    (slowest,) = [cells for cells in lines if cells[-2:] == ["◀", "slowest"]]
    assert slowest[:2] == ["rank", str(SLOW)]
    assert "Times and memory elsewhere are those of rank 2 (host 1), which waits least for the others." in text
    assert "Ranks" not in as_text(record_tables(several_ranks().alike))
    assert "ranks 0 to 2 (even)" in as_text(record_tables(several_ranks().unlike))
    assert rank_name(3) == "rank 3"


def test_of_many_ranks_the_ends_are_shown() -> None:
    record = several_ranks().measured
    quick = next(one for one in record.ranks if one.rank != SLOW)
    waits = quick.rank_waits[0]
    many = [
        quick.model_copy(update={"rank": rank, "rank_waits": (waits.model_copy(update={"seconds": float(rank)}),)})
        for rank in range(100)
    ]
    crowd = record.model_copy(update={"ranks": tuple(many), "rank": 0})
    assert [one.rank for one in ranks_shown(crowd)] == [*range(8), *range(92, 100)]
    assert "84 ranks, which wait neither least nor most, are not shown." in " ".join(
        as_text(record_tables(crowd)).split()
    )
    assert name_of_rank(crowd, many[5]) == "rank 5", "all are on one host"


def test_a_trace_has_a_process_per_rank_on_one_clock() -> None:
    example = several_ranks()
    trace = json.loads(chrome_trace({"simulated": example.alike, "measured": example.measured}))["traceEvents"]
    names = [event["args"]["name"] for event in trace if event["name"] == "process_name"]
    expected = ["simulated", *(f"measured, rank {rank} (host {rank // 2})" for rank in range(4))]
    assert names == [f"{name}: decoder" for name in expected]
    assert all(event.get("ts", 0) >= 0 for event in trace)
    zeros = {e["pid"]: e["ts"] for e in trace if e["name"] == "iteration begins"}
    assert zeros[1] == zeros[2 + SLOW], "a record begins where its own rank does"
    for one in example.measured.ranks:
        own = [event for event in trace if event["pid"] == 2 + one.rank]
        assert zeros[2 + one.rank] - zeros[1] == pytest.approx(one.begins_s * 1e6, abs=2e-3)
        waits = [event for event in own if event["name"] == "waiting for other ranks"]
        assert sum(event["dur"] for event in waits) == pytest.approx(one.waited_s * 1e6, rel=0.01, abs=1)
        tasks = {event["name"]: event for event in own if event["ph"] == "X"}
        for wait in waits:
            assert wait["ts"] + wait["dur"] == pytest.approx(tasks[wait["args"]["before"]]["ts"], abs=2e-3)
    # All meet in collectives: each begins at one time in all processes of the measurement.
    gathers = [e for e in trace if e.get("cat") in ("all_gather", "reduce_scatter") and e["pid"] > 1]
    by_name: dict[str, list[float]] = {}
    for event in gathers:
        by_name.setdefault(event["name"], []).append(event["ts"])
    assert by_name
    assert all(len(at) == 4 and max(at) - min(at) < 0.01 for at in by_name.values())


def test_the_page_shows_ranks_beside_each_other() -> None:
    example = several_ranks()
    found = report("t", Facts(predicted=example.alike, measured=example.measured, schedule=example.schedule))
    names = [figure.name for figure in found.figures]
    assert "ranks-measured" in names
    assert "ranks-predicted" not in names
    assert f"timeline-measured-rank-{SLOW}" in names
    chart = next(figure for figure in found.figures if figure.name == "ranks-measured")
    rows = row_bars(chart.drawing)
    assert list(rows) == [f"rank {rank} (host {rank // 2})" for rank in range(4)]
    for name, bars in rows.items():
        ends = [(left, left + width) for left, width, _ in bars]
        assert [end for _, end in ends[:-1]] == pytest.approx([start for start, _ in ends[1:]], abs=2e-5), name
        assert ends[-1][1] == pytest.approx(1, abs=5e-3), "a bar is the iteration"
    slow, quick = ({colour: width for _, width, colour in bars} for bars in list(rows.values())[SLOW : SLOW + 2])
    assert slow.get("maroon", 0.0) < quick["maroon"]
    page = parse(found.html)
    told = [element.words for element in page.elements]
    assert any("Measured, rank 2" in words for words in told)
    assert "Of several ranks the slowest is drawn" in found.html
    assert "Of several ranks" not in report("t", Facts(predicted=example.alike)).html
    quick_waits = next(one for one in example.measured.ranks if one.rank == 0).waited_s
    assert any(format_seconds(quick_waits) in words for words in told)
