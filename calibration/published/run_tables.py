"""Tables of published training runs: in their own units, by class, as comparisons of plans, and their memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, median
from typing import Final

from ...shared.methods.runtime_profile import Runtime
from ...shared.tables.table import Heading, Parts, Table
from .comparisons import COVERED_FRAC, Comparison, Difference, Spread
from .measured_runs import MEASURED_RUNS, RUNS_OF_OTHER_FORMS, SOURCES, MeasuredRun, Unit
from .memory_margin import (
    MemoryOfRun,
    memory_of_kind,
    num_refused,
    quantiles_of_ratio,
    share_covered,
    share_within_device,
)
from .outcome import Outcome
from .run_predictions import PredictedRun

Predicted = Mapping[str, PredictedRun]

WITHIN_FRAC: Final = 0.15
"""Errors of times that count as near."""
MARGINS: Final = (0.0, 0.02, 0.05, 0.08, 0.10)
"""Shares of the device's memory that may be left free."""


def in_own_units(predicted: Predicted) -> Parts:
    """Prediction beside measurement for single runs, in the unit of each source; positive errors are too much of it."""
    notes: list[str] = []
    rows = []
    for run in (run for run in MEASURED_RUNS if run.is_shown):
        numbers = [_number(note, notes) for note in run.approximations]
        for place, (unit, measured, likely) in enumerate(_figures(run, predicted[run.id])):
            named = (run.trained, run.where) if place == 0 else ("", "")
            note = ", ".join(f"note {number}" for number in numbers) if place == 0 else ""
            rows.append((*named, unit, _show(measured), _show(likely), f"{likely / measured - 1:+.1%}", note))
    used = dict.fromkeys(run.source for run in MEASURED_RUNS if run.is_shown)
    lines = [
        "Errors are signed in the unit itself: too much of a rate is too short a time.",
        "MFU is predicted as records count it, without tables that are looked up; sources count all parameters.",
    ]
    lines += [f"note {number}: {note}" for number, note in enumerate(notes, start=1)]
    lines += [f"{name}: {SOURCES[name].about}. {SOURCES[name].url}" for name in used]
    columns = ("trained", "on", "unit", ">measured", ">predicted", ">error", "differs")
    return Table(title="Published runs in their own units", columns=columns, rows=rows), "\n".join(lines)


def of_runs(runs: Sequence[MeasuredRun], predicted: Predicted) -> Parts:
    """Every one of ``runs``: its own unit, prediction, measurement, signed error, and the interval of the time."""
    notes: list[str] = []
    rows: list[tuple[str, ...]] = []
    errors: list[float | None] = []
    for run in runs:
        numbers = ", ".join(str(_number(note, notes)) for note in run.approximations)
        found = predicted[run.id]
        speed = run.measured.speed
        if speed is not None:
            unit, measured = speed
            likely, measured_s = own_figure(found, unit), run.iteration_s
            assert measured_s is not None
            error = found.iteration_s / measured_s - 1
            interval = found.iteration_interval_s
            within = "" if interval is None else f"{interval.low / measured_s:.2f} to {interval.high / measured_s:.2f}"
            told = (f"{_show(measured)} {_SHORT[unit]}", _show(likely), f"{error:+.1%}", within)
        else:
            error, told = None, ("", "", "", "")
        memory = run.measured.memory
        if memory is None:
            of_memory_cells = ("", "", "")
        else:
            kind, measured_bytes = memory
            likely_bytes = memory_of_kind(found, kind)
            gib = f"{measured_bytes / 2**30:.2f}"
            of_memory_cells = (str(kind), gib, f"{likely_bytes / measured_bytes - 1:+.1%}")
        marked = f"{run.trained} ({numbers})" if numbers else run.trained
        rows.append((marked, run.where, *told, *of_memory_cells))
        errors.append(error)
    columns: tuple[str, ...] = (
        "trained",
        "on",
        ">measured",
        ">predicted",
        ">error\nof time",
        ">interval /\nmeasured",
        "memory",
        ">GiB",
        ">error",
    )
    lines = [f"{number}: {note}" for number, note in enumerate(notes, start=1)]
    used = dict.fromkeys(run.source for run in runs)
    lines += [f"{name}: {' '.join(SOURCES[name].about.split())}. {SOURCES[name].url}" for name in used]
    expendable: tuple[str, ...] = ("memory", ">GiB", ">error")
    if all(run.measured.speed is None for run in runs):  # of memory alone, which then is the answer
        columns, rows, expendable = (*columns[:2], *columns[6:]), [(*row[:2], *row[6:]) for row in rows], ()
    table = Table(title="Published runs", columns=columns, rows=rows, errors_frac=errors, expendable=expendable)
    return table, "\n".join(lines)


_SHORT: Final = {Unit.TOKENS_PER_DEVICE: "tok/s", Unit.SAMPLES: "samples/s", Unit.ITERATION: "s"}
"""Units of a cell; tokens are those of one device."""


def _number(note: str, notes: list[str]) -> int:
    if note not in notes:
        notes.append(note)
    return notes.index(note) + 1


def _figures(run: MeasuredRun, predicted: PredictedRun) -> Iterator[tuple[str, float, float]]:
    """Unit, measured and predicted, of every speed that the source states."""
    speed = run.measured.speed
    assert speed is not None
    unit, measured = speed
    yield unit, measured, own_figure(predicted, unit)
    if run.measured.mfu_percent is not None:
        assert predicted.mfu_frac is not None
        yield "MFU, %", run.measured.mfu_percent, 100 * predicted.mfu_frac


def own_figure(predicted: PredictedRun, unit: Unit) -> float:
    """The predicted speed in ``unit``."""
    match unit:
        case Unit.TOKENS_PER_DEVICE:
            return predicted.tokens_per_s_per_device
        case Unit.SAMPLES:
            return predicted.samples_per_s
        case Unit.ITERATION:
            return predicted.iteration_s


def _show(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:#.3g}"


def by_class(predicted: Predicted) -> Parts:
    """Signed errors of times, class by class, over all runs whose speed was published."""
    classes: dict[str, list[float]] = {}
    for run in MEASURED_RUNS:
        if run.iteration_s is not None:
            classes.setdefault(run.run_class, []).append(predicted[run.id].iteration_s / run.iteration_s - 1)
    rows = [
        (*_errors_row(name, errors), f"{sum(abs(error) <= WITHIN_FRAC for error in errors)}")
        for name, errors in classes.items()
    ]
    columns = (*_ERRORS_OF_CLASS, f">within {WITHIN_FRAC:.0%}")
    return (Table(title="Times of all published runs, by class", columns=columns, rows=rows),)


_ERRORS_OF_CLASS: Final = ("class", ">runs", ">mean error", ">mean size", ">worst")


def _errors_row(name: str, errors: Sequence[float]) -> tuple[str, ...]:
    mean, size, worst = fmean(errors), fmean(map(abs, errors)), max(errors, key=abs)
    return name, str(len(errors)), f"{mean:+.1%}", f"{size:.1%}", f"{worst:+.1%}"


def memory_by_class(predicted: Predicted) -> Parts:
    """Signed errors of memory, class by class, over all runs whose memory was published."""
    classes: dict[str, list[float]] = {}
    for run in MEASURED_RUNS:
        if run.measured.memory is not None:
            kind, measured_bytes = run.measured.memory
            error = memory_of_kind(predicted[run.id], kind) / measured_bytes - 1
            classes.setdefault(run.run_class, []).append(error)
    every = [error for errors in classes.values() for error in errors]
    rows = [_errors_row(name, errors) for name, errors in (*classes.items(), ("all", every))]
    return (
        Table(
            title="Memory of all published runs, by class",
            columns=_ERRORS_OF_CLASS,
            rows=rows,
            ruled=frozenset({len(rows) - 1}),
            styles={len(rows) - 1: "bold"},
        ),
    )


def of_intervals(predicted: Predicted) -> Parts:
    """How many measured times the predicted intervals contain, class by class, and how wide these are."""
    classes: dict[str, list[tuple[bool, float]]] = {}
    for run in MEASURED_RUNS:
        found = predicted[run.id]
        interval = found.iteration_interval_s
        if run.iteration_s is not None and interval is not None:
            told = interval.contains(run.iteration_s), interval.half_width_frac(found.iteration_s)
            classes.setdefault(run.run_class, []).append(told)
    every = [told for of_class in classes.values() for told in of_class]
    if not every:
        return ()
    rows = [_interval_row(name, of_class) for name, of_class in (*classes.items(), ("all", every))]
    columns = ("class", ">runs", ">inside", ">share", ">median half-width")
    return (
        Table(
            title="Intervals that nine in ten measured times are to lie in",
            columns=columns,
            rows=rows,
            ruled=frozenset({len(rows) - 1}),
            styles={len(rows) - 1: "bold"},
        ),
    )


def _interval_row(name: str, told: Sequence[tuple[bool, float]]) -> tuple[str, ...]:
    num_inside = sum(is_inside for is_inside, _ in told)
    width = median(half_width for _, half_width in told)
    return name, str(len(told)), str(num_inside), f"{num_inside / len(told):.0%}", f"{width:.0%}"


def of_comparisons(
    at_one_shape: Sequence[Comparison], on_one_machine: Sequence[Comparison], calibrated: Sequence[Comparison]
) -> Parts:
    """How errors of comparisons spread, by what is compared, and every published pair."""
    groups = (
        ("data sheets, one shape", at_one_shape),
        ("data sheets, other micro-batches", on_one_machine),
        ("calibrated", calibrated),
    )
    rows = [row for name, compared in groups for row in _spread_rows(name, compared)]
    columns = ("prediction", "plans differ", ">pairs", ">mean", ">median", f">{COVERED_FRAC:.0%} within", ">range")
    pairs = [
        (
            pair.first.name,
            pair.second.name,
            f"{pair.predicted_ratio:.3f}",
            f"{pair.measured_ratio:.3f}",
            f"{pair.error_frac:+.1%}",
        )
        for pair in at_one_shape
        if pair.difference is not Difference.EXTENT
    ]
    words = (
        "Ratios are seconds of the second plan over those of the first; errors are fractions of the longer time, and "
        "negative where the second plan is predicted too fast."
    )
    return (
        Table(title="Comparisons of two plans, by what they differ in", columns=columns, rows=rows),
        words,
        Table(
            title="Published pairs of plans",
            columns=("first", "second", ">predicted", ">measured", ">error"),
            rows=pairs,
        ),
    )


def _spread_rows(name: str, compared: Sequence[Comparison]) -> Iterator[tuple[str, ...]]:
    for difference in reversed(Difference):
        chosen = [pair for pair in compared if pair.difference is difference]
        if chosen:
            spread = Spread.of(chosen)
            yield (
                name,
                difference,
                str(spread.num),
                f"{spread.mean:.1%}",
                f"{spread.median:.1%}",
                f"{spread.covering:.1%}",
                f"{spread.low:+.1%} to {spread.high:+.1%}",
            )


def of_memory(predicted: Predicted, every: Sequence[MemoryOfRun]) -> Parts:
    """Measured over predicted memory, and what a margin covers and refuses."""
    alike = [one for one in every if one.is_of_plan]
    others = [one for one in every if one.differs is None and not one.is_of_plan]
    shares = (0.1, 0.5, 0.8, 0.9, 1.0)
    rows = [
        (name, str(len(found)), *(f"{ratio:.2f}" for ratio in quantiles_of_ratio(found, shares)))
        for name, found in (
            ("plain loops, no known difference", alike),
            ("other systems, no known difference", others),
            ("all", every),
        )
        if found
    ]
    headings = (*(f">{share:.0%}" for share in shares[:-1]), ">most")
    known = [run for run in MEASURED_RUNS if run.memory_differs is None and run.runtime is Runtime.OURS]
    margins = [
        (
            f"{margin:.0%}",
            f"{share_covered(alike, margin):.0%}",
            f"{share_within_device(alike, margin):.0%}",
            f"{share_covered(every, margin):.0%}",
            f"{share_within_device(every, margin):.0%}",
            f"{num_refused(known, predicted, margin)} of {len(known)}",
            f"{num_refused(MEASURED_RUNS, predicted, margin)} of {len(MEASURED_RUNS)}",
        )
        for margin in MARGINS
    ]
    columns = (
        "margin",
        ">covers, by ratio",
        ">by device",
        ">of all, by ratio",
        ">by device",
        ">ran, but refused",
        ">of all",
    )
    reasons = sorted({one.differs for one in every if one.differs is not None})
    return (
        Table(title="Measured over predicted memory", columns=("runs", ">number", *headings), rows=rows),
        Table(title="Margins of memory", columns=columns, rows=margins),
        "By ratio: if errors grow with the plan.  By device: if they do not.  Known differences: "
        + "; ".join(reasons)
        + ".",
    )


def of_other_forms() -> Parts:
    """Runs in forms that no plan has: what was measured, and the form."""
    rows = []
    for run in RUNS_OF_OTHER_FORMS:
        speed, memory = run.measured.speed, run.measured.memory
        cells = ("", "") if speed is None else (str(speed[0]), _show(speed[1]))
        gib = "" if memory is None else f"{memory[1] / 2**30:.1f}"
        rows.append((run.id, run.where, *cells, gib, run.other_form or ""))
    columns = ("run", "on", "unit", ">measured", ">GiB", "form")
    return (Table(title="Published runs in forms that no plan has: not predicted", columns=columns, rows=rows),)


def run_tables(outcome: Outcome, calibrated: Sequence[Comparison]) -> Parts:
    """All of them; ``calibrated``: comparisons of plans that were predicted with a calibration."""
    predicted = outcome.predicted
    return (
        Heading("Training runs"),
        *in_own_units(predicted),
        *by_class(predicted),
        *memory_by_class(predicted),
        *of_intervals(predicted),
        *of_other_forms(),
        *of_comparisons(*outcome.pairs(), calibrated),
        *of_memory(predicted, outcome.memories()),
    )
