"""Projections of what lies in parts on several ranks: the bits of whole chunks, and what one rank gets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from protwin.runtime import CpuDevice, carry_out, project_gradients, project_parameters
from protwin.runtime.chunks import projections
from protwin.runtime.osft.projection import coefficients, project_, take_away_
from protwin.shared.layout.layout import layout_of
from protwin.shared.phases.subspaces import SubspaceAxis
from protwin.shared.schema.plan import ParallelMode, Plan, TrainingMethod
from protwin.shared.schema.workload import Workload
from tests.proof_size import share, some_quick
from tests.runtime.accounts import BAR
from tests.runtime.models import one_group, snapshot, uncached
from tests.runtime.ranks.beside_ddp import all_cases, in_default_group
from tests.runtime.ranks.measuring import peak_error, weights_hash
from tests.runtime.ranks.processes import Ranks

NUM_BATCHES = 12
STEPS = 2
WIDE = "llama, 64 wide, factorised"
TOLERANCE = 4 * STEPS * 2**-24
"""Ranks with one batch have one gradient: n of them are added up with n - 1 roundings and divided with one more, so
that three ranks' mean is off by at most 3 half units in the last place, in every step, and SGD is linear in it."""


def parts(workload: Workload, num_ranks: int, chunk_bytes: int = 9_000, n_persist: int = 1, **knobs: Any) -> Plan:
    """A plan whose chunks but the first lie on the devices in parts."""
    layout = layout_of(workload, chunk_bytes)
    return Plan(
        workload_id=workload.identity,
        method=TrainingMethod.OSFT,
        chunk_bytes=chunk_bytes,
        n_persist=n_persist,
        n_shard=len(layout.chunks) - n_persist,
        n_buffer=layout.min_buffers(n_persist) + 1,
        parallel=ParallelMode.SHARDED,
        num_ranks=num_ranks,
        **knobs,
    )


# -- the bits of whole chunks ----------------------------------------------------------------------------------------


@some_quick(
    ("num_ranks", "shard_ranks", "chunk_bytes"),
    [(4, 2, 1), (3, None, 1), (4, 2, 3_000), (3, None, 9_000), (4, None, 1), (2, None, 1)],
    quick=1,
)
def test_parts_give_the_bits_of_whole_chunks(
    num_ranks: int, shard_ranks: int | None, chunk_bytes: int, request: pytest.FixtureRequest
) -> None:
    """Every rank projects whole chunks, or owners do: with chunks of one unit, some ranks have nothing of a matrix.

    Other ranks have other gradients, some of them none.
    """
    ranks: Ranks = request.getfixturevalue({2: "two_ranks", 3: "three_ranks", 4: "four_ranks"}[num_ranks])
    workload = all_cases(NUM_BATCHES)["gated, factorised"].workload
    plan = parts(workload, num_ranks, chunk_bytes, n_persist=0, shard_ranks=shard_ranks, n_checkpoint=1)
    whole = plan.model_copy(update={"n_persist": plan.n_shard, "n_shard": 0})
    found = {one for of in (plan, whole) for one in ranks.run(weights_hash, "gated, factorised", of, NUM_BATCHES)}
    assert len(found) == 1


# -- what one rank gets ----------------------------------------------------------------------------------------------


def _padded(part: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    whole = torch.zeros(rows, columns, dtype=part.dtype)
    whole[: part.shape[0], : part.shape[1]] = part
    return whole


def sum_of_blocks_(values: torch.Tensor, frozen: torch.Tensor, axis: SubspaceAxis, *, num_ranks: int) -> None:
    """The wrong variant of a public system: coefficients with the rank's own rows of V_high, summed over ranks."""
    if axis is SubspaceAxis.COLUMNS:
        project_(values, frozen, axis)
        return
    r, k = values.shape[0], frozen.shape[0]
    own = list(zip(values.chunk(num_ranks), frozen.chunk(num_ranks), strict=False))
    total = sum(_padded(coefficients(high, value, axis), r, k) for value, high in own)
    assert isinstance(total, torch.Tensor)
    for value, high in own:
        take_away_(value, high, total[: value.shape[0], : high.shape[0]].clone(), axis)


def gather_of_blocks_(values: torch.Tensor, frozen: torch.Tensor, axis: SubspaceAxis, *, num_ranks: int) -> None:
    """The wrong remedy: every rank's block of coefficients side by side, as if all had the rows of this one."""
    if axis is SubspaceAxis.COLUMNS:
        project_(values, frozen, axis)
        return
    r, k = values.shape[0], frozen.shape[0]
    own = list(zip(values.chunk(num_ranks), frozen.chunk(num_ranks), strict=False))
    blocks = [(_padded(coefficients(high, value, axis), r, k), _padded(high, k, high.shape[1])) for value, high in own]
    for value, _ in own:
        for block, high in blocks:
            take_away_(value, high, block[: value.shape[0]].clone(), axis)


FORMS: dict[str, Callable[..., None]] = {"sum of blocks": sum_of_blocks_, "gather of blocks": gather_of_blocks_}


@in_default_group
def gap_to_one_rank(rank: int, num_ranks: int, form: str | None) -> float:
    """The largest difference of a weight from one rank's, as a part of the largest; all have the same batches."""
    case = replace(all_cases(NUM_BATCHES)[WIDE], make_optimizer=partial(torch.optim.SGD, lr=0.05), groups=one_group)
    batches = [*case.batches][:STEPS]
    plain = uncached(case.build())
    optimizer = case.make_optimizer(case.groups(plain))
    for batch in batches:
        case.loss(plain, batch).backward()
        project_gradients(plain)
        optimizer.step()
        optimizer.zero_grad()
        project_parameters(plain)
    model = case.build()
    wrong = partial(FORMS[form], num_ranks=num_ranks) if form is not None else project_
    plan = parts(case.workload, num_ranks)
    with (
        mock.patch.object(projections, "project_", wrong),
        carry_out(model, plan, case.workload, optimizer=case.make_optimizer, device=CpuDevice()) as training,
    ):
        for batch in batches:
            case.loss(model, batch).backward()
            training.step()
    assert plan.n_shard > 3
    return _gap(model, snapshot(plain))


def _gap(model: nn.Module, expected: dict[str, torch.Tensor]) -> float:
    found = snapshot(model)
    largest = max(float(value.abs().max()) for value in expected.values())
    return max(float((found[name] - value).abs().max()) for name, value in expected.items()) / largest


@some_quick("num_ranks", (3, 4, 2), quick=1)
def test_ranks_with_one_batch_get_what_one_rank_gets(num_ranks: int, request: pytest.FixtureRequest) -> None:
    """To the bit where sums of equal gradients do not round; with either wrong form far from it."""
    ranks: Ranks = request.getfixturevalue({2: "two_ranks", 3: "three_ranks", 4: "four_ranks"}[num_ranks])
    allowed = TOLERANCE if num_ranks == 3 else 0.0
    assert max(ranks.run(gap_to_one_rank, num_ranks, None)) <= allowed
    for form in share(FORMS, 2):
        assert max(ranks.run(gap_to_one_rank, num_ranks, form)) > 100 * TOLERANCE


# -- memory ----------------------------------------------------------------------------------------------------------


@some_quick("n_persist", (1, 0, 5), quick=1)
def test_the_peak_is_the_schedules_own(n_persist: int, three_ranks: Ranks) -> None:
    plan = parts(all_cases(NUM_BATCHES)[WIDE].workload, 3, n_persist=n_persist, n_checkpoint=3)
    for error, host_bytes, said_bytes in three_ranks.run(peak_error, WIDE, plan, NUM_BATCHES):
        assert error == pytest.approx(0, abs=BAR)
        assert host_bytes == said_bytes == 0
