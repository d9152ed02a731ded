"""Plans for two ranks give the bits of DistributedDataParallel, whatever stays, leaves, swaps or is recomputed.

With several micro-batches gradients that leave are averaged in each of them, as FSDP does, and those that stay in the
last, as DDP does: the reference is written out by hand.  Ranks that have parts of gradients take their norm in float64,
and so does the reference; ``test_memory_of_ranks`` lays that norm beside torch's.
"""

from __future__ import annotations

from itertools import product
from random import Random

from protwin.shared.layout.layout import layout_of
from protwin.shared.schema.optimizer import HostGradients
from protwin.shared.schema.plan import ParallelMode, Plan, ProjectionPlace
from protwin.shared.schema.workload import Workload
from tests.proof_size import share, some_quick
from tests.runtime.ranks.beside_ddp import all_cases, train
from tests.runtime.ranks.processes import Ranks
from tests.runtime.ranks.wrong_ranks import VARIANTS, train_wrong

NUM_RANKS = 2
NUM_BATCHES = 12
NAMES = (
    "llama, tied",
    "gpt2, groups",
    "llama, frozen prologue and blocks",
    "llama in bfloat16",
    "hand-written, partly narrow",
    "hand-written, unused parameters",
    "hand-written, blocks run twice",
    "gated",
)
PROJECTED = ("gated, factorised", "llama in bfloat16, factorised")
MODES = (ParallelMode.DDP, ParallelMode.REPLICATED, ParallelMode.SHARDED)


def plan_for(workload: Workload, parallel: ParallelMode, seed: int, num_ranks: int = NUM_RANKS) -> Plan:
    """A random plan of this mode; every second seed limits the norm, every third one has one micro-batch."""
    random = Random(seed)
    chunk_bytes = random.choice((3_000, 9_000, 20_000))
    layout = layout_of(workload, chunk_bytes)
    num_chunks = len(layout.chunks)
    n_persist = num_chunks if parallel is ParallelMode.DDP else random.randrange(num_chunks // 3)
    others = random.randrange(num_chunks - n_persist) // 2 if n_persist < num_chunks else 0
    kept = n_persist + (others if parallel is ParallelMode.REPLICATED else 0)
    n_swap = random.randrange(workload.num_blocks + 1)
    return Plan(
        workload_id=workload.identity,
        method=workload.method,
        chunk_bytes=chunk_bytes,
        n_persist=n_persist,
        n_host_stepped=others if parallel is ParallelMode.REPLICATED else 0,
        n_shard=others if parallel is ParallelMode.SHARDED else 0,
        n_buffer=layout.min_buffers(kept) + random.randrange(3),
        prefetch_depth=1 + random.randrange(3),
        n_swap=n_swap,
        n_checkpoint=random.randrange(workload.num_blocks + 1 - n_swap),
        micro_batches=1 if seed % 3 == 0 else random.choice((2, 3)),
        max_gradient_norm=None if seed % 2 else 0.5,
        parallel=parallel,
        num_ranks=num_ranks,
    )


@some_quick(("name", "parallel"), product(NAMES, MODES), quick=4)
def test_two_ranks_give_the_bits_of_ddp(name: str, parallel: ParallelMode, two_ranks: Ranks) -> None:
    plan = plan_for(all_cases(NUM_BATCHES)[name].workload, parallel, NAMES.index(name) + MODES.index(parallel))
    for found in two_ranks.run(train, name, plan, NUM_BATCHES):
        assert found.losses == found.expected_losses, plan
        assert not found.different, plan


@some_quick(("parallel", "seed"), product(MODES[1:], (1, 3, 5)), quick=[(ParallelMode.SHARDED, 3)])
def test_hosts_of_two_ranks_add_up_in_float32_and_devices_do_not(
    parallel: ParallelMode, seed: int, two_ranks: Ranks
) -> None:
    """Of a bfloat16 model some chunks are stepped by hosts, and others, in parts, by devices."""
    name = "llama in bfloat16"
    workload = all_cases(NUM_BATCHES)[name].workload
    knobs = {"micro_batches": 3, "max_gradient_norm": None, "n_swap": 0, "host_gradients": HostGradients.FLOAT32}
    plan = plan_for(workload, parallel, seed).model_copy(update=knobs)
    assert (plan.n_shard > 0) is (parallel is ParallelMode.SHARDED)
    for found in two_ranks.run(train, name, plan, NUM_BATCHES):
        assert found.losses == found.expected_losses, plan
        assert not found.different, plan
        assert found.num_cpu_adam_steps > 0


@some_quick("parallel", MODES, quick=1)
def test_two_ranks_share_a_packed_base(parallel: ParallelMode, two_ranks: Ranks) -> None:
    """Parts of packed weights and of their states, on hosts or devices; adapters beside them are trained."""
    workload = all_cases(NUM_BATCHES)["packed"].workload
    plan = plan_for(workload, parallel, MODES.index(parallel))
    for found in two_ranks.run(train, "packed", plan, NUM_BATCHES):
        assert found.losses == found.expected_losses, plan
        assert not found.different, plan


@some_quick(("parallel", "place"), product([ParallelMode.DDP, ParallelMode.REPLICATED], ProjectionPlace), quick=2)
def test_two_ranks_project_the_means_of_their_gradients(
    parallel: ParallelMode, place: ProjectionPlace, two_ranks: Ranks
) -> None:
    """Orthogonal subspace fine-tuning: each rank projects all of them, those that only the other has too."""
    workload = all_cases(NUM_BATCHES)["gated, factorised"].workload
    for seed in share((0, 3, 7), 3):
        plan = plan_for(workload, parallel, seed)
        plan = plan.model_copy(update={"projects_gradients_on": place})
        for found in two_ranks.run(train, "gated, factorised", plan, NUM_BATCHES):
            assert found.losses == found.expected_losses, plan
            assert not found.different, plan
        assert found.peak_bytes <= found.guaranteed_bytes
        assert (found.num_cpu_adam_steps > 0) == (parallel is not ParallelMode.DDP)


def sharded(plan: Plan, workload: Workload, shard_ranks: int | None = None) -> Plan:
    """The plan with no chunk on hosts."""
    left = len(layout_of(workload, plan.chunk_bytes).chunks) - plan.n_persist
    return plan.model_copy(update={"n_shard": left, "shard_ranks": shard_ranks})


@some_quick(("name", "seed"), product(PROJECTED, range(6)), quick=1)
def test_two_ranks_project_what_lies_in_parts(name: str, seed: int, two_ranks: Ranks) -> None:
    """An owner projects whole matrices of gradients and of what is stepped, to the bits of ddp."""
    workload = all_cases(NUM_BATCHES)[name].workload
    plan = sharded(plan_for(workload, ParallelMode.SHARDED, seed), workload)
    for found in two_ranks.run(train, name, plan, NUM_BATCHES):
        assert found.losses == found.expected_losses, plan
        assert not found.different, plan
        assert found.peak_bytes <= found.guaranteed_bytes


@some_quick(("variant", "name", "parallel", "seed"), VARIANTS, quick=[VARIANTS[at] for at in (1, 3, 4, 6, 7)])
def test_a_wrong_variant_gives_other_weights(
    variant: str, name: str, parallel: ParallelMode, seed: int, two_ranks: Ranks
) -> None:
    plan = plan_for(all_cases(NUM_BATCHES)[name].workload, parallel, seed)
    assert all(found.different for found in two_ranks.run(train_wrong, variant, name, plan, NUM_BATCHES))
    assert not any(found.different for found in two_ranks.run(train, name, plan, NUM_BATCHES))
