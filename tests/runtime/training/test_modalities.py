"""Models that read images and sounds train by a plan as in the plain loop."""

from __future__ import annotations

from tests.proof_size import some_quick
from tests.runtime.equality import offloaded_chunks, trained
from tests.runtime.modalities import model_and_batch
from tests.runtime.models import Case
from tests.runtime.resuming import plan_of


@some_quick("name", ["clip", "qwen2_vl", "whisper"], quick=1)
def test_a_plan_that_offloads_equals_the_plain_loop(name: str) -> None:
    case = Case(lambda: model_and_batch(name)[0], [model_and_batch(name)[1]] * 2)
    plan = plan_of(case.workload, chunk_bytes=9_000, n_persist=1, n_checkpoint=2)
    assert offloaded_chunks(case.workload, plan)
    outcome = trained(case, plan)
    assert outcome.losses == case.plain.losses
    assert outcome.different == []
    assert outcome.num_gathers > 0
    assert outcome.num_cpu_adam_steps > 0
