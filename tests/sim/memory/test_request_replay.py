"""Schedules replayed through the allocator: levels against the guaranteed peak, sequences by hand, the account."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protwin.shared.catalogue.machines import machine as catalogue_machine
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.layout.layout import build_layout
from protwin.shared.schema.hardware import Device, DeviceKind
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.schedule import Content, Memory, Schedule
from protwin.shared.schema.workload import Workload
from protwin.shared.verify.guaranteed_peak import guaranteed_device_peak
from protwin.shared.workloads.untraced import resolve_family
from protwin.sim.memory.allocator import AllocatorFullError, CachingAllocator
from protwin.sim.memory.libraries import matrix_workspaces, nccl_bytes, outside_allocator_bytes
from protwin.sim.memory.request_replay import RequestLog, replay
from protwin.sim.memory.requests_of_schedule import Act, Step, allocation_program
from protwin.sim.memory.reserved import device_reserved
from protwin.sim.memory.static_tensors import static_tensors
from protwin.sim.memory.within_task import Inside
from protwin.sim.searching.request import Effort
from protwin.sim.searching.search import search
from tests.proof_size import examples
from tests.sim.fastest import fastest_request
from tests.sim.hand_made import machine, phase, plan, workload
from tests.strategies.plans import PlannedWorkload, planned_workloads

MIB = 2**20


class Watched(CachingAllocator):
    """Notes the highest level of what is asked for, at the moments that the replay tells."""

    def __init__(self) -> None:
        super().__init__()
        self.levels: dict[int, list[int]] = {}

    def note(self, iteration: int) -> None:
        assert self.requested_bytes <= self.allocated_bytes <= self.reserved_bytes
        self.levels.setdefault(iteration, []).append(self.requested_bytes)


def layout_of(model: Workload, chosen: Plan):  # type: ignore[no-untyped-def]
    return build_layout(model.parameters, num_blocks=model.num_blocks, chunk_bytes=chosen.chunk_bytes)


def replayed(schedule: Schedule, model: Workload, layout, inside: Inside = Inside.BY_SIZE) -> Watched:  # type: ignore[no-untyped-def]
    allocator = Watched()
    static = static_tensors(schedule, model.parameters, layout)
    log = RequestLog(allocation_program(schedule), static, inside=inside)
    replay(log, allocator, on_change=allocator.note)
    return allocator


@given(planned_workloads(), st.sampled_from(Inside))
def test_what_is_asked_for_is_what_no_timing_exceeds(drawn: PlannedWorkload, inside: Inside) -> None:
    # Memory comes as early and goes as late as in any timing: the highest level is the guaranteed peak to the byte.
    # What blocks swap may wait on its way out while there is room already for its way back, which never happens at
    # once; the guarantee counts it once.
    schedule = compile_schedule(drawn.plan, drawn.workload, drawn.layout)
    allocator = replayed(schedule, drawn.workload, drawn.layout, inside)
    highest_bytes = max(allocator.levels[max(allocator.levels)])
    guaranteed_bytes = guaranteed_device_peak(schedule).size_bytes
    swapped_bytes = sum(
        b.size_bytes for b in schedule.buffers if b.content is Content.SWAPPED and b.memory is Memory.PINNED_HOST
    )
    assert guaranteed_bytes <= highest_bytes <= guaranteed_bytes + swapped_bytes * drawn.plan.micro_batches


@settings(max_examples=examples(40, 6))
@given(planned_workloads())
def test_tensors_made_once_are_the_static_buffers(drawn: PlannedWorkload) -> None:
    schedule = compile_schedule(drawn.plan, drawn.workload, drawn.layout)
    static = static_tensors(schedule, drawn.workload.parameters, drawn.layout)
    kept = sum(tensor.size_bytes for tensor in static.set_up if tensor.stays) + sum(static.first_step)
    assert kept == schedule.static_bytes(Memory.DEVICE)
    # What stays on the device is filled where it stays.
    num_kept = drawn.plan.n_persist + drawn.plan.n_host_stepped
    at_home = {b.chunk for b in schedule.buffers if b.memory is Memory.PINNED_HOST and b.chunk is not None}
    offloaded = {chunk for chunk in at_home if chunk >= num_kept}
    assert sum(not tensor.stays for tensor in static.set_up) == len(
        {c for c in offloaded if drawn.layout.chunks[c].size_bytes}
    )


@settings(max_examples=examples(40, 6))
@given(planned_workloads())
def test_the_replay_is_settled_and_repeats(drawn: PlannedWorkload) -> None:
    schedule = compile_schedule(drawn.plan, drawn.workload, drawn.layout)
    static = static_tensors(schedule, drawn.workload.parameters, drawn.layout)
    program = allocation_program(schedule)
    one, two = (replay(RequestLog(program, static), CachingAllocator()) for _ in range(2))
    assert one == two
    assert one.is_settled
    more = replay(RequestLog(program, static), CachingAllocator(), max_iterations=one.num_iterations)
    assert more == one


# -- by hand ---------------------------------------------------------------------------------------------------------


def test_the_order_of_memory_by_hand() -> None:
    # Two offloaded chunks, a buffer for each, both blocks kept; one block ahead.  Neither is needed anew in backward.
    model = workload()
    schedule = compile_schedule(plan(model), model)
    program = allocation_program(schedule)
    names = {b.id: f"{b.content} {b.chunk if b.chunk is not None else b.section}" for b in schedule.buffers}
    found = [
        (step.act.name, [names[b] for b in step.buffers], step.iterations_later)
        for step in program.steps
        if step.act is not Act.BEGIN and step.act is not Act.LEVEL
    ]
    # Gradients have left when the step two after their own begins: the prologue's backward, and its next forward.  Room
    # for chunk 0 is made when the step two before its own ends, the prologue's backward; for chunk 1 with its forward.
    assert found == [
        ("FREE", ["gradients 0"], -1),
        ("END", ["output prologue"], 0),
        ("MAKE", ["parameters 1"], 0),
        ("END", ["activations 0", "output 0"], 0),
        ("END", ["activations 1", "output 1"], 0),
        ("END", ["activations epilogue"], 0),
        ("END", ["incoming_gradient epilogue"], 0),
        ("END", ["gradients 1", "incoming_gradient 1"], 0),
        ("END", ["gradients 0"], 0),
        ("FREE", ["gradients 1"], 0),
        ("END", [], 0),
        ("MAKE", ["parameters 0"], 1),
        ("STEP", [], 0),
        ("END", [], 0),
    ]


def large_workload(num_blocks: int = 2) -> Workload:
    """Blocks whose chunk has 30 MiB, and which save 50 MiB and hand on 4."""
    model = workload(num_blocks)
    gradient = 30 * MIB
    profile = model.profiles[0].model_copy(
        update={
            "output_bytes": 4 * MIB,
            "forward": phase(1.0, 54 * MIB, 60 * MIB),
            "backward": phase(2.0, gradient - 54 * MIB, 20 * MIB),
            "checkpoint_forward": phase(1.0, 4 * MIB, 60 * MIB),
            "recompute": phase(1.0, 50 * MIB, 56 * MIB),
            "checkpoint_backward": phase(2.0, gradient - 54 * MIB, 20 * MIB),
        }
    )
    parameters = tuple(p.model_copy(update={"shape": (30 * MIB // 4,)}) for p in model.parameters)
    return model.model_copy(
        update={
            "profiles": (profile,),
            "parameters": parameters,
            "prologue_forward": phase(1.0, 4 * MIB),
            "epilogue_forward": phase(1.0, 2 * MIB),
            "epilogue_backward": phase(1.0, -2 * MIB, 3 * MIB),
            "prologue_backward": phase(1.0, -4 * MIB),
        }
    )


def test_reserved_by_hand() -> None:
    # Both chunks persistent, everything kept.  Segments in MiB, what is in use before the bar:
    #   set-up                30 | 0, 30 | 0
    #   forward prologue      an output of 4 opens a segment of 20                                     4 | 16
    #   forward 0             60 are nowhere free; of them 54 stay when the level falls.  The tensor of 54 is more than
    #                         the 50 of activations: 50 and an output of 4 are made anew of the 60    54 | 6
    #   forward 1             another 60, left as 50; its output of 4 goes into the 6 beside block 0's
    #   epilogue              2 go where 2 are left, 3 into the 10 behind block 1's activations
    #   backward 1            20 are nowhere free in one piece: a segment of 20.  It leaves a gradient of 30 where its
    #                         activations were                                                        30 | 30
    #   backward 0            20 are there, and 30 for its gradient                                   30, 30 | 0
    #   first device Adam     four moments of 30: two of them in the 60 of block 0, two in segments of their own; two
    #                         counts of steps in a segment of 2
    # Then one of the two segments of 60 has moments in it for good: forward 1 of the second iteration needs a third.
    model = large_workload()
    chosen = plan(model, n_persist=2, n_buffer=0).model_copy(update={"chunk_bytes": 30 * MIB})
    schedule = compile_schedule(chosen, model)
    layout = layout_of(model, chosen)
    program = allocation_program(schedule)
    ends = [number for number, step in enumerate(program.steps) if step.act is Act.END]
    allocator = CachingAllocator()
    reserved: dict[int, list[int]] = {}
    static = static_tensors(schedule, model.parameters, layout)
    result = replay(
        RequestLog(program, static),
        allocator,
        on_change=lambda iteration: reserved.setdefault(iteration, []).append(allocator.reserved_bytes // MIB),
    )
    assert reserved[-1] == [60]
    assert [reserved[0][number] for number in ends] == [80, 140, 200, 200, 200, 220, 220, 220, 282]
    assert [reserved[1][number] for number in ends] == [282, 282, 342, 342, 342, 342, 342, 342, 342]
    assert (result.peak_reserved_bytes, result.num_iterations, result.is_settled) == (342 * MIB, 3, True)


def test_gradients_that_stay_a_task_longer_are_another_level() -> None:
    # The wrong variant: what a copy has read goes when the next compute task ends, not before it begins.
    model = large_workload(4)
    chosen = plan(model, n_checkpoint=4).model_copy(update={"chunk_bytes": 30 * MIB})
    schedule = compile_schedule(chosen, model)
    program = allocation_program(schedule)
    steps: list[Step] = []
    waiting: list[Step] = []
    for step in program.steps:
        if step.act is Act.FREE:
            waiting.append(step)
            continue
        steps.append(step)
        if step.act is Act.END:
            steps += waiting
            waiting = []
    assert steps != list(program.steps)
    static = static_tensors(schedule, model.parameters, layout_of(model, chosen))
    highest = []
    for one in (program, replace(program, steps=tuple(steps))):
        allocator = Watched()
        replay(RequestLog(one, static), allocator, on_change=allocator.note)
        highest.append(max(allocator.levels[max(allocator.levels)]))
    guaranteed_bytes = guaranteed_device_peak(schedule).size_bytes
    assert highest[0] == guaranteed_bytes
    assert highest[1] > guaranteed_bytes


def test_offloaded_chunks_leave_room_in_the_cache_when_they_have_been_filled() -> None:
    model = large_workload()
    chosen = plan(model, n_checkpoint=2).model_copy(update={"chunk_bytes": 30 * MIB})
    schedule = compile_schedule(chosen, model)
    allocator = CachingAllocator()
    static = static_tensors(schedule, model.parameters, layout_of(model, chosen))
    assert [tensor.stays for tensor in static.set_up] == [False, False]
    replay(RequestLog(allocation_program(schedule), static), allocator, max_iterations=0)
    # Chunk 0 was filled and went, chunk 1 used the same segment; then room is made for the first gather.
    assert allocator.reserved_bytes == 30 * MIB
    assert allocator.allocated_bytes == 30 * MIB


def test_what_a_device_cannot_hold_is_said() -> None:
    model = large_workload()
    chosen = plan(model, n_persist=2, n_buffer=0).model_copy(update={"chunk_bytes": 30 * MIB})
    schedule, layout = compile_schedule(chosen, model), layout_of(model, chosen)

    def account(memory_bytes: int):  # type: ignore[no-untyped-def]
        device = machine().device.model_copy(update={"memory_bytes": memory_bytes, "name": "rtx-3090"})
        return device_reserved(schedule, model, layout, device)

    ample = account(2**40)
    assert ample.num_retries == 0
    assert ample.fits
    assert ample.outside_bytes == 256 * MIB  # nothing is said of reserved memory: a context
    assert ample.workspace_bytes == sum(matrix_workspaces(catalogue_machine("rtx-3090").device))
    assert ample.at_least_bytes >= guaranteed_device_peak(schedule).size_bytes + ample.workspace_bytes
    tight = account(ample.outside_bytes + ample.expected_bytes)
    assert tight.num_retries == 0
    tighter = account(ample.outside_bytes + ample.expected_bytes - 2 * MIB)
    assert tighter.expected_bytes == ample.expected_bytes
    assert tighter.num_retries is None or tighter.num_retries > 0
    assert tight.expandable_bytes is None
    assert tighter.expandable_bytes is not None
    assert ample.at_least_bytes <= tighter.expandable_bytes + 2 * MIB
    assert tight.expandable_retries is None
    assert tighter.expandable_retries == 0 or tighter.expandable_bytes > tighter.limit_bytes
    hopeless = account(ample.outside_bytes + ample.at_least_bytes - 2 * MIB)
    assert hopeless.num_retries is None
    assert not hopeless.fits
    half = account(ample.outside_bytes + ample.at_least_bytes // 2)
    assert half.expandable_retries is None
    assert not half.needs_expandable


def test_a_plan_that_fills_its_device_needs_expandable_segments() -> None:
    """Llama 3 8B on a card of 24 GB: without a limit more than there is, within it pages go back in time.

    A wrong reading of the former, as the least that expandable segments need, would call the plan hopeless.
    """
    family = resolve_family("llama-3-8b")
    assert family is not None
    found = search(
        fastest_request(
            workload=family.at(batch_size=1, sequence_length=2048),
            hardware=catalogue_machine("rtx-4090"),
            effort=Effort(max_replays=400),
        )
    )
    reserved = found.prediction.device_reserved
    assert reserved is not None
    assert reserved.expandable_bytes is not None
    assert reserved.expandable_bytes > reserved.limit_bytes
    assert reserved.expandable_retries
    assert not reserved.fits
    assert reserved.needs_expandable


def test_within_the_limit_nothing_is_reserved_beyond_it() -> None:
    model = large_workload()
    chosen = plan(model, n_persist=2, n_buffer=0).model_copy(update={"chunk_bytes": 30 * MIB})
    schedule = compile_schedule(chosen, model)
    static = static_tensors(schedule, model.parameters, layout_of(model, chosen))
    allocator = CachingAllocator(limit_bytes=100 * MIB)
    with pytest.raises(AllocatorFullError, match="expandable_segments:True"):
        replay(RequestLog(allocation_program(schedule), static), allocator)
    assert allocator.reserved_bytes <= 100 * MIB


@settings(max_examples=examples(40, 6))
@given(planned_workloads())
def test_the_account_ascends_and_a_cpu_has_none(drawn: PlannedWorkload) -> None:
    schedule = compile_schedule(drawn.plan, drawn.workload, drawn.layout)
    device = catalogue_machine("rtx-4090").device
    found = device_reserved(schedule, drawn.workload, drawn.layout, device)
    assert found is not None
    peak_bytes = guaranteed_device_peak(schedule).size_bytes
    assert peak_bytes + found.workspace_bytes <= found.at_least_bytes <= found.expected_bytes <= found.at_most_bytes
    assert found.limit_bytes + found.outside_bytes == device.memory_bytes
    static = static_tensors(schedule, drawn.workload.parameters, drawn.layout)
    log = RequestLog(allocation_program(schedule), static, workspaces=matrix_workspaces(device))
    grown = replay(log, CachingAllocator(expandable_segments=True))
    assert grown.peak_reserved_bytes >= peak_bytes + found.workspace_bytes
    cpu = device.model_copy(update={"kind": DeviceKind.CPU})
    assert device_reserved(schedule, drawn.workload, drawn.layout, cpu) is None


# -- what is counted where -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "workspace_mib"),
    [
        ("rtx-3090", 2 * (8.125 + 1)),
        ("a100-80gb", 2 * (8.125 + 1)),
        ("v100-32gb", 2 * (8.125 + 1)),
        ("h100-80gb", 2 * (32 + 1)),
        ("gh200-96gb", 2 * (32 + 1)),
        ("b200-180gb", 2 * (8.125 + 1)),
        ("mi250x-64gb", 2 * (32 + 76)),
        ("mi300x-192gb", 2 * (128 + 76)),
    ],
)
def test_workspaces_of_matrix_products(name: str, workspace_mib: float) -> None:
    device = catalogue_machine(name).device
    assert sum(matrix_workspaces(device)) == workspace_mib * MIB


@pytest.mark.parametrize("name", ["NVIDIA H100 80GB HBM3", "NVIDIA GH200 480GB", "NVIDIA H200"])
def test_drivers_names_are_known_too(name: str) -> None:
    device = catalogue_machine("h100-80gb").device.model_copy(update={"name": name})
    assert sum(matrix_workspaces(device)) == 66 * MIB


def test_buffers_of_collectives() -> None:
    # 4 MiB, 0.5 MiB and 4.6875 MiB for each of three protocols: 10 MiB in pages of 2 MiB, as issue 1685 of NCCL shows.
    assert nccl_bytes(num_channels=1, num_connections=1) == 10_485_760
    assert nccl_bytes(num_channels=32) == 640 * MIB


def device_with(reserved_bytes: int, *, memory_bytes: int = 2**34) -> Device:
    return machine().device.model_copy(update={"memory_bytes": memory_bytes, "reserved_bytes": reserved_bytes})


def test_nothing_counts_twice() -> None:
    # A catalogue's figure has the context and 256 MiB for what the model of the allocator computes itself.
    assert outside_allocator_bytes(device_with(1024 * MIB)) == 768 * MIB
    assert outside_allocator_bytes(device_with(100 * MIB)) == 0
    assert outside_allocator_bytes(device_with(0)) == 616 * MIB
    assert outside_allocator_bytes(device_with(0, memory_bytes=1000)) == 999
