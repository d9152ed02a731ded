"""Decompositions spread over ranks: the bits of one rank on all of them, evenly, and one message where one fails."""

from __future__ import annotations

import hashlib
from functools import partial
from itertools import permutations
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from protwin.runtime import make_orthogonal
from protwin.runtime.commands.random_model import random_model
from protwin.runtime.osft import orthogonal_model
from protwin.runtime.osft.factorisation import factorise
from protwin.runtime.osft.spread import givers_of
from protwin.runtime.ranks.world import met_group
from protwin.runtime.tracing.configurations import apply_options
from protwin.shared.basics.errors import WorkloadError
from protwin.shared.schema.training_options import OsftOptions, TrainingOptions
from tests.runtime.models import llama
from tests.runtime.ranks.beside_ddp import in_default_group
from tests.runtime.ranks.processes import Ranks

TARGETS = ("*",)


def model(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """Maps of several shapes, no multiple of three of them."""
    torch.manual_seed(7)
    shapes = [(9, 12), (12, 30), (30, 4), (4, 17), (17, 5), (5, 8), (8, 3)]
    return nn.Sequential(*[nn.Linear(m, n, dtype=dtype) for m, n in shapes])


def digest(of: nn.Module) -> str:
    found = hashlib.sha256()
    for name, parameter in of.named_parameters():
        found.update(name.encode() + parameter.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


@in_default_group
def spread(rank: int) -> tuple[str, int]:
    """What the model is then, and how many weights this rank has decomposed."""
    made = model()
    with mock.patch.object(orthogonal_model, "factorise", side_effect=factorise) as counted:
        make_orthogonal(made, unfreeze_rank_ratio=0.4, targets=TARGETS, group=dist.group.WORLD)
    return digest(made), counted.call_count


def test_all_ranks_get_the_bits_of_one_and_each_makes_some(three_ranks: Ranks) -> None:
    alone = model()
    targets = make_orthogonal(alone, unfreeze_rank_ratio=0.4, targets=TARGETS)
    found = three_ranks.run(spread)
    assert {one for one, _ in found} == {digest(alone)}
    assert sum(count for _, count in found) == len(targets) == 7
    assert min(count for _, count in found) >= 1


@in_default_group
def failing(rank: int, what: str) -> tuple[str, bool]:
    """What rank 1's failure says here, and whether the model is what it was."""
    made = model(torch.float32)
    if what == "not finite" and rank == 1:
        with torch.no_grad():
            for layer in made:
                layer.weight[0, 0] = torch.nan
    before = digest(made)
    ratio = 0.5 if what == "another ratio" and rank == 1 else 0.4
    broken = mock.patch.object(orthogonal_model, "factorise", side_effect=RuntimeError("no memory"))
    with broken if what == "no memory" and rank == 1 else mock.patch.object(orthogonal_model, "FactorCache"):
        try:
            make_orthogonal(made, unfreeze_rank_ratio=ratio, targets=TARGETS, group=dist.group.WORLD)
        except WorkloadError as error:
            return str(error), digest(made) == before
    return "", False


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("not finite", "not finite on rank 1"),
        ("no memory", "could not be factorised on rank 1"),
        ("another ratio", "other targets, sizes or ratios"),
    ],
)
def test_all_ranks_hear_of_a_failure_and_change_nothing(what: str, words: str, three_ranks: Ranks) -> None:
    found = three_ranks.run(failing, what)
    assert len({said for said, _ in found}) == 1
    assert words in found[0][0]
    assert all(is_unchanged for _, is_unchanged in found)


def test_work_is_given_away_evenly() -> None:
    """At most 4/3 of what the best of all distributions leaves the busiest rank."""
    sizes = [(9, 9), (8, 8), (7, 7), (6, 6), (5, 5), (4, 20)]
    work = [n * m * min(n, m) for n, m in sizes]
    for num_ranks in (1, 2, 3, 4, 9):
        givers = givers_of(sizes, num_ranks)
        busiest = max(sum(w for w, g in zip(work, givers, strict=True) if g == rank) for rank in range(num_ranks))
        best = min(_busiest([work[at] for at in order], num_ranks) for order in permutations(range(len(work))))
        assert busiest * 3 <= best * 4


def _busiest(work: list[int], num_ranks: int) -> int:
    """Each in this order to whoever has the least; of all orders the best is the best distribution."""
    load = [0] * num_ranks
    for amount in work:
        load[load.index(min(load))] += amount
    return max(load)


def random_weights(rank: int, num_ranks: int) -> tuple[str, int]:
    """What a model of ``protwin run`` is without a folder of weights, and how many this rank has decomposed."""
    configuration = llama(num_layers=1, vocab_size=32).config.to_dict()
    options = TrainingOptions(osft=OsftOptions(unfreeze_rank_ratio=0.4))
    with (
        mock.patch.object(orthogonal_model, "factorise", side_effect=factorise) as counted,
        met_group(num_ranks, timeout_s=60) as group,
    ):
        adapt = partial(apply_options, group=group)
        made = random_model(configuration, "llama", "float32", 3, options, adapt=adapt)
    return digest(made), counted.call_count


def test_ranks_of_a_run_share_the_decompositions_of_random_weights(three_ranks: Ranks) -> None:
    found = three_ranks.run(random_weights, 3)
    assert len({made for made, _ in found}) == 1
    assert sum(count for _, count in found) == 7
    assert min(count for _, count in found) >= 1
