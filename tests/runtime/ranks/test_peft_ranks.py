"""Two ranks that train one model with adapters of PEFT, beside DistributedDataParallel."""

from __future__ import annotations

import pytest

from protwin.shared.schema.plan import ParallelMode
from tests.runtime.ranks.beside_ddp import OF_PEFT, all_cases, train
from tests.runtime.ranks.processes import Ranks
from tests.runtime.ranks.test_beside_ddp import NUM_BATCHES, plan_for


@pytest.mark.parametrize(("kind", "parallel"), [(OF_PEFT[0], ParallelMode.SHARDED), (OF_PEFT[1], ParallelMode.DDP)])
def test_adapted_models_of_two_ranks_have_the_bits_of_ddp(kind: str, parallel: ParallelMode, two_ranks: Ranks) -> None:
    """In the guaranteed memory."""
    workload = all_cases(NUM_BATCHES)[f"PEFT, {kind}"].workload
    # One micro-batch: the reference is DDP itself.
    plan = plan_for(workload, parallel, seed=9).model_copy(update={"micro_batches": 1})
    for found in two_ranks.run(train, f"PEFT, {kind}", plan, NUM_BATCHES):
        assert found.losses == found.expected_losses
        assert not found.different
        assert found.peak_bytes <= found.guaranteed_bytes
        if parallel is ParallelMode.SHARDED:
            assert found.to_host_bytes > 0
