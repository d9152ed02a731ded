"""Weights that FSDP2 gathers in float8: bytes by hand, operations as torchao runs them, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from protwin.shared.basics.errors import PlanError, WorkloadError
from protwin.shared.catalogue.machines import machine
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.layout.layout import layout_of
from protwin.shared.methods.runtime_profile import Runtime, RuntimeProfile
from protwin.shared.observed.float8 import gathered_narrow
from protwin.shared.observed.observation import OperatorCall
from protwin.shared.schema.optimizer import Optimizer
from protwin.shared.schema.plan import ParallelMode, Plan
from protwin.shared.schema.schedule import Lane, Schedule, TaskKind
from protwin.shared.schema.training_options import TrainingOptions
from protwin.shared.schema.workload import Compiled, DType, Float8, Float8Gather, OperationClass, Parameter, Workload
from protwin.shared.verify.guaranteed_peak import guaranteed_device_peak
from protwin.shared.workloads.source import load_workload
from protwin.sim.costs.float8_gathers import Float8Gathers
from protwin.sim.costs.runtimes import RuntimeCosts
from protwin.sim.costs.task_costs import CostModel
from protwin.sim.engine.simulator import simulate
from protwin.sim.searching.request import SearchRequest
from protwin.sim.searching.search import search

_H100 = machine("h100-80gb-x8")
MACHINE = _H100.model_copy(update={"device": _H100.device.model_copy(update={"launch_overhead_s": 0.0})})
"""Its host dispatches in no time, so that bytes alone count."""
RANKS = 8
WIDTH, INNER, KEYS, NUM_BLOCKS = 2048, 8192, 512, 16
NARROW = 2 * WIDTH * WIDTH + 2 * KEYS * WIDTH + 3 * INNER * WIDTH
"""Scalars of the maps of a block of llama-3.2-1b."""
NORMS = 2 * WIDTH
FSDP2 = RuntimeProfile(Runtime.FSDP2, DType.FLOAT32)


@cache
def llama(gather: Float8Gather | None) -> Workload:
    options = TrainingOptions(compiled=Compiled.BLOCKS, float8=Float8.TENSORWISE, float8_gather=gather)
    return load_workload("llama-3.2-1b", batch_size=1, sequence_length=2048, dtype=DType.BFLOAT16, options=options)


def sharded(workload: Workload, **changes: Any) -> Plan:
    """Every block a chunk, and what is gathered for forward stays for backward."""
    chunk_bytes = 2 * (NARROW + NORMS)
    num_chunks = len(layout_of(workload, chunk_bytes).chunks)
    return Plan(
        workload_id=workload.identity,
        chunk_bytes=chunk_bytes,
        n_persist=0,
        n_shard=num_chunks,
        n_buffer=num_chunks,
        parallel=ParallelMode.SHARDED,
        num_ranks=RANKS,
    ).model_copy(update=changes)


def moved(schedule: Schedule, kind: TaskKind) -> list[int]:
    return [task.moved_bytes for task in schedule.tasks if task.kind is kind]


@pytest.mark.parametrize("gather", Float8Gather)
def test_maps_of_blocks_are_gathered_in_a_byte_and_all_else_in_two(gather: Float8Gather) -> None:
    wide, narrow = llama(None), llama(gather)
    assert narrow.identity == wide.identity, "a plan may be asked about in either way"
    schedules = [compile_schedule(sharded(workload), workload) for workload in (wide, narrow)]
    before, after = (moved(schedule, TaskKind.ALL_GATHER) for schedule in schedules)
    assert len(before) == len(after) > NUM_BLOCKS
    assert sorted(set(before) - set(after)) == [2 * (NARROW + NORMS)]
    assert sorted(set(after) - set(before)) == [NARROW + 2 * NORMS]
    # Parts and gradients stay as they are.
    for kind in (TaskKind.REDUCE_SCATTER, TaskKind.DEVICE_ADAM):
        assert moved(schedules[0], kind) == moved(schedules[1], kind)
    peaks = [guaranteed_device_peak(schedule).size_bytes for schedule in schedules]
    # At the peak, in the backward of the last block, all blocks lie there.
    assert peaks[0] - peaks[1] == NUM_BLOCKS * NARROW


class Traffic(TorchDispatchMode):
    """Bytes that operations read and write, views left out."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [one for one in tree_flatten((args, kwargs))[0] if isinstance(one, torch.Tensor)]
        found = func(*args, **(kwargs or {}))
        made = [one for one in tree_flatten(found)[0] if isinstance(one, torch.Tensor)]
        held = {one.untyped_storage().data_ptr() for one in given}
        if any(one.untyped_storage().data_ptr() not in held for one in made):
            self.bytes += sum(one.numel() * one.element_size() for one in (*given, *made))
        return found


def traffic(run: Callable[[], object]) -> int:
    with Traffic() as seen:
        run()
    return seen.bytes


@pytest.mark.parametrize("gather", Float8Gather)
@pytest.mark.parametrize("stepped", [DType.FLOAT32, DType.BFLOAT16])
def test_a_cast_moves_what_its_operations_do(gather: Float8Gather, stepped: DType) -> None:
    part, scale = torch.randn(1 << 12, 4, dtype=getattr(torch, stepped)), torch.tensor(3.0)
    largest = torch.finfo(torch.float8_e4m3fn).max

    def cast() -> torch.Tensor:
        scaled = part.to(torch.float32) * scale
        return scaled.clamp(min=-largest, max=largest).to(torch.float8_e4m3fn)

    counted = traffic(cast)
    if gather is Float8Gather.DYNAMIC:
        counted += traffic(lambda: torch.max(torch.abs(part)))
    per_element = Float8Gathers(gather, 7).cast_bytes(stepped)
    assert counted == pytest.approx(per_element * part.numel(), rel=1e-3)  # beside scalars


@pytest.mark.parametrize("optimizer", [Optimizer.ADAMW, Optimizer.ADAMW_BF16])
@pytest.mark.parametrize("scales", Float8Gather)
def test_casts_scales_and_copies_are_counted_by_hand(scales: Float8Gather, optimizer: Optimizer) -> None:
    wide, narrow = llama(None), llama(scales)
    plan = sharded(wide, optimizer=optimizer)
    of = []
    for workload in (wide, narrow):
        costs = RuntimeCosts.like(CostModel.of(workload, MACHINE, num_ranks=RANKS), FSDP2, workload)
        schedule = compile_schedule(plan, workload)
        of.append((schedule, costs, costs.durations_s(schedule)))
    (_, _, before), (schedule, costs, after) = of
    rate = 0.85 * MACHINE.device.memory_bandwidth_bytes_per_s  # of element-wise kernels
    stepped = 2 if optimizer is Optimizer.ADAMW_BF16 else 4
    gather = next(task for task in schedule.tasks if task.kind is TaskKind.ALL_GATHER)

    def collective_s(kind: TaskKind, moved_bytes: int) -> float:
        return costs.task_s(replace(gather, kind=kind, moved_bytes=moved_bytes))

    saved = collective_s(TaskKind.ALL_GATHER, 2 * (NARROW + NORMS))
    saved -= collective_s(TaskKind.ALL_GATHER, NARROW + 2 * NORMS)
    cast = {4: 21, 2: 27}[stepped] + (3 * stepped if scales is Float8Gather.DYNAMIC else 0)
    for task, one, other in zip(schedule.tasks, before, after, strict=True):
        if task.kind is TaskKind.ALL_GATHER and task.moved_bytes == NARROW + 2 * NORMS:
            more = (cast - 6) * NARROW / RANKS / rate  # a cast to bfloat16 reads four and writes two
            more += 7 * collective_s(TaskKind.ALL_REDUCE, 4) if scales is Float8Gather.DYNAMIC else 0.0
            assert other - one == pytest.approx(more - saved, rel=1e-6)
        elif task.kind is TaskKind.DEVICE_ADAM and scales is Float8Gather.PRECOMPUTED:
            scan_s = stepped * NUM_BLOCKS * NARROW / RANKS / rate
            assert other - one == pytest.approx(
                scan_s + collective_s(TaskKind.ALL_REDUCE, 4 * 7 * NUM_BLOCKS), rel=1e-6
            )
        elif task.lane is not Lane.COMPUTE or not isinstance(task.section, int):
            assert other == one
        else:
            assert other < one, "casts are gone, and less is copied out"


def test_backward_turns_weights_that_came_narrow() -> None:
    """What is left of scaling and casts: five reads and writes of a weight go from forward, one byte from backward."""
    wide, narrow = (llama(gather).profiles[0] for gather in (None, Float8Gather.DYNAMIC))

    def cast_bytes(phase: Any) -> int:
        return sum(op.bytes_moved * op.count for op in phase.operations if op.name.startswith("float8"))

    assert cast_bytes(wide.forward) - cast_bytes(narrow.forward) == 5 * NARROW
    assert cast_bytes(wide.backward) - cast_bytes(narrow.backward) == 1 * NARROW
    assert [op for op in wide.forward.operations if not op.name.startswith("float8")] == [
        op for op in narrow.forward.operations if not op.name.startswith("float8")
    ]


def test_gathers_in_float8_spare_memory_and_bytes_but_not_always_time() -> None:
    records = [simulate(sharded(llama(one)), llama(one), MACHINE, runtime=FSDP2) for one in (None, *Float8Gather)]
    plain, ahead, alone = records
    assert ahead.guaranteed_peak_device_bytes == alone.guaranteed_peak_device_bytes < plain.guaranteed_peak_device_bytes
    assert "gathered in float8 with precomputed scales" in " ".join(ahead.emulated)
    assert ahead.iteration_s < alone.iteration_s


@pytest.mark.parametrize(
    ("changes", "profile", "words"),
    [
        pytest.param({}, RuntimeProfile(), r"--as", id="ours"),
        pytest.param({}, RuntimeProfile(Runtime.FSDP), r"FSDP2 alone", id="flat parameters"),
        pytest.param(
            {"parallel": ParallelMode.SINGLE, "num_ranks": 1, "n_shard": 0, "n_persist": 18, "n_buffer": 0},
            FSDP2,
            r"one rank, which has no collectives",
            id="one rank",
        ),
        pytest.param({"n_persist": 2, "n_shard": 16}, FSDP2, r"chunk 1 .* is persistent", id="persistent"),
        pytest.param({"n_shard": 0}, FSDP2, r"chunk 1 .* is offloaded", id="offloaded"),
    ],
)
def test_plans_that_gather_nothing_so_are_refused(changes: dict[str, Any], profile: RuntimeProfile, words: str) -> None:
    workload = llama(Float8Gather.PRECOMPUTED)
    with pytest.raises(PlanError, match=words):
        simulate(sharded(workload, **changes), workload, MACHINE, runtime=profile)


def test_searches_and_other_scales_are_refused() -> None:
    with pytest.raises(PlanError, match=r"ask about one plan \(protwin simulate --as fsdp2\)"):
        search(SearchRequest(workload=llama(Float8Gather.PRECOMPUTED), hardware=MACHINE))
    for scaling, words in ((Float8.ROWWISE, "scaled rowwise"), (Float8.DELAYED, "delayed"), (None, "nothing multipl")):
        options = TrainingOptions(compiled=Compiled.BLOCKS, float8=scaling, float8_gather=Float8Gather.DYNAMIC)
        with pytest.raises(WorkloadError, match=words):
            load_workload("llama-3.2-1b", batch_size=1, sequence_length=2048, options=options)


def test_weights_are_told_by_their_sizes_or_not_at_all() -> None:
    def product(outputs: int, inputs: int) -> OperatorCall:
        kind = OperationClass.MATMUL
        return OperatorCall("mm", kind, DType.FLOAT8_E4M3FN, 0, (), (0,), (1, 64, outputs, inputs))

    def weight(name: str, *shape: int, block: int | None = 0) -> Parameter:
        return Parameter(name=name, shape=shape, dtype=DType.BFLOAT16, block=block)

    given = (weight("w", 32, 16), weight("b", 32), weight("table", 32, 16, block=None), weight("u", 16, 48))
    found = gathered_narrow(given, [0], {0: [product(32, 16)]})
    assert [parameter.name for parameter in found if parameter.gathered_dtype is not None] == ["w"]
    with pytest.raises(WorkloadError, match=r"weights of block 0 .* Leave --float8-gather out"):
        gathered_narrow((*given, weight("v", 16, 32)), [0], {0: [product(32, 16)]})
