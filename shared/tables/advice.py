"""Advice as tables, and the largest models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ..answers.advice import Advice, LargestModel, LargestModels, MachineAdvice, PublishedLargest, TrainedModel
from ..basics.units import format_bytes, format_duration, format_number, format_seconds
from ..phases.operations import lowering_notes
from ..schema.training_options import TrainingOptions
from .labels import LANE_NAMES, NO_VALUE, format_interval_s, format_share, notes_of_plan_words, plan_words
from .memory import EXPANDABLE_SETTING
from .question import asked_of_all_table
from .table import Parts, Row, Table

_PRICES: Final = (">USD per\nhour", ">USD per\nstep", ">USD per\nM tokens")
_RUN: Final = (">time", ">USD\nin all")
_BEFORE: Final = ">before\nstep 1"
_PEAK: Final = ">device\npeak"
_EXPECTED: Final = "expected"
_MICRO_BATCH: Final = ">micro-\nbatch"
_LONGEST: Final = ">longest\nsequence"
TIGHT_NOTE: Final = (
    f"* fits without the margin, or with {EXPANDABLE_SETTING} alone; protwin search says which of the two."
)
"""What a star behind a plan means."""


def advice_tables(advice: Advice) -> Parts:
    """Machines as they are ranked, what a million tokens costs where a price is known, and why others cannot."""
    order = "the longest sequences" if advice.is_longest else "machines by time"
    title = f"{advice.model}, global batch {advice.global_batch_size:,}: {order}"
    parts: list[Table | str] = [machine_table(title, advice.deals)]
    if advice.question is not None:
        parts.insert(0, asked_of_all_table(advice.question, advice.global_batch_size, is_longest=advice.is_longest))
    if advice.emulated:
        parts.append(f"emulated: {', '.join(advice.emulated)}.")
    if limits := limit_table(advice.deals):
        parts.append(limits)
    if sentence := meaning_sentence(advice):
        parts.append(sentence)
    if advice.by_cost:
        best = advice.by_cost[0]
        parts.append(f"Cheapest: {best.name}, ${best.usd_per_million_tokens:.3f} a million tokens.")
    if prices := price_table(advice):
        parts.append(prices)
    if advice.without_plan:
        parts.append(reason_table(advice.without_plan))
    if not advice.is_complete:
        parts.append(interruption_sentence(advice))
    return tuple(parts)


def machine_table(title: str, deals: Sequence[MachineAdvice]) -> Table:
    """Machines with time, memory and batch, and cost where any price is known."""
    columns: Row = (
        "machine",
        _LONGEST,
        ">iteration",
        ">tokens\nper s",
        ">ranks",
        "mode",
        ">best\nwithin",
        _PEAK,
        _MICRO_BATCH,
        "plan",
        _EXPECTED,
        _BEFORE,
        *_RUN,
        *_PRICES,
    )
    rows = [_cells(one) for one in deals]
    if not any(one.price_usd_per_hour for one in deals):
        columns, rows = columns[: -len(_PRICES)], [row[: -len(_PRICES)] for row in rows]
    if not any(one.run for one in deals):
        columns, rows = _without(columns, rows, _RUN)
    if not any(one.longest_sequence for one in deals):
        columns, rows = _without(columns, rows, (_LONGEST,))
    if not any(one.factorisation for one in deals):
        columns, rows = _without(columns, rows, (_BEFORE,))
    expendable = tuple(name for name in (_EXPECTED, *_PRICES[:2], _PEAK, _MICRO_BATCH, ">iteration") if name in columns)
    notes = notes_of_plan_words(one.plan for one in deals if one.plan is not None)
    return Table(title=title, columns=columns, rows=rows, always=3, expendable=expendable, notes=notes)


def price_table(advice: Advice) -> Table | None:
    """What the machines with a plan were listed for, by whom and when; None where no list price counts."""
    shown = {one.hardware_name for one in advice.deals}
    rows = [
        (one.hardware_name, f"{one.usd_per_hour:.2f}", one.kind.words, f"{one.provider}, {one.offer}", str(one.stated))
        for one in advice.list_prices
        if one.hardware_name in shown
    ]
    if not rows:
        return None
    return Table(
        title="Prices, as they were listed",
        columns=("machine", ">USD per\nhour", "kind", "offer", "read on"),
        rows=rows,
        always=4,
        notes=["Prices of whole machines, without tax, which age: state yours with --price NAME=USD."],
    )


def limit_table(deals: Sequence[MachineAdvice]) -> Table | None:
    """What stands against longer sequences than the longest; None where the length was given."""
    rows = [(one.name, short_reason(one.limit)) for one in deals if one.limit]
    return Table(title="Longer sequences", columns=("machine", "what stands against them"), rows=rows) if rows else None


def reason_table(without: Sequence[MachineAdvice]) -> Table:
    """Why some machines have no plan."""
    rows = [(one.name, short_reason(one.reason)) for one in without]
    return Table(title="Machines without a plan", columns=("machine", "why there is no plan"), rows=rows)


def short_reason(reason: str) -> str:
    """The reason without the plan that comes closest and the budgets to raise: ``--json`` has all of it."""
    return f"{reason.partition(' (chunk_bytes')[0].partition('. ')[0].rstrip('.')}."


def meaning_sentence(advice: Advice) -> str:
    """What the table says of machines with several devices, and of how sure it is; nothing without plans."""
    if not advice.deals:
        return ""
    proven = "No plan expected to fit is faster than its row's by more than what stands under best within."
    counts = {one.factorisation.num_weights for one in advice.deals if one.factorisation is not None}
    if counts:
        proven += (
            f" Before step 1, the host takes {max(counts):,} singular value decomposition"
            f"{'s' if max(counts) > 1 else ''}, once; iterations, and costs, leave them out."
        )
    if advice.ranks or all(one.num_devices == 1 for one in advice.machines):
        return proven
    return f"{proven} Machines are rented whole: devices that cannot share the batch idle, and are paid for."


def interruption_sentence(advice: Advice) -> str:
    """What an interrupted sweep did not get to."""
    complete = {one.hardware_name for one in advice.machines} - set(advice.unanswered)
    asked = len(complete) + len(advice.unanswered)
    return (
        f"interrupted: this is the ranking so far, and it is not complete: {len(complete)} of {asked} machines. "
        f"Not searched: {', '.join(advice.unanswered)}."
    )


def _cells(one: MachineAdvice) -> Row:
    assert one.iteration_s is not None
    assert one.tokens_per_s is not None
    assert one.plan is not None
    cost, price, step = one.usd_per_million_tokens, one.price_usd_per_hour, one.usd_per_step
    return (
        one.hardware_name,
        NO_VALUE if one.longest_sequence is None else f"{one.longest_sequence:,}",
        format_seconds(one.iteration_s),
        format_number(one.tokens_per_s),
        f"{one.num_ranks:,}",
        one.plan.parallel,
        NO_VALUE if one.gap_frac is None else format_share(one.gap_frac),
        format_bytes(one.guaranteed_peak_device_bytes or 0),
        f"{one.micro_batch_size} x {one.plan.micro_batches}",
        _plan_cell(one),
        format_interval_s(one.iteration_interval_s) or NO_VALUE,
        NO_VALUE if one.factorisation is None else format_seconds(one.factorisation.host_s),
        *_run_cells(one),
        NO_VALUE if price is None else f"{price:.2f}",
        NO_VALUE if step is None else format_number(step),
        NO_VALUE if cost is None else f"{cost:.3f}",
    )


def _plan_cell(one: MachineAdvice) -> str:
    if one.plan_kind is None or one.plan is None:
        return NO_VALUE
    return f"{plan_words(one.plan, one.plan_kind)}{'' if one.survives is not False else ', tight'}"


def _run_cells(one: MachineAdvice) -> Row:
    if one.run is None:
        return (NO_VALUE, NO_VALUE)
    return (
        format_duration(one.run.time_s),
        NO_VALUE if one.run.cost_usd is None else format_number(one.run.cost_usd),
    )


def _without(columns: Row, rows: Sequence[Row], names: Sequence[str]) -> tuple[Row, list[Row]]:
    """The table without these columns."""
    kept = [place for place, name in enumerate(columns) if name not in names]
    return tuple(columns[place] for place in kept), [tuple(row[place] for place in kept) for row in rows]


# -- the largest models ----------------------------------------------------------------------------------------------

_FOUND: Final = ("model", ">parameters", ">iteration", ">tokens\nper s", "bottleneck")


def largest_tables(answer: LargestModels) -> Parts:
    """The largest models by device and host memory, and beside them what others published."""
    step = f"{answer.batch_size} x {answer.sequence_length:,} tokens, {answer.optimizer.words}"
    step += "".join(f", {words}" for words in _options_words(answer.options))
    has_disk = any(one.disk_name is not None for one in answer.machines)
    rows = [
        (
            one.hardware_name,
            format_bytes(one.device_memory_bytes),
            "unlimited" if one.host_memory_bytes is None else format_bytes(one.host_memory_bytes),
            *([one.disk_name or "none"] if has_disk else []),
            *_found_cells(one.found),
            *_following_cells(one),
            _expected(one.found),
        )
        for one in answer.machines
    ]
    columns = (
        "machine",
        ">device",
        ">host",
        *(["disk"] if has_disk else []),
        *_FOUND,
        "next larger",
        "which lacks",
        _EXPECTED,
    )
    notes = []
    if any(one.found is not None and one.found.survives is False for one in answer.machines):
        notes.append(TIGHT_NOTE)
    if answer.left_out:
        notes.append(f"Left out, for they have no such sequences: {', '.join(answer.left_out)}.")
    if answer.untraced:
        notes.append(f"Left out, for only a trace knows them in this training: {', '.join(answer.untraced)}.")
    title = f"The largest models that train: {step}"
    parts: list[Table | str] = [
        Table(title=title, columns=columns, rows=rows, always=8 + has_disk, notes=notes, expendable=(_EXPECTED,))
    ]
    if answer.published:
        parts.append(_published_table(answer.published))
    return tuple(parts)


def _options_words(options: TrainingOptions) -> list[str]:
    """What differs from plain full training: ``["LoRA of rank 16 beside nf4"]``."""
    words = []
    if (lora := options.lora) is not None:
        maps = f" on {', '.join(lora.targets)}" if lora.targets else ""
        base = "" if options.quantized is None else f" beside {options.quantized.how.words}"
        words.append(f"LoRA of rank {lora.rank}{maps}{base}")
    if options.osft is not None:
        words.append(f"{format_share(options.osft.unfreeze_rank_ratio)} of directions trained")
    if options.other_loss is not None:
        words.append(f"loss {options.other_loss}")
    return [*words, *lowering_notes(options.compiled, options.float8, options.packed_products)]


def _published_table(published: Sequence[PublishedLargest]) -> Table:
    rows = [
        (
            one.system,
            one.hardware_name,
            f"{format_number(one.num_parameters / 10**9)}B",
            "unknown" if one.host_memory_bytes is None else format_bytes(one.host_memory_bytes),
            NO_VALUE if one.least_host_memory_bytes is None else format_bytes(one.least_host_memory_bytes),
            *_found_cells(one.found, one.model),
        )
        for one in published
    ]
    return Table(
        title="Beside what was published",
        columns=("system", "machine", ">published", ">its host", ">host that\nis enough", *_FOUND),
        rows=rows,
        always=9,
        notes=[
            "The model is the catalogue's nearest in size, on the catalogue's machine, with the published host memory "
            "or as much more as it takes.",
            *dict.fromkeys(f"{one.system}: {one.source}." for one in published),
        ],
    )


def _found_cells(found: TrainedModel | None, model: str = "none") -> Row:
    if found is None:
        return (model, *[NO_VALUE] * (len(_FOUND) - 1))
    return (
        f"{found.model}{'*' if found.survives is False else ''}",
        f"{found.num_parameters / 10**9:.1f}B",
        format_seconds(found.iteration_s),
        format_number(found.tokens_per_s),
        NO_VALUE if found.bottleneck is None else LANE_NAMES[found.bottleneck],
    )


def _expected(found: TrainedModel | None) -> str:
    return (None if found is None else format_interval_s(found.iteration_interval_s)) or NO_VALUE


def _following_cells(one: LargestModel) -> Row:
    following = one.following
    if following is None:
        return (NO_VALUE, "")
    lacks = [(following.short_host_bytes, "host"), (following.short_device_bytes, "device")]
    lacks.append((following.short_disk_bytes, "disk"))
    return (following.model, " and ".join(f"{format_bytes(size)} {memory}" for size, memory in lacks if size))
