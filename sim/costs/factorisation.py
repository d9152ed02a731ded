"""What it takes to factorise weights before the first step ([Note: Subspaces] in ``shared/phases/subspaces.py``).

[Note: Decompositions]
A thin singular value decomposition of an n x m matrix, n >= m, takes 14 n m^2 + 8 m^3 FLOPs (Golub and Van Loan,
Matrix Computations, section 8.6, with U_1, S and V), in float32.  Most are products, which execute at a part of the
rate of large products.  Reducing the matrix to two diagonals is not: half of
its FLOPs are products of a matrix and a vector, which read what is left of the matrix once per column (LAPACK's
``gebrd``), so that all columns together read 4 (n m^2 / 2 - m^3 / 6) bytes from memory.  A host takes the sum of both.

``benchmarks/factorisation.py`` prints the part of the rate that a machine's CPU reaches.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Final

from ...shared.factors.sizes import FACTOR_NAMES
from ...shared.schema.hardware import Hardware
from ...shared.schema.record import Factorisation
from ...shared.schema.workload import DType, Workload
from .projections import host_flop_per_s

HOST_FRAC: Final = 0.5
"""Of the host's rate of float32 products.  ``benchmarks/factorisation.py`` on one core of a Xeon: 0.4 to 0.9."""
_ITEM_BYTES: Final = DType.FLOAT32.item_bytes
"""Matrices are factorised in float32."""


def factorised_sizes(workload: Workload) -> list[tuple[int, int]]:
    """(n, m) of every factorised weight, in order; none where nothing is factorised."""
    shapes = {parameter.name: parameter.shape for parameter in workload.parameters}
    found = []
    for name, shape in shapes.items():
        path, _, factor = name.rpartition(".")
        beside = [shapes.get(f"{path}.{other}", ()) for other in FACTOR_NAMES[3:]]
        if factor == FACTOR_NAMES[3] and [len(each) for each in beside] == [2, 1, 2]:
            found.append((shape[0], beside[2][1]))
    return found


def decomposition_flops(num_out: int, num_in: int) -> int:
    """FLOPs of one weight's decomposition: 14 n m^2 + 8 m^3 for n >= m (Note: Decompositions)."""
    most, least = max(num_out, num_in), min(num_out, num_in)
    return 14 * most * least**2 + 8 * least**3


def decomposition_bytes(num_out: int, num_in: int) -> int:
    """Memory on the way, in bytes.

    The weight in float32 and LAPACK's copy of it, U and V and both once more with signs turned, and 4 p^2 + 7 p scalars
    of work for p singular values (LAPACK's ``gesdd``).
    """
    least = min(num_out, num_in)
    scalars = 2 * num_out * num_in + 2 * (num_out + num_in) * least + 4 * least**2 + 7 * least
    return scalars * _ITEM_BYTES


def factorisation_of(workload: Workload, machine: Hardware, num_ranks: int = 1) -> Factorisation | None:
    """What factorising takes on the hosts of ``num_ranks`` ranks, each with its share; None if no weight is factorised.

    ``machine`` is one rank's share.  Weights go to ranks largest first, each to the one that has least to do.
    """
    sizes = factorised_sizes(workload)
    if not sizes:
        return None
    mine = _share(sizes, num_ranks)
    return Factorisation(
        num_weights=len(sizes),
        flops=sum(decomposition_flops(*size) for size in sizes),
        host_s=sum(host_decomposition_s(machine, *size) for size in mine),
        working_bytes=max(decomposition_bytes(*size) for size in sizes),
    )


def host_decomposition_s(machine: Hardware, num_out: int, num_in: int) -> float:
    """Seconds of one weight's decomposition on all cores of the host (Note: Decompositions)."""
    most, least = max(num_out, num_in), min(num_out, num_in)
    read_bytes = _ITEM_BYTES * (most * least**2 / 2 - least**3 / 6)
    computing_s = decomposition_flops(num_out, num_in) / (HOST_FRAC * host_flop_per_s(machine))
    return computing_s + read_bytes / machine.host.memory_bandwidth_bytes_per_s


def _share(sizes: Sequence[tuple[int, int]], num_ranks: int) -> list[tuple[int, int]]:
    """The weights of the rank that has most to do."""
    ranks: list[tuple[int, int, list[tuple[int, int]]]] = [(0, rank, []) for rank in range(num_ranks)]
    for size in sorted(sizes, key=lambda each: decomposition_flops(*each), reverse=True):
        flops, rank, own = heapq.heappop(ranks)
        heapq.heappush(ranks, (flops + decomposition_flops(*size), rank, [*own, size]))
    return max(ranks)[2]
