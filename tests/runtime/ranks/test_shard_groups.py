"""Two shard groups of two ranks give the bits of plain training that adds gradients up in the same two levels."""

from __future__ import annotations

from pathlib import Path

import pytest

from protwin.shared.layout.layout import build_layout
from protwin.shared.schema.plan import ParallelMode, Plan
from tests.proof_size import some_quick
from tests.runtime.accounts import BAR
from tests.runtime.ranks.beside_ddp import STEPS, all_cases
from tests.runtime.ranks.beside_groups import WRONG, Stretch, scalars_written, train_grouped, train_interrupted
from tests.runtime.ranks.measuring import one_step, peak_error, weights_hash
from tests.runtime.ranks.processes import Ranks
from tests.runtime.ranks.test_beside_ddp import NUM_BATCHES, plan_for
from tests.runtime.ranks.test_memory_of_ranks import sharded_plan
from tests.runtime.saved_models import save

GROUPS = {"num_ranks": 4, "shard_ranks": 2}
NAMES = ("llama, tied", "gpt2, groups", "hand-written, partly narrow", "gated")


def grouped(name: str, seed: int, **knobs: object) -> Plan:
    """A random plan of two groups."""
    plan = plan_for(all_cases(NUM_BATCHES)[name].workload, ParallelMode.SHARDED, seed, num_ranks=4)
    return plan.model_copy(update={**GROUPS, **knobs})


@some_quick("name", NAMES, quick=1)
def test_groups_give_the_bits_of_two_levels(name: str, four_ranks: Ranks) -> None:
    plan = grouped(name, 1 + NAMES.index(name))
    for found in four_ranks.run(train_grouped, name, plan, NUM_BATCHES):
        assert found.losses == found.expected_losses, plan
        assert not found.different, plan
        assert not found.different_in_state, plan
        assert found.peak_bytes <= found.guaranteed_bytes


@some_quick("variant", [variant for variant in WRONG if variant], quick=1)
def test_a_wrong_variant_gives_other_weights(variant: str, four_ranks: Ranks) -> None:
    name = "gated"
    every = four_ranks.run(train_grouped, name, grouped(name, 4), NUM_BATCHES, STEPS, variant)
    assert all(found.different for found in every)


@pytest.mark.slow
def test_plans_of_one_grouping_give_the_same_bits(four_ranks: Ranks) -> None:
    """All chunks whole; some in parts on devices, some on hosts; and others of other chunks: one micro-batch each."""
    name = "gpt2, groups"
    mixed = sharded_plan(name, "on both").model_copy(update=GROUPS)
    workload = all_cases(NUM_BATCHES)[name].workload
    layout = build_layout(workload.parameters, num_blocks=workload.num_blocks, chunk_bytes=mixed.chunk_bytes)
    whole = mixed.model_copy(update={"n_persist": len(layout.chunks), "n_shard": 0})
    others = grouped(name, 3, micro_batches=1, max_gradient_norm=None)
    hashes = {
        found for plan in (mixed, whole, others) for found in four_ranks.run(weights_hash, name, plan, NUM_BATCHES)
    }
    assert len(hashes) == 1


def test_one_step_is_that_of_the_mean_of_all(four_ranks: Ranks) -> None:
    """Of plain SGD with the mean in float64: every scalar within the rounding of sums and step."""
    plan = sharded_plan("gated", "on both").model_copy(update=GROUPS)
    for worst in four_ranks.run(one_step, "gated", plan, NUM_BATCHES):
        assert worst <= 1


def test_the_peak_and_the_host_are_the_schedules_own(four_ranks: Ranks) -> None:
    name = "llama, 64 wide"
    plan = sharded_plan(name, "on both", micro_batches=2, max_norm=0.5).model_copy(update=GROUPS)
    for error, host_bytes, said_bytes in four_ranks.run(peak_error, name, plan, NUM_BATCHES):
        assert error == pytest.approx(0, abs=BAR)
        assert 0.95 * said_bytes <= host_bytes <= said_bytes


# -- files and checkpoints -------------------------------------------------------------------------------------------


def stretches_of(name: str, values: tuple[str, str, str]) -> list[Stretch]:
    """Two steps in groups, none without groups, and two more in groups, each by other chunks."""
    ends = ((1, {}, 2), (3, {"shard_ranks": None}, 2), (2, {}, 4))
    return [
        Stretch(grouped(name, seed, micro_batches=1, max_gradient_norm=None, **knobs), begun, last_step)
        for (seed, knobs, last_step), begun in zip(ends, values, strict=True)
    ]


@some_quick(
    ("name", "values"),
    [
        ("hand-written, batch statistics", ("files", "rank 0", "files")),
        ("llama, frozen prologue and blocks", ("rank 0", "files", "rank 0")),
    ],
    quick=[("hand-written, batch statistics", ("files", "rank 0", "files"))],
)
def test_groups_begin_from_anywhere_and_go_on_from_checkpoints(
    name: str, values: tuple[str, str, str], four_ranks: Ranks, tmp_path: Path
) -> None:
    """As plain training that nothing interrupted, buffers included; one copy of all replicas is written."""
    (tmp_path / "base").mkdir()
    save(all_cases(NUM_BATCHES)[name].build(), tmp_path / "base")
    stretches = stretches_of(name, values)
    for found in four_ranks.run(train_interrupted, name, stretches, NUM_BATCHES, tmp_path):
        assert found.losses == found.expected_losses
        assert not found.different
        assert not found.different_in_state
        assert all(peak <= most for peak, most in zip(found.peaks_bytes, found.guaranteed_bytes, strict=True))
    for number in range(len(stretches)):
        beside, known_bytes, written_bytes = scalars_written(tmp_path / str(number))
        assert beside
        assert not any(beside.values())
        assert known_bytes == written_bytes
