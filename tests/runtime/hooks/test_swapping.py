"""Saved activations that travel: what travels, that nothing else does, and that backward sees what was saved."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import nn

from protwin.runtime import CpuDevice, carry_out, trace
from protwin.runtime.devices.ledger import MemoryLedger
from protwin.runtime.hooks.swapping import SavedActivations, SwappableTally, SwappedActivations, _OwnStorages
from protwin.shared.layout.layout import build_layout
from protwin.shared.schema.plan import ActivationMode, Plan
from protwin.shared.schema.schedule import Memory, TaskKind
from tests.proof_size import some_quick
from tests.runtime.models import SEED, Case, cases, differences

KEEP, CHECKPOINT, SWAP = ActivationMode.KEEP, ActivationMode.CHECKPOINT, ActivationMode.SWAP


def plan_of(case: Case, modes: tuple[ActivationMode, ...], *, is_offloaded: bool, micro_batches: int = 1) -> Plan:
    layout = build_layout(case.workload.parameters, num_blocks=case.workload.num_blocks, chunk_bytes=9_000)
    return Plan(
        workload_id=case.workload.identity,
        chunk_bytes=9_000,
        n_persist=0 if is_offloaded else len(layout.chunks),
        n_buffer=layout.min_buffers(0) + 1 if is_offloaded else 0,
        n_swap=modes.count(SWAP),
        n_checkpoint=modes.count(CHECKPOINT),
        activation_modes=modes,
        micro_batches=micro_batches,
    )


@some_quick(
    ("micro_batches", "is_offloaded", "name"),
    product([1, 2], [False, True], ["llama", "gpt2 with dropout, tied", "hand-written, batch statistics"]),
    quick=4,
)
def test_every_mixture_of_modes_equals_the_plain_loop(name: str, is_offloaded: bool, micro_batches: int) -> None:
    """Also the last block, whose activations have hardly left when they are needed again."""
    case = cases()[name]
    modes = tuple((SWAP, CHECKPOINT, KEEP, SWAP)[-case.workload.num_blocks :])
    plan = plan_of(case, modes, is_offloaded=is_offloaded, micro_batches=micro_batches)
    model, losses = case.build(), []
    with carry_out(
        model, plan, case.workload, optimizer=case.make_optimizer, parameter_groups=case.groups(model)
    ) as training:
        torch.manual_seed(SEED)
        for batches in case.steps(micro_batches):
            for batch in batches:
                loss = case.loss(model, batch)
                loss.backward()
                losses.append(loss.item())
            training.step()
    plain = case.plain_with(micro_batches, None)
    assert losses == plain.losses
    assert differences(model, plain.weights[-1]) == []
    swapped = sum(case.workload.profile_of(block).swappable_bytes for block, mode in enumerate(modes) if mode is SWAP)
    assert swapped > 0
    moved = swapped * micro_batches * len(case.batches)
    if is_offloaded:
        assert training.bytes_device_to_host > moved
    else:
        assert training.bytes_device_to_host == training.bytes_host_to_device == moved


def test_swapping_needs_less_of_the_device_than_keeping_and_pinned_memory_instead() -> None:
    case = cases()["llama"]
    peaks, pinned = {}, {}
    for mode in (KEEP, SWAP):
        plan = plan_of(case, (mode,) * case.workload.num_blocks, is_offloaded=True)
        device, model = CpuDevice(), case.build()
        with carry_out(model, plan, case.workload, optimizer=case.make_optimizer, device=device) as training:
            for batch in case.batches:
                case.loss(model, batch).backward()
                training.step()
            pinned[mode] = training.schedule.static_bytes(Memory.PINNED_HOST)
            kinds = [task.kind for task in training.schedule.tasks]
            assert kinds.count(TaskKind.ACTIVATION_FETCH) == (case.workload.num_blocks if mode is SWAP else 0)
        assert device.ledger.named_bytes == 0
        peaks[mode] = training.peak_device_bytes
    saved = sum(case.workload.profile_of(block).swappable_bytes for block in range(case.workload.num_blocks))
    assert pinned[SWAP] == pinned[KEEP] + saved
    assert peaks[SWAP] < peaks[KEEP]


class Odd(nn.Module):
    """Saves a transposed view, its own input, a parameter, a tiny tensor, and one storage twice."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 32))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """(n, 32) in and out."""
        made = rows * self.weight.sum()
        crossed = made.t() @ made
        tiny = made[0, :2].exp()
        return rows + (crossed @ self.weight).tanh().sum(0) * tiny.sum() + made


def saved_by(block: Odd, rows: torch.Tensor) -> tuple[torch.Tensor, SavedActivations]:
    saving = SavedActivations(block, block)
    return saving.run(block.forward, (rows,), {}), saving


def test_only_what_the_block_made_and_does_not_hand_on_travels() -> None:
    torch.manual_seed(0)
    block, rows = Odd(), torch.randn(8, 32, requires_grad=True)
    _, saving = saved_by(block, rows)
    found = saving.take()
    storages = {saved.source.untyped_storage()._cdata for saved in found if saved.source is not None}
    assert len(storages) == len(found)
    assert rows.untyped_storage()._cdata not in storages
    assert block.weight.untyped_storage()._cdata not in storages
    # ``made`` once, though it is saved three times and as a view; ``crossed``; what tanh gave.  Not the tiny one.
    assert sorted(saved.size_bytes for saved in found) == [8 * 32 * 4, 32 * 32 * 4, 32 * 32 * 4]


def swapped(block: Odd, rows: torch.Tensor, room_bytes: int) -> tuple[list[torch.Tensor], int]:
    """Gradients of input and weight after the trip, and the bytes that made it."""
    trip = SwappedActivations(block, block, 0, room_bytes, CpuDevice())
    output = trip.run(block.forward, (rows,), {})
    trip.leave()
    moved = trip.offload()
    assert trip.fetch() == moved
    trip.arrive()
    return list(torch.autograd.grad(output.square().sum(), [rows, block.weight])), moved


@pytest.mark.parametrize("room_bytes", [2**20, 5_000, 0])
def test_gradients_are_those_without_the_trip_even_if_not_all_find_room(room_bytes: int) -> None:
    torch.manual_seed(0)
    block, rows = Odd(), torch.randn(8, 32, requires_grad=True)
    expected = torch.autograd.grad(block(rows).square().sum(), [rows, block.weight])
    found, moved = swapped(block, rows, room_bytes)
    assert moved == {2**20: 9_216, 5_000: 1_024, 0: 0}[room_bytes] or 0 < moved <= room_bytes
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


class Forgetful(nn.Module):
    """Saves a tensor in each of many branches that its result does not depend on, one after the other."""

    size = 4_096

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(20):
            x.detach().requires_grad_().exp()
        return x.exp().exp().sum()


def test_what_a_block_saves_and_drops_stays_its_own_affair() -> None:
    """The storages of such branches lie at one address, one after the other; by address alone each is the last."""
    x = torch.ones(Forgetful.size, requires_grad=True)
    block = Forgetful()
    tally, saving = SwappableTally(block, block), SavedActivations(block, block)
    tally.run(block, (x,), {})
    ledger = MemoryLedger()
    with ledger.metering():
        total = saving.run(block, (x,), {})
    found = saving.take()
    assert total.grad_fn is not None
    assert [saved.size_bytes for saved in found] == tally.sizes_bytes == [4 * Forgetful.size] * 2
    assert ledger.watched_peak_bytes < 4 * 4 * Forgetful.size, "branches that were dropped were held"


class InPlace(nn.Module):
    """Changes what backward needs."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """(n, 32) in and out."""
        made = (rows * 2).exp()
        made.add_(1)
        return made.sum() + rows


def test_what_was_changed_after_it_was_saved_is_refused_as_by_autograd() -> None:
    rows = torch.randn(64, 32, requires_grad=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        InPlace()(rows).sum().backward()
    trip = SwappedActivations(nn.Module(), InPlace(), 0, 2**20, CpuDevice())
    output = trip.run(InPlace().forward, (rows,), {})
    trip.leave()
    trip.offload()
    trip.fetch()
    trip.arrive()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_an_untraced_model_has_nothing_to_swap_in_checkpointed_blocks() -> None:
    """The tally belongs to mode KEEP: it is what saving would take without recomputation."""
    case = cases()["llama"]
    workload = trace(case.build(), case.batches[0], repeats=0)
    for profile in workload.profiles:
        saved_bytes = profile.forward.net_bytes - profile.output_bytes
        assert 0.9 * saved_bytes < profile.swappable_bytes <= saved_bytes


def test_what_lies_where_a_replaced_buffer_was_is_the_blocks_own() -> None:
    block = nn.Module()
    block.register_buffer("mean", torch.zeros(64))
    own = _OwnStorages(block, block)
    assert own.key_of(block.mean) is None
    address = block.mean.untyped_storage()._cdata
    block.mean = None
    made = []
    while not made or made[-1].untyped_storage()._cdata != address:
        assert len(made) < 10_000, "no tensor came to lie there"
        made.append(torch.empty(64))
    assert own.key_of(made[-1]) == address
