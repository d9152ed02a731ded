"""Keys and values that a loop caches: how much of them lies on the device, and when."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from protwin.runtime import trace
from protwin.runtime.devices.ledger import MemoryLedger
from protwin.shared import load_workload
from protwin.shared.basics.errors import PlanError, ScheduleError
from protwin.shared.catalogue.models import model_configuration
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.layout.cached_keys import cached_bytes
from protwin.shared.layout.keeping import Keeping
from protwin.shared.methods.full_training import FULL_TRAINING
from protwin.shared.methods.runtime_profile import RuntimeProfile
from protwin.shared.schema.plan import TrainingMethod
from protwin.shared.schema.schedule import Content, Lane, Schedule
from protwin.shared.schema.workload import DType, Operation, OperationClass, Workload
from protwin.shared.verify.guaranteed_peak import guaranteed_device_peak
from protwin.shared.verify.verify import verify_schedule
from protwin.sim.commands.options import RuntimeChoice
from tests.proof_size import examples
from tests.shared.methods.test_buckets import compiled, method_of
from tests.shared.small_models import chain, plan
from tests.strategies.plans import PlannedWorkload, parallel_workloads, planned_workloads

CACHING = method_of(Keeping(caches_keys=True))
SAMPLES, TOKENS, HEADS, WIDTH, BLOCKS = 2, 128, 2, 16, 4
KEYS_BYTES = 2 * 4 * SAMPLES * TOKENS * HEADS * WIDTH
"""Of one block's keys and values, in float32."""


def cached_by_blocks(workload: Workload) -> list[int]:
    """Bytes of each block's keys and values."""
    profiles = (workload.profiles[block.profile] for block in workload.blocks)
    return [cached_bytes(profile.forward) for profile in profiles]


def cached_by_time(schedule: Schedule) -> list[int]:
    """Bytes that are cached behind each compute task."""
    cached = {buffer.id: buffer for buffer in schedule.buffers if buffer.content is Content.CACHED_KEYS}
    alive, found = sum(buffer.size_bytes for buffer in cached.values() if buffer.is_static), []
    for task in (schedule.tasks[number] for number in schedule.lanes[Lane.COMPUTE]):
        alive += sum(cached[number].size_bytes for number in task.allocates if number in cached)
        alive -= sum(cached[number].size_bytes for number in task.frees if number in cached)
        found.append(alive)
    return found


@pytest.mark.parametrize("name", ["llama-3-8b", "llama-2-7b", "qwen2.5-7b", "mistral-7b", "gpt2-xl", "qwen3-8b"])
def test_they_are_as_large_as_the_configuration_says(name: str) -> None:
    """Two numbers for each token, head that has keys, and dim of it: heads that share keys count once."""
    given_by: Any = model_configuration(name).config
    heads = given_by.get("num_attention_heads", given_by.get("n_head"))
    width = given_by.get("head_dim") or given_by.get("hidden_size", given_by.get("n_embd")) // heads
    model = load_workload(name, batch_size=2, sequence_length=512)
    each = 2 * model.compute_dtype.item_bytes * (given_by.get("num_key_value_heads") or heads) * width
    assert set(cached_by_blocks(model)) == {each * 2 * 512}


@settings(max_examples=examples(200, 15), deadline=None)
@given(planned_workloads() | parallel_workloads())
def test_every_schedule_is_proven(case: PlannedWorkload) -> None:
    """Rules count what is cached by themselves; a schedule without is refused, where there is something to cache."""
    for held in (False, True):
        workload = case.workload.model_copy(update={"keeps_outputs": held})
        asked = case.plan.model_copy(update={"workload_id": workload.identity})
        found = compile_schedule(asked, workload, case.layout, policies=CACHING.policies)
        verify_schedule(found, asked, workload, case.layout, rules=CACHING.rules)
        own = compile_schedule(asked, workload, case.layout)
        sizes = cached_by_blocks(workload)
        expected = sum(sizes) if held else 0
        assert cached_by_time(found)[-1] == expected
        if not any(buffer.content is Content.CACHED_KEYS for buffer in found.buffers):
            assert found == own
            continue
        assert guaranteed_device_peak(found).size_bytes >= guaranteed_device_peak(own).size_bytes + expected
        for schedule, rules in ((own, CACHING.rules), (found, FULL_TRAINING.rules)):
            with pytest.raises(ScheduleError):
                verify_schedule(schedule, asked, workload, case.layout, rules=rules)


def test_blocks_whose_activations_travel_leave_theirs_too() -> None:
    """Two calls of a kernel in each of four blocks, of which two are swapped and one is recomputed."""
    kernel = Operation(
        name="attention",
        operation_class=OperationClass.ATTENTION,
        dtype=DType.FLOAT32,
        flops=1,
        bytes_moved=4 * (4 * 2 * 8 * 16) + 4 * 2 * 8,
        count=2,
        shape=(2, 8, 8, 16),
    )
    model = chain(4)
    profiles = (
        one.model_copy(update={"forward": one.forward.model_copy(update={"operations": (kernel,), "measured_s": None})})
        for one in model.profiles
    )
    model = model.model_copy(update={"profiles": tuple(profiles)})
    of_block = 2 * 2 * (4 * 2 * 8 * 16)
    asked = plan(model, n_persist=4, n_checkpoint=1).model_copy(update={"n_swap": 2})
    assert max(cached_by_time(compiled(asked, model, CACHING))) == 3 * of_block


class _Block(nn.Module):
    """Attention that gives its keys and values beside what it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.maps = nn.Linear(HEADS * WIDTH, 3 * HEADS * WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        parts = self.maps(x).chunk(3, dim=-1)
        q, k, v = (one.reshape(SAMPLES, TOKENS, HEADS, WIDTH).transpose(1, 2).contiguous() for one in parts)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + mixed.transpose(1, 2).reshape(x.shape), (k, v)


class _Model(nn.Module):
    """A stack of them, recomputed by a wrapper that knows of no cache."""

    def __init__(self, *, caches: bool, recomputes: bool) -> None:
        super().__init__()
        self.caches, self.recomputes = caches, recomputes
        self.layers = nn.ModuleList(_Block() for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        cache = []
        for layer in self.layers:
            x, cached = checkpoint(layer, x, use_reentrant=False) if self.recomputes else layer(x)
            cache += [cached] if self.caches else []
            del cached
        return {"loss": x.square().mean(), "cache": cache}


def measured_peak(*, caches: bool, recomputes: bool, holds: bool) -> int:
    """Bytes of three steps of a loop that holds the model's output, or its loss alone."""
    torch.manual_seed(0)
    model = _Model(caches=caches, recomputes=recomputes)
    x = torch.randn(SAMPLES, TOKENS, HEADS * WIDTH)
    model(x)["loss"].backward()
    ledger = MemoryLedger()
    ledger.ignore([*model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None), x])
    output: Any = None
    with ledger.metering():
        for _ in range(3):
            if holds:
                output = model(x)
                output["loss"].backward()
            else:
                model(x)["loss"].backward()
    return ledger.watched_peak_bytes


@pytest.mark.parametrize("holds", [False, True])
@pytest.mark.parametrize("recomputes", [False, True])
def test_plain_loops_take_what_the_account_says(*, recomputes: bool, holds: bool) -> None:
    """What caching adds to the peak of torch's own loop: of recomputed blocks, one set, and two where it is held."""
    more = measured_peak(caches=True, recomputes=recomputes, holds=holds)
    more -= measured_peak(caches=False, recomputes=recomputes, holds=holds)
    model, x = _Model(caches=False, recomputes=False), torch.zeros(SAMPLES, TOKENS, HEADS * WIDTH)
    workload = trace(model, x, loss=_loss).model_copy(update={"keeps_outputs": holds})
    assert cached_by_blocks(workload) == [KEYS_BYTES] * BLOCKS
    asked = plan(workload, n_persist=1, n_checkpoint=BLOCKS if recomputes else 0)
    peaks = [
        guaranteed_device_peak(compiled(asked, workload, method)).size_bytes for method in (CACHING, FULL_TRAINING)
    ]
    allowed = BLOCKS * KEYS_BYTES if holds and not recomputes else 0
    assert more <= peaks[0] - peaks[1] <= more + allowed, "of kept blocks that hold, twice while backward runs"
    assert (more > 0) is (recomputes or holds)


def test_under_autocast_they_are_of_what_attention_computes_in() -> None:
    model, x = _Model(caches=False, recomputes=False), torch.zeros(SAMPLES, TOKENS, HEADS * WIDTH)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        workload = trace(model, x, loss=_loss)
    assert cached_by_blocks(workload) == [KEYS_BYTES // 2] * BLOCKS


def _loss(output: dict[str, Any], _: Any = None) -> torch.Tensor:
    return output["loss"]


def test_a_set_stays_from_step_to_step_where_outputs_do() -> None:
    model = load_workload("llama-2-7b", batch_size=1, sequence_length=256)
    asked = plan(model, chunk_bytes=2**30, n_buffer=4, n_checkpoint=32, micro_batches=2)
    schedule = compiled(asked, model, CACHING)
    one = cached_bytes(model.profiles[0].forward)
    held = model.model_copy(update={"keeps_outputs": True})
    of_held = compiled(asked.model_copy(update={"workload_id": held.identity}), held, CACHING)
    of_forward = [0, *(one * count for count in range(1, 33)), 0]
    found = cached_by_time(schedule)
    assert found[:34] == of_forward
    assert not any(found[34 : 34 + 66])
    assert [size - 32 * one for size in cached_by_time(of_held)] == found


def test_it_is_asked_for_where_it_is_known() -> None:
    asked = RuntimeProfile(caches_keys=True)
    assert asked.other == "cached keys and values"
    assert RuntimeChoice(caches_keys=True).profile() == asked
    assert asked.method(FULL_TRAINING).policies.keeping == Keeping(caches_keys=True)
    model = load_workload("gpt2", batch_size=1, sequence_length=64)
    bypass = plan(model).model_copy(update={"method": TrainingMethod.BYPASS})
    with pytest.raises(PlanError, match="cached keys and values are those of full training"):
        asked.check(bypass)
