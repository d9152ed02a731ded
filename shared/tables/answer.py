"""What a search answers first: what people would do without it, the recommendation, and what was passed over for it."""

from __future__ import annotations

from typing import Final

from ..answers.plan_kind import PlanKind
from ..answers.search_result import Baseline, Goal, PlanOutcome, Risk, SearchResult
from ..basics.units import format_bytes, format_number, format_seconds
from ..schema.plan import Plan, TrainingMethod
from .labels import NO_VALUE, format_share
from .memory import DEFAULT_SETTINGS, EXPANDABLE_SETTING
from .table import Table

_GOALS: Final = {
    Goal.FASTEST: "Fastest",
    Goal.CHEAPEST: "Cheapest",
    Goal.LONGEST_SEQUENCE: "Longest sequence",
    Goal.LARGEST_BATCH: "Largest batch",
    Goal.LEAST_MEMORY: "Least memory",
}


def baseline_table(result: SearchResult) -> Table:
    """Every baseline beside the recommended plan: time, throughput, memory, and by how much it does not fit."""
    record = result.prediction
    rows = [_baseline_row(baseline) for baseline in result.baselines]
    segments_bytes = None if record.device_reserved is None else record.device_reserved.expected_bytes
    host = record.host_memory
    rows.append(
        (
            "◀ recommended",
            format_seconds(record.iteration_s),
            format_number(record.tokens_per_s),
            format_bytes(record.guaranteed_peak_device_bytes),
            _bytes(segments_bytes),
            _bytes(None if host is None else host.planned_bytes),
            _fits_words(result),
        )
    )
    return Table(
        title="Without a search, and with it",
        columns=("", ">iteration", ">tokens\nper second", ">device\npeak", ">in\nsegments", ">host", "fits?"),
        rows=rows,
        styles={
            **{place: "dim" for place, baseline in enumerate(result.baselines) if not baseline.fits},
            len(rows) - 1: "bold",
        },
        ruled=frozenset({len(rows) - 1}),
        always=7,
        expendable=(">in\nsegments",),
        notes=_notes(result),
    )


def _fits_words(result: SearchResult) -> str:
    if result.survives is not False:
        return "fits"
    reserved = result.prediction.device_reserved
    if reserved is not None and reserved.expected_bytes <= reserved.limit_bytes:
        return "fits, without the margin"
    return "may run out of memory"


def _baseline_row(baseline: Baseline) -> tuple[str, ...]:
    host_bytes = baseline.pinned_host_bytes + baseline.host_bytes
    return (
        baseline.name,
        format_seconds(baseline.iteration_s),
        format_number(baseline.tokens_per_s),
        format_bytes(baseline.guaranteed_peak_device_bytes),
        _bytes(baseline.expected_segments_bytes),
        _bytes(host_bytes),
        lacking_words(baseline),
    )


def lacking_words(baseline: Baseline) -> str:
    """``"fits"``, or what it lacks: ``"98.1 GiB short of device memory"``."""
    if baseline.fits:
        return "fits"
    return ", ".join(f"{format_bytes(lack.size_bytes)} short of {lack.memory}" for lack in baseline.lacking)


def _bytes(size_bytes: int | None) -> str:
    return format_bytes(size_bytes) if size_bytes else NO_VALUE


def _notes(result: SearchResult) -> list[str]:
    if not any(baseline.plan_kind is PlanKind.OFFLOADED for baseline in result.baselines):
        return []
    return [
        "Times of FSDP2 and DeepSpeed are those of their plans, with their copies around collectives and without "
        "other costs of their own. DeepSpeed ZeRO-2 with offload keeps parameters on the device and steps them on the "
        "host, as plans with n_host_stepped do."
    ]


# -- sentences -------------------------------------------------------------------------------------------------------


def recommendation(result: SearchResult) -> str:
    """Whether the host binds, what to do, what it gains, whether it survives, and what was passed over."""
    goal = f"{_GOALS[result.goal]}: {result.goal_words}." if result.goal_words else ""
    sentences = [_host_bound(result), goal, _gain(result), _survival(result), _expandable(result), _passed_over(result)]
    sentences.insert(3, _risk(result))
    return " ".join(sentence for sentence in sentences if sentence)


def _host_bound(result: SearchResult) -> str:
    other = result.host_bound
    if other is None:
        return ""
    ratio = other.iteration_s / result.prediction.iteration_s
    more = format_bytes(other.host_bytes - result.host_budget_bytes)
    which = f"takes {format_share(1 - ratio)} less time" if ratio < 1 else "leaves the margin of device memory"
    return (
        f"Host memory binds: a plan that {which} needs {format_bytes(other.host_bytes)} of it, {more} more than the "
        f"budget of {format_bytes(result.host_budget_bytes)}; a host of {format_bytes(other.host_memory_bytes)} is "
        f"enough."
    )


def _on_disk(plan: Plan) -> str:
    """What of them lies on the host's disk."""
    if not plan.n_disk_state:
        return ""
    parameters = f", parameters of {plan.n_disk} of these" if plan.n_disk else ""
    return f" and its disk (optimizer state of {plan.n_disk_state} chunks{parameters})"


def _gain(result: SearchResult) -> str:
    head = f"Recommended: {result.plan_kind.words}{_on_disk(result.plan)}"
    best = result.best_baseline
    if not result.baselines:
        return f"{head}."
    if best is None:
        return f"{head}. None of the others fits."
    ratio = result.prediction.tokens_per_s / best.tokens_per_s
    uncertainty_frac = result.uncertainty.between(result.plan_kind, best.plan_kind)
    is_tied = 1 - uncertainty_frac < ratio < 1 / (1 - uncertainty_frac)
    within = f", which is within the uncertainty of such a comparison, {format_share(uncertainty_frac)}"
    if f"{ratio:.2f}" < "1.00":
        # A plan of the space may need what a baseline does not: a block's chunk, or the margin.
        gain = (
            f"{best.name} fits, too, and gives {1 / ratio:.2f} times its tokens per second{within if is_tied else ''}"
        )
        return f"{head}. {gain}: with it at hand no plan is worth a change."
    gain = f"{ratio:.2f} times the tokens per second of {best.name}, the best of the others that fit"
    return f"{head}; {gain}{within if is_tied else ''}."


def _risk(result: SearchResult) -> str:
    """What the plan was chosen by, where that is not the predicted time."""
    interval, other = result.prediction.iteration_interval_s, result.passed_over_for_risk
    if result.risk is Risk.MEAN or interval is None:
        return ""
    chosen = (
        f"Of the {result.num_weighed:,} fastest plans that were looked at closely, it has the least upper end of the "
        f"time: {format_seconds(interval.high)}"
    )
    if other is None or other.iteration_interval_s is None:
        return f"{chosen}."
    slower = format_share(max(0.0, result.prediction.iteration_s / other.iteration_s - 1))
    lower = format_share(1 - interval.high / other.iteration_interval_s.high)
    return f"{chosen}, {lower} below that of the plan with the least predicted time, for {slower} more of that."


def _survival(result: SearchResult) -> str:
    reserved = result.prediction.device_reserved
    if reserved is None or result.margin_frac is None:
        return ""
    held = f"{format_bytes(reserved.expected_bytes)} of {format_bytes(reserved.limit_bytes)}"
    if result.survives:
        return (
            f"With {DEFAULT_SETTINGS} its segments are expected to take {held}; the margin of "
            f"{format_share(result.margin_frac)} of the device stays free."
        )
    remedy = f" It fits with {EXPANDABLE_SETTING}." if reserved.needs_expandable else ""
    return (
        f"No plan leaves the margin of {format_share(result.margin_frac)} with {DEFAULT_SETTINGS}: this one's segments "
        f"are expected to take {held}.{remedy}"
    )


def _expandable(result: SearchResult) -> str:
    other = result.expandable
    if other is None:
        return ""
    return (
        f"With {EXPANDABLE_SETTING} a plan fits that takes {_faster(other, result)} less time: {short_plan(other)}, "
        f"{format_bytes(other.guaranteed_peak_device_bytes)}."
    )


def _passed_over(result: SearchResult) -> str:
    other = result.passed_over
    if other is None:
        return ""
    uncertainty = format_share(result.uncertainty.between(result.plan_kind, other.plan_kind))
    return (
        f"Less simple plans ({other.plan_kind.words}) would take {_faster(other, result)} less time: within the "
        f"uncertainty of such a comparison, {uncertainty} ({result.uncertainty.source})."
    )


def _faster(other: PlanOutcome, result: SearchResult) -> str:
    return format_share(1 - other.iteration_s / result.prediction.iteration_s)


def short_plan(outcome: PlanOutcome) -> str:
    """The knobs that matter most, on one line."""
    plan = outcome.plan
    shown = [f"chunk_bytes {format_bytes(plan.chunk_bytes)}", f"n_persist {plan.n_persist}"]
    if plan.n_host_stepped:
        shown.append(f"n_host_stepped {plan.n_host_stepped}")
    if plan.n_shard:
        shown.append(f"n_shard {plan.n_shard}")
    if plan.shard_ranks is not None:
        shown.append(f"shard_ranks {plan.shard_ranks:,}")
    if plan.looks_up_rows:
        shown.append("looks_up_rows")
    if plan.sequence_ranks > 1:
        shown.append(f"sequence_ranks {plan.sequence_ranks:,}")
    shown += [f"n_buffer {plan.n_buffer}", f"prefetch_depth {plan.prefetch_depth}"]
    if plan.method is not TrainingMethod.BYPASS:
        shown.append(f"n_checkpoint {plan.n_checkpoint}")
    if plan.n_offload_input:
        shown.append(f"n_offload_input {plan.n_offload_input}")
    if plan.n_selective:
        shown.append(f"n_selective {plan.n_selective}")
    if plan.product_stride > 1:
        shown.append(f"product_stride {plan.product_stride}")
    if plan.n_swap:
        shown.append(f"n_swap {plan.n_swap}")
    if plan.mlp_tiles > 1:
        shown.append(f"mlp_tiles {plan.mlp_tiles}")
    if plan.loss_tiles > 1:
        shown.append(f"loss_tiles {plan.loss_tiles}")
    return ", ".join(shown)
