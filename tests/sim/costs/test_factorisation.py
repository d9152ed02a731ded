"""What it takes to factorise weights before the first step."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protwin.shared.catalogue.machines import machine
from protwin.shared.tables.record import factorisation_sentence
from protwin.sim.costs import factorisation
from protwin.sim.costs.factorisation import (
    HOST_FRAC,
    _share,
    decomposition_flops,
    factorisation_of,
    factorised_sizes,
    host_decomposition_s,
)
from protwin.sim.costs.projections import host_flop_per_s
from tests.shared.laid_out import decoder_workload
from tests.shared.verify.test_osft import factorised

MACHINE = machine("rtx-3090")


def test_only_weights_in_factors_are_counted() -> None:
    assert factorisation_of(decoder_workload(2), MACHINE) is None
    for num_frozen in (1, 3, 5):
        assert factorised_sizes(factorised(num_frozen)) == [(8, 6)] * 2, "whatever part of it is frozen"


def test_flops_are_those_of_the_book() -> None:
    assert decomposition_flops(8, 6) == decomposition_flops(6, 8) == 14 * 8 * 36 + 8 * 216
    found = factorisation_of(factorised(), MACHINE)
    assert found is not None
    assert (found.num_weights, found.flops) == (2, 2 * decomposition_flops(8, 6))


def test_the_largest_weight_says_what_is_needed_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 8 x 6: two copies, U (8 x 6) and V (6 x 6) twice, and 4 * 36 + 7 * 6 scalars of work, of 4 bytes each."""
    of_one = 4 * (2 * 48 + 2 * (48 + 36) + 144 + 42)
    for sizes in ([(8, 6)], [(6, 8), (8, 5)], [(2, 9), (8, 6), (1, 1)]):
        monkeypatch.setattr(factorisation, "factorised_sizes", lambda workload, sizes=sizes: sizes)
        found = factorisation_of(factorised(), MACHINE)
        assert found is not None
        assert found.working_bytes == of_one


@given(st.integers(1, 9000), st.integers(1, 9000))
def test_no_decomposition_is_faster_than_its_flops(num_out: int, num_in: int) -> None:
    at_least_s = decomposition_flops(num_out, num_in) / (HOST_FRAC * host_flop_per_s(MACHINE))
    assert at_least_s < host_decomposition_s(MACHINE, num_out, num_in)
    assert host_decomposition_s(MACHINE, num_out, num_in) == host_decomposition_s(MACHINE, num_in, num_out)


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=6), st.integers(1, 3))
def test_weights_are_spread_evenly(sizes: list[tuple[int, int]], num_ranks: int) -> None:
    """Largest first is within 4/3 - 1/(3 ranks) of the best of all ways (Graham 1969)."""
    flops = [decomposition_flops(*size) for size in sizes]
    best = min(
        max(sum(each for each, rank in zip(flops, ways, strict=True) if rank == one) for one in range(num_ranks))
        for ways in product(range(num_ranks), repeat=len(sizes))
    )
    longest = sum(decomposition_flops(*size) for size in _share(sizes, num_ranks))
    assert best <= longest <= best * (4 / 3 - 1 / (3 * num_ranks)) * (1 + 1e-12)


def test_the_answer_says_what_comes_before_the_first_step() -> None:
    found = factorisation_of(factorised(), MACHINE)
    assert found is not None
    assert factorisation_sentence(found).startswith("Before the first step: 2 singular value decompositions, ")
