"""Where offloading becomes free, beside a plain search over all points, and the page of a sweep."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from protwin.shared.answers.plan_kind import PlanKind
from protwin.shared.catalogue.list_prices import list_price
from protwin.shared.catalogue.machines import load_hardware
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.schedule import Lane
from protwin.shared.sweeps.report import cost_chart, sweep_report, throughput_chart
from protwin.shared.sweeps.sweep import Sweep, SweepPlan, SweepPoint, crossovers
from protwin.shared.sweeps.tables import free_sentences, missing_table, sweep_tables
from protwin.shared.tables.table import Table
from protwin.shared.tables.terminal import as_text
from tests.shared.report_pages import check_self_contained, parse

HOSTILE = "<script>alert(1)</script>"
PLAN = Plan(workload_id="w", chunk_bytes=1, n_persist=0, n_buffer=1)


def point(
    batch_size: int,
    length: int,
    cost_frac: float | None = None,
    *,
    kind: PlanKind = PlanKind.OFFLOADED,
    reason: str = "",
) -> SweepPoint:
    """A point whose plan offloads at this cost; without one, a plan with everything on the device, or no plan."""
    num_tokens = batch_size * length
    if reason:
        return SweepPoint(batch_size=batch_size, sequence_length=length, num_tokens=num_tokens, reason=reason)
    kind = PlanKind.RESIDENT if cost_frac is None else kind
    seconds = 2.0 * (1 + (cost_frac or 0.0))
    found = SweepPlan(
        plan=PLAN,
        plan_kind=kind,
        iteration_s=seconds,
        tokens_per_s=num_tokens / seconds,
        guaranteed_peak_device_bytes=2**30,
        host_bytes=2**20 if kind.uses_host else 0,
        mfu_frac=0.5,
        bottleneck=Lane.COMPUTE,
        survives=True,
    )
    return SweepPoint(
        batch_size=batch_size,
        sequence_length=length,
        num_tokens=num_tokens,
        found=found,
        on_device=None if kind.uses_host else found,
        unlimited_s=1.6,
        same_recomputation_s=2.0,
    )


def sweep(*points: SweepPoint, name: str = "model") -> Sweep:
    return Sweep(
        model=name,
        model_name=name,
        hardware_name="machine",
        device_budget_bytes=None,
        sequence_lengths=tuple(sorted({one.sequence_length for one in points})),
        batch_sizes=tuple(sorted({one.batch_size for one in points})),
        points=points,
        crossovers=crossovers(points),
    )


def test_costs_are_told_apart() -> None:
    one = point(2, 1024, 0.25)
    assert one.offloading_cost_frac == pytest.approx(0.25)
    assert one.recomputation_cost_frac == pytest.approx(0.25)
    assert not one.is_free
    assert point(2, 1024, -0.05).is_free, "the host may step what the device would"
    assert not point(2, 1024, 0.01).is_free
    assert point(2, 1024, 0.0099).is_free
    resident = point(2, 1024)
    assert (resident.offloads, resident.offloading_cost_frac, resident.is_free) == (False, None, False)


@pytest.mark.parametrize("seed", range(40))
def test_crossovers_are_those_of_a_plain_search(seed: int) -> None:
    draw = random.Random(seed)
    sizes, lengths = [1, 2, 4, 8, 16], [512, 1024, 2048]
    points = []
    for length in lengths:
        for size in sizes:
            kind = draw.random()
            cost = None if kind < 0.2 else draw.choice([-0.03, 0.0, 0.009, 0.012, 0.04, 0.3])
            points.append(point(size, length, cost, reason="too large" if kind > 0.85 else ""))
    found = sweep(*points)
    for length in lengths:
        own = [one for one in points if one.sequence_length == length and one.offloads]
        crossing = next((one for one in found.crossovers if one.sequence_length == length), None)
        assert (crossing is None) == (not own)
        if crossing is None:
            continue
        fitting = [
            size
            for size in sizes
            if any(one.batch_size == size for one in own) and all(one.is_free for one in own if one.batch_size >= size)
        ]
        assert crossing.batch_size == (min(fitting) if fitting else None)
        assert crossing.least_cost_frac == min(one.offloading_cost_frac or 0.0 for one in own)
    offloading = [one for one in points if one.offloads]
    starts = [
        one.num_tokens
        for one in offloading
        if one.is_free
        and all((o.offloading_cost_frac or 0) < 0.05 for o in offloading if o.num_tokens >= one.num_tokens)
    ]
    first = found.free_from
    assert (None if first is None else first.num_tokens) == min(starts, default=None)
    if first is not None:
        assert first.is_free
        assert set(found.exceptions) == {
            one for one in offloading if one.num_tokens >= first.num_tokens and not one.is_free
        }


@pytest.mark.parametrize(
    ("costs", "said"),
    [
        ([0.4, 0.004, -0.02], "From 2 x 1,024 tokens on (2,048 a step), offloading costs less than 1 %; with fewer"),
        (
            [-0.01, 0.0, 0.002],
            "At every point that offloads, offloading costs less than 1 %. Recomputation costs 25.0 %",
        ),
        (
            [0.4, 0.004, 0.03],
            "less than 1 %, but for 4 x 1,024 (3.0 %); with fewer in a step up to 40.0 %, at 1 x 1,024",
        ),
        ([0.4, 0.2, 0.02], "From no number of tokens on is offloading free: the least that it costs is 2.0 %, at 4 x"),
        ([0.4, 0.0, 0.3], "From no number of tokens on is offloading free: the least that it costs is 0.0 %, at 2 x"),
        ([None, None, None], "No plan has anything on the host"),
    ],
)
def test_the_crossover_is_said_in_words(costs: list[float | None], said: str) -> None:
    points = [point(2**place, 1024, cost) for place, cost in enumerate(costs)]
    assert said in free_sentences(sweep(*points))[0]


def test_many_exceptions_are_counted() -> None:
    costs = [0.4, 0.0, 0.012, 0.013, 0.02]
    points = [point(2**place, 1024, cost) for place, cost in enumerate(costs)]
    assert "but for 3 of 4 points, where it costs up to 2.0 %, at 16 x 1,024" in free_sentences(sweep(*points))[0]


def test_points_without_a_plan_are_named_and_larger_ones_counted() -> None:
    short = point(4, 1024, reason="no plan fits: 3 GiB too little. Raise it.")
    skipped = point(8, 1024, reason="no less than").model_copy(update={"is_searched": False})
    found = sweep(point(1, 1024, 0.2), short, skipped)
    table = missing_table(found)
    assert table is not None
    assert table.rows == [("4 x 1,024", "no plan fits: 3 GiB too little.")]
    assert table.notes == ["1 larger points were not searched: they need no less memory than these."]
    assert missing_table(sweep(point(1, 1024))) is None
    nothing = sweep(short)
    text = as_text(sweep_tables(nothing))
    assert "Points without a plan" in text
    assert "offloading" not in text
    assert sweep_report(nothing).figures == ()


def test_the_page_shows_every_point_and_runs_nothing_else() -> None:
    points = [point(size, length, 0.5 / size) for length in (1024, 4096) for size in (1, 2, 4)]
    points += [point(8, 1024, 0.001, kind=PlanKind.SWAPPED), point(8, 4096, reason=HOSTILE), point(1, 256)]
    price = list_price(load_hardware("rtx-4090"))
    assert price is not None
    found = sweep(*points, name=HOSTILE).model_copy(update={"list_price": price, "emulated": ("as compiled",)})
    page = sweep_report(found)
    for said in (f"{price.usd_per_hour:.2f} USD an hour", "emulated: as compiled."):
        assert said in page.html, "the page says no less than the terminal"
        assert said in as_text(sweep_tables(found))
    check_self_contained(parse(page.html))
    assert "<script>alert" not in page.html
    throughput, costs = page.figures
    assert throughput.drawing.count("<title>") == 8, "one mark for each point with a plan"
    assert costs.drawing.count("<title>") == 7, "and one for each that offloads"
    assert [words for _, words in throughput.legend] == [
        "256 tokens",
        "1,024 tokens",
        "4,096 tokens",
        PlanKind.RESIDENT.words,
        PlanKind.OFFLOADED.words,
        PlanKind.SWAPPED.words,
    ]
    assert "limit-line" in costs.drawing
    assert cost_chart(sweep(point(1, 256))) is None
    alone = throughput_chart(sweep(point(1, 256)))
    assert alone.drawing.count("<title>") == 1, "one point alone can be drawn"


def test_lines_run_through_their_points() -> None:
    """Places are shares of the width: twice the tokens are as far apart everywhere, and more tokens a second higher."""
    drawing = throughput_chart(sweep(*(point(size, 512) for size in (1, 2, 4, 8)))).drawing
    places = [one.attributes for one in parse(drawing).elements if one.attributes.get("class") == "placed"]
    x = [float((one["x"] or "").removesuffix("%")) for one in places]
    y = [float(one["y"] or "") for one in places]
    steps = [right - left for left, right in pairwise(x)]
    assert max(steps) - min(steps) < 0.001
    assert y == sorted(y, reverse=True)
    assert len(y) == 4


@pytest.mark.parametrize(
    ("knobs", "cell", "note"),
    [
        ({}, "resident", None),
        ({"loss_tiles": 4}, "resident†", "†: "),
        ({"mlp_tiles": 2}, "resident†", "†: "),
        ({"n_checkpoint": 2, "n_selective": 1, "mlp_tiles": 2}, "resident, selective†", "selective: "),
    ],
)
def test_a_plan_that_runs_in_tiles_says_so(knobs: dict[str, int], cell: str, note: str | None) -> None:
    """It recomputes them, though no block is checkpointed: 'resident' beside a cost of recomputation was no reason."""
    one, plain = point(2, 1024), point(4, 1024)
    assert one.found is not None
    tiled = one.found.model_copy(update={"plan": PLAN.model_copy(update=knobs)})
    (table, *_) = sweep_tables(sweep(one.model_copy(update={"found": tiled}), plain))
    assert isinstance(table, Table)
    assert [row[table.columns.index("plan")] for row in table.rows] == [cell, "resident"]
    assert [line.startswith(note or "") for line in table.notes][:1] == [True] * (note is not None)
