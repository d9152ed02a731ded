"""What a prologue does where it looks the rows of its embeddings up on the host, from what a trace saw it do.

[Note: Rows in place of tables]
A lookup gives the same rows, wherever the table lies: its forward leaves the same levels, and a copy of the rows takes
the operator's place.  Its backward makes a tensor of gradients of rows, with the bytes of the rows, in place of one of
the whole table.  The first gradient of a table stays as it is; every other one, and each of a table whose rows are not
all that is used of it, is added to those before by the operator that follows.  That operator is left out: rows are
added up on the host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from ..schema.plan import ActivationMode
from ..schema.schedule import OuterSection, TaskKind
from ..schema.workload import LookedUpTable, Operation, OperationClass, Parameter
from .observation import Observation, OperatorCall
from .observed_inputs import PhaseKey

_LOOKUP: Final = "embedding"
_TABLE_GRADIENT: Final = "embedding_dense_backward"
_SUMS: Final = ("add", "add_")
_FORWARD: Final[PhaseKey] = (TaskKind.FORWARD, OuterSection.PROLOGUE)
_BACKWARD: Final[PhaseKey] = (TaskKind.BACKWARD, OuterSection.PROLOGUE)

Observed = Mapping[ActivationMode, Mapping[PhaseKey, Observation]]


@dataclass(frozen=True, slots=True)
class Lookup:
    """One lookup in the prologue's forward."""

    table: int
    """Index of the parameter."""
    row_bytes: int
    """Of the rows that it gives."""


def lookups_of(parameters: Sequence[Parameter], names: Sequence[str], observed: Observed) -> tuple[Lookup, ...]:
    """The lookups of the prologue's forward, in order; none unless the trace shows one for each of ``names``.

    ``names``: the tables, lookup by lookup.
    """
    index_of = {name: index for index, p in enumerate(parameters) if _is_table(p) for name in (p.name, *p.aliases)}
    if not index_of.keys() >= set(names):
        return ()
    found: set[tuple[Lookup, ...]] = set()
    for sections in observed.values():
        calls = [call for call in sections[_FORWARD].calls if call.name == _LOOKUP]
        if len(calls) != len(names):
            return ()
        lookups = [Lookup(index_of[n], sum(c.writes_bytes)) for n, c in zip(names, calls, strict=True)]
        num_trained = sum(parameters[lookup.table].trainable for lookup in lookups)
        if num_trained != sum(call.name == _TABLE_GRADIENT for call in sections[_BACKWARD].calls):
            return ()
        found.add(tuple(lookups))
    return found.pop() if len(found) == 1 else ()


def _is_table(parameter: Parameter) -> bool:
    """Whether the prologue's backward adds the last part of its gradient, if it has one, and reads nothing of it."""
    uses = parameter.uses
    if uses is None or len(parameter.shape) != 2 or OuterSection.PROLOGUE in uses.backward:
        return False
    return not parameter.trainable or uses.gradient is OuterSection.PROLOGUE


def tables_of(lookups: Sequence[Lookup], parameters: Sequence[Parameter]) -> tuple[LookedUpTable, ...]:
    """The tables that are looked up, in the order of their parameters, with the rows of one forward."""
    num_rows: dict[int, int] = {}
    for lookup in lookups:
        table = parameters[lookup.table]
        rows = lookup.row_bytes // (table.shape[1] * table.dtype.item_bytes)
        num_rows[lookup.table] = num_rows.get(lookup.table, 0) + rows
    return tuple(LookedUpTable(parameter=index, num_rows=rows) for index, rows in sorted(num_rows.items()))


def looking_up(observed: Observed, lookups: Sequence[Lookup], parameters: Sequence[Parameter]) -> Observed:
    """``observed`` with a prologue that looks rows up on the host; see [Note: Rows in place of tables]."""
    return {
        mode: {
            **sections,
            _FORWARD: _forward(sections[_FORWARD], lookups),
            _BACKWARD: _backward(sections[_BACKWARD], lookups, parameters),
        }
        for mode, sections in observed.items()
    }


def _forward(seen: Observation, lookups: Sequence[Lookup]) -> Observation:
    operations = list(seen.operations)
    places = [place for place, call in enumerate(seen.calls) if call.name == _LOOKUP]
    for place, lookup in zip(places, lookups, strict=True):
        operations[place] = _copy(seen.calls[place], lookup.row_bytes)
    return replace(seen, operations=operations)


def _backward(seen: Observation, lookups: Sequence[Lookup], parameters: Sequence[Parameter]) -> Observation:
    # Backward goes through the lookups from the last on; frozen tables have no gradients.
    trained = [lookup for lookup in reversed(lookups) if parameters[lookup.table].trainable]
    places = [place for place, call in enumerate(seen.calls) if call.name == _TABLE_GRADIENT]
    rows = {place: lookup.row_bytes for place, lookup in zip(places, trained, strict=True)}
    operations, levels = [], []
    shift_bytes = 0
    skipped = -1
    for place, (call, level) in enumerate(zip(seen.calls, seen.levels, strict=True)):
        if place == skipped:
            continue
        if place not in rows:
            operations.append(seen.operations[place])
            levels.append(level + shift_bytes)
            continue
        table_bytes, row_bytes = sum(call.writes_bytes), rows[place]
        operations.append(_copy(call, 2 * row_bytes))
        levels.append(level + shift_bytes - table_bytes + row_bytes)
        shift_bytes += row_bytes
        if _is_sum(seen.calls[place + 1 : place + 2], table_bytes):
            # Of the two that are added up one goes, and the other was there when the section began.
            skipped = place + 1
        else:
            shift_bytes -= table_bytes
    gradient_bytes = sum(rows.values()) - sum(parameters[t].size_bytes for t in {one.table for one in trained})
    return replace(
        seen,
        end_bytes=seen.end_bytes + shift_bytes,
        operations=operations,
        calls=[],
        levels=levels,
        adding_levels=levels,
        gradient_bytes=seen.gradient_bytes + gradient_bytes,
    )


def _is_sum(following: Sequence[OperatorCall], size_bytes: int) -> bool:
    """Whether the operator that follows adds two tensors of this size up."""
    return any(
        call.name in _SUMS
        and call.writes_bytes == (size_bytes,)
        and [size for _, size in call.reads] == [size_bytes] * 2
        for call in following
    )


def _copy(call: OperatorCall, moved_bytes: int) -> Operation:
    return Operation(
        name="clone",
        operation_class=OperationClass.ELEMENTWISE,
        dtype=call.dtype,
        flops=0,
        bytes_moved=moved_bytes,
        shape=(),
    )
