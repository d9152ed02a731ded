"""What is answered about a configuration file of another tool, in words and tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from ...shared.answers.search_result import Lack
from ...shared.basics.units import format_bytes, format_number, format_seconds
from ...shared.foreign.asked_run import KeyNote, Reading
from ...shared.schema.record import Record
from ...shared.tables.answer import baseline_table, recommendation
from ...shared.tables.labels import format_share, num_blocks
from ...shared.tables.question import question_table
from ...shared.tables.record import iteration_table, lane_table, memory_table, plan_table
from ...shared.tables.table import Heading, Parts, Table
from .explanation import Explanation

_UNKNOWN: Final = "not known here: whether it changes time or memory nobody says"
_MOST_NAMES: Final = 12


def explanation_tables(told: Explanation) -> Parts:
    """What was understood and left out, the prediction, and what a plan would do, in this order.

    The command line (``Explanation.command``) is none of them: it stays whole, however narrow a terminal is.
    """
    record = told.configured
    parts: list[Table | str] = [*reading_tables(told.reading, told.file), *_notes(told)]
    parts.append(Heading(f"The run as {told.file} has it: {record.model_name} on {record.hardware_name}"))
    assert record.question is not None, "a prediction says what was asked"
    parts += [question_table(record.question), plan_table(record.plan, num_blocks=num_blocks(record))]
    parts += [iteration_table(record), memory_table(record), lane_table(record), fit_sentence(told)]
    if told.other_readings:
        parts.append(_other_readings(told))
    return (*parts, *_searched(told))


def reading_tables(reading: Reading, file: str) -> list[Table | str]:
    """Key by key what a file asks for, and what of it is left out."""
    parts: list[Table | str] = [
        _keys(f"{file}: {reading.tool.words}", [*reading.understood, *reading.assumed], dim=len(reading.understood))
    ]
    left = [*reading.left_out, *(KeyNote(key=one.key, value=one.value, about=_UNKNOWN) for one in reading.unknown)]
    if left:
        parts.append(_keys("Left out of the answer", left))
    else:
        parts.append("Nothing that changes time or memory is left out of the answer.")
    if reading.without_effect:
        names = ", ".join(reading.without_effect[:_MOST_NAMES])
        more = len(reading.without_effect) - _MOST_NAMES
        rest = f" and {more} more (--json has all)" if more > 0 else ""
        parts.append(f"Without effect on the time and memory of a step: {names}{rest}.")
    return parts


def _keys(title: str, notes: Sequence[KeyNote], dim: int | None = None) -> Table:
    """Keys with their values; from the row ``dim`` on the file is silent."""
    rows = [
        (note.key, note.value if dim is None or place < dim else f"({note.value})", note.about)
        for place, note in enumerate(notes)
    ]
    return Table(
        title=title,
        columns=("key", "value", "meaning"),
        rows=rows,
        styles={place: "dim" for place in range(len(rows)) if dim is not None and place >= dim},
        notes=["In brackets: what the tool has where the file is silent."]
        if dim is not None and dim < len(rows)
        else [],
        always=None,
    )


def _notes(told: Explanation) -> Iterator[str]:
    if told.settled:
        yield "Taken in the place of what the file does not say:\n" + "\n".join(f"- {note}" for note in told.settled)
    yield "In what the prediction differs from the run:\n" + "\n".join(f"- {one}" for one in told.differences)


def fit_sentence(told: Explanation) -> str:
    """Whether the run fits, or by how much it does not."""
    if not told.masters_bytes:
        return _fits(told)
    own = f"Its peak is {format_bytes(told.peak_bytes)}, without the float32 masters of the prediction."
    return f"{_fits(told)} {own}"


def _fits(told: Explanation) -> str:
    if told.segments is not None:
        return f"The run fits by what it allocates, but {told.segments}"
    if not told.lacking and told.found is not None and not told.fits_as_plans_do:
        margin = format_share(told.found.margin_frac or 0.0)
        return f"The run fits, but leaves less of the device free than the {margin} that plans below leave."
    if not told.lacking:
        return "The run fits."
    return f"The run does not fit: {lack_words(told.lacking)}. Times are as if the memory were there."


def lack_words(lacking: Sequence[Lack]) -> str:
    """``98.1 GiB short of device memory``."""
    return ", ".join(f"{format_bytes(lack.size_bytes)} short of {lack.memory}" for lack in lacking)


def _other_readings(told: Explanation) -> Table:
    record = told.configured
    rows = [
        (one.name, format_seconds(one.iteration_s), format_bytes(one.guaranteed_peak_device_bytes))
        for one in told.other_readings
    ]
    rows.insert(1, ("as predicted", *_figures(record)))
    return Table(title="Ends of what it may be", columns=("", ">iteration", ">device peak"), rows=rows)


def _figures(record: Record) -> tuple[str, str]:
    return format_seconds(record.iteration_s), format_bytes(record.guaranteed_peak_device_bytes)


def _searched(told: Explanation) -> Iterator[Table | str]:
    found = told.found
    if found is None:
        if told.infeasible is not None:
            yield f"No plan fits either: {told.infeasible}"
        return
    yield Heading("What a plan would do for it")
    if found.baselines:
        yield baseline_table(found)
    yield recommendation(found)
    yield plan_table(found.plan, num_blocks=num_blocks(found.prediction))
    yield _ratio(told)


def _ratio(told: Explanation) -> str:
    assert told.found is not None
    assert told.speedup is not None
    plan = told.found.prediction
    has_tokens = plan.question is None or plan.question.sequence_length is not None
    speed = plan.tokens_per_s if has_tokens else plan.samples_per_s
    rate = f"{format_number(speed)} {'tokens' if has_tokens else 'samples'} per second"
    if told.lacking:
        return f"The plan fits, where the run does not: {rate}, {format_seconds(plan.iteration_s)} per step."
    less = told.peak_bytes - plan.guaranteed_peak_device_bytes
    memory = f"{format_bytes(abs(less))} {'less' if less > 0 else 'more'} device memory at the peak"
    if not less:
        memory = "as much device memory"
    fits = " It fits with the allocator's own settings, where the run does not." if told.segments else ""
    return f"The plan: {rate}, {told.speedup:.2f} times those of the run as predicted, with {memory}.{fits}"
