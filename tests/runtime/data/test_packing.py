"""Packing keeps every document whole and wastes little, against a packing by hand."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from protwin.runtime.data.packing import pack


def pack_naively(lengths: Sequence[int], order: Sequence[int], capacity: int) -> list[list[int]]:
    """Looks at every sequence for every document; of equally full ones the latest is taken."""
    sequences: list[list[int]] = []
    for place in order:
        room = [capacity - sum(lengths[p] for p in sequence) for sequence in sequences]
        fitting = [(free, -number) for number, free in enumerate(room) if free >= lengths[place]]
        if fitting:
            sequences[-min(fitting)[1]].append(place)
        else:
            sequences.append([place])
    return sequences


@st.composite
def packings(draw: st.DrawFn) -> tuple[list[int], list[int], int]:
    capacity = draw(st.integers(1, 40))
    lengths = draw(st.lists(st.integers(1, capacity), max_size=60))
    return lengths, draw(st.permutations(range(len(lengths)))), capacity


@given(packings())
def test_best_fit_is_what_a_search_of_all_sequences_finds(case: tuple[list[int], list[int], int]) -> None:
    lengths, order, capacity = case
    found = pack(lengths, order, capacity)
    assert found == pack_naively(lengths, order, capacity)
    assert sorted(place for sequence in found for place in sequence) == list(range(len(lengths)))
    used = [sum(lengths[place] for place in sequence) for sequence in found]
    assert all(0 < tokens <= capacity for tokens in used)
    # No two sequences that would go into one: so fewer than twice the fewest possible.
    assert sum(tokens <= capacity // 2 for tokens in used) <= 1


def test_many_documents_take_no_long_time() -> None:
    lengths = [1 + (7919 * place) % 500 for place in range(20_000)]
    found = pack(lengths, range(len(lengths)), 1_000)
    assert len(found) <= 1.02 * sum(lengths) / 1_000
