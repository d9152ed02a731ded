"""The ledger against hand counts, and against what the garbage collector finds alive."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack, _pop_mode

from protwin.runtime.devices.ledger import CpuOutOfMemoryError, MemoryLedger
from protwin.runtime.model.nested_tensors import storage_bytes
from protwin.shared.basics.errors import DeviceOutOfMemoryError, ProtwinError

KIB = 1024


def kib(number: int) -> torch.Tensor:
    """A tensor of ``number`` KiB."""
    return torch.empty(number * KIB // 4)


def is_watched() -> bool:
    return bool(_get_current_dispatch_mode_stack())


# -- scripts with hand counts ----------------------------------------------------------------------------------------


def test_allocations_views_and_in_place_operations() -> None:
    ledger = MemoryLedger()
    with ledger.metering():
        a = kib(4)
        assert ledger.watched_bytes == 4 * KIB
        view = a[10:20].view(2, 5).t()
        a.add_(1)
        a.mul_(view.sum())
        assert ledger.watched_bytes == 4 * KIB
        b = a + a
        assert ledger.watched_bytes == 8 * KIB
        del a
        assert ledger.watched_bytes == 8 * KIB  # the view keeps the storage
        del view
        assert ledger.watched_bytes == 4 * KIB
        b += 1
        assert ledger.watched_bytes == 4 * KIB
    del b
    assert ledger.level_bytes == 0
    assert ledger.peak_bytes == 8 * KIB
    assert not is_watched()


def test_several_results_and_results_of_no_use() -> None:
    ledger = MemoryLedger()
    with ledger.metering():
        values, places = kib(8).sort()
        assert ledger.watched_bytes == 8 * KIB + 16 * KIB
        del places
        assert ledger.watched_bytes == 8 * KIB
        torch.ones(KIB)
        assert ledger.watched_bytes == 8 * KIB
    del values
    assert ledger.peak_bytes == 8 * KIB + 8 * KIB + 16 * KIB  # what is sorted is there until sort has ended


def test_a_storage_that_changes_its_size() -> None:
    ledger = MemoryLedger()
    with ledger.metering():
        a = kib(4)
        a.resize_(3 * KIB)
        assert ledger.watched_bytes == 12 * KIB
        a.resize_(KIB)  # torch keeps the larger storage
        assert ledger.watched_bytes == 12 * KIB
        out = torch.empty(0)
        torch.add(kib(8), 1, out=out)
        assert ledger.watched_bytes == 20 * KIB
        a.untyped_storage().resize_(0)
        assert ledger.watched_bytes == 20 * KIB  # no operation: seen at the next one
        a.resize_(2 * KIB)
        assert ledger.watched_bytes == 16 * KIB
    del a, out
    assert ledger.level_bytes == 0


def test_tensors_that_were_there_before() -> None:
    ledger = MemoryLedger()
    known, slice_of_much, unknown, on_the_host = kib(4), kib(400)[: KIB // 2], kib(4), kib(40)
    assert ledger.adopt([known, known, known.view(-1), slice_of_much]) == 4 * KIB + 2 * KIB
    with ledger.metering():
        known.add_(1)
        ledger.is_finding = False
        made = on_the_host[:4] + 1
        assert ledger.watched_bytes == 6 * KIB + made.nbytes
        del made
        ledger.is_finding = True
        unknown.view(2, -1)
        unknown.add_(1)
        assert ledger.watched_bytes == 10 * KIB
        del unknown
        assert ledger.watched_bytes == 6 * KIB
    del known, slice_of_much
    assert ledger.watched_bytes == 0


def test_tensors_from_python_values_are_new_memory() -> None:
    ledger = MemoryLedger()
    with ledger.metering():
        made = torch.tensor([1.0] * KIB)
        assert ledger.watched_bytes == 4 * KIB
    del made
    assert ledger.watched_bytes == 0


def test_backward_and_gradients() -> None:
    ledger = MemoryLedger()
    weight = torch.randn(32, 32, requires_grad=True)
    ledger.adopt([weight])
    with ledger.metering():
        hidden = torch.ones(8, 32)  # 1 KiB
        loss = (hidden @ weight).relu().sum()  # 1 KiB saved by relu, a scalar
        assert ledger.watched_bytes == 4 * KIB + KIB + KIB + 4
        loss.backward()
        assert ledger.watched_bytes == 4 * KIB + KIB + 4 + 4 * KIB
        weight.grad = None
        del loss, hidden
    assert ledger.watched_bytes == 4 * KIB


def test_named_allocations_come_on_top() -> None:
    ledger = MemoryLedger()
    ledger.allocate(10, "a chunk")
    with ledger.metering():
        a = kib(1)
        assert ledger.level_bytes == KIB + 10
        ledger.free(10)
        ledger.allocate(5, "another chunk")
    del a
    assert (ledger.level_bytes, ledger.peak_bytes) == (5, KIB + 10)


def test_watched_tensors_become_named() -> None:
    ledger = MemoryLedger()
    with ledger.metering():
        a, b = kib(2), kib(3)
        both = [a, a[5:], b]
        ledger.make_named(both)
        assert (ledger.watched_bytes, ledger.named_bytes) == (0, 5 * KIB)
        size_bytes = storage_bytes(both)
        del a, b, both
        assert ledger.level_bytes == 5 * KIB
        ledger.free(size_bytes)
    assert ledger.level_bytes == 0
    assert ledger.peak_bytes == 5 * KIB


def test_ignored_storages_never_count() -> None:
    ledger = MemoryLedger()
    flat = kib(4)
    ledger.ignore([flat])
    with ledger.metering():
        flat.add_(1)
        assert flat[3:].view(-1).storage_offset() == 3
        assert ledger.watched_bytes == 0
        flat.untyped_storage().resize_(0)
        flat.untyped_storage().resize_(4 * KIB)
        flat.zero_()
        assert ledger.watched_bytes == 0


def test_other_threads_are_not_watched() -> None:
    ledger = MemoryLedger()
    kept: list[torch.Tensor] = []
    with ledger.metering():
        thread = threading.Thread(target=lambda: kept.append(kib(64)))
        thread.start()
        thread.join()
        assert ledger.level_bytes == 0


# -- random programs against the garbage collector -------------------------------------------------------------------


def alive_storages() -> dict[int, int]:
    """Address and bytes of every storage that a tensor known to the garbage collector refers to."""
    tensors = (item for item in gc.get_objects() if issubclass(type(item), torch.Tensor))
    return {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors if t.device.type == "cpu"}


MOVES: dict[str, Callable[[list[torch.Tensor], int], Any]] = {
    "make": lambda kept, n: kept.append(torch.ones(8 + n, 4)),
    "view": lambda kept, n: kept.append(kept[n % len(kept)].view(-1)[1:]),
    "transpose": lambda kept, n: kept.append(kept[n % len(kept)].view(4, -1).t()),
    "copy": lambda kept, n: kept.append(kept[n % len(kept)].clone()),
    "add": lambda kept, n: kept.append(kept[n % len(kept)] + 1),
    "in place": lambda kept, n: kept[n % len(kept)].mul_(2),
    "reduce": lambda kept, n: kept.append(kept[n % len(kept)].sum()),
    "split": lambda kept, n: kept.extend(kept[n % len(kept)].view(-1).split(3)),
    "sort": lambda kept, n: kept.extend(kept[n % len(kept)].view(-1).sort()),
    "empty": lambda kept, n: kept.append(torch.empty(0)),
    "drop": lambda kept, n: kept.pop(n % len(kept)),
    "fail": lambda kept, n: kept[n % len(kept)].view(3, 5, 7, 11, 13),
}


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from(sorted(MOVES)), st.integers(0, 50)), max_size=30))
def test_random_programs_agree_with_the_garbage_collector(moves: list[tuple[str, int]]) -> None:
    before = alive_storages()
    ledger = MemoryLedger()
    highest = 0
    kept: list[torch.Tensor] = []
    with ledger.metering():
        for name, number in moves:
            if not kept and name not in ("make", "empty"):
                continue
            with contextlib.suppress(RuntimeError):
                MOVES[name](kept, number)
            alive = sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in kept}.values())
            assert ledger.watched_bytes == alive
            highest = max(highest, alive)
    assert ledger.watched_bytes == sum(size for key, size in alive_storages().items() if key not in before)
    assert ledger.peak_bytes >= highest
    kept.clear()
    assert ledger.watched_bytes == 0


# -- budgets ---------------------------------------------------------------------------------------------------------


def test_the_error_is_both_ours_and_torchs() -> None:
    assert issubclass(CpuOutOfMemoryError, torch.OutOfMemoryError)
    assert issubclass(CpuOutOfMemoryError, DeviceOutOfMemoryError)
    assert issubclass(CpuOutOfMemoryError, ProtwinError)


def test_a_budget_may_be_used_to_the_last_byte() -> None:
    ledger = MemoryLedger(4 * KIB)
    with ledger.metering():
        a = kib(4)
        with pytest.raises(CpuOutOfMemoryError, match=r"needs 1 KiB but 0 B of the budget of 4 KiB is free"):
            kib(1)
        with pytest.raises(CpuOutOfMemoryError):
            ledger.allocate(1, "a chunk")
        with pytest.raises(CpuOutOfMemoryError):
            torch.empty(1)
    assert ledger.peak_bytes == 4 * KIB  # what was refused was never there
    del a
    assert ledger.level_bytes == 0
    assert not is_watched()


def test_what_was_refused_leaves_nothing() -> None:
    ledger = MemoryLedger(8 * KIB)
    with pytest.raises(CpuOutOfMemoryError), ledger.metering():
        kept = [kib(3) for _ in range(5)]  # noqa: F841
    assert ledger.level_bytes == 0
    assert ledger.peak_bytes == 6 * KIB
    ledger.allocate(8 * KIB, "a chunk")


def test_a_level_above_the_budget_refuses_no_release() -> None:
    """Budgets can be set when more is alive already; then only more is refused."""
    ledger = MemoryLedger()
    a, b = kib(4), torch.empty(0)
    ledger.adopt([a, b])
    ledger.allocate(8, "a chunk")
    ledger.budget_bytes = 5
    ledger.free(4)
    del a, b
    assert ledger.level_bytes == 4


def test_a_claim_counts_while_nobody_watches() -> None:
    ledger = MemoryLedger(100)
    ledger.allocate(60, "a chunk")
    ledger.claim(40)
    with pytest.raises(CpuOutOfMemoryError):
        ledger.allocate(1, "another chunk")
    with pytest.raises(CpuOutOfMemoryError):
        ledger.claim(41)
    assert ledger.level_bytes == 100
    ledger.claim(0)
    ledger.allocate(40, "another chunk")


# -- modes -----------------------------------------------------------------------------------------------------------


def test_an_error_within_an_operation_leaves_no_mode() -> None:
    ledger = MemoryLedger(KIB)
    with pytest.raises(CpuOutOfMemoryError), ledger.metering():
        kib(2)
    assert not is_watched()
    a = kib(64)
    assert a is not None
    assert ledger.level_bytes == 0


@pytest.fixture
def _inert_modes_go() -> Iterator[None]:
    """A mode that could not leave its thread's stack does nothing, but must not stay there for other tests to find."""
    yield
    while _get_current_dispatch_mode_stack():
        _pop_mode()


@pytest.mark.usefixtures("_inert_modes_go")
def test_metering_ends_under_another_mode() -> None:
    """A mode that a caller entered above the ledger's stays, and the ledger sees nothing more."""

    class Counting(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            Counting.calls += 1
            return func(*args, **(kwargs or {}))

    ledger = MemoryLedger()
    ledger.start_metering()
    with Counting():
        ledger.stop_metering()
        a = kib(4)
        assert Counting.calls == 1
        assert ledger.level_bytes == 0
    ledger.start_metering()
    ledger.stop_metering()
    b = kib(4)
    assert ledger.level_bytes == 0
    del a, b


@pytest.mark.usefixtures("_inert_modes_go")
def test_metering_ends_from_another_thread() -> None:
    ledger = MemoryLedger()
    ledger.start_metering()
    thread = threading.Thread(target=ledger.stop_metering)
    thread.start()
    thread.join()
    a = kib(4)
    assert ledger.level_bytes == 0
    assert not ledger.is_metering
    del a
    # The mode lies on this thread's stack still, asleep; torch would tell later tests of it.
    for mode in _get_current_dispatch_mode_stack():
        mode.__exit__(None, None, None)
