"""Looks ahead at gradients: they save time, and decide nothing that has changed since."""

from __future__ import annotations

import gc
import threading
import weakref
from concurrent.futures import Future

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import protwin.runtime.optimizers.non_finite as non_finite_module
from protwin.runtime.devices.ledger import MemoryLedger
from protwin.runtime.optimizers.non_finite import GradientLooks, NonFiniteGradientError

CHANGES = (
    "none",
    "spoiled in place",
    "mended in place",
    "replaced: spoiled",
    "replaced: whole",
    "gone",
)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def gradient(dtype: torch.dtype, *, is_whole: bool) -> torch.Tensor:
    made = torch.ones(5, 3, dtype=dtype)
    if not is_whole:
        made[2, 1] = float("nan")
    return made


def change(name: str, old: torch.Tensor) -> torch.Tensor | None:
    match name:
        case "spoiled in place":
            old[0, 0] = float("inf")
        case "mended in place":
            old.fill_(1)
        case "replaced: spoiled":
            return gradient(old.dtype, is_whole=False)
        case "replaced: whole":
            return gradient(old.dtype, is_whole=True)
        case "gone":
            return None
    return old


def is_refused(looks: GradientLooks, gradients: list[torch.Tensor | None]) -> bool:
    try:
        looks.refuse_non_finite(gradients, [str(place) for place in range(len(gradients))])
    except NonFiniteGradientError:
        return True
    return False


@st.composite
def cases(draw: st.DrawFn) -> list[tuple[torch.dtype, bool, bool, str]]:
    """Element type, whether it begins whole, whether it is looked at, what happens to it then."""
    return draw(
        st.lists(st.tuples(st.sampled_from(DTYPES), st.booleans(), st.booleans(), st.sampled_from(CHANGES)), max_size=5)
    )


def outcome(case: list[tuple[torch.dtype, bool, bool, str]]) -> tuple[bool, bool]:
    """Whether the gradients that there are in the end were refused, and whether they should be."""
    looks = GradientLooks(torch.device("cpu"))
    try:
        gradients: list[torch.Tensor | None] = [gradient(dtype, is_whole=is_whole) for dtype, is_whole, _, _ in case]
        for (_, _, is_seen, _), one in zip(case, gradients, strict=True):
            if is_seen:
                looks.look([one, None])
        for _, seen in looks._looks:
            assert isinstance(seen, Future)
            seen.result()
        for place, (_, _, _, name) in enumerate(case):
            one = gradients[place]
            assert one is not None
            gradients[place] = change(name, one)
        return is_refused(looks, gradients), any(g is not None and not bool(g.isfinite().all()) for g in gradients)
    finally:
        looks.close()


@given(cases())
def test_what_counts_are_the_gradients_at_the_step(case: list[tuple[torch.dtype, bool, bool, str]]) -> None:
    refused, expected = outcome(case)
    assert refused is expected


def test_a_look_that_ignores_versions_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(non_finite_module, "_is_same", lambda gradient, noted: noted is not None)
    assert outcome([(torch.float32, True, True, "spoiled in place")]) == (False, True)


def test_a_sum_beyond_its_range_is_no_infinity() -> None:
    looks = GradientLooks(torch.device("cpu"))
    large = torch.full((64,), 60_000.0, dtype=torch.float16)
    looks.look([large])
    assert not is_refused(looks, [large])
    looks.close()


def test_looks_keep_no_gradient_alive_and_end_their_thread() -> None:
    before = threading.active_count()
    looks = GradientLooks(torch.device("cpu"))
    threads = torch.get_num_threads()
    one = torch.ones(1000)
    looks.look([one])
    kept = weakref.ref(one)
    looks.close()
    del one
    gc.collect()
    assert kept() is None
    assert threading.active_count() == before
    assert torch.get_num_threads() == threads
    looks.close()


def test_an_account_of_memory_finds_nothing_of_the_looks() -> None:
    """What the thread gave may live a little longer than the step: no later operation of the loop may meet it."""
    gradients = [torch.ones(5, 3), torch.ones(7)]
    ledger = MemoryLedger()
    ledger.adopt(gradients)
    with ledger.metering():
        before = dict(ledger.watched)
        ledger.changes = []
        looks = GradientLooks(torch.device("cpu"))
        looks.look(gradients)
        assert not is_refused(looks, list(gradients))
        changes, _ = ledger.take_changes()
        looks.close()
    assert changes == []
    assert ledger.watched == before
