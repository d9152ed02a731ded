"""The report of an iteration: a prediction, and where there is one the measurement laid over it, on one page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from html import escape
from typing import Final, ParamSpec

from ..basics.errors import ProtwinError
from ..basics.units import format_bytes, format_number, format_seconds
from ..records.chrome_trace import check_schedule
from ..records.comparison import Comparison, signed_error_frac
from ..records.memory_by_content import memory_stack
from ..schema.record import Origin, Record
from ..schema.schedule import Memory, Schedule
from ..schema.search_result import BatchSearchResult, SearchResult
from ..tables.labels import NO_VALUE, ORIGIN_NAMES, format_error, format_share, how_much_faster
from .losses import agreement, losses_chart
from .memory import Limit, alive_chart, limits, memory_chart, stack_chart
from .page import Report, Section, card, card_grid
from .search import plain_result, search_sections
from .svg import Figure, tag
from .tables import alive_table, beyond_table, comparison_section, knob_table, traffic_table
from .timeline import lane_charts, time_range_s

_Facts = ParamSpec("_Facts")
_ONE_ITERATION: Final = "One iteration of the steady state. What runs past its end overlaps with the next one."


def report(
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
    search: SearchResult | BatchSearchResult | None = None,
) -> Report:
    """Everything that is known of an iteration, as figures and tables.

    ``losses``: per run (say "plain" and "planned") the loss of every step.  ``plain_peak_bytes``: device memory that
    training without a plan needs.  ``schedule``, where it is at hand, adds what each task moves and waits for, and
    what the memory holds over time.  ``search``: the search that found the plan.
    Raises ProtwinError if the records, the comparison, the schedule and the search do not all belong to one plan.
    """
    records = [predicted] if measured is None else [predicted, measured]
    _check_one_plan(records, comparison, schedule, search)
    held_against = limits(
        budget_bytes=budget_bytes, plain_peak_bytes=plain_peak_bytes, reserved=predicted.device_reserved
    )
    sections = [
        Section("Plan", (tag("div", knob_table(predicted), traffic_table(records), class_="columns"),)),
        Section("Timeline", (tag("p", _ONE_ITERATION, class_="quiet"), *lane_charts(records, schedule))),
        Section("Device memory", _memory_figures(records, schedule, held_against)),
    ]
    if alive := alive_chart(records, held_against):
        sections.append(Section("Alive at the peak", (alive, alive_table(records))))
    if beyond := beyond_table(predicted):
        sections.append(Section("Memory beyond the schedule", (beyond,)))
    if losses and (drawing := losses_chart(losses)):
        sections.append(Section("Losses", (drawing,)))
    if comparison is not None:
        sections.append(Section("Predicted against measured", (comparison_section(comparison),)))
    if search is not None:
        # Where nothing was measured, the search is the news; else it is how the plan came about.
        place = 0 if measured is None else len(sections)
        sections[place:place] = search_sections(search)
    sections.append(Section("Notes", (_notes(records, notes),)))
    return Report(
        title=title,
        subtitle=_subtitle(records),
        cards=_cards(predicted, measured, budget_bytes, plain_peak_bytes, losses, search),
        sections=tuple(section for section in sections if section.content),
    )


def _as_html(make: Callable[_Facts, Report]) -> Callable[_Facts, str]:
    """``make`` as a page of HTML; equal input gives equal bytes."""

    @wraps(make)
    def html(*args: _Facts.args, **facts: _Facts.kwargs) -> str:
        return make(*args, **facts).html

    return html


html_report = _as_html(report)
"""``report`` as a page of HTML."""


def _memory_figures(
    records: Sequence[Record], schedule: Schedule | None, held_against: Sequence[Limit]
) -> tuple[Figure, ...]:
    """The curves of all records, and what the simulated one consists of."""
    range_s = time_range_s(records)
    figures = []
    if curves := memory_chart(records, range_s, held_against):
        figures.append(curves)
    simulated = next((record for record in records if record.origin is Origin.SIMULATED), None)
    if schedule is not None and simulated is not None and (stack := memory_stack(simulated, schedule)):
        figures.append(stack_chart(stack, range_s, held_against))
    return tuple(figures)


def _check_one_plan(
    records: Sequence[Record],
    comparison: Comparison | None,
    schedule: Schedule | None,
    search: SearchResult | BatchSearchResult | None,
) -> None:
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
    if search is not None and plain_result(search).prediction.plan_id != plan_id:
        raise ProtwinError(
            f"the records follow plan {plan_id} but the search found plan {plain_result(search).prediction.plan_id}. "
            f"Give the search that found the plan."
        )


def _subtitle(records: Sequence[Record]) -> str:
    first = records[0]
    origins = " and ".join(ORIGIN_NAMES[record.origin] for record in records)
    machine = next((record.machine for record in records if record.machine), first.hardware_name)
    return f"{first.model_name} on {machine}: {first.num_tokens:,} tokens per iteration, {origins}"


# -- headline --------------------------------------------------------------------------------------------------------


def _cards(
    predicted: Record,
    measured: Record | None,
    budget_bytes: int | None,
    plain_peak_bytes: int | None,
    losses: Mapping[str, Sequence[float]] | None,
    search: SearchResult | BatchSearchResult | None,
) -> str:
    cards = [_iteration_card(predicted, measured), _peak_card(predicted, measured)]
    if budget_bytes is not None or plain_peak_bytes is not None:
        shown = measured if measured is not None and measured.peak_device_bytes else predicted
        cards.append(_budget_card(shown, budget_bytes, plain_peak_bytes))
    cards += [_throughput_card(measured or predicted), _offload_card(measured or predicted)]
    if losses and (found := agreement(losses)) is not None:
        names = " and ".join(losses)
        cards.append(card(f"Losses, {names}", found.headline, escape(found.detail)))
    if len(cards) == 5:
        # The sixth place: how sure the plan is the best, else what it asks of the host.
        cards.append(_search_card(plain_result(search)) if search is not None else _host_card(measured or predicted))
    return card_grid(cards)


def _iteration_card(predicted: Record, measured: Record | None) -> str:
    if measured is None:
        return card("Iteration, predicted", format_seconds(predicted.iteration_s), *_spread(predicted))
    error = format_error(signed_error_frac(predicted.iteration_s, measured.iteration_s))
    return card(
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
        return card("Peak device memory, predicted", format_bytes(predicted.peak_device_bytes), bound)
    error = format_error(signed_error_frac(predicted.peak_device_bytes, measured.peak_device_bytes))
    return card(
        "Peak device memory, measured",
        format_bytes(measured.peak_device_bytes),
        f"predicted {tag('b', escape(format_bytes(predicted.peak_device_bytes)))}, error {tag('b', error)}",
        bound,
    )


def _budget_card(record: Record, budget_bytes: int | None, plain_peak_bytes: int | None) -> str:
    details = []
    plain = tag("b", escape(format_bytes(plain_peak_bytes))) if plain_peak_bytes else ""
    if budget_bytes is None:
        return card("Device budget", "none", f"plain training needs {plain}")
    if plain_peak_bytes:
        details.append(f"{format_share(budget_bytes / plain_peak_bytes)} of plain training's {plain}")
    left_bytes = budget_bytes - record.peak_device_bytes
    if left_bytes >= 0:
        details.append(f"{format_bytes(left_bytes)} to spare at the peak")
    else:
        details.append(tag("span", f"exceeded by {format_bytes(-left_bytes)}", class_="over"))
    return card("Device budget", format_bytes(budget_bytes), *details)


def _throughput_card(record: Record) -> str:
    label = f"Tokens per second, {ORIGIN_NAMES[record.origin]}"
    return card(label, format_number(record.tokens_per_s), f"{record.num_tokens:,} tokens per iteration")


def _host_card(record: Record) -> str:
    host = record.host_memory
    in_all = [f"{format_bytes(host.total_bytes)} of host memory in all"] if host is not None else []
    figure = format_bytes(record.peak_pinned_bytes) if record.curve(Memory.PINNED_HOST) else NO_VALUE
    return card(f"Pinned host memory, {ORIGIN_NAMES[record.origin]}", figure, *in_all)


def _search_card(result: SearchResult) -> str:
    """How sure it is that the plan is the best."""
    certificate = result.certificate
    if not certificate.is_certified:
        proof = "the search was ended early: nothing is proven of the rest"
    else:
        proof = f"none of them {how_much_faster(result.gap_frac)}"
    return card("Plans in the space", f"{certificate.num_candidates:,}", escape(proof))


def _offload_card(record: Record) -> str:
    moved_bytes = sum(use.moved_bytes for use in record.lanes)
    return card(
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
