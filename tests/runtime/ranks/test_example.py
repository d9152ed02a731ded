"""The example of several ranks runs, on processes that are there already."""

from __future__ import annotations

import io
import re
import runpy
from contextlib import redirect_stdout
from pathlib import Path

import torch

from tests.runtime.ranks.processes import Ranks

EXAMPLE = Path(__file__).parents[3] / "examples" / "train_ranks.py"


def run_example(rank: int) -> tuple[str, dict[str, torch.Tensor]]:
    """What it prints, and the weights that it ends with."""
    output = io.StringIO()
    with redirect_stdout(output):
        found = runpy.run_path(str(EXAMPLE), run_name="__main__")
    return output.getvalue(), found["model"].state_dict()


def test_train_ranks(two_ranks: Ranks) -> None:
    (printed, weights), (silence, others) = two_ranks.run(run_example)
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", printed)]
    assert len(losses) == 4
    assert losses[-1] < losses[0] / 5
    gathered, stepped = re.search(r"2 ranks: ([\d.]+) MiB gathered, (\d+) steps", printed).groups()  # type: ignore[union-attr]
    assert float(gathered) > 0
    assert int(stepped) > 0
    assert silence == ""
    assert all(torch.equal(weights[name], others[name]) for name in weights), "ranks have parted"
