"""What the simulator says of the published runs, from data sheets and configurations alone.

Every prediction is a range: what a run leaves open is given its favourable, its likely and its unfavourable reading.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from ...shared.basics.errors import InfeasibleError
from ...shared.catalogue.parts import host_part
from ...shared.layout.layout import layout_of
from ...shared.schema.hardware import Hardware, Host
from ...shared.schema.plan import ParallelMode, Plan
from ...shared.schema.record import Record
from ...shared.schema.workload import Workload
from ...sim.costs.runtimes import FUSED_BYTES, LOOPED_BYTES
from ...sim.costs.task_costs import host_adam_bytes_per_s
from ...sim.engine.simulator import simulate
from ...sim.operations.efficiency import CORE_BYTES_PER_S
from ...sim.searching.request import SearchRequest
from ...sim.searching.search import search
from ...sim.space.space import SearchSpace
from .largest import largest_predictions
from .longest import longest_predictions
from .machines import (
    Range,
    four_rank_machine,
    one_rank_machine,
    replicated_rank,
    sharded_rank,
    sharded_reduction_s,
    small_all_reduces_s,
)
from .runs import (
    ADAM_32_THREADS,
    ADAM_128_THREADS,
    ADAM_4210R,
    DATA_PARALLEL,
    ON_DEVICE,
    PLAN_OF_130_CHUNKS,
    PUBLISHED_RUNS,
    REPLICATED,
    SHARDED,
    Prediction,
    Quantity,
)
from .sharded import sharded_predictions

NUM_RANKS: Final = 4
BUDGET_BYTES: Final = 4 * 2**30
CHUNK_BYTES: Final = 128 * 2**20
"""The chunk size that the fork's pages name for R2, taken for its other runs as well."""
_OTHER_CHUNK_BYTES: Final = (64 * 2**20, 256 * 2**20)
"""The others that it chooses among and that hold every matrix of a block of R1's."""

THREADS_PER_CORE: Final = 2

_LLAMA_2_7B: Final = 6_738_415_616
_XEON_4210R: Final = Host(
    name="Xeon 4210R",
    num_cores=10,
    memory_bytes=2**38,
    memory_bandwidth_bytes_per_s=92e9,
    source="Intel ARK: 10 cores, six channels of DDR4-2400 (115.2 GB/s); 80 % of the peak",
)

MATCHING: Final = "by its memory"

OnStep = Callable[[int, int], None]


def predict_published(on_step: OnStep = lambda done, total: None) -> tuple[Prediction, ...]:
    """Every figure of ``PUBLISHED_RUNS`` that can be predicted.  ``on_step`` is told how much is done."""
    parts: Sequence[Callable[[], list[Prediction]]] = (
        _small_llama,
        _llama_7b,
        largest_predictions,
        adam_predictions,
        sharded_predictions,
        longest_predictions,
    )
    found: list[Prediction] = []
    for done, part in enumerate(parts):
        on_step(done, len(parts))
        found += part()
    on_step(len(parts), len(parts))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class _Scenario:
    """One reading of everything that a run leaves open."""

    workload: Workload
    hardware: Hardware


def _scenarios(machines: Range, configuration: dict[str, Any], name: str, batch_size: int) -> list[_Scenario]:
    """Favourable, likely and unfavourable."""
    from .workloads import adapted_workload  # traces, with torch

    workload = adapted_workload(configuration, name, batch_size=batch_size, sequence_length=256)
    return [_Scenario(workload, hardware) for hardware in machines.all]


def _small_llama() -> list[Prediction]:
    """R1."""
    from .workloads import llama

    scenarios = _scenarios(four_rank_machine(), llama(2560, 26, 20, 6912), "llama-2.2b-lora", batch_size=2)
    found = _all_on_device("R1", scenarios) + _data_parallel("R1", scenarios)
    found += _offloaded(
        REPLICATED,
        ParallelMode.REPLICATED,
        scenarios,
        replicated_rank,
        _reducing_each_s,
        "all ranks copy at once through the host's memory, and reduce the gradient of each adapter by itself",
    )
    return found + _offloaded(
        SHARDED,
        ParallelMode.SHARDED,
        scenarios,
        sharded_rank,
        _reducing_chunks_s,
        "a rank's own share comes from the host, the rest by a ring through the host's memory; gradients are reduced "
        "by whole chunks, frozen parts included",
    )


def _offloaded(
    case: str,
    mode: ParallelMode,
    scenarios: Sequence[_Scenario],
    rank: Callable[[Hardware, int], Hardware],
    reducing_s: Callable[[Plan, _Scenario], float],
    how: str,
) -> list[Prediction]:
    """The best plan under the budget, and the plan that the run's own memory figures point to.

    ``reducing_s``: what the run's own way of reducing takes, on the stream of compute, so that nothing hides it.
    """
    best = [
        _simulated(
            search(
                SearchRequest(
                    workload=s.workload, hardware=rank(s.hardware, NUM_RANKS), device_budget_bytes=BUDGET_BYTES
                )
            ).plan,
            s,
            mode,
        )
        for s in scenarios
    ]
    num_shards = NUM_RANKS if mode is ParallelMode.SHARDED else 1
    matching = [_simulated(plan_of_figures(case, s, num_shards), s, mode) for s in scenarios]
    best_s, matching_s = (
        [reducing_s(record.plan, scenario) for record, scenario in zip(records, scenarios, strict=True)]
        for records in (best, matching)
    )
    plans = f"the plan nearest to the memory figures of the run; {how}"
    return [
        _seconds("R1", case, best, best_s, how=f"the best plan under 4 GiB; {how}"),
        _peaks("R1", case, best, how="the best plan under 4 GiB"),
        _pinned(case, best, how="the best plan under 4 GiB"),
        _seconds("R1", case, matching, matching_s, how=plans, variant=MATCHING),
        _peaks("R1", case, matching, how=plans, variant=MATCHING, is_given=True),
        _pinned(case, matching, how=plans, variant=MATCHING, is_given=True),
    ]


def _reducing_each_s(plan: Plan, scenario: _Scenario) -> float:
    """An all-reduce for the gradient of every adapter (chunk/manager.py of the runs' code, the hook of a gradient)."""
    return small_all_reduces_s(_gradient_sizes(scenario.workload), scenario.hardware, NUM_RANKS)


def _reducing_chunks_s(plan: Plan, scenario: _Scenario) -> float:
    """A reduce-scatter of every offloaded chunk that trains something, with zeros in the place of what is frozen.

    Source: chunk/manager.py of the runs' code, _reduce_scatter_and_offload_shard.
    """
    workload = scenario.workload
    layout = layout_of(workload, plan.chunk_bytes)
    persistent = layout.persistent(plan.n_persist)
    return sum(
        sharded_reduction_s(chunk.size_bytes, scenario.hardware, NUM_RANKS)
        for chunk in layout.chunks
        if chunk.is_trainable and chunk.id not in persistent
    )


def _simulated(plan: Plan, scenario: _Scenario, mode: ParallelMode) -> Record:
    """One of four ranks that carry out ``plan`` in ``mode``."""
    together = plan.model_copy(update={"parallel": mode, "num_ranks": NUM_RANKS})
    return simulate(together, scenario.workload, scenario.hardware)


def plan_of_figures(case: str, scenario: _Scenario, num_shards: int) -> Plan:
    """The fastest plan that pins as much as was pinned and peaks no higher than was measured.

    Its chunk size is the one that the fork's pages name for another run.
    """
    pinned_bytes = measured("R1", case, Quantity.PINNED)[0] * num_shards
    workload = scenario.workload
    layout = layout_of(workload, CHUNK_BYTES)

    def missing(n_persist: int) -> float:
        persistent = layout.persistent(n_persist)
        sizes = sum(chunk.size_bytes + chunk.staging_bytes for chunk in layout.chunks if chunk.id not in persistent)
        return abs(sizes - pinned_bytes)

    space = SearchSpace(
        chunk_bytes=(CHUNK_BYTES,),
        n_persist=(min(range(len(layout.chunks)), key=missing),),
        prefetch_depth=(1, 2, 3, workload.num_blocks),
    )
    for peak_bytes in measured("R1", case, Quantity.DEVICE_PEAK):
        try:
            return search(
                SearchRequest(
                    workload=workload, hardware=scenario.hardware, device_budget_bytes=int(peak_bytes), space=space
                )
            ).plan
        except InfeasibleError:
            continue
    return search(
        SearchRequest(workload=workload, hardware=scenario.hardware, device_budget_bytes=BUDGET_BYTES, space=space)
    ).plan


def _llama_7b() -> list[Prediction]:
    """R2."""
    from .workloads import llama

    shape = llama(4096, 32, 32, 11008)
    records, numbers = [], set()
    for scenario in _scenarios(one_rank_machine(), shape, "llama-7b-lora", batch_size=1):
        workload = scenario.workload
        layout = layout_of(workload, CHUNK_BYTES)
        numbers.add(len(layout.chunks))
        plan = Plan(
            workload_id=workload.identity,
            chunk_bytes=CHUNK_BYTES,
            n_persist=113,
            n_buffer=8,
            prefetch_depth=workload.num_blocks,
            n_checkpoint=31,
        )
        records.append(simulate(plan, workload, scenario.hardware, layout=layout))
    chunks = " or ".join(map(str, sorted(numbers)))
    knobs = "8 buffers, 31 of 32 blocks checkpointed, gathers as early as buffers allow"
    how = f"the published plan: {knobs}; {chunks} chunks here"
    found = [_seconds("R2", PLAN_OF_130_CHUNKS, records, how=how), _peaks("R2", PLAN_OF_130_CHUNKS, records, how=how)]
    scenarios = _scenarios(four_rank_machine(), shape, "llama-7b-lora", batch_size=2)
    return found + _all_on_device("R2", scenarios) + _data_parallel("R2", scenarios)


def adam_predictions() -> list[Prediction]:
    """R5: CPU Adam from cores and memory bandwidth.

    Fused and on all cores; the range reaches to a loop of separate operations on one core.
    """
    wide = host_part("epyc-64")
    narrow = wide.model_copy(update={"num_cores": 32 // THREADS_PER_CORE})
    cases = (
        (ADAM_128_THREADS, _LLAMA_2_7B, wide, "64 cores with eight channels of DDR4"),
        (ADAM_32_THREADS, _LLAMA_2_7B, narrow, "16 cores with eight channels of DDR4"),
        (ADAM_4210R, 1_350_000_000, _XEON_4210R, "10 cores with six channels of DDR4"),
    )
    return [
        Prediction(
            row="R5",
            case=case,
            quantity=Quantity.ADAM,
            low=num_scalars * FUSED_BYTES / host.memory_bandwidth_bytes_per_s,
            likely=num_scalars * FUSED_BYTES / host_adam_bytes_per_s(host),
            high=num_scalars * LOOPED_BYTES / CORE_BYTES_PER_S,
            how=f"{what}; from all of the bandwidth, fused, to one core that runs each step on its own",
        )
        for case, num_scalars, host, what in cases
    ]


def _all_on_device(row: str, scenarios: Sequence[_Scenario]) -> list[Prediction]:
    records = [simulate(plan_on_device(s.workload), s.workload, s.hardware) for s in scenarios]
    how = "every chunk persistent, every block checkpointed, two buffers for every chunk of a block besides"
    found = [_seconds(row, ON_DEVICE, records, how=how)]
    if measured(row, ON_DEVICE, Quantity.DEVICE_PEAK):
        found.append(_peaks(row, ON_DEVICE, records, how=how, more_bytes=idle_buffer_bytes(scenarios[0].workload)))
    return found


def _data_parallel(row: str, scenarios: Sequence[_Scenario]) -> list[Prediction]:
    """As on one device; each gradient is divided by itself, and all are reduced from a bucket that stays."""
    from .workloads import with_divisions

    workload = scenarios[0].workload
    records = [
        _simulated(plan_on_device(s.workload), replace(s, workload=with_divisions(s.workload)), ParallelMode.DDP)
        for s in scenarios
    ]
    how = "as on one device, a division of every gradient, all-reduces through the host's memory, and their bucket"
    found = [_seconds(row, DATA_PARALLEL, records, how=how)]
    if measured(row, DATA_PARALLEL, Quantity.DEVICE_PEAK):
        more_bytes = [sum(_gradient_sizes(workload)) + idle_bytes for idle_bytes in idle_buffer_bytes(workload)]
        found.append(_peaks(row, DATA_PARALLEL, records, how=how, more_bytes=more_bytes))
    return found


def plan_on_device(workload: Workload) -> Plan:
    """Everything on the device, every block checkpointed."""
    layout = layout_of(workload, CHUNK_BYTES)
    return Plan(
        workload_id=workload.identity,
        chunk_bytes=CHUNK_BYTES,
        n_persist=len(layout.chunks),
        n_buffer=0,
        n_checkpoint=workload.num_blocks,
    )


def idle_buffer_bytes(workload: Workload) -> tuple[int, ...]:
    """Buffers that the runs hold though nothing is gathered: two for every chunk of the block with the most.

    The likely reading first, for ``CHUNK_BYTES``, then those for the other chunk sizes that the runs choose among.
    Source: the runs' own code (``FORK``: api/model_wrapper.py, with force_all_persistent; chunk/sizing.py).
    """
    found = []
    for chunk_bytes in (CHUNK_BYTES, *_OTHER_CHUNK_BYTES):
        layout = layout_of(workload, chunk_bytes)
        widest = max(len(chunks) for chunks in layout.needed[1 : 1 + workload.num_blocks])
        found.append(2 * widest * chunk_bytes)
    return tuple(found)


def _gradient_sizes(workload: Workload) -> list[int]:
    return [parameter.size_bytes for parameter in workload.parameters if parameter.trainable]


def measured(row: str, case: str, quantity: Quantity) -> tuple[float, ...]:
    """The readings of a published figure; empty if there is none."""
    run = next(run for run in PUBLISHED_RUNS if run.row == row)
    return next((m.readings for m in run.measurements if (m.case, m.quantity) == (case, quantity)), ())


def _seconds(
    row: str, case: str, records: Sequence[Record], more_s: Sequence[float] = (), *, how: str, variant: str = ""
) -> Prediction:
    """``more_s``: what every reading takes besides."""
    times = [record.iteration_s + more for record, more in zip(records, more_s or [0.0] * len(records), strict=True)]
    return Prediction.of(row, case, Quantity.ITERATION, times, how=how, variant=variant)


def _peaks(
    row: str,
    case: str,
    records: Sequence[Record],
    *,
    how: str,
    more_bytes: Sequence[int] = (0,),
    variant: str = "",
    is_given: bool = False,
) -> Prediction:
    """What is allocated at the peak, which is what the runs state; ``more_bytes``: readings of what is held besides."""
    allocated = [record.peak_device_bytes for record in records]
    return Prediction(
        row=row,
        case=case,
        quantity=Quantity.DEVICE_PEAK,
        variant=variant,
        low=min(allocated) + min(more_bytes),
        likely=allocated[1] + more_bytes[0],
        high=max(allocated) + max(more_bytes),
        how=how,
        is_given=is_given,
    )


def _pinned(case: str, records: Sequence[Record], *, how: str, variant: str = "", is_given: bool = False) -> Prediction:
    """Of one rank."""
    sizes = [max(1.0, record.peak_pinned_bytes) for record in records]
    return Prediction.of("R1", case, Quantity.PINNED, sizes, how=how, variant=variant, is_given=is_given)
