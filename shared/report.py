"""The report: one self-contained HTML page that lays a prediction and its measurement over each other.

It needs no network and runs no script; its policy forbids both.  Figures are drawn here as SVG, the look is in
``report.css``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files

from .comparison import Comparison, signed_error_frac
from .errors import ProtwinError
from .record import Record
from .report_losses import agreement, losses_chart
from .report_memory import alive_chart, limits, memory_chart
from .report_svg import tag
from .report_tables import alive_table, comparison_section, knob_table, traffic_table
from .report_timeline import lane_charts, time_range_s
from .report_words import ORIGIN_NAMES, format_error, format_share
from .schedule import Schedule
from .timeline import check_schedule
from .units import format_bytes, format_seconds

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def html_report(
    *,
    title: str,
    predicted: Record,
    measured: Record | None = None,
    budget_bytes: int | None = None,
    losses: Mapping[str, Sequence[float]] | None = None,
    plain_peak_bytes: int | None = None,
    comparison: Comparison | None = None,
    notes: Sequence[str] = (),
    schedule: Schedule | None = None,
) -> str:
    """The page as text; equal input gives equal bytes.

    ``losses``: per run (say "plain" and "planned") the loss of every step.  ``plain_peak_bytes``: device memory that
    training without a plan needs.  ``schedule``, where it is at hand, adds the bytes that each task moves.
    Raises ProtwinError if the records, the comparison and the schedule do not all belong to one plan.
    """
    records = [predicted] if measured is None else [predicted, measured]
    _check_one_plan(records, comparison, schedule)
    held_against = limits(budget_bytes=budget_bytes, plain_peak_bytes=plain_peak_bytes)
    memory = memory_chart(records, time_range_s(records), held_against)
    alive = alive_chart(records, held_against)
    body = [
        _header(title, records),
        _cards(predicted, measured, budget_bytes, plain_peak_bytes, losses),
        _section("Plan", tag("div", knob_table(predicted), traffic_table(records), class_="columns")),
        _section(
            "Timeline",
            tag(
                "p",
                "One iteration of the steady state. What runs past its end overlaps with the next one.",
                class_="quiet",
            ),
            lane_charts(records, schedule),
        ),
    ]
    if memory:
        body.append(_section("Device memory", memory))
    if alive:
        body.append(_section("Alive at the peak", alive, alive_table(records)))
    if losses and (drawing := losses_chart(losses)):
        body.append(_section("Losses", drawing))
    if comparison is not None:
        body.append(_section("Predicted against measured", comparison_section(comparison)))
    body.append(_section("Notes", _notes(records, notes)))
    return _page(title, "\n".join(body))


def _check_one_plan(records: Sequence[Record], comparison: Comparison | None, schedule: Schedule | None) -> None:
    plan_id = records[0].plan_id
    for record in records:
        if record.plan_id != plan_id:
            raise ProtwinError(
                f"the predicted record follows plan {plan_id} but the measured one {record.plan_id}. "
                f"Simulate the plan that was run."
            )
        check_schedule(record, schedule, label=ORIGIN_NAMES[record.origin])
    if comparison is not None and comparison.plan_id != plan_id:
        raise ProtwinError(
            f"the records follow plan {plan_id} but the comparison is of plan {comparison.plan_id}. "
            f"Compare these records."
        )


def _page(title: str, body: str) -> str:
    style = files(__package__).joinpath("report.css").read_text(encoding="utf-8")
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _section(heading: str, *content: str) -> str:
    name = heading.lower().replace(" ", "-")
    return tag("section", tag("h2", escape(heading), id=name), *content, aria_labelledby=name)


def _header(title: str, records: Sequence[Record]) -> str:
    first = records[0]
    origins = " and ".join(ORIGIN_NAMES[record.origin] for record in records)
    machine = next((record.machine for record in records if record.machine), first.hardware_name)
    subtitle = f"{first.model_name} on {machine}: {first.num_tokens:,} tokens per iteration, {origins}"
    return tag("header", tag("h1", escape(title)), tag("p", escape(subtitle), class_="quiet"))


# -- headline --------------------------------------------------------------------------------------------------------


def _cards(
    predicted: Record,
    measured: Record | None,
    budget_bytes: int | None,
    plain_peak_bytes: int | None,
    losses: Mapping[str, Sequence[float]] | None,
) -> str:
    cards = [_iteration_card(predicted, measured), _peak_card(predicted, measured)]
    if budget_bytes is not None or plain_peak_bytes is not None:
        shown = measured if measured is not None and measured.peak_device_bytes else predicted
        cards.append(_budget_card(shown, budget_bytes, plain_peak_bytes))
    cards += [_throughput_card(measured or predicted), _offload_card(measured or predicted)]
    if losses and (found := agreement(losses)) is not None:
        names = " and ".join(losses)
        cards.append(_card(f"Losses, {names}", found.headline, escape(found.detail)))
    return tag("div", *cards, class_=f"cards {'four' if len(cards) == 4 else 'three'}")


def _card(label: str, figure: str, *details: str) -> str:
    """``details`` are markup."""
    return tag(
        "div",
        tag("div", escape(label), class_="label"),
        tag("div", escape(figure), class_="figure"),
        *(tag("div", detail, class_="detail") for detail in details),
        class_="card",
    )


def _iteration_card(predicted: Record, measured: Record | None) -> str:
    if measured is None:
        return _card("Iteration, predicted", format_seconds(predicted.iteration_s), *_spread(predicted))
    error = format_error(signed_error_frac(predicted.iteration_s, measured.iteration_s))
    return _card(
        "Iteration, measured",
        format_seconds(measured.iteration_s),
        f"predicted {tag('b', escape(format_seconds(predicted.iteration_s)))}, error {tag('b', error)}",
        f"noise ± {format_share(measured.iteration_noise_frac)} over {measured.num_iterations} iterations",
    )


def _spread(record: Record) -> list[str]:
    return [f"± {format_share(record.iteration_noise_frac)}"] if record.iteration_noise_frac else []


def _peak_card(predicted: Record, measured: Record | None) -> str:
    bound = f"never above {format_bytes(predicted.guaranteed_peak_device_bytes)}, whatever the timing"
    if measured is None or not measured.peak_device_bytes:
        return _card("Peak device memory, predicted", format_bytes(predicted.peak_device_bytes), bound)
    error = format_error(signed_error_frac(predicted.peak_device_bytes, measured.peak_device_bytes))
    return _card(
        "Peak device memory, measured",
        format_bytes(measured.peak_device_bytes),
        f"predicted {tag('b', escape(format_bytes(predicted.peak_device_bytes)))}, error {tag('b', error)}",
        bound,
    )


def _budget_card(record: Record, budget_bytes: int | None, plain_peak_bytes: int | None) -> str:
    details = []
    plain = tag("b", escape(format_bytes(plain_peak_bytes))) if plain_peak_bytes else ""
    if budget_bytes is None:
        return _card("Device budget", "none", f"plain training needs {plain}")
    if plain_peak_bytes:
        details.append(f"{format_share(budget_bytes / plain_peak_bytes)} of plain training's {plain}")
    left_bytes = budget_bytes - record.peak_device_bytes
    if left_bytes >= 0:
        details.append(f"{format_bytes(left_bytes)} to spare at the peak")
    else:
        details.append(tag("span", f"exceeded by {format_bytes(-left_bytes)}", class_="over"))
    return _card("Device budget", format_bytes(budget_bytes), *details)


def _throughput_card(record: Record) -> str:
    label = f"Tokens per second, {ORIGIN_NAMES[record.origin]}"
    return _card(label, f"{record.tokens_per_s:,.4g}", f"{record.num_tokens:,} tokens per iteration")


def _offload_card(record: Record) -> str:
    moved_bytes = sum(use.moved_bytes for use in record.lanes)
    return _card(
        "Moved per iteration",
        format_bytes(moved_bytes),
        f"{record.num_gathers} chunks gathered, {record.num_cpu_adam_steps} CPU Adam steps",
    )


# -- notes -----------------------------------------------------------------------------------------------------------


def _notes(records: Sequence[Record], notes: Sequence[str]) -> str:
    paragraphs = [tag("p", escape(note)) for note in notes]
    paragraphs.append(tag("p", f"Plan {tag('code', escape(records[0].plan_id))}", class_="quiet"))
    for record in records:
        facts = [record.machine or record.hardware_name]
        if record.emulated:
            facts.append(f"emulated: {', '.join(record.emulated)}")
        facts += [f"{name} {version}" for name, version in sorted(record.software.items())]
        name = ORIGIN_NAMES[record.origin].capitalize()
        paragraphs.append(tag("p", escape(f"{name}: {'; '.join(facts)}"), class_="quiet"))
    return "".join(paragraphs)
