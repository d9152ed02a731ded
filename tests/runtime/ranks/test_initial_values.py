"""Ranks begin with the same weights wherever these come from, and hold no more than their parts and one chunk.

Every rank may have a model of its own, rank 0 alone, or none: then each reads its parts of files.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from protwin.runtime import CpuDevice, carry_out, training_of
from protwin.runtime.chunks.chunk import DeviceChunk
from protwin.runtime.chunks.model_optimizers import ModelOptimizers
from protwin.runtime.chunks.saved_weights import SavedWeights
from protwin.runtime.chunks.sharded_chunk import ShardedChunk
from protwin.runtime.lanes.transfer_lanes import TransferLanes
from protwin.runtime.ranks.placing import Rank0Values
from protwin.shared import FileError, RanksError
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.layout.layout import build_layout
from protwin.shared.schema.plan import ParallelMode, Plan
from protwin.shared.schema.schedule import Memory
from tests.proof_size import share, some_quick
from tests.runtime.models import Case, differences, snapshot
from tests.runtime.ranks.beside_ddp import all_cases, in_default_group, reference, run
from tests.runtime.ranks.processes import Ranks, without_a_word
from tests.runtime.saved_models import HostPeak, on_meta, save
from tests.runtime.watchdog import lanes_alive

NUM_BATCHES = 12
CHUNK_BYTES = 9_000
NAMES = (
    "gpt2 with dropout, tied",
    "llama, frozen prologue and blocks",
    "hand-written, partly narrow",
    "hand-written, batch statistics",
)
MODES = {"ddp": 1.0, "replicated": 0.3, "sharded": 0.0, "sharded on devices": 0.3}
"""The part of the chunks that stay whole, and, sharded, that are sharded over the devices."""


def plan_of(name: str, mode: str, **knobs: Any) -> Plan:
    workload = all_cases(NUM_BATCHES)[name].workload
    layout = build_layout(workload.parameters, num_blocks=workload.num_blocks, chunk_bytes=CHUNK_BYTES)
    n_persist = int(MODES[mode] * len(layout.chunks))
    is_sharded = mode.startswith("sharded")
    return Plan(
        workload_id=workload.identity,
        chunk_bytes=CHUNK_BYTES,
        n_persist=n_persist,
        n_shard=n_persist if is_sharded else 0,
        n_buffer=layout.min_buffers(n_persist) + 1,
        parallel=ParallelMode(mode.split()[0]),
        **({"num_ranks": 2} | knobs),
    )


def spoiled(model: nn.Module) -> nn.Module:
    """Every parameter and every buffer has other values."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.copy_(tensor + 1)
    return model


def without_memory(model: nn.Module) -> nn.Module:
    """Buffers included, as within ``torch.device("meta")``."""
    return on_meta(model).to("meta")


def model_of(case: Case, rank: int, kind: str) -> nn.Module:
    model = case.build()
    if kind == "own":
        return model if rank == 0 else spoiled(model)
    if kind == "rank 0":
        return model if rank == 0 else without_memory(model)
    return on_meta(model)


@in_default_group
def trained(rank: int, name: str, plan: Plan, kind: str, folder: str) -> tuple[bool, list[str], set[str]]:
    """Whether losses are DDP's, which weights are not, and where parameters are afterwards."""
    case = all_cases(NUM_BATCHES)[name]
    expected = reference(name, rank, plan, NUM_BATCHES)
    model = model_of(case, rank, kind)
    options: dict[str, Any] = {"weights": folder} if kind == "files" else {}
    _, losses = run(case, model, plan, rank, CpuDevice(), **options)
    places = {parameter.device.type for parameter in model.parameters()}
    return losses == expected.losses, [] if "meta" in places else differences(model, expected.weights), places


KINDS = (
    *((kind, name) for kind in ("own", "rank 0") for name in (NAMES[0], NAMES[3])),
    *(("files", name) for name in NAMES),
)


@some_quick(("kind", "name"), KINDS, quick=3)
def test_training_is_that_of_models_which_were_equal_before(
    kind: str, name: str, two_ranks: Ranks, tmp_path: Path
) -> None:
    """In every mode, bit for bit.  What rank 1 had a part of and no memory for is on rank 0 alone in the end."""
    save(all_cases(NUM_BATCHES)[name].build(), tmp_path)
    # Models of one kind take turns, so that each kind is tried in every mode.
    first = KINDS.index((kind, name)) % 2
    for mode in share([*MODES][first:] + [*MODES][:first], 2):
        found = two_ranks.run(trained, name, plan_of(name, mode), kind, str(tmp_path))
        assert [(same_losses, different) for same_losses, different, _ in found] == [(True, [])] * 2, mode
        has_parts = mode.startswith("sharded") and kind != "own"
        assert found[0][2] == {"cpu"}
        assert ("meta" in found[1][2]) == has_parts, mode


@in_default_group
def trained_wrong(rank: int, name: str, plan: Plan) -> tuple[bool, list[str]]:
    """Rank 0 sends every rank but itself the stretch that lies one scalar before the right one."""
    case, fill = all_cases(NUM_BATCHES)[name], Rank0Values.fill
    expected = reference(name, rank, plan, NUM_BATCHES)

    def shifted(self: Rank0Values, wanted: Any) -> None:
        fill(self, wanted)
        for one in wanted if rank else ():
            one.place.copy_(one.place.roll(1))

    with mock.patch.object(Rank0Values, "fill", shifted):
        model = case.build()
        _, losses = run(case, model, plan, rank, CpuDevice())
    return losses == expected.losses, differences(model, expected.weights)


def test_a_part_that_is_off_by_one_is_noticed(two_ranks: Ranks) -> None:
    for same_losses, different in two_ranks.run(trained_wrong, NAMES[0], plan_of(NAMES[0], "sharded")):
        assert not same_losses
        assert different


# -- memory ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Start:
    peak_bytes: int
    held_bytes: int
    planned_bytes: int
    before_bytes: int
    chunk_bytes: int


@in_default_group
def start(rank: int, name: str, plan: Plan, kind: str, folder: str, *, holds_originals: bool = False) -> Start:
    """What the host holds while training begins, the model that is there before included."""
    case = all_cases(NUM_BATCHES)[name]
    model = model_of(case, rank, kind)
    schedule = compile_schedule(plan, case.workload)
    layout = build_layout(case.workload.parameters, num_blocks=case.workload.num_blocks, chunk_bytes=plan.chunk_bytes)
    options: dict[str, Any] = {"weights": folder} if kind == "files" else {}
    kept = [parameter.data for parameter in model.parameters()] if holds_originals else []
    with HostPeak(*(tensor for tensor in model.parameters() if not tensor.is_meta)) as memory:
        before_bytes = memory.bytes
        training = carry_out(model, plan, case.workload, device=CpuDevice(), **options)
        found = Start(
            memory.peak_bytes,
            memory.bytes,
            schedule.static_bytes(Memory.PINNED_HOST) + schedule.static_bytes(Memory.HOST),
            before_bytes,
            max(chunk.size_bytes for chunk in layout.chunks),
        )
    training.close()
    del kept
    return found


@some_quick("kind", ["own", "rank 0", "files"], quick=1)
def test_a_rank_holds_its_part_and_one_chunk(kind: str, three_ranks: Ranks, tmp_path: Path) -> None:
    """A rank with a model of its own begins with that, and it goes chunk by chunk."""
    name = "llama, 64 wide"
    save(all_cases(NUM_BATCHES)[name].build(), tmp_path)
    plan = plan_of(name, "sharded", num_ranks=3, micro_batches=2)
    for rank, found in enumerate(three_ranks.run(start, name, plan, kind, str(tmp_path))):
        most = max(found.before_bytes + found.chunk_bytes, 1.05 * found.planned_bytes) + found.chunk_bytes
        if not found.before_bytes:
            most -= found.chunk_bytes
            assert found.peak_bytes <= 1.05 * found.planned_bytes + found.chunk_bytes, rank
        assert found.peak_bytes <= most, rank
        assert found.held_bytes <= 1.05 * found.planned_bytes, rank


@pytest.mark.slow
def test_a_model_that_stays_beside_its_parts_is_noticed(three_ranks: Ranks) -> None:
    plan = plan_of("llama, 64 wide", "sharded", num_ranks=3, micro_batches=2)
    for found in three_ranks.run(partial(start, holds_originals=True), "llama, 64 wide", plan, "own", ""):
        assert found.peak_bytes > max(found.before_bytes, found.planned_bytes) + 2 * found.chunk_bytes


# -- starts that fail ------------------------------------------------------------------------------------------------


@contextmanager
def failing(owner: type, method: str, at: int) -> Iterator[None]:
    """Its call number ``at`` fails."""
    right: Callable[..., Any] = getattr(owner, method)
    calls = iter(range(10_000))

    def wrong(self: Any, *args: Any, **kwargs: Any) -> Any:
        if next(calls) == at:
            raise FileError(f"{method} has failed")
        return right(self, *args, **kwargs)

    with mock.patch.object(owner, method, wrong):
        yield


PLACES: dict[str, tuple[type, str, int]] = {
    "the first chunk": (DeviceChunk, "__init__", 0),
    "memory": (ShardedChunk, "_find_pieces", 5),
    "after values have come": (ShardedChunk, "_views", 2),
    "an optimizer": (ModelOptimizers, "add", 4),
    "the last optimizer": (ModelOptimizers, "add", 9),
    "lanes": (TransferLanes, "__init__", 0),
}


@in_default_group
def begin(rank: int, name: str, plan: Plan, kind: str, place: str) -> str:
    """Rank 1 fails in ``place``; both tell it, and have their models."""
    case = all_cases(NUM_BATCHES)[name]
    model = model_of(case, rank, kind)
    expected = snapshot(case.build())
    owner, method, at = PLACES[place]
    with failing(owner, method, at if rank == 1 else -1), pytest.raises((FileError, RanksError)) as caught:
        carry_out(model, plan, case.workload, device=CpuDevice(), rank_timeout_s=20)
    assert training_of(model) is None
    assert lanes_alive() == []
    if kind == "own" or rank == 0:
        expected_of_rank = [expected] if rank == 0 else [expected, snapshot(spoiled(case.build()))]
        state = model.state_dict()
        assert all(any(torch.equal(state[n], own[n]) for own in expected_of_rank) for n in state)
    else:
        assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    return f"{type(caught.value).__name__}: {caught.value}"


@some_quick(("kind", "place"), product(["own", "rank 0"], PLACES), quick=5)
def test_a_start_that_fails_on_one_rank_gives_all_their_models_back(place: str, kind: str, two_ranks: Ranks) -> None:
    """However many chunks are in parts by then."""
    name = "hand-written, partly narrow"
    first, second = two_ranks.run(begin, name, plan_of(name, "sharded on devices"), kind, place)
    assert first == second == f"FileError: rank 1: {PLACES[place][1]} has failed"


@in_default_group
def read_other(rank: int, name: str, plan: Plan, folder: str) -> str:
    """Each rank reads a folder of its own."""
    case = all_cases(NUM_BATCHES)[name]
    model = on_meta(case.build())
    own = f"{folder}/{rank}"
    with pytest.raises(Exception, match="rank") as caught:
        carry_out(model, plan, case.workload, device=CpuDevice(), rank_timeout_s=20, weights=own)
    assert all(parameter.is_meta for parameter in model.parameters())
    return f"{type(caught.value).__name__}: {caught.value}"


def test_folders_with_other_weights_are_refused_by_all(two_ranks: Ranks, tmp_path: Path) -> None:
    name = "hand-written, partly narrow"
    model = all_cases(NUM_BATCHES)[name].build()
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        save(model, tmp_path / str(rank))
        with torch.no_grad():
            model.exit.bias[0] += 1
    arguments = name, plan_of(name, "sharded"), str(tmp_path)
    first, second = two_ranks.run(read_other, *arguments)
    assert first == second
    assert first.startswith("PlanError: ranks differ in weights: ")
    os.unlink(tmp_path / "1" / "model-1.safetensors")
    first, second = two_ranks.run(read_other, *arguments)
    assert first == second
    assert first.startswith(f"FileError: rank 1: {tmp_path}/1 lacks model-1.safetensors")


def test_the_same_folder_anywhere_is_the_same(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        save(all_cases(NUM_BATCHES)["llama"].build(), tmp_path / name)
    one, two = (SavedWeights(tmp_path / name).fingerprint() for name in ("one", "two"))
    assert one == two


@in_default_group
def begin_and_die(rank: int, name: str, plan: Plan) -> tuple[str, float, bool]:
    """Rank 1's process ends while its fourth chunk is filled: what rank 0 says, how late, and whether all is known."""
    case = all_cases(NUM_BATCHES)[name]
    model, expected = case.build(), snapshot(case.build())
    views, calls = ShardedChunk._views, iter(range(100))

    def last(self: ShardedChunk) -> Any:
        if rank == 1 and next(calls) == 3:
            os._exit(9)
        return views(self)

    began = time.monotonic()
    with without_a_word(), mock.patch.object(ShardedChunk, "_views", last), pytest.raises(RanksError) as caught:
        carry_out(model, plan, case.workload, device=CpuDevice(), rank_timeout_s=120)
    state = model.state_dict()
    is_known = all(torch.equal(state[n], expected[n]) or bool(state[n].isnan().all()) for n in state)
    return str(caught.value), time.monotonic() - began, is_known and training_of(model) is None


def test_a_rank_that_dies_while_all_begin_ends_the_others_at_once(two_ranks: Ranks) -> None:
    """What was in parts by then is NaN, and nothing else."""
    name = "hand-written, partly narrow"
    survivor, gone = two_ranks.outcomes(begin_and_die, name, plan_of(name, "sharded"))
    assert gone.error is not None
    said, taken_s, is_known = survivor.get()
    assert "another rank has ended" in said
    assert taken_s < 60
    assert is_known
