"""Projections of factors in parts equal those of whole ones: uneven parts, empty ones, missing gradients, types."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from protwin.runtime.osft.projection import coefficients, projected, take_away_
from protwin.runtime.osft.sharded_projection import RowsForm, project_column_shards_, project_row_shards_
from protwin.shared.phases.subspaces import SubspaceAxis
from tests.runtime.ranks.beside_ddp import in_default_group
from tests.runtime.ranks.processes import Ranks

SIZES = [(7, 5, 3, 9), (3, 1, 4, 6), (16, 5, 8, 13), (2, 2, 1, 5)]
"""n, k, r, m of targets; 3, 1 and 2 rows are fewer than four ranks."""
EPS = torch.finfo(torch.float64).eps
TOLERANCE = 64 * EPS
"""Of sums of at most 16 products of numbers below 4, in any order."""


def factors(seed: int) -> list[tuple[torch.Tensor, ...]]:
    """U_high, dU, V_high and dV of every target, whole, the same on all ranks."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for n, k, r, m in SIZES:
        u, _ = torch.linalg.qr(torch.randn(n, min(n, k), generator=generator, dtype=torch.float64))
        v, _ = torch.linalg.qr(torch.randn(m, k, generator=generator, dtype=torch.float64))
        d_u = torch.randn(n, r, generator=generator, dtype=torch.float64)
        found.append((u, d_u, v.T.contiguous(), torch.randn(r, m, generator=generator, dtype=torch.float64)))
    return found


def own_rows(whole: torch.Tensor, rank: int, num_ranks: int) -> torch.Tensor:
    """As ``Shard(0)``: torch.chunk's parts, which may be fewer than the ranks."""
    parts = whole.chunk(num_ranks)
    return (parts[rank] if rank < len(parts) else whole[:0]).clone()


def error(own: list[torch.Tensor], whole: list[torch.Tensor], rank: int, num_ranks: int) -> float:
    differences = [
        (part - own_rows(of, rank, num_ranks)).abs() for part, of in zip(own, whole, strict=True) if part.numel()
    ]
    return max((float(found.max()) for found in differences), default=0.0)


@in_default_group
def errors(rank: int, seed: int, form: str) -> tuple[float, float]:
    """The largest differences from one rank's projections, of columns and of rows."""
    num_ranks, every = dist.get_world_size(), factors(seed)
    shards = [[own_rows(of, rank, num_ranks) for of in target] for target in every]
    u, d_u, v, d_v = (list(parts) for parts in zip(*shards, strict=True))
    project_column_shards_(d_u, u, num_trained=[r for _, _, r, _ in SIZES])
    if form == "sum":
        _sum_of_blocks_(d_v, v)
    elif form == "blocks":
        _gather_of_blocks_(d_v, v)
    else:
        project_row_shards_(d_v, v, form=RowsForm(form))
    columns = [projected(du, of, SubspaceAxis.COLUMNS) for of, du, _, _ in every]
    rows = [projected(dv, of, SubspaceAxis.ROWS) for _, _, of, dv in every]
    return error(d_u, columns, rank, num_ranks), error(d_v, rows, rank, num_ranks)


def _padded(part: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    whole = torch.zeros(rows, columns, dtype=part.dtype)
    whole[: part.shape[0], : part.shape[1]] = part
    return whole


def _sum_of_blocks_(values: list[torch.Tensor], frozen: list[torch.Tensor]) -> None:
    """The wrong variant of a public system: coefficients with the rank's own rows of V_high, summed over ranks."""
    for value, own, (_, k, r, _) in zip(values, frozen, SIZES, strict=True):
        block = _padded(coefficients(own, value, SubspaceAxis.ROWS), r, k)
        dist.all_reduce(block)
        take_away_(value, own, block[: value.shape[0], : own.shape[0]].clone(), SubspaceAxis.ROWS)


def _gather_of_blocks_(values: list[torch.Tensor], frozen: list[torch.Tensor]) -> None:
    """The wrong remedy: every rank's block of coefficients side by side, as if all had the rows of this one."""
    num_ranks = dist.get_world_size()
    for value, own, (_, k, r, m) in zip(values, frozen, SIZES, strict=True):
        block = _padded(coefficients(own, value, SubspaceAxis.ROWS), r, k)
        blocks = [torch.empty_like(block) for _ in range(num_ranks)]
        dist.all_gather(blocks, block)
        rows = [torch.empty(k, m, dtype=own.dtype) for _ in range(num_ranks)]
        dist.all_gather(rows, _padded(own, k, m))
        for of_rank, high in zip(blocks, rows, strict=True):
            take_away_(value, high, of_rank[: value.shape[0]].clone(), SubspaceAxis.ROWS)


@pytest.mark.parametrize("form", list(RowsForm))
def test_parts_are_projected_as_the_whole(two_ranks: Ranks, three_ranks: Ranks, four_ranks: Ranks, form: str) -> None:
    for ranks in (two_ranks, three_ranks, four_ranks):
        for found in ranks.run(errors, 1, str(form)):
            assert max(found) <= TOLERANCE


@pytest.mark.parametrize("wrong", ["sum", "blocks"])
def test_blocks_of_coefficients_neither_add_up_nor_fit_together(
    two_ranks: Ranks, four_ranks: Ranks, wrong: str
) -> None:
    """Rows of V_high in parts: the same test fails by far."""
    for ranks in (two_ranks, four_ranks):
        found = ranks.run(errors, 1, wrong)
        assert max(columns for columns, _ in found) <= TOLERANCE
        assert max(rows for _, rows in found) > 0.1


@in_default_group
def one_by_one(rank: int, form: str) -> float:
    """How far all together are from each alone, one of them without a gradient on the last rank."""
    num_ranks, every = dist.get_world_size(), factors(2)
    is_last = rank == num_ranks - 1

    def given() -> list[list[torch.Tensor | None]]:
        shards = [[own_rows(of, rank, num_ranks) for of in target] for target in every]
        return [[None if is_last and n == 2 and i % 2 else of for i, of in enumerate(t)] for n, t in enumerate(shards)]

    together, alone = given(), given()
    trained = [r for _, _, r, _ in SIZES]
    project_column_shards_([t[1] for t in together], [t[0] for t in together], num_trained=trained)  # type: ignore[misc]
    project_row_shards_([t[3] for t in together], [t[2] for t in together], form=RowsForm(form))  # type: ignore[misc]
    for target, r in zip(alone, trained, strict=True):
        assert target[0] is not None
        assert target[2] is not None
        project_column_shards_([target[1]], [target[0]], num_trained=[r])
        project_row_shards_([target[3]], [target[2]], form=RowsForm(form))
    pairs = [(a, b) for one, two in zip(together, alone, strict=True) for a, b in zip(one, two, strict=True)]
    assert all((a is None) == (b is None) for a, b in pairs)
    return max(
        (float((a - b).abs().max()) for a, b in pairs if a is not None and b is not None and a.numel()), default=0.0
    )


@pytest.mark.parametrize("form", list(RowsForm))
def test_collectives_of_all_equal_one_by_one_and_none_waits_for_a_missing_gradient(
    two_ranks: Ranks, three_ranks: Ranks, form: str
) -> None:
    """Of two ranks to the bit; a ring of three adds up in an order that depends on where a number lies."""
    assert max(two_ranks.run(one_by_one, str(form))) == 0
    assert max(three_ranks.run(one_by_one, str(form))) <= TOLERANCE


@in_default_group
def without_one_gradient(rank: int) -> float:
    """The error of columns if the last rank has no gradient: as if that had been zeros there."""
    num_ranks, (u, d_u, _, _) = dist.get_world_size(), factors(3)[0]
    whole = d_u.clone()
    whole[d_u.shape[0] - own_rows(d_u, num_ranks - 1, num_ranks).shape[0] :] = 0
    own = None if rank == num_ranks - 1 else own_rows(d_u, rank, num_ranks)
    project_column_shards_([own], [own_rows(u, rank, num_ranks)], num_trained=[d_u.shape[1]])
    return 0.0 if own is None else error([own], [projected(whole, u, SubspaceAxis.COLUMNS)], rank, num_ranks)


def test_a_missing_gradient_counts_as_zeros(three_ranks: Ranks) -> None:
    assert max(three_ranks.run(without_one_gradient)) <= TOLERANCE


@in_default_group
def in_a_group_of_two(rank: int) -> float:
    """Four ranks, of which two share a copy: the collective is the pair's, and not all ranks'."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pair = rank // 2
    every = factors(4 + pair)
    u, d_u, v, d_v = (
        list(parts) for parts in zip(*[[own_rows(x, rank % 2, 2) for x in t] for t in every], strict=True)
    )
    project_column_shards_(d_u, u, pairs[pair], num_trained=[r for _, _, r, _ in SIZES])
    project_row_shards_(d_v, v, pairs[pair])
    columns = [projected(du, of, SubspaceAxis.COLUMNS) for of, du, _, _ in every]
    rows = [projected(dv, of, SubspaceAxis.ROWS) for _, _, of, dv in every]
    return max(error(d_u, columns, rank % 2, 2), error(d_v, rows, rank % 2, 2))


def test_copies_of_the_parts_are_projected_apart(four_ranks: Ranks) -> None:
    assert max(four_ranks.run(in_a_group_of_two)) <= TOLERANCE


@in_default_group
def in_bfloat16(rank: int) -> bool:
    """Whether gathered rows give the nearest bfloat16 of what float32 gives."""
    num_ranks, (_, _, v, d_v) = dist.get_world_size(), factors(5)[2]
    v, d_v = v.bfloat16(), d_v.bfloat16()
    own = own_rows(d_v, rank, num_ranks)
    project_row_shards_([own], [own_rows(v, rank, num_ranks)])
    wide = projected(own_rows(d_v, rank, num_ranks).float(), v.float(), SubspaceAxis.ROWS)
    return own.dtype == torch.bfloat16 and torch.equal(own, wide.bfloat16())


def test_narrow_parts_are_projected_in_float32(three_ranks: Ranks) -> None:
    assert all(three_ranks.run(in_bfloat16))
