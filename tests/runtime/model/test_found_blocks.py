"""Where blocks are found in models that have them in no plain list."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from protwin.runtime import trace
from protwin.runtime.model.blocks import find_blocks
from protwin.shared.basics.errors import ScheduleError
from tests.runtime.equality import miscounted, random_plans, trained
from tests.runtime.models import Case, Layer, point_batches

WIDTH = 24


class Leaf(nn.Module):
    """A block whose parameters are its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 5)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(batch, WIDTH) in and out."""
        return hidden + torch.tanh(hidden @ self.weight)


class InRows(nn.Module):
    """Its blocks run in the order of a dict or a list."""

    def __init__(self, rows: nn.ModuleDict | nn.ModuleList) -> None:
        super().__init__()
        self.entry, self.rows, self.exit = nn.Linear(5, WIDTH), rows, nn.Linear(WIDTH, 3)

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        """(batch, 5) to (batch, 3)."""
        hidden = self.entry(points)
        for block in self.rows.values() if isinstance(self.rows, nn.ModuleDict) else self.rows:
            hidden = block(hidden)
        return self.exit(hidden)


def layer() -> nn.Module:
    return Layer(WIDTH, has_statistics=False)


def in_dict() -> nn.Module:
    torch.manual_seed(0)
    return InRows(nn.ModuleDict({name: layer() for name in ("first", "second", "third")}))


def of_leaves() -> nn.Module:
    torch.manual_seed(0)
    return InRows(nn.ModuleList(Leaf() for _ in range(3)))


def in_a_row() -> nn.Module:
    torch.manual_seed(0)
    ends = nn.Linear(5, WIDTH), nn.Linear(WIDTH, 3)
    return nn.Sequential(ends[0], nn.Tanh(), layer(), layer(), nn.ReLU(), nn.LayerNorm(WIDTH), layer(), ends[1])


@pytest.mark.parametrize(
    ("build", "names"),
    [
        (in_dict, ["rows.first", "rows.second", "rows.third"]),
        (of_leaves, ["rows.0", "rows.1", "rows.2"]),
        (in_a_row, ["2", "3", "6"]),
    ],
)
def test_what_is_found_trains_to_the_bits_of_the_plain_loop(build: Callable[[], nn.Module], names: list[str]) -> None:
    case = Case(build, point_batches(), has_loss=False)
    assert [block.name for block in case.workload.blocks] == names
    for plan in random_plans(case.workload, 3, seed=len(names[0]), has_disk=False):
        outcome = trained(case, plan)
        expected = case.plain_with(plan.micro_batches, plan.max_gradient_norm)
        assert outcome.losses == expected.losses, plan
        assert not outcome.different, plan
        assert not miscounted(case, plan, outcome), plan
        assert outcome.peak_bytes <= outcome.guaranteed_bytes, plan


def test_a_dict_that_is_named_stands_for_its_members() -> None:
    model = in_dict()
    assert find_blocks(model, "rows") == find_blocks(model, ["rows"]) == find_blocks(model)


@pytest.mark.parametrize("seed", range(10))
def test_what_else_a_model_has_never_takes_the_place_of_a_list_of_blocks(seed: int) -> None:
    """A dict of heads, a row of own modules, a Sequential with others between: none counts beside a plain stack."""
    draw = Random(seed)
    others: list[Callable[[], nn.Module]] = [
        partial(nn.ModuleDict, {"a": layer(), "b": layer()}),
        partial(nn.ModuleList, [Leaf(), Leaf()]),
        partial(nn.Sequential, nn.Linear(5, 5), layer(), layer()),
    ]
    parts = [nn.ModuleList(layer() for _ in range(3)), *(make() for make in draw.sample(others, 2))]
    draw.shuffle(parts)
    at = next(place for place, part in enumerate(parts) if isinstance(part, nn.ModuleList) and len(part) == 3)
    model = nn.Module()
    for place, part in enumerate(parts):
        model.add_module(f"part{place}", part)
    assert [block.name for block in find_blocks(model)] == [f"part{at}.{index}" for index in range(3)]


class Unseen(InRows):
    """Runs its blocks by a way that passes their hooks by."""

    def __init__(self, run: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__(nn.ModuleList(layer() for _ in range(3)))
        self.run = run

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        """(batch, 5) to (batch, 3)."""
        hidden = self.entry(points)
        for block in self.rows:
            hidden = self.run(block, hidden)
        return self.exit(hidden)


@pytest.mark.parametrize(
    "run",
    [lambda block, hidden: block.forward(hidden), partial(checkpoint, use_reentrant=True)],
    ids=["forward", "reentrant"],
)
def test_blocks_that_run_unseen_are_told_how_to_be_seen(run: Callable[..., torch.Tensor]) -> None:
    model = Unseen(run)
    model(torch.ones(2, 5)).sum().backward()
    with pytest.raises(ScheduleError, match=r"ended before block (rows\.\d).*\1\.forward\(x\).*reentrant"):
        trace(model, torch.ones(2, 5), loss=lambda output, _: output.sum(), repeats=0)


def test_classes_of_a_file_that_nobody_imported_train(tmp_path: Path) -> None:
    """As notebooks and loaders of files give them: their module is in no table of Python."""
    path = tmp_path / "mine.py"
    path.write_text(
        "import torch\nfrom torch import nn\n"
        "class Layer(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.up, self.down = nn.Linear(24, 40), nn.Linear(40, 24)\n"
        "    def forward(self, hidden):\n"
        "        return hidden + self.down(torch.tanh(self.up(hidden)))\n"
        "def model():\n"
        "    torch.manual_seed(0)\n"
        "    return nn.Sequential(nn.Linear(5, 24), Layer(), Layer(), nn.Linear(24, 3))\n"
    )
    build = runpy.run_path(str(path), run_name="of_no_table")["model"]
    case = Case(build, point_batches(), has_loss=False)
    (plan,) = random_plans(case.workload, 1, seed=1, has_disk=False)
    outcome = trained(case, plan)
    assert outcome.losses == case.plain_with(plan.micro_batches, plan.max_gradient_norm).losses
    assert not outcome.different
