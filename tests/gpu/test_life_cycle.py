"""Errors surface where they belong, labels are seen, streams are kept to, a training can be closed and resumed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from protwin.runtime import NonFiniteGradientError, carry_out
from protwin.shared.basics.errors import ScheduleError
from tests.gpu.subject import (
    CHECKPOINT,
    DEVICE,
    KEEP,
    SWAP,
    differing,
    host_snapshot,
    make_device,
    offloaded_names,
    on_device,
    plan_of,
    train,
    train_plainly,
)
from tests.runtime.models import SEED, cases
from tests.runtime.watchdog import ends_in_time

pytestmark = pytest.mark.gpu


def test_an_error_in_backward_surfaces_on_the_main_thread_with_the_weights_of_the_last_step() -> None:
    case = cases()["llama"]
    plan = plan_of(case, [SWAP, CHECKPOINT, KEEP])
    plain = train_plainly(case, on_host=offloaded_names(case, plan))
    model = case.build()

    def fail(_: torch.Tensor) -> None:
        raise ZeroDivisionError("on purpose")

    def train_and_fail() -> None:
        with carry_out(model, plan, case.workload, optimizer=case.make_optimizer, device=make_device()) as training:
            torch.manual_seed(SEED)
            for number, batch in enumerate(case.batches):
                loss = case.loss(model, on_device(batch))
                if number == 2:
                    loss.register_hook(fail)
                loss.backward()
                training.step()

    with ends_in_time(), pytest.raises(ZeroDivisionError, match="on purpose"):
        train_and_fail()
    assert differing(host_snapshot(model), plain.weights[2]) == []


def test_a_gradient_that_is_not_finite_is_named() -> None:
    case = cases()["llama"]
    plan = plan_of(case, [KEEP], persistent=0.5)
    model = case.build()

    def train_badly() -> None:
        with carry_out(model, plan, case.workload, optimizer=case.make_optimizer, device=make_device()) as training:
            (case.loss(model, on_device(case.batches[0])) * float("inf")).backward()
            training.step()

    with ends_in_time(), pytest.raises(NonFiniteGradientError, match="is not finite"):
        train_badly()


def test_a_forward_on_another_stream_is_refused_and_one_on_the_callers_own_is_not() -> None:
    case = cases()["llama"]
    plan = plan_of(case, [SWAP, CHECKPOINT, KEEP])
    plain = train_plainly(case, on_host=offloaded_names(case, plan))
    model, own = case.build(), torch.cuda.Stream(DEVICE)
    own.wait_stream(torch.cuda.current_stream(DEVICE))
    with torch.cuda.stream(own):
        training = carry_out(model, plan, case.workload, optimizer=case.make_optimizer, device=make_device())
        try:
            with torch.cuda.stream(torch.cuda.Stream(DEVICE)), pytest.raises(ScheduleError, match="another CUDA"):
                case.loss(model, on_device(case.batches[0]))
            run = train(case, plan, training, model)
        finally:
            training.close()
    torch.cuda.synchronize()
    assert run.losses == plain.losses
    assert differing(host_snapshot(model), plain.weights[-1]) == []


@pytest.mark.filterwarnings("ignore")
def test_the_profiler_shows_every_lanes_tasks_by_name(tmp_path: Path) -> None:
    case = cases()["llama"]
    plan = plan_of(case, [SWAP, CHECKPOINT, KEEP])
    model = case.build()
    everywhere = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with carry_out(model, plan, case.workload, optimizer=case.make_optimizer, device=make_device()) as training:
        with profile(
            activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], experimental_config=everywhere
        ) as profiler:
            train(case, plan, training, model)
            training.synchronize()
        profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    names = {event.name for event in profiler.events()}
    for kind in ("gather", "gradient_offload", "activation_offload", "activation_fetch", "cpu_adam", "device_adam"):
        assert any(name.startswith(f"protwin::{kind}") for name in names), kind
    text = (tmp_path / "trace.json").read_text()
    assert "HtoD" in text
    assert "DtoH" in text


def test_a_checkpoint_of_one_plan_goes_on_under_another(tmp_path: Path) -> None:
    case = cases()["gpt2 with dropout, tied"]
    plan, other = plan_of(case, [SWAP, KEEP]), plan_of(case, [CHECKPOINT], chunk_bytes=20_000)
    assert offloaded_names(case, plan) == offloaded_names(case, other)
    plain = train_plainly(case, on_host=offloaded_names(case, plan))
    half = len(case.batches) // 2
    losses = []
    for chosen, batches in ((plan, case.batches[:half]), (other, case.batches[half:])):
        model = case.build()
        with carry_out(model, chosen, case.workload, optimizer=case.make_optimizer, device=make_device()) as training:
            torch.manual_seed(SEED)
            if chosen is other:
                training.resume(tmp_path / "checkpoint")
            for batch in batches:
                loss = case.loss(model, on_device(batch))
                loss.backward()
                losses.append(loss.item())
                training.step()
            training.save(tmp_path / "checkpoint")
    assert losses == plain.losses
    assert differing(host_snapshot(model), plain.weights[-1]) == []
