"""``protwin.train`` on two ranks trains as DistributedDataParallel does, to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from protwin.shared.schema.plan import ParallelMode
from tests.runtime.ranks.one_call import searched_and_resumed, shared_data, ten_steps
from tests.runtime.ranks.processes import Ranks
from tests.runtime.small_language import texts, write_rows


@pytest.mark.parametrize(
    ("mode", "limit"),
    [
        (ParallelMode.REPLICATED, 0.5),
        (ParallelMode.DDP, 0.5),
        (ParallelMode.SHARDED, None),
    ],
)
@pytest.mark.slow
def test_ten_steps_are_those_of_ddp(mode: ParallelMode, limit: float | None, two_ranks: Ranks) -> None:
    two_ranks.run(ten_steps, str(mode), limit)


@pytest.mark.slow
def test_a_searched_plan_and_a_resume_under_another(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(searched_and_resumed, tmp_path / "saved", None)


@pytest.mark.slow
@pytest.mark.parametrize("is_text", [True, False])
def test_ranks_that_share_sequences_take_the_same_batches(is_text: bool, two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(shared_data, write_rows(tmp_path / "rows.jsonl", texts(40)) if is_text else None)
