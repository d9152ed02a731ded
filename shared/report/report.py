"""The report of an iteration: a prediction, and where there is one the measurement laid over it, on one page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from markupsafe import Markup

from ..answers.search_result import SearchResult
from ..basics.errors import ProtwinError
from ..basics.interval import Interval
from ..basics.units import counted, format_bytes, format_number, format_seconds
from ..records.chrome_trace import check_schedule
from ..records.comparison import compare_records, signed_error_frac
from ..records.memory_by_content import memory_stack
from ..schema.record import Origin, Record
from ..schema.schedule import Memory, Schedule
from ..tables.comparison import comparison_sentences, pair_tables
from ..tables.labels import (
    CONTENT_NAMES,
    NO_VALUE,
    ORIGIN_NAMES,
    format_error,
    format_interval_bytes,
    format_interval_s,
    format_share,
    how_much_faster,
    num_blocks,
    peak_name,
)
from ..tables.question import question_table
from ..tables.record import alive_table, beyond_table, factorisation_sentence, plan_table, ranks_table, traffic_table
from .alive import alive_chart
from .expected import expected_chart
from .losses import LossTolerance, agreement, losses_chart
from .memory import CONTENT_COLOURS, Limit, limits, memory_chart, stack_chart
from .page import Card, PageTable, Part, Report, Section, quiet
from .phases import phase_chart
from .ranks import rank_charts
from .search import search_sections
from .svg import Figure, tag
from .timeline import lane_charts, time_range_s

_ONE_ITERATION: Final = (
    "One iteration of the steady state, to its end. A task that runs past the end, or begins before the iteration, is "
    "drawn where the neighbouring iteration's task lies within this one."
)
_OF_RANKS: Final = (
    " Of several ranks the slowest is drawn, and the one that waits most for the others, each from its own first "
    "compute task on. The exported timeline has all of them on one clock."
)
_SWATCHES: Final = {CONTENT_NAMES[content]: colour for content, colour in CONTENT_COLOURS.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Everything that is known of an iteration; ``measured`` follows the plan of ``predicted``."""

    predicted: Record
    measured: Record | None = None
    budget_bytes: int | None = None
    plain_peak_bytes: int | None = None
    """Device memory that training without a plan needs."""
    losses: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Per run (say "plain" and "planned") the loss of every step."""
    loss_tolerance: LossTolerance | None = None
    """How far losses may be apart, where runs are not to be identical."""
    notes: Sequence[str] = ()
    schedule: Schedule | None = None
    """It adds what each task moves and waits for, and what the memory holds over time."""
    search: SearchResult | None = None
    """The search that found the plan."""
    warnings: tuple[str, ...] = ()
    """What a reader must know before following the plan."""
    further: tuple[Section, ...] = ()
    """What else the page shows, before the comparison."""

    @property
    def records(self) -> tuple[Record, ...]:
        """The prediction, and the measurement if there is one."""
        return (self.predicted,) if self.measured is None else (self.predicted, self.measured)

    @property
    def best_known(self) -> Record:
        """The measurement, or the prediction without one."""
        return self.measured or self.predicted


def report(title: str, facts: Facts) -> Report:
    """The facts as figures and tables.

    Raises ProtwinError if the records, the schedule and the search do not all belong to one plan.
    """
    _check_one_plan(facts)
    records, predicted = facts.records, facts.predicted
    held_against = limits(
        budget_bytes=facts.budget_bytes, plain_peak_bytes=facts.plain_peak_bytes, reserved=predicted.device_reserved
    )
    knobs = PageTable(replace(plan_table(predicted.plan, num_blocks=num_blocks(predicted)), title="Knobs"), "knobs")
    sections = [
        Section("Plan", ((knobs, PageTable(traffic_table(records))),)),
        Section("Where the time goes", (*_phases(records, facts.search), *_before(predicted))),
        Section("Ranks", _ranks(records)),
        Section("Timeline", _timeline(facts)),
        Section("Device memory", _memory_figures(facts, held_against)),
        Section("Alive at the peak", _alive(records, held_against)),
    ]
    if beyond := beyond_table(predicted):
        sections.append(Section("Memory beyond the schedule", (PageTable(beyond),)))
    if drawing := losses_chart(facts.losses, facts.loss_tolerance):
        sections.append(Section("Losses", (drawing,)))
    sections += facts.further
    if facts.measured is not None:
        comparison = compare_records(predicted, facts.measured)
        tables = tuple(map(PageTable, pair_tables(comparison)))
        sections.append(Section("Predicted against measured", (*comparison_sentences(comparison), tables)))
    if facts.search is not None:
        # Where nothing was measured, the search is the news; else it is how the plan came about.
        place = 0 if facts.measured is None else len(sections)
        sections[place:place] = search_sections(facts.search)
    sections.append(Section("Notes", _notes(facts)))
    if (asked := facts.predicted.question) is not None:
        sections.insert(0, Section("Asked", (PageTable(replace(question_table(asked), title="")),)))
    return Report(
        title=title,
        subtitle=_subtitle(records),
        cards=_cards(facts),
        sections=tuple(section for section in sections if section.content),
        warnings=facts.warnings,
    )


def _check_one_plan(facts: Facts) -> None:
    plan_id = facts.predicted.plan_id
    for record in facts.records:
        if record.plan_id != plan_id:
            raise ProtwinError(
                f"the predicted record follows plan {plan_id} but the measured one {record.plan_id}. "
                f"Simulate the plan that was run."
            )
        check_schedule(record, facts.schedule, label=ORIGIN_NAMES[record.origin])
    if facts.search is not None and (found := facts.search.prediction.plan_id) != plan_id:
        raise ProtwinError(
            f"the records follow plan {plan_id} but the search found plan {found}. Give the search that found the plan."
        )


def _subtitle(records: Sequence[Record]) -> str:
    first = records[0]
    origins = " and ".join(ORIGIN_NAMES[record.origin] for record in records)
    machine = next((record.machine for record in records if record.machine), first.hardware_name)
    ranks = f" of {first.plan.num_ranks} ranks" if first.plan.num_ranks > 1 else ""
    return f"{first.model_name} on {machine}: {first.num_tokens:,} tokens per iteration{ranks}, {origins}"


def _ranks(records: Sequence[Record]) -> tuple[Part, ...]:
    """What each of several ranks does, beside each other."""
    tables = [PageTable(replace(ranks_table(r), title=f"Ranks, {ORIGIN_NAMES[r.origin]}")) for r in records if r.ranks]
    return (*rank_charts(records), *tables)


def _timeline(facts: Facts) -> tuple[Part, ...]:
    """What every lane does when."""
    words = (_ONE_ITERATION, _OF_RANKS) if any(record.ranks for record in facts.records) else (_ONE_ITERATION,)
    return (quiet(*words), *lane_charts(facts.records, facts.schedule))


def _phases(records: Sequence[Record], search: SearchResult | None) -> tuple[Figure, ...]:
    """How sure the times are, and what compute does and waits for in each phase."""
    charts = (expected_chart(records, search), phase_chart(records))
    return tuple(chart for chart in charts if chart is not None)


def _before(predicted: Record) -> tuple[Part, ...]:
    """What comes before the first step, where something does."""
    return () if predicted.factorisation is None else (quiet(factorisation_sentence(predicted.factorisation)),)


def _memory_figures(facts: Facts, held_against: Sequence[Limit]) -> tuple[Figure, ...]:
    """The curves of all records, and what the simulated one consists of."""
    range_s = time_range_s(facts.records)
    figures = []
    if curves := memory_chart(facts.records, range_s, held_against):
        figures.append(curves)
    simulated = next((record for record in facts.records if record.origin is Origin.SIMULATED), None)
    if facts.schedule is not None and simulated is not None and (stack := memory_stack(simulated, facts.schedule)):
        figures.append(stack_chart(stack, range_s, held_against))
    return tuple(figures)


def _alive(records: Sequence[Record], held_against: Sequence[Limit]) -> tuple[Part, ...]:
    """What was alive at the peaks, as bars and as a table, whose swatches are their legend too."""
    chart = alive_chart(records, held_against)
    if chart is None:
        return ()
    named = [(ORIGIN_NAMES[record.origin], record.curve(Memory.DEVICE)) for record in records]
    curves = [(name, curve) for name, curve in named if curve is not None and curve.peak_bytes]
    peaks = "; ".join(f"{name} in {peak_name(curve)}" for name, curve in curves)
    return chart, PageTable(alive_table(f"At the peak: {peaks}", curves), "narrow", _SWATCHES)


def _notes(facts: Facts) -> tuple[str, ...]:
    paragraphs: list[str] = [*facts.notes, quiet("Plan ", tag("code", facts.predicted.plan_id))]
    for record in facts.records:
        told = [record.machine or record.hardware_name]
        if record.emulated:
            told.append(f"emulated: {', '.join(record.emulated)}")
        told += [f"{name} {version}" for name, version in sorted(record.software.items())]
        paragraphs.append(quiet(f"{ORIGIN_NAMES[record.origin].capitalize()}: {'; '.join(told)}"))
    return tuple(paragraphs)


# -- headline --------------------------------------------------------------------------------------------------------


def _cards(facts: Facts) -> tuple[Card, ...]:
    predicted, measured, shown = facts.predicted, facts.measured, facts.best_known
    cards = [_iteration_card(predicted, measured), _peak_card(predicted, measured)]
    if facts.budget_bytes is not None or facts.plain_peak_bytes is not None:
        with_peak = shown if shown.peak_device_bytes else predicted
        cards.append(_budget_card(with_peak, facts.budget_bytes, facts.plain_peak_bytes))
    cards += [_throughput_card(shown), _offload_card(shown)]
    if (found := agreement(facts.losses, facts.loss_tolerance)) is not None:
        cards.append(Card(f"Losses, {' and '.join(facts.losses)}", found.headline, (found.detail,)))
    if len(cards) == 5:
        # The sixth place: how sure the plan is the best, else what it asks of the host.
        cards.append(_search_card(facts.search) if facts.search is not None else _host_card(shown))
    return tuple(cards)


def _iteration_card(predicted: Record, measured: Record | None) -> Card:
    if measured is None:
        noise_frac = predicted.iteration_noise_frac
        spread = (f"± {format_share(noise_frac)}",) if noise_frac else ()
        if predicted.iteration_interval_s is not None:
            spread = (f"expected {format_interval_s(predicted.iteration_interval_s)}",)
        return Card("Iteration, predicted", format_seconds(predicted.iteration_s), spread)
    error = format_error(signed_error_frac(predicted.iteration_s, measured.iteration_s))
    expected = predicted.iteration_interval_s
    where = () if expected is None else (f"{_where(expected, measured.iteration_s)} {format_interval_s(expected)}",)
    is_one = measured.num_iterations == 1
    timed = f"{counted(measured.num_iterations, 'iteration')} {'was' if is_one else 'were'} timed"
    return Card(
        "Iteration, measured",
        format_seconds(measured.iteration_s),
        (
            _predicted(format_seconds(predicted.iteration_s), error),
            *where,
            timed if is_one else f"noise ± {format_share(measured.iteration_noise_frac)}; {timed}",
        ),
    )


def _peak_card(predicted: Record, measured: Record | None) -> Card:
    bound = f"never above {format_bytes(predicted.guaranteed_peak_device_bytes)}, whatever the timing"
    if measured is not None and measured.peak_device_bytes > predicted.guaranteed_peak_device_bytes:
        more_bytes = measured.peak_device_bytes - predicted.guaranteed_peak_device_bytes
        bound = f"{format_bytes(more_bytes)} above the plan's own most, which the training loop holds besides"
    expected = predicted.peak_interval_bytes
    if measured is None or not measured.peak_device_bytes:
        told = () if expected is None else (f"expected {format_interval_bytes(expected)}",)
        return Card("Peak device memory, predicted", format_bytes(predicted.peak_device_bytes), (*told, bound))
    error = format_error(signed_error_frac(predicted.peak_device_bytes, measured.peak_device_bytes))
    details: tuple[str, ...] = (_predicted(format_bytes(predicted.peak_device_bytes), error), bound)
    if measured.highest_peak_device_bytes > measured.peak_device_bytes:
        details = (*details, f"the highest of any rank is {format_bytes(measured.highest_peak_device_bytes)}")
    return Card("Peak device memory, measured", format_bytes(measured.peak_device_bytes), details)


def _where(interval: Interval, measured: float) -> str:
    return "inside" if interval.contains(measured) else "outside"


def _predicted(figure: str, error: str) -> Markup:
    return Markup("predicted <b>{}</b>, error <b>{}</b>").format(figure, error)


def _budget_card(record: Record, budget_bytes: int | None, plain_peak_bytes: int | None) -> Card:
    plain = tag("b", format_bytes(plain_peak_bytes)) if plain_peak_bytes else ""
    if budget_bytes is None:
        return Card("Device budget", "none", (Markup("plain training needs {}").format(plain),))
    details: list[str] = []
    if plain_peak_bytes:
        share = format_share(budget_bytes / plain_peak_bytes)
        details.append(Markup("{} of plain training's {}").format(share, plain))
    left_bytes = budget_bytes - record.peak_device_bytes
    if left_bytes >= 0:
        details.append(f"{format_bytes(left_bytes)} to spare at the peak")
    else:
        details.append(tag("span", f"exceeded by {format_bytes(-left_bytes)}", class_="over"))
    return Card("Device budget", format_bytes(budget_bytes), tuple(details))


def _throughput_card(record: Record) -> Card:
    label = f"Tokens per second, {ORIGIN_NAMES[record.origin]}"
    return Card(label, format_number(record.tokens_per_s), (f"{record.num_tokens:,} tokens per iteration",))


def _host_card(record: Record) -> Card:
    host = record.host_memory
    in_all = (f"{format_bytes(host.total_bytes)} of host memory in all",) if host is not None else ()
    figure = format_bytes(record.peak_pinned_bytes) if record.curve(Memory.PINNED_HOST) else NO_VALUE
    return Card(f"Pinned host memory, {ORIGIN_NAMES[record.origin]}", figure, in_all)


def _search_card(result: SearchResult) -> Card:
    """How sure it is that the plan is the best."""
    certificate = result.certificate
    if not certificate.is_certified:
        proof = "the search was ended early: nothing is proven of the rest"
    else:
        of_which = "none of them" if not certificate.num_bounded_by_segments else "none whose segments fit"
        proof = f"{of_which} {how_much_faster(result.gap_frac)}"
    return Card("Plans in the space", f"{certificate.num_candidates:,}", (proof,))


def _offload_card(record: Record) -> Card:
    moved_bytes = sum(use.moved_bytes for use in record.lanes)
    told = f"{record.num_gathers} chunks gathered, {record.num_cpu_adam_steps} CPU Adam steps"
    return Card("Moved per iteration", format_bytes(moved_bytes), (told,))
