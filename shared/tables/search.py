"""The outcome of a search as tables: the plan with its prediction, what is proven about it, and the plans beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ..answers.search_result import BatchSizes, Certificate, LeftOut, PlanOutcome, SearchResult, WhatIf
from ..basics.units import format_bytes, format_seconds
from .answer import baseline_table, recommendation
from .labels import NO_VALUE, format_error, format_interval_s, format_share, how_much_faster, knobs
from .record import record_tables
from .table import Parts, Table, breakable

_MOST_ROWS: Final = 10
"""Rows of a front that a person reads; the drawing has them all, and so has the JSON."""


def search_tables(result: SearchResult) -> Parts:
    """Everything that a search answers: the baselines and the recommendation first, then its plan and the proof."""
    title, *parts = record_tables(result.prediction)
    asked = [parts.pop(0)] if result.prediction.question is not None else []
    first = [title, *asked, *([baseline_table(result)] if result.baselines else []), recommendation(result)]
    proven = (budget_sentence(result), certificate_sentence(result), left_out_sentence(result))
    parts = [*first, *parts, "\n".join(sentence for sentence in proven if sentence)]
    if result.modes:
        parts.append(mode_table(result))
    if result.alternatives:
        parts.append(alternatives_table(result))
    if len(result.pareto) > 1:
        parts.append(front_table(result))
    if result.what_if:
        parts.append(_what_if_table(result.what_if))
    if result.batch is not None:
        parts.append(batch_table(result.batch))
    return tuple(parts)


def batch_table(found: BatchSizes) -> Table:
    """Per size of the micro-batch its best plan's time, and what no plan of it can beat."""
    rows = [
        (
            str(choice.micro_batch_size),
            str(choice.micro_batches),
            _seconds(choice.best_iteration_s),
            _seconds(choice.shortest_possible_s),
            f"{choice.num_candidates:,}",
            f"{choice.num_simulated:,}",
        )
        for choice in found.choices
    ]
    return Table(
        title=f"Sizes of the micro-batch at {found.global_batch_size:,} samples per step",
        columns=(">micro-batch\nsize", ">micro-\nbatches", ">best\niteration", ">not\nbelow", ">plans", ">simulated"),
        rows=rows,
        styles={
            place: "bold"
            for place, choice in enumerate(found.choices)
            if choice.micro_batch_size == found.micro_batch_size
        },
    )


def mode_table(result: SearchResult) -> Table:
    """What became of every parallel mode, and why some have no plan; the chosen one is marked."""
    rows = []
    for mode in result.modes:
        state = "does not fit" if mode.num_candidates else "no plan"
        if not mode.reason:
            state = "◀ chosen" if mode.has(result.plan) else ""
        rows.append(
            (
                mode.words,
                _seconds(mode.best_iteration_s),
                _seconds(mode.shortest_possible_s),
                f"{mode.num_candidates:,}",
                f"{mode.num_simulated:,}",
                state,
            )
        )
    return Table(
        title=f"What {result.plan.num_ranks:,} ranks do together",
        columns=("mode", ">best\niteration", ">not\nbelow", ">plans", ">simulated", ""),
        rows=rows,
        styles={place: "bold" for place, mode in enumerate(result.modes) if mode.has(result.plan)},
        notes=[f"{mode.words}: {mode.reason}" for mode in result.modes if mode.reason],
    )


def alternatives_table(result: SearchResult) -> Table:
    """The next best plans of other kinds."""
    return outcome_table("Plans close to it", result.alternatives, result)


def front_table(result: SearchResult) -> Table:
    """Plans of the front of time against memory: both ends, and between them at even steps of its order."""
    front, title = result.pareto, "The front of time against device memory"
    if len(front) > _MOST_ROWS:
        title = f"{title}, {_MOST_ROWS} of its {len(front)} plans"
        front = tuple(front[round(step * (len(front) - 1) / (_MOST_ROWS - 1))] for step in range(_MOST_ROWS))
    return outcome_table(title, front, result)


def outcome_table(title: str, outcomes: Sequence[PlanOutcome], result: SearchResult) -> Table:
    """Plans with their time, memory and knobs; columns for those knobs alone that any of them has."""
    found = [{knob.name: knob.value for knob in knobs(outcome.plan)} for outcome in outcomes]
    names = list(dict.fromkeys(name for values in found for name in values))
    rows = [
        (
            format_seconds(outcome.iteration_s),
            format_error(outcome.iteration_s / result.prediction.iteration_s - 1)
            + (" =" if outcome.is_near_tie else ""),
            format_bytes(outcome.guaranteed_peak_device_bytes),
            format_interval_s(outcome.iteration_interval_s) or NO_VALUE,
            format_bytes(outcome.pinned_host_bytes),
            *(values.get(name, "0") for name in names),
        )
        for outcome, values in zip(outcomes, found, strict=True)
    ]
    fixed = (">iteration", ">over the\nplan", ">device\npeak", ">expected", ">pinned\nhost")
    ties = any(outcome.is_near_tie for outcome in outcomes)
    return Table(
        title=title,
        columns=(*fixed, *(f">{breakable(name)}" for name in names)),
        rows=rows,
        always=3,
        expendable=(fixed[-1], f">{breakable('prefetch_depth')}", fixed[3]),
        notes=["= intervals cannot tell it from the plan"] if ties else [],
    )


def _what_if_table(answers: Sequence[WhatIf]) -> Table:
    rows = [
        (one.change, "nothing fits", "", "")
        if one.iteration_s is None or one.speedup is None
        else (
            one.change,
            format_seconds(one.iteration_s),
            format_interval_s(one.iteration_interval_s) or NO_VALUE,
            f"{one.speedup:.2f} times",
        )
        for one in answers
    ]
    return Table(
        title="If one thing were different",
        columns=("", ">iteration", ">expected", ">tokens per second"),
        rows=rows,
        expendable=(">expected",),
    )


def _seconds(time_s: float | None) -> str:
    return NO_VALUE if time_s is None else format_seconds(time_s)


# -- sentences -------------------------------------------------------------------------------------------------------


def budget_sentence(result: SearchResult) -> str:
    """How much of the budget the plan needs."""
    need_bytes = result.prediction.guaranteed_peak_device_bytes
    return (
        f"Device budget {format_bytes(result.device_budget_bytes)}: the plan needs {format_bytes(need_bytes)} at most, "
        f"{format_share(need_bytes / result.device_budget_bytes)} of it."
    )


def certificate_sentence(result: SearchResult) -> str:
    """What the search proves, and how many plans it looked at to prove it."""
    return f"{_counts(result.certificate)} {_proof(result)}"


def _counts(certificate: Certificate) -> str:
    plural = "" if certificate.num_candidates == 1 else "s"
    counted = [
        (certificate.num_bounded_by_memory, "cannot fit"),
        (certificate.num_bounded_by_segments, "expected to take too much in segments"),
        (certificate.num_bounded_by_time, "cannot be faster"),
        (certificate.num_simulated, "simulated"),
        (certificate.num_undecided, "left undecided"),
    ]
    listed = ", ".join(f"{count:,} {words}" for count, words in counted if count)
    on_disk = (
        " Of every placement that the host has no memory for, it has those with the fewest chunks on the disk that the "
        "host's memory allows: with their optimizer state there, and with their parameters too."
        if certificate.has_fewest_on_disk
        else ""
    )
    return f"{certificate.num_candidates:,} plan{plural} in the space: {listed}.{on_disk}"


def _proof(result: SearchResult) -> str:
    if result.certificate.is_interrupted:
        return "The search was interrupted: this is the best plan so far, and it is not certified."
    if not result.certificate.is_certified:
        return "The search was ended early; nothing is proven about the plans that it left undecided."
    of_which = "Of the others none" if result.certificate.num_bounded_by_segments else "No plan of the space"
    sentence = f"{of_which} {how_much_faster(result.gap_frac)}."
    tolerance_frac, best_s = result.certificate.tolerance_frac, result.certificate.best_iteration_s
    if best_s < result.prediction.iteration_s * (1 - tolerance_frac):
        sentence += f" The fastest that was found takes {format_seconds(best_s)}."
    elif any(outcome.iteration_s < result.prediction.iteration_s for outcome in (*result.alternatives, *result.pareto)):
        sentence += f" Of the plans within {format_share(tolerance_frac)} of the fastest, this is the simplest."
    return sentence


def left_out_sentence(result: SearchResult) -> str:
    """Which plans were not searched, how they are, and by how much they may at most be faster; empty without any."""
    if not result.left_out:
        return ""
    told = [f"{one.sort.words} ({one.sort.option}), {_most_gained(result, one)}" for one in result.left_out]
    return f"Not searched by default are plans with {'; '.join(told)}."


def _most_gained(result: SearchResult, one: LeftOut) -> str:
    gain_frac = result.left_out_frac(one)
    if gain_frac is None:
        return "of whose times nothing is known"
    claim = f"none of which {how_much_faster(gain_frac)}"
    uncertainty_frac = result.uncertainty.between(result.plan_kind, one.sort.kind)
    if 0 < gain_frac <= uncertainty_frac:
        claim += f" (within the uncertainty of {format_share(uncertainty_frac)})"
    return claim
