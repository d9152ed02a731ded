"""Factors of weights in files: every rank decomposes some, and all have the bits of one rank that decomposes all."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from protwin.runtime import CpuDevice, carry_out, make_orthogonal
from protwin.runtime.chunks.saved_weights import SavedWeights
from protwin.runtime.osft import spread_reader
from protwin.runtime.osft.factorisation import Factors
from protwin.runtime.osft.orthogonal_model import make_dense, orthogonal_maps
from protwin.shared.basics.errors import WorkloadError
from protwin.shared.layout.layout import layout_of
from protwin.shared.schema.plan import ParallelMode, Plan, TrainingMethod
from tests.proof_size import some_quick
from tests.runtime.models import differences, snapshot
from tests.runtime.ranks.beside_ddp import all_cases, in_default_group
from tests.runtime.ranks.processes import Ranks
from tests.runtime.saved_models import on_meta, save

NUM_BATCHES = 12
NAME = "gated, factorised"


def plan_of(name: str, mode: str, num_ranks: int, chunk_bytes: int) -> Plan:
    workload = all_cases(NUM_BATCHES)[name].workload
    layout = layout_of(workload, chunk_bytes)
    num_shard = len(layout.chunks) if mode == "sharded" else 0
    n_persist = len(layout.chunks) if mode == "ddp" else 0
    return Plan(
        workload_id=workload.identity,
        method=TrainingMethod.OSFT,
        chunk_bytes=chunk_bytes,
        n_persist=n_persist,
        n_shard=num_shard,
        n_buffer=0 if n_persist == len(layout.chunks) else layout.min_buffers(n_persist) + 1,
        parallel=ParallelMode(mode),
        num_ranks=num_ranks,
    )


@in_default_group
def filled(rank: int, name: str, plan: Plan, folder: str, in_round: int) -> tuple[list[str], int, int, int]:
    """Which weights differ, where this rank has them again; maps; decompositions of this rank; the most it kept."""
    case = all_cases(NUM_BATCHES)[name]
    # What was saved are products of rounded factors: decomposed in memory, they give what is expected.
    whole = case.build()
    targets = make_dense(whole)
    make_orthogonal(whole, unfreeze_rank_ratio=0.4, targets=targets)
    model, expected = on_meta(case.build()), snapshot(whole)
    saved = SavedWeights(Path(folder)).for_model(model)
    kept, made = [0], spread_reader.SpreadReader._made

    def watched(self: Any, weight: str) -> Factors:
        found = made(self, weight)
        kept[0] = max(kept[0], len(self._kept) + 1)
        return found

    with (
        mock.patch.object(spread_reader, "_WEIGHTS_OF_A_RANK", in_round),
        mock.patch.object(spread_reader.SpreadReader, "_made", watched),
    ):
        carry_out(model, plan, case.workload, device=CpuDevice(), weights=saved).close()
    is_whole = not any(parameter.is_meta for parameter in model.parameters())
    assert is_whole or rank > 0
    different = differences(model, expected) if is_whole else []
    return different, len(orthogonal_maps(model)), saved.reader.num_made, kept[0]


@some_quick(
    ("name", "mode", "num_ranks", "chunk_bytes", "in_round"),
    [
        (NAME, "sharded", 3, 9_000, 4),
        (NAME, "ddp", 2, 1, 1),
        (NAME, "sharded", 2, 1, 1),
        (NAME, "replicated", 3, 3_000, 1),
    ],
    quick=[(NAME, "sharded", 2, 1, 1)],
)
def test_every_rank_decomposes_some_weights_and_gives_them_to_all(
    name: str,
    mode: str,
    num_ranks: int,
    chunk_bytes: int,
    in_round: int,
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> None:
    """Each weight once, evenly, the remainder too; as often as ranks if each were to read its own."""
    ranks: Ranks = request.getfixturevalue({2: "two_ranks", 3: "three_ranks"}[num_ranks])
    dense = all_cases(NUM_BATCHES)[name].build()
    make_dense(dense)
    save(dense, tmp_path)
    found = ranks.run(filled, name, plan_of(name, mode, num_ranks, chunk_bytes), str(tmp_path), in_round)
    counts = [count for _, _, count, _ in found]
    assert [different for different, *_ in found] == [[]] * num_ranks
    assert sum(counts) == found[0][1]
    assert min(counts) >= 1
    if in_round == 1:
        assert max(most for *_, most in found) == 1, "more of a rank's factors wait than a round has for it"


@in_default_group
def refused(rank: int, name: str, plan: Plan, folder: str) -> str:
    """What all say of a weight that is not finite."""
    case = all_cases(NUM_BATCHES)[name]
    model = on_meta(case.build())
    with pytest.raises(WorkloadError) as caught:
        carry_out(model, plan, case.workload, device=CpuDevice(), weights=folder, rank_timeout_s=20)
    assert all(parameter.is_meta for parameter in model.parameters())
    return str(caught.value)


def test_all_ranks_refuse_a_weight_that_is_not_finite(three_ranks: Ranks, tmp_path: Path) -> None:
    dense = all_cases(NUM_BATCHES)[NAME].build()
    paths = make_dense(dense)
    with torch.no_grad():
        dense.get_submodule(paths[-1]).weight[0, 0] = torch.nan
    save(dense, tmp_path)
    (said,) = set(three_ranks.run(refused, NAME, plan_of(NAME, "sharded", 3, 1), str(tmp_path)))
    assert f"{paths[-1]}.weight has entries that are not finite" in said
