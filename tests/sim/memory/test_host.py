"""The host's memory: pinned buffers as they are rounded, the model while it loads, and all of it together."""

from __future__ import annotations

import mmap

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protwin.shared.compile.compile import compile_schedule
from protwin.shared.layout.layout import build_layout
from protwin.shared.layout.shards import rank_part
from protwin.shared.schema.hardware import DeviceKind
from protwin.shared.schema.memory_accounts import HostMemory, PinnedRule
from protwin.shared.schema.optimizer import HostGradients, Optimizer
from protwin.shared.schema.plan import ParallelMode
from protwin.shared.schema.workload import DType, Workload
from protwin.sim.memory.host import (
    PAGE_BYTES,
    PROCESS_BYTES,
    RESERVE_BYTES,
    default_reserve_bytes,
    host_memory,
    in_pages,
    loading_peak_bytes,
    pinned_size,
    power_of_two,
    shares_of_one_memory,
)
from tests.proof_size import examples
from tests.sim.hand_made import machine, plan, workload
from tests.strategies.plans import PlannedWorkload, parallel_workloads, planned_workloads


def next_power(size: int) -> int:
    found = 1
    while found < size:
        found *= 2
    return found if size else 0


@given(st.integers(0, 2**48))
def test_powers_of_two(size: int) -> None:
    assert power_of_two(size) == next_power(size) or size > 2**40
    assert power_of_two(size) < 2 * max(size, 1)
    assert power_of_two(size) >= size
    assert power_of_two(size).bit_count() == (size > 0)


def test_pinned_buffers_by_hand() -> None:
    sizes = [0, 1, 4096, 4097, 5 * 2**30]
    assert pinned_size(sizes, PinnedRule.PAGES) == 3 * 4096 + 4096 + 5 * 2**30
    assert pinned_size(sizes, PinnedRule.POWER_OF_TWO) == 4096 + 4096 + 8192 + 8 * 2**30


def test_the_page_is_this_machine_s_where_it_has_the_usual_one() -> None:
    assert mmap.PAGESIZE % PAGE_BYTES == 0


def of(
    model: Workload,
    *,
    kind: DeviceKind = DeviceKind.CUDA,
    n_persist: int = 0,
    device_peak_bytes: int = 0,
    num_sharing: int = 1,
) -> HostMemory:
    """The account of a plan, of one of ``num_sharing`` ranks that each hold a part of what is offloaded."""
    chosen = plan(model, n_persist=n_persist)
    if num_sharing > 1:
        chosen = chosen.model_copy(update={"parallel": ParallelMode.SHARDED, "num_ranks": num_sharing})
    layout = build_layout(model.parameters, num_blocks=model.num_blocks, chunk_bytes=chosen.chunk_bytes)
    schedule = compile_schedule(chosen, model, layout)
    return host_memory(
        schedule, model.parameters, layout, machine(kind=kind), widens=False, device_peak_bytes=device_peak_bytes
    )


def narrow(num_blocks: int) -> Workload:
    """``workload`` with 2 bytes a parameter."""
    model = workload(num_blocks)
    parameters = tuple(p.model_copy(update={"dtype": DType.BFLOAT16}) for p in model.parameters)
    return model.model_copy(update={"parameters": parameters})


def test_the_account_by_hand() -> None:
    # Three chunks of 64 float32 scalars; the first stays on the device.  Pinned: parameters and gradients of two
    # chunks, a page each.  Optimizer state of two: 512 bytes of moments and a count.
    found = of(workload(3), n_persist=1, device_peak_bytes=12345)
    assert found.pinned_requested_bytes == 4 * 4096
    assert found.pinned_rounded_bytes == 4 * 4096
    assert found.pinned_bytes == 4 * 4096
    assert found.state_bytes == 2 * 516
    assert found.device_bytes == 0
    # Loading: chunk 0 goes to the device; two pages for chunk 1, two more for chunk 2.
    assert found.loading_bytes == 4 * 4096
    assert found.total_bytes == PROCESS_BYTES[DeviceKind.CUDA] + 4 * 4096 + 2 * 516


def test_a_cpu_s_device_memory_is_the_host_s() -> None:
    found = of(workload(3), kind=DeviceKind.CPU, n_persist=1, device_peak_bytes=10**6)
    assert found.device_bytes == 10**6
    assert found.total_bytes == PROCESS_BYTES[DeviceKind.CPU] + 4 * 4096 + 2 * 516 + 10**6


def test_nothing_offloaded_takes_nothing_of_a_host_that_is_no_device() -> None:
    model = workload(3)
    on_gpu, on_cpu = of(model, n_persist=3), of(model, kind=DeviceKind.CPU, n_persist=3)
    assert on_gpu.pinned_bytes == on_gpu.state_bytes == 0
    assert on_gpu.loading_bytes == 0
    assert on_cpu.loading_bytes == 3 * 256


def test_narrow_parameters_have_masters_from_the_beginning() -> None:
    # 128 bytes each: a page for parameters and one for gradients of either, and masters of 256.
    assert of(narrow(2)).loading_bytes == 4 * 4096 + 2 * 256


def test_a_rank_has_its_part_of_the_masters_of_offloaded_chunks_alone() -> None:
    # Chunks come one by one, each of 256 bytes.  The first stays, with masters of 256, all of them.  When the second is
    # filled, there are two pages for its parts and masters of 128, half of them.
    found = of(narrow(2), kind=DeviceKind.CPU, n_persist=1, num_sharing=2)
    assert found.loading_bytes == (256 + 256) + 256 + 2 * 4096 + 128


def loading_by_hand(case: PlannedWorkload, *, is_on_host: bool) -> int:
    """Every allocation of [Note: Loading], one after the other, from the plan alone."""
    chosen, parameters, layout = case.plan, case.workload.parameters, case.layout
    is_sharded = chosen.parallel is ParallelMode.SHARDED
    kept = chosen.n_persist + chosen.n_host_stepped
    host_stepped = {c.id for c in layout.chunks[chosen.n_persist : kept] if c.is_trainable}
    in_parts = {c.id for c in layout.chunks[kept : kept + chosen.n_shard]}
    level = peak = 0

    def take(size_bytes: int) -> None:
        nonlocal level, peak
        level += size_bytes
        peak = max(peak, level)

    for chunk in layout.chunks:
        members = [parameters[placed.index] for placed in chunk.parameters]
        widens = chosen.host_gradients is HostGradients.FLOAT32 and (
            chosen.micro_batches > 1 or chosen.max_gradient_norm is not None
        )
        knobs = (chosen.parallel, chosen.shard_ranks or chosen.num_ranks, chosen.optimizer)
        part = rank_part(chunk, parameters, *knobs, widens=widens)
        is_whole = chunk.id < kept
        is_at_home = chunk.id in host_stepped or not (is_whole or chunk.id in in_parts)
        if is_at_home:
            take(in_pages(part.parameter_bytes))
            if chunk.is_trainable:
                take(in_pages(part.staging_bytes))  # the sum
                if chosen.micro_batches > 1 or widens:
                    take(in_pages(part.arrival_bytes))
        if is_on_host or is_at_home:
            own = (DType.BFLOAT16,) if chosen.optimizer is Optimizer.ADAMW_BF16 else ()
            narrow = (p for p in members if p.trainable and p.dtype.item_bytes < 4 and p.dtype not in own)
            masters = sum(4 * p.num_elements for p in narrow)
            take(masters if is_whole or not is_sharded else -(-masters // (chosen.shard_ranks or chosen.num_ranks)))
        if is_on_host:
            take(chunk.size_bytes)  # where it is filled
            level -= chunk.size_bytes
            if is_whole or chunk.id in in_parts:
                level += chunk.size_bytes if is_whole else part.parameter_bytes
    return peak


@settings(max_examples=examples(60, 7))
@given(planned_workloads() | parallel_workloads(), st.booleans())
def test_loading_is_what_its_allocations_come_to(case: PlannedWorkload, is_on_host: bool) -> None:
    schedule = compile_schedule(case.plan, case.workload, case.layout)
    found = loading_peak_bytes(schedule, case.workload.parameters, case.layout, is_on_host=is_on_host)
    assert found == loading_by_hand(case, is_on_host=is_on_host)


def test_masters_of_what_stays_on_a_device_are_there_too() -> None:
    # Two chunks of 256 that go to the device with masters of theirs.
    assert of(narrow(2), n_persist=2).loading_bytes == 0
    assert of(narrow(2), n_persist=2, kind=DeviceKind.CPU).loading_bytes == 2 * (256 + 256)


@pytest.mark.parametrize("kind", DeviceKind)
def test_the_rounding_that_applies_is_the_one_that_counts(kind: DeviceKind) -> None:
    found = of(workload(3), kind=kind)
    other = found.model_copy(update={"pinned_rule": PinnedRule.POWER_OF_TWO})
    assert found.pinned_rule is PinnedRule.PAGES
    assert found.pinned_bytes == found.pinned_requested_bytes
    assert other.pinned_bytes == found.pinned_rounded_bytes


# -- budgets ---------------------------------------------------------------------------------------------------------

GIB = 2**30


@pytest.mark.parametrize(
    ("memory_bytes", "expected_bytes"),
    [
        (10**9, 10**8),
        (8 * GIB - 1, (8 * GIB - 1) // 10),
        (8 * GIB, 2 * GIB),
        (30 * GIB, 3 * GIB),
        (64 * GIB, 4 * GIB),
        (1024 * GIB, RESERVE_BYTES),
    ],
)
def test_the_reserve_has_room_for_the_process(memory_bytes: int, expected_bytes: int) -> None:
    assert default_reserve_bytes(memory_bytes, DeviceKind.CUDA) == expected_bytes


def test_one_memory_is_shared_by_need() -> None:
    # There is room for both: the host has what any plan needs, the device the rest.
    assert shares_of_one_memory(100, most_device_bytes=60, host_needs_bytes=[0, 30]) == (70, 30)
    # There is not: the device comes first, with what any plan could use of it.
    assert shares_of_one_memory(100, most_device_bytes=80, host_needs_bytes=[0, 30]) == (80, 20)
    assert shares_of_one_memory(100, most_device_bytes=150, host_needs_bytes=[0, 30]) == (100, 0)
    # All plans offload something: without room for that, none would be left.
    assert shares_of_one_memory(100, most_device_bytes=150, host_needs_bytes=[25, 30]) == (75, 25)
    assert shares_of_one_memory(100, most_device_bytes=150, host_needs_bytes=[500]) == (1, 99)


@given(st.integers(1, 1000), st.integers(0, 2000), st.lists(st.integers(0, 2000), min_size=1))
def test_shares_never_exceed_the_memory(memory_bytes: int, most_device: int, host_needs: list[int]) -> None:
    device, host = shares_of_one_memory(memory_bytes, most_device_bytes=most_device, host_needs_bytes=host_needs)
    assert device + host == memory_bytes
    assert device >= 1
    assert host >= 0
