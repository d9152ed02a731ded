"""The outcome of a search as tables: the plan with its prediction, what is proven about it, and the plans beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich.console import Group, RenderableType
from rich.text import Text

from ..basics.units import format_bytes, format_seconds
from ..schema.search_result import BatchSearchResult, Certificate, PlanOutcome, SearchResult, WhatIf
from .labels import NO_VALUE, format_error, format_share, how_much_faster
from .record import record_tables
from .style import FittingTable, add_row, plain_table, titled

_SHARDS: Final = ">n_\nshard"
"""The column of a knob that only ranks in mode sharded have."""
_COLUMNS: Final = (
    ">iteration",
    ">against\nit",
    ">device\npeak",
    ">pinned\nhost",
    ">chunk_\nbytes",
    ">n_\npersist",
    _SHARDS,
    ">n_\nbuffer",
    ">prefetch_\ndepth",
    ">n_\ncheckpoint",
    ">n_\nswap",
)
_MOST_ROWS: Final = 8
"""Rows of a front that a person reads; the JSON has them all."""


def search_tables(result: SearchResult) -> RenderableType:
    """Everything that a search answers, the plan first."""
    parts: list[RenderableType] = [
        record_tables(result.prediction),
        Text(""),
        Text(budget_sentence(result)),
        Text(certificate_sentence(result)),
    ]
    if result.modes:
        parts += [Text(""), _mode_table(result)]
    if result.alternatives:
        parts += [Text(""), _outcome_table("Plans close to it", result.alternatives, result)]
    if len(result.pareto) > 1:
        parts += [Text(""), _outcome_table("Time against device memory", _spread(result.pareto), result)]
    if result.what_if:
        parts += [Text(""), _what_if_table(result.what_if)]
    return Group(*parts)


def batch_tables(found: BatchSearchResult) -> RenderableType:
    """The same for a search over the sizes of the micro-batch, and what became of each size."""
    table = plain_table(">size", ">number", ">best\niteration", ">at least", ">plans", ">simulated")
    for choice in found.choices:
        add_row(
            table,
            str(choice.micro_batch_size),
            str(choice.micro_batches),
            NO_VALUE if choice.best_iteration_s is None else format_seconds(choice.best_iteration_s),
            NO_VALUE if choice.shortest_possible_s is None else format_seconds(choice.shortest_possible_s),
            f"{choice.num_candidates:,}",
            str(choice.num_simulated),
        )
    title = f"Micro-batches of a global batch of {found.global_batch_size:,}"
    return Group(search_tables(found.result), Text(""), titled(title, table))


def _mode_table(result: SearchResult) -> RenderableType:
    """What became of every parallel mode; the chosen one is marked."""
    table = plain_table("mode", ">best\niteration", ">at least", ">plans", ">simulated", "")
    for mode in result.modes:
        is_chosen = mode.parallel is result.plan.parallel
        add_row(
            table,
            mode.parallel,
            NO_VALUE if mode.best_iteration_s is None else format_seconds(mode.best_iteration_s),
            NO_VALUE if mode.shortest_possible_s is None else format_seconds(mode.shortest_possible_s),
            f"{mode.num_candidates:,}",
            str(mode.num_simulated),
            "◀ chosen"
            if is_chosen
            else ""
            if not mode.reason
            else "does not fit"
            if mode.num_candidates
            else "no plan",
            style="bold" if is_chosen else "",
        )
    reasons = [Text(f"{mode.parallel}: {mode.reason}", style="dim") for mode in result.modes if mode.reason]
    return Group(titled(f"What {result.plan.num_ranks:,} ranks do together", table), *reasons)


def _spread(front: Sequence[PlanOutcome]) -> list[PlanOutcome]:
    """At most ``_MOST_ROWS`` plans of a front: both ends, and between them the nearest to even steps of memory."""
    if len(front) <= _MOST_ROWS:
        return list(front)
    ordered = sorted(front, key=lambda outcome: outcome.guaranteed_peak_device_bytes, reverse=True)
    most, least = ordered[0].guaranteed_peak_device_bytes, ordered[-1].guaranteed_peak_device_bytes
    chosen: dict[int, PlanOutcome] = {}
    for step in range(_MOST_ROWS):
        wanted = most - (most - least) * step / (_MOST_ROWS - 1)
        place = min(range(len(ordered)), key=lambda i: (abs(ordered[i].guaranteed_peak_device_bytes - wanted), i))
        chosen[place] = ordered[place]
    return [chosen[place] for place in sorted(chosen)]


def budget_sentence(result: SearchResult) -> str:
    """How much of the budget the plan needs."""
    need_bytes = result.prediction.guaranteed_peak_device_bytes
    return (
        f"Device budget {format_bytes(result.device_budget_bytes)}: the plan needs {format_bytes(need_bytes)} at most, "
        f"{format_share(need_bytes / result.device_budget_bytes)} of it."
    )


def certificate_sentence(result: SearchResult) -> str:
    """What the search proves, and how many plans it looked at to prove it."""
    certificate = result.certificate
    return f"{_counts(certificate)} {_proof(result)}"


def _counts(certificate: Certificate) -> str:
    plural = "" if certificate.num_candidates == 1 else "s"
    counted = [
        (certificate.num_bounded_by_memory, "cannot fit"),
        (certificate.num_bounded_by_time, "cannot be faster"),
        (certificate.num_simulated, "simulated"),
        (certificate.num_undecided, "left undecided"),
    ]
    listed = ", ".join(f"{count:,} {words}" for count, words in counted if count)
    return f"{certificate.num_candidates:,} plan{plural} in the space: {listed}."


def _proof(result: SearchResult) -> str:
    if result.certificate.is_interrupted:
        return "The search was interrupted: this is the best plan so far, and it is not certified."
    if not result.certificate.is_certified:
        return "The search was ended early; nothing is proven about the plans that it left undecided."
    sentence = f"No plan of the space {how_much_faster(result.gap_frac)}."
    tolerance_frac = result.certificate.tolerance_frac
    if any(outcome.iteration_s < result.prediction.iteration_s for outcome in (*result.alternatives, *result.pareto)):
        sentence += f" Of the plans within {format_share(tolerance_frac)} of the fastest, this is the simplest."
    return sentence


def _outcome_table(title: str, outcomes: Sequence[PlanOutcome], result: SearchResult) -> RenderableType:
    rows: list[tuple[str, ...]] = [
        (
            format_seconds(outcome.iteration_s),
            format_error(outcome.iteration_s / result.prediction.iteration_s - 1),
            format_bytes(outcome.guaranteed_peak_device_bytes),
            format_bytes(outcome.pinned_host_bytes),
            format_bytes(outcome.plan.chunk_bytes),
            str(outcome.plan.n_persist),
            str(outcome.plan.n_shard),
            str(outcome.plan.n_buffer),
            str(outcome.plan.prefetch_depth),
            str(outcome.plan.n_checkpoint),
            str(outcome.plan.n_swap),
        )
        for outcome in outcomes
    ]
    columns: tuple[str, ...] = _COLUMNS
    if not any(outcome.plan.n_shard for outcome in outcomes):
        place = columns.index(_SHARDS)
        columns = (*columns[:place], *columns[place + 1 :])
        rows = [(*row[:place], *row[place + 1 :]) for row in rows]
    return titled(title, FittingTable(columns, rows, always=3, expendable=(">pinned\nhost", ">prefetch_\ndepth")))


def _what_if_table(answers: Sequence[WhatIf]) -> RenderableType:
    table = plain_table("", ">iteration", ">faster")
    for answer in answers:
        if answer.iteration_s is None or answer.speedup is None:
            add_row(table, answer.change, "nothing fits", "")
        else:
            add_row(table, answer.change, format_seconds(answer.iteration_s), f"{answer.speedup:.2f} times")
    return titled("What if the machine had", table)
