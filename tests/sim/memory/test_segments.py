"""Segments of other systems' processes: expandable ones, and those of a stream that gathers."""

from __future__ import annotations

import random
from typing import Any

import pytest

from protwin.shared.catalogue.machines import machine, override_hardware
from protwin.shared.layout.layout import layout_of
from protwin.shared.methods.runtime_profile import OUR_RUNTIME, Runtime, RuntimeProfile
from protwin.shared.schema.plan import ParallelMode, Plan
from protwin.shared.schema.record import Record
from protwin.shared.schema.workload import Workload
from protwin.shared.workloads.source import load_workload
from protwin.sim.engine.simulator import simulate
from protwin.sim.memory.libraries import outside_allocator_bytes
from protwin.sim.memory.reserved import AS_USUAL, Segments, segment_limit_bytes
from protwin.sim.memory.segments import segments_of

EXPANDABLE = RuntimeProfile(expandable_segments=True)
FSDP2 = RuntimeProfile(Runtime.FSDP2)


def workload(tokens: int = 512) -> Workload:
    return load_workload("smollm2-135m", batch_size=1, sequence_length=tokens, dtype="bfloat16")


def sharded(given: Workload, num_ranks: int = 8, **more: Any) -> Plan:
    chunk_bytes = 30 << 20
    num_chunks = len(layout_of(given, chunk_bytes).chunks)
    return Plan(
        workload_id=given.identity,
        chunk_bytes=chunk_bytes,
        n_persist=0,
        n_shard=num_chunks,
        n_buffer=num_chunks,
        parallel=ParallelMode.SHARDED,
        num_ranks=num_ranks,
        **more,
    )


def reserved(record: Record) -> tuple[int, int, int]:
    found = record.device_reserved
    assert found is not None
    return found.at_least_bytes, found.expected_bytes, found.at_most_bytes


@pytest.mark.parametrize("seed", range(6))
def test_a_gathering_stream_holds_the_largest_two_groups_in_a_row_and_the_parts_that_it_casts(seed: int) -> None:
    """The oracle walks over the gathers of an iteration and holds each place until the next one is filled."""
    chance = random.Random(seed)
    given = workload()
    sizes = [chance.randrange(1, 10**6) for _ in range(given.num_blocks)]
    parameters = tuple(
        parameter.model_copy(update={"shape": (sizes[parameter.block],)}) if parameter.block is not None else parameter
        for parameter in given.parameters
        if parameter.block is None or parameter.name.endswith("q_proj.weight")
    )
    drawn = given.model_copy(update={"parameters": parameters})
    num_ranks, shard_ranks = chance.choice(((8, None), (16, 8), (2, None)))
    plan = sharded(given, num_ranks, shard_ranks=shard_ranks)
    outside = sum(parameter.size_bytes for parameter in given.parameters if parameter.block is None)
    of_blocks = [2 * size for size in sizes]
    held, most, previous = 0, 0, 0
    for size in (outside, *of_blocks, *reversed(of_blocks)):
        held = previous + size
        most = max(most, held)
        previous = size
    cast = max(outside, *of_blocks) // (shard_ranks or num_ranks)
    assert segments_of(FSDP2, plan, drawn) == Segments(gathering_bytes=most + cast, parts_apart=True)


def test_who_gathers_on_the_stream_of_compute_holds_nothing_more() -> None:
    given = workload()
    plan = sharded(given)
    for profile in (OUR_RUNTIME, RuntimeProfile(Runtime.DDP)):
        assert segments_of(profile, plan, given) == AS_USUAL
    assert segments_of(RuntimeProfile(Runtime.DEEPSPEED_ZERO3), plan, given) == Segments(num_together=10**9)
    assert segments_of(EXPANDABLE, plan, given) == Segments(are_expandable=True)


@pytest.mark.parametrize("seed", range(6))
def test_a_reducing_stream_holds_the_part_that_further_micro_batches_add(seed: int) -> None:
    """The oracle walks over micro-batches: the first part stays for the step, and is in the schedule already."""
    chance = random.Random(seed)
    given = workload()
    is_trained = [chance.random() < 0.5 for _ in given.parameters]
    parameters = tuple(
        parameter.model_copy(update={"trainable": trained})
        for parameter, trained in zip(given.parameters, is_trained, strict=True)
    )
    drawn = given.model_copy(update={"parameters": parameters})
    num_ranks, shard_ranks = chance.choice(((8, None), (16, 8), (2, None)))
    overlap = RuntimeProfile(Runtime.DEEPSPEED_ZERO2, has_two_buckets=True)
    part = sum(p.num_elements * 2 for p in parameters if p.trainable)
    part = -(-part // (shard_ranks or num_ranks))
    for micro_batches in (1, 2, 5):
        plan = sharded(given, num_ranks, shard_ranks=shard_ranks, micro_batches=micro_batches)
        held, kept, most = 0, 0, 0
        for _ in range(micro_batches):
            held += part
            most = max(most, held)
            if kept:
                held -= part
            kept = part
        assert segments_of(overlap, plan, drawn).own_bytes == most - kept


def test_gradients_that_are_reduced_on_the_stream_of_compute_take_none_of_their_own() -> None:
    given = workload()
    plan = sharded(given, micro_batches=4)
    for profile in (
        RuntimeProfile(Runtime.DEEPSPEED_ZERO2),
        RuntimeProfile(Runtime.DEEPSPEED_ZERO1, has_two_buckets=True),
    ):
        assert segments_of(profile, plan, given).own_bytes == 0


def test_they_are_part_of_what_is_reserved_and_of_nothing_else() -> None:
    """Beside FSDP, whose parts of gradients come and go likewise, and which gathers on the stream of compute."""
    given, hardware = workload(2048), machine("h100-80gb-x8")
    plan = sharded(given)
    own = segments_of(FSDP2, plan, given).gathering_bytes
    with_stream, plain = (
        simulate(plan, given, hardware, runtime=profile) for profile in (FSDP2, RuntimeProfile(Runtime.FSDP))
    )
    assert own > 50 << 20
    assert [a - b for a, b in zip(reserved(with_stream), reserved(plain), strict=True)] == [own] * 3
    assert with_stream.guaranteed_peak_device_bytes == plain.guaranteed_peak_device_bytes


def test_what_lies_beside_the_allocator_is_left_to_no_segment() -> None:
    """Collectives' buffers, the margin and what is never the allocator's; together they are the device."""
    device = machine("h100-80gb-x8").device
    outside = outside_allocator_bytes(device)
    for beside_bytes, margin_frac in ((0, 0.0), (3 << 30, 0.0), (3 << 30, 0.25)):
        left = segment_limit_bytes(device, beside_bytes=beside_bytes, margin_frac=margin_frac)
        assert left is not None
        assert left + beside_bytes + outside + margin_frac * device.memory_bytes == device.memory_bytes


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_parts_of_gradients_are_reserved_whether_they_are_there_or_not(micro_batches: int) -> None:
    """By the stream that reduces: about as much as where they lie for good, though the allocated peak is lower.

    About: parts that lie for good share segments of 20 MiB with other tensors.
    """
    given, hardware = workload(2048), machine("h100-80gb-x8")
    plan = sharded(given, num_ranks=2, micro_batches=micro_batches)
    parts = sum(parameter.size_bytes for parameter in given.parameters if parameter.trainable) / plan.num_ranks
    records = [simulate(plan, given, hardware, runtime=RuntimeProfile(of)) for of in (Runtime.FSDP, Runtime.OURS)]
    going, staying = (record.guaranteed_peak_device_bytes for record in records)
    assert going < staying if micro_batches == 1 else going == staying
    for by_going, by_staying in zip(*map(reserved, records), strict=True):
        assert abs(by_going - by_staying) < 0.4 * parts


def test_expandable_segments_hold_what_is_said_to_fit_with_them() -> None:
    """Where cached segments do not fit, the same record says what expandable ones come to; with them it is expected."""
    given, hardware = workload(1024), machine("h100-80gb-x8")
    plan = sharded(given)
    plain, expandable = simulate(plan, given, hardware), simulate(plan, given, hardware, runtime=EXPANDABLE)
    least, expected, most = reserved(expandable)
    assert plain.guaranteed_peak_device_bytes <= expected < reserved(plain)[1]
    assert least <= expected <= most
    others = {"device_reserved", "question"}  # the question names the profile
    assert expandable.model_dump(exclude=others) == plain.model_dump(exclude=others)
    found = plain.device_reserved
    assert found is not None
    small = override_hardware(
        hardware,
        {
            "device.memory_bytes": str(expected + found.outside_bytes + (8 << 20)),
            "device.reserved_bytes": str(hardware.device.reserved_bytes),
        },
    )
    told = simulate(plan, given, small).device_reserved
    with_them = simulate(plan, given, small, runtime=EXPANDABLE).device_reserved
    assert told is not None
    assert with_them is not None
    assert (told.expandable_bytes, told.num_retries == 0) == (expected, False)
    assert (with_them.expected_bytes, with_them.num_retries, with_them.expandable_bytes) == (expected, 0, None)
