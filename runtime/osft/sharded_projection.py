"""Projections of factors whose rows lie in parts on several ranks (``Shard(0)``), over ``torch.distributed``.

[Note: Two sides, two collectives]
Rank p has the rows N_p of U_high (n x k) and of dU (n x r), and the rows K_p of V_high (k x m) and R_p of dV (r x m).

- *Columns.*  U_high^T dU is a sum over rows, of which every rank has a part: sum_p U_high[N_p]^T dU[N_p].  The sum of
  all ranks' products is the coefficient, whole, and every rank takes its rows of U_high times it away.
- *Rows.*  dV[R_p] V_high^T = [dV[R_p] V_high[K_0]^T, dV[R_p] V_high[K_1]^T, ...]: rank p needs every row of V_high for
  its own rows of dV.  Its product with its own rows of V_high is one block of these columns, no summand, and the blocks
  that other ranks have are of *their* rows of dV.  So neither a sum of the blocks nor all of them together help; right
  are a gather of V_high, or the Gram matrix V_high^T V_high = sum_p V_high[K_p]^T V_high[K_p] (m x m), a sum again.

Tensors that every rank has whole need no collective: ``projected``.  Of ranks that hold several copies of the parts,
the group is the one that shares a copy (the shard group).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import torch
from torch import distributed

from ...shared.phases.subspaces import SubspaceAxis
from .precision import computed
from .projection import coefficients, take_away_


class RowsForm(StrEnum):
    """How ranks learn of each other's rows of V_high."""

    GATHER = "gather"
    """Every rank gets all rows: k m scalars."""
    GRAM = "gram"
    """The ranks add up V_high^T V_high: m m scalars."""


def project_column_shards_(
    values: Sequence[torch.Tensor | None],
    frozen: Sequence[torch.Tensor],
    group: distributed.ProcessGroup | None = None,
    *,
    num_trained: Sequence[int],
) -> None:
    """Project the rank's rows of several U or dU (n_p, r), each onto its rows of U_high (n_p, k), in place.

    One all-reduce of all coefficients together, in float32 at least.  A rank whose value is None, as it had no
    gradient, takes part with zeros, so that no rank waits; ``num_trained`` says r of each.  To be called on all ranks
    of ``group``, for the same factors in the same order.
    """
    wide = _widest(frozen)
    parts = []
    for value, of, trained in zip(values, frozen, num_trained, strict=True):
        if value is None:
            parts.append(torch.zeros(of.shape[1], trained, dtype=wide, device=of.device))
        else:
            parts.append(coefficients(of, value, SubspaceAxis.COLUMNS).to(wide))
    if not parts:
        return
    flat = torch.cat([part.reshape(-1) for part in parts])
    distributed.all_reduce(flat, group=group)
    for value, of, along in zip(values, frozen, torch.split(flat, [part.numel() for part in parts]), strict=True):
        if value is not None:
            take_away_(value, of, along.view(of.shape[1], -1), SubspaceAxis.COLUMNS)


def project_row_shards_(
    values: Sequence[torch.Tensor | None],
    frozen: Sequence[torch.Tensor],
    group: distributed.ProcessGroup | None = None,
    *,
    form: RowsForm = RowsForm.GATHER,
) -> None:
    """Project the rank's rows of several V or dV (r_p, m), each onto all rows of V_high, of which it has (k_p, m).

    In place.  One collective for all of them.  A rank whose value is None takes part all the same.  To be called on all
    ranks of ``group``, for the same factors in the same order, with the same ``form``.
    """
    if not frozen:
        return
    if form is RowsForm.GRAM:
        _project_by_gram_(values, frozen, group)
        return
    for value, whole in zip(values, gathered_rows(frozen, group), strict=True):
        if value is not None:
            take_away_(value, whole, coefficients(whole, value, SubspaceAxis.ROWS), SubspaceAxis.ROWS)


def gathered_rows(parts: Sequence[torch.Tensor], group: distributed.ProcessGroup | None = None) -> list[torch.Tensor]:
    """Of several matrices, all rows, from the rank's own (k_p, m); ranks may have different numbers of them, or none.

    Two collectives: who has how many rows, and the rows of all matrices together, as bytes, so that element types may
    differ, padded to the most that a rank has.
    """
    size = distributed.get_world_size(group)
    device = parts[0].device
    own = torch.tensor([part.shape[0] for part in parts], device=device)
    counts = [torch.empty_like(own) for _ in range(size)]
    distributed.all_gather(counts, own, group=group)
    rows = [count.tolist() for count in counts]
    row_bytes = [part.shape[1] * part.element_size() for part in parts]
    sizes = [[n * wide for n, wide in zip(of_rank, row_bytes, strict=True)] for of_rank in rows]
    flat = torch.zeros(max(map(sum, sizes)), dtype=torch.uint8, device=device)
    mine = [part.detach().contiguous().view(torch.uint8).reshape(-1) for part in parts if part.numel()]
    if mine:
        joined = torch.cat(mine)
        flat[: joined.numel()] = joined
    received = [torch.empty_like(flat) for _ in range(size)]
    distributed.all_gather(received, flat, group=group)
    split = [torch.split(flat_of[: sum(s)], s) for flat_of, s in zip(received, sizes, strict=True)]
    return [
        torch.cat([of_rank[number] for of_rank in split]).view(part.dtype).view(-1, part.shape[1])
        for number, part in enumerate(parts)
    ]


def _project_by_gram_(
    values: Sequence[torch.Tensor | None], frozen: Sequence[torch.Tensor], group: distributed.ProcessGroup | None
) -> None:
    """``values -= values G`` with G = V_high^T V_high, which the ranks add up."""
    wide = _widest(frozen)
    parts = [coefficients(of, of, SubspaceAxis.COLUMNS).to(wide) for of in frozen]
    flat = torch.cat([part.reshape(-1) for part in parts])
    distributed.all_reduce(flat, group=group)
    grams = torch.split(flat, [part.numel() for part in parts])
    for value, part, gram in zip(values, parts, grams, strict=True):
        if value is not None:
            # A copy: the product is taken away from what it is made of.
            take_away_(value, gram.view_as(part), value.detach().to(wide, copy=True), SubspaceAxis.ROWS)


def _widest(tensors: Sequence[torch.Tensor]) -> torch.dtype:
    found = torch.float32
    for tensor in tensors:
        found = torch.promote_types(found, computed(tensor.dtype))
    return found
