"""A training begins and ends without a trace, whatever happens in between."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, is_in_torch_dispatch_mode
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from protwin.runtime import CpuDevice, CpuOutOfMemoryError, Training, carry_out
from protwin.shared.layout.layout import build_layout
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.workload import Workload
from tests.runtime.models import SEED, Case, adamw, cases, differences, snapshot, uncached
from tests.runtime.tracing.test_tracing import hooks_of, same
from tests.runtime.watchdog import FaultyDevice, ends_in_time, lanes_alive

CHUNK_BYTES = 9_000


def plan_for(workload: Workload, *, n_persist: int = 2, more_buffers: int = 1) -> Plan:
    """Something of everything: persistent and offloaded chunks, kept and checkpointed blocks."""
    layout = build_layout(workload.parameters, num_blocks=workload.num_blocks, chunk_bytes=CHUNK_BYTES)
    return Plan(
        workload_id=workload.identity,
        chunk_bytes=CHUNK_BYTES,
        n_persist=n_persist,
        n_buffer=layout.min_buffers(n_persist) + more_buffers,
        prefetch_depth=2,
        n_checkpoint=2,
    )


@pytest.fixture
def case() -> Case:
    return cases()["llama"]


def start(case: Case, model: nn.Module, **settings: Any) -> Training:
    return carry_out(model, plan_for(case.workload), case.workload, **({"optimizer": case.make_optimizer} | settings))


def train(case: Case, model: nn.Module, training: Training, steps: int | None = None) -> list[float]:
    losses = []
    for batch in case.batches[:steps]:
        loss = case.loss(model, batch)
        loss.backward()
        training.step()
        losses.append(loss.item())
    return losses


def ordinary_facts(model: nn.Module) -> dict[str, Any]:
    return {
        "parameters": [(name, id(p), p.requires_grad, p.shape, p.dtype) for name, p in model.named_parameters()],
        "hooks": hooks_of(model),
        "state hooks": [
            (list(m._state_dict_pre_hooks.values()), list(m._load_state_dict_pre_hooks.values()))
            for m in model.modules()
        ],
        "gradient hooks": [list((p._post_accumulate_grad_hooks or {}).values()) for p in model.parameters()],
        "attributes": [sorted(vars(module)) for module in model.modules()],
        "flags": [module.training for module in model.modules()],
        "use_cache": model.config.use_cache,
        "threads": torch.get_num_threads(),
    }


def check_ordinary(model: nn.Module, facts: dict[str, Any]) -> None:
    """The model is as it was but for its weights, and nothing of the runtime goes on."""
    after = ordinary_facts(model)
    assert [name for name in facts if not same(facts[name], after[name])] == []
    assert lanes_alive() == []
    assert _get_current_dispatch_mode_stack() == []
    assert all(p.grad is None for p in model.parameters())
    storages = [p.untyped_storage() for p in model.parameters()]
    assert len({storage._cdata for storage in storages}) == len(storages)
    assert [s.nbytes() for s in storages] == [p.numel() * p.element_size() for p in model.parameters()]


def blocks_between(case: Case, model: nn.Module, step: int) -> set[int]:
    """For each parameter the step that it is at, which must be ``step`` or the next one, bit for bit."""
    before, after = case.plain.weights[step], case.plain.weights[step + 1]
    found = set()
    for name, parameter in model.state_dict().items():
        if torch.equal(parameter, before[name]):
            found.add(step)
        elif torch.equal(parameter, after[name]):
            found.add(step + 1)
        else:
            raise AssertionError(f"{name} is at no step")
    return found


# -- an ordinary end -------------------------------------------------------------------------------------------------


def test_a_model_is_ordinary_before_and_after(case: Case, tmp_path: Path) -> None:
    model = case.build()
    facts = ordinary_facts(model)
    threads_before = set(threading.enumerate())
    with ends_in_time():
        with start(case, model) as training:
            assert lanes_alive() == ["protwin-cpu_optim", "protwin-d2h", "protwin-h2d", "protwin-looks_0"]
            train(case, model, training)
        training.close()
        training.close()
    assert set(threading.enumerate()) == threads_before
    check_ordinary(model, facts)
    assert differences(model, case.plain.weights[-1]) == []
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert differences(again, case.plain.weights[-1]) == []
    assert differences(copy.deepcopy(model), case.plain.weights[-1]) == []
    model.load_state_dict(case.plain.weights[0])
    assert model.generate(case.batches[0]["input_ids"][:, :3], max_new_tokens=2).shape[1] == 5


def test_a_second_training_goes_on_where_the_first_ended(case: Case) -> None:
    """Only the optimizer's state starts anew, so the reference is two plain runs of one step each."""
    model, plain = case.build(), uncached(case.build())
    for batch in case.batches[:2]:
        with ends_in_time(), start(case, model) as training:
            loss = case.loss(model, batch)
            loss.backward()
            training.step()
        optimizer = case.make_optimizer(case.groups(plain))
        expected = case.loss(plain, batch)
        expected.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert loss.item() == expected.item()
    assert differences(model, snapshot(plain)) == []


def test_a_training_that_never_ran_leaves_the_weights(case: Case) -> None:
    model = case.build()
    facts = ordinary_facts(model)
    with ends_in_time():
        start(case, model).close()
    check_ordinary(model, facts)
    assert differences(model, case.plain.weights[0]) == []


def test_threads_that_start_later_have_as_many_cores_as_ever(case: Case) -> None:
    """Lanes use one thread per operation; torch would hand their setting on."""
    expected = torch.get_num_threads()
    found: list[int] = []
    with ends_in_time(), start(case, case.build()):
        thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert torch.get_num_threads() == expected
    assert found == [expected]


def test_the_forward_of_a_block_is_its_own_again(case: Case) -> None:
    model = case.build()

    def own_forward(*args: Any, **kwargs: Any) -> Any:
        return type(model.model.layers[1]).forward(model.model.layers[1], *args, **kwargs)

    model.model.layers[1].forward = own_forward
    with ends_in_time(), start(case, model, device=CpuDevice()) as training:
        assert train(case, model, training) == case.plain.losses
    assert model.model.layers[1].forward is own_forward
    assert all("forward" not in vars(model.model.layers[index]) for index in (0, 2, 3))


# -- endings in the middle -------------------------------------------------------------------------------------------


class Interruption(KeyboardInterrupt):
    """Ctrl-C, told from a real one."""


@pytest.mark.parametrize("error", [ZeroDivisionError, Interruption, SystemExit])
@pytest.mark.parametrize("block", [0, 1, 3])
@pytest.mark.parametrize("step", [0, 1])
def test_an_error_in_forward(case: Case, step: int, block: int, error: type[BaseException]) -> None:
    """Step 0 is watched; blocks 0 and 3 keep, block 1 is checkpointed."""
    model = case.build()
    model.eval()
    facts = ordinary_facts(model)
    with (  # noqa: PT012
        ends_in_time(),
        pytest.raises(error, match="in the middle"),
        start(case, model) as training,
    ):
        train(case, model, training, step)

        def fail(*_: Any) -> None:
            raise error("in the middle")

        handle = model.model.layers[block].mlp.register_forward_hook(fail)
        try:
            case.loss(model, case.batches[step])
        finally:
            handle.remove()
    check_ordinary(model, facts)
    assert differences(model, case.plain.weights[step]) == []


@pytest.mark.parametrize("error", [ZeroDivisionError, Interruption])
@pytest.mark.parametrize("block", [0, 1, 3])
@pytest.mark.parametrize("step", [0, 3])
def test_an_error_in_backward(case: Case, step: int, block: int, error: type[BaseException]) -> None:
    """Chunks that CPU Adam has stepped by then keep the step; all others are as before it."""
    model = case.build()
    facts = ordinary_facts(model)
    with (  # noqa: PT012
        ends_in_time(),
        pytest.raises(error, match="in the middle"),
        start(case, model) as training,
    ):
        train(case, model, training, step)

        def fail(_: Any) -> None:
            raise error("in the middle")

        handle = model.model.layers[block].mlp.register_forward_hook(
            lambda module, args, output: output.register_hook(fail) and None
        )
        loss = case.loss(model, case.batches[step])
        handle.remove()
        loss.backward()
    check_ordinary(model, facts)
    assert blocks_between(case, model, step) <= {step, step + 1}


def test_an_error_of_the_users_between_forward_and_backward(case: Case) -> None:
    model = case.build()
    facts = ordinary_facts(model)
    with (  # noqa: PT012
        ends_in_time(),
        pytest.raises(ZeroDivisionError),
        start(case, model) as training,
    ):
        train(case, model, training, 1)
        case.loss(model, case.batches[1])
        raise ZeroDivisionError
    check_ordinary(model, facts)
    assert differences(model, case.plain.weights[1]) == []


@pytest.mark.parametrize("after", ["forward", "backward"])
def test_closing_in_the_middle_of_an_iteration(case: Case, after: str) -> None:
    model = case.build()
    facts = ordinary_facts(model)
    with ends_in_time():
        training = start(case, model)
        train(case, model, training, 1)
        loss = case.loss(model, case.batches[1])
        if after == "backward":
            loss.backward()
        del loss
        training.close()
    check_ordinary(model, facts)
    assert blocks_between(case, model, 1) <= ({1} if after == "forward" else {1, 2})


# -- errors of lanes -------------------------------------------------------------------------------------------------


class FailingAdam(torch.optim.AdamW):
    """Fails at its n-th step on the host, or on the device."""

    remaining = 0
    fails_on_host = True

    def step(self, closure: Any = None) -> Any:
        if (threading.current_thread() is not threading.main_thread()) == FailingAdam.fails_on_host:
            FailingAdam.remaining -= 1
            if FailingAdam.remaining == 0:
                raise ZeroDivisionError("in the optimizer")
        return super().step(closure)


@pytest.mark.parametrize("number", [1, 5, 40])
def test_an_error_in_cpu_adam_surfaces_on_the_main_thread(case: Case, number: int) -> None:
    model = case.build()
    facts = ordinary_facts(model)
    FailingAdam.remaining, FailingAdam.fails_on_host = number, True
    failing = partial(FailingAdam, lr=1e-2, weight_decay=0.1, fused=True)
    with (
        ends_in_time(),
        pytest.raises(ZeroDivisionError, match="in the optimizer") as raised,
        start(case, model, optimizer=failing) as training,
    ):
        train(case, model, training)
    assert any(frame.name == "step_on_host" for frame in raised.traceback)
    check_ordinary(model, facts)


def test_an_error_in_the_last_cpu_adam_surfaces_when_training_closes(case: Case) -> None:
    """Nothing waits for it but close."""
    model = case.build()
    facts = ordinary_facts(model)
    layout = build_layout(case.workload.parameters, num_blocks=4, chunk_bytes=CHUNK_BYTES)
    offloaded = sum(bool(chunk.blocks) for chunk in layout.chunks[2:])
    FailingAdam.remaining, FailingAdam.fails_on_host = offloaded, True
    failing = partial(FailingAdam, lr=1e-2, weight_decay=0.1, fused=True)
    with ends_in_time():
        training = start(case, model, optimizer=failing)
        try:
            train(case, model, training, 1)
        except ZeroDivisionError:
            with suppress(ZeroDivisionError):
                training.close()
            pytest.skip("the last CPU Adam was faster than the step on the device")
        with pytest.raises(ZeroDivisionError, match="in the optimizer"):
            training.close()
        training.close()
    check_ordinary(model, facts)


def test_an_error_in_device_adam(case: Case) -> None:
    model = case.build()
    facts = ordinary_facts(model)
    FailingAdam.remaining, FailingAdam.fails_on_host = 2, False
    failing = partial(FailingAdam, lr=1e-2, weight_decay=0.1, fused=True)
    with (
        ends_in_time(),
        pytest.raises(ZeroDivisionError, match="in the optimizer"),
        start(case, model, optimizer=failing) as training,
    ):
        train(case, model, training)
    check_ordinary(model, facts)


def fail_to_copy() -> None:
    raise OSError("a copy failed")


@pytest.mark.parametrize("to_device", [True, False])
@pytest.mark.parametrize("number", [1, 9, 30])
def test_an_error_in_a_copy_surfaces_on_the_main_thread(case: Case, number: int, to_device: bool) -> None:
    model = case.build()
    facts = ordinary_facts(model)
    device = FaultyDevice(fail_to_copy, to_device=to_device, copy_number=number)
    with (
        ends_in_time(),
        pytest.raises(OSError, match="a copy failed"),
        start(case, model, device=device) as training,
    ):
        train(case, model, training)
    check_ordinary(model, facts)
    assert device.ledger.named_bytes == 0


def test_a_failed_training_says_so_until_it_is_closed(case: Case) -> None:
    model = case.build()
    device = FaultyDevice(fail_to_copy, to_device=True, copy_number=9)
    with ends_in_time():
        training = start(case, model, device=device)
        with pytest.raises(OSError, match="a copy failed"):
            train(case, model, training)
        for attempt in (training.step, lambda: model(**case.batches[0]), lambda: training.set_learning_rate(0.1)):
            with pytest.raises(training_error(), match="a copy failed") as raised:
                attempt()
            assert isinstance(raised.value.__cause__, OSError)
        training.close()


def training_error() -> type[Exception]:
    from protwin.shared.basics.errors import ScheduleError

    return ScheduleError


@pytest.mark.parametrize("number", [3, 25, 60])
def test_out_of_memory_in_a_gather(case: Case, number: int) -> None:
    """For the n-th gather alone the budget is what is there: the compute thread raises what the gather raised."""
    model = case.build()
    facts = ordinary_facts(model)
    device = CpuDevice()
    with (  # noqa: PT012
        ends_in_time(),
        pytest.raises(CpuOutOfMemoryError, match=r"chunk \d+ needs"),
        start(case, model, device=device) as training,
    ):
        allocate, remaining = device.ledger.allocate, number

        def allocate_or_shrink(size_bytes: int, name: str, *content: Any) -> None:
            nonlocal remaining
            remaining -= 1
            if remaining == 0:
                device.ledger.budget_bytes = device.ledger.level_bytes
            try:
                allocate(size_bytes, name, *content)
            finally:
                device.ledger.budget_bytes = None

        device.ledger.allocate = allocate_or_shrink  # type: ignore[method-assign]
        train(case, model, training)
    check_ordinary(model, facts)
    assert device.ledger.named_bytes == 0


def test_setting_up_that_fails_leaves_the_model(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every stage: in an optimizer, in a lane's thread, in the hooks."""
    from protwin.runtime.training import assembly, transfer_lanes

    def fail(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("in the middle")

    stages: list[tuple[dict[str, Any], Callable[[pytest.MonkeyPatch], None]]] = [
        ({"optimizer": fail}, lambda patch: None),
        ({}, lambda patch: patch.setattr(transfer_lanes, "WorkerLane", fail)),
        ({}, lambda patch: patch.setattr(assembly, "SectionWalker", fail)),
    ]
    for settings, break_it in stages:
        model = case.build()
        facts = ordinary_facts(model)
        with monkeypatch.context() as patch, ends_in_time():
            break_it(patch)
            with pytest.raises(ZeroDivisionError, match="in the middle"):
                start(case, model, **settings)
        check_ordinary(model, facts)
        assert differences(model, case.plain.weights[0]) == []
        with ends_in_time(), start(case, model) as training_again:
            assert train(case, model, training_again, 2) == case.plain.losses[:2]


# -- dispatch modes --------------------------------------------------------------------------------------------------


def test_nothing_is_watched_after_an_error_within_a_watched_operation(case: Case) -> None:
    model = case.build()
    device = CpuDevice()
    with ends_in_time():
        training = start(case, model, device=device)
        device.ledger.budget_bytes = device.ledger.level_bytes + 30_000
        with pytest.raises(CpuOutOfMemoryError):
            train(case, model, training)
        training.close()
        assert _get_current_dispatch_mode_stack() == []
        level = device.ledger.level_bytes
        kept = torch.ones(100_000)
        assert device.ledger.level_bytes == level
        del kept


def test_training_closed_on_another_thread(case: Case) -> None:
    model = case.build()
    facts = ordinary_facts(model)
    training = start(case, model)
    loss = case.loss(model, case.batches[0])
    del loss
    thread = threading.Thread(target=training.close)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    # The mode of this thread's stack lies there still, asleep; nothing is watched.
    for mode in _get_current_dispatch_mode_stack():
        mode.__exit__(None, None, None)
    check_ordinary(model, facts)
    torch.manual_seed(SEED)
    case.loss(model, case.batches[0]).backward()
    assert adamw is not None


# -- modes of the user's own -----------------------------------------------------------------------------------------


PARTS = ("forward", "backward", "step")


@pytest.mark.parametrize("around", [("forward",), ("backward",), ("backward", "step"), PARTS])
def test_a_mode_of_ones_own_around_any_part_of_a_step(case: Case, around: tuple[str, ...]) -> None:
    """It overlaps with the ledger's, which begins within the forward and ends within the step."""

    def counted_flops(model: nn.Module, step: Callable[[], Any]) -> list[int]:
        counted = []
        for batch in case.batches:
            losses: list[torch.Tensor] = []
            calls = {
                "forward": lambda batch=batch, losses=losses: losses.append(case.loss(model, batch)),
                "backward": lambda losses=losses: losses.pop().backward(),
                "step": step,
            }
            for part in PARTS[: PARTS.index(around[0])]:
                calls[part]()
            with FlopCounterMode(display=False) as counter:
                for part in around:
                    calls[part]()
            for part in PARTS[PARTS.index(around[-1]) + 1 :]:
                calls[part]()
            counted.append(counter.get_total_flops())
        return counted

    # The counter lets some operations run in pieces, so the plain loop has it too.
    plain = uncached(case.build())
    optimizer = case.make_optimizer(case.groups(plain))
    expected = counted_flops(plain, lambda: (optimizer.step(), optimizer.zero_grad()))
    plan = plan_for(case.workload).model_copy(update={"n_checkpoint": 0})
    peaks = []
    for is_counted in (True, False):
        model = case.build()
        with ends_in_time(), carry_out(model, plan, case.workload, optimizer=case.make_optimizer) as training:
            found = counted_flops(model, training.step) if is_counted else train(case, model, training)
        peaks.append(training.peak_device_bytes)
        assert _get_current_dispatch_mode_stack() == []
        assert not is_in_torch_dispatch_mode()
        if is_counted:
            assert found == expected
            assert differences(model, snapshot(plain)) == []
    # A curve that missed backward would be lower by activations and gradients.
    assert peaks[0] == pytest.approx(peaks[1], rel=0.1)
