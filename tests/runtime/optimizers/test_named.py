"""Optimizers that plans name: carried out to the bit, in as much memory as was said, or refused by name."""

from __future__ import annotations

import sys
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path
from threading import Barrier, BrokenBarrierError, Thread

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.profiler import ProfilerActivity, profile

from protwin.runtime import CpuDevice, carry_out, named_optimizer
from protwin.runtime.optimizers.chunk_optimizer import ChunkOptimizer
from protwin.runtime.optimizers.step_options import ParameterGroup, StepOptions
from protwin.shared.basics.errors import PlanError
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.layout.layout import build_layout
from protwin.shared.optimizers.state import LEAST_QUANTIZED_SCALARS, is_quantized, state_bytes
from protwin.shared.optimizers.work import host_temporary_bytes, temporary_bytes
from protwin.shared.schema.optimizer import Optimizer
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.workload import DType
from protwin.shared.verify.guaranteed_peak import guaranteed_device_peak
from tests.proof_size import some_quick
from tests.runtime.life_cycle import plan_for
from tests.runtime.models import SEED, Case, cases, differences, hand_written, llama, token_batches
from tests.strategies.plans import plans

ON_CPU = [optimizer for optimizer in Optimizer if optimizer is not Optimizer.PAGED_ADAMW_8BIT]
RATES = {Optimizer.SGD: 0.1, Optimizer.LION: 1e-3}
"""At which every step shows in every bit; the others have 0.01."""


def wide_llama(dtype: torch.dtype) -> nn.Module:
    """Matrices above and below the size from which state is quantized."""
    return llama(num_layers=2, hidden_size=64, intermediate_size=160).to(dtype)


@lru_cache
def case_of(optimizer: Optimizer, dtype: torch.dtype) -> Case:
    return Case(
        partial(wide_llama, dtype),
        token_batches(3),
        make_optimizer=named_optimizer(optimizer, lr=RATES.get(optimizer, 1e-2)),
        has_masters=optimizer is not Optimizer.ADAMW_BF16,
    )


def dtypes_of(optimizer: Optimizer) -> tuple[torch.dtype, ...]:
    return (torch.bfloat16,) if optimizer is Optimizer.ADAMW_BF16 else (torch.float32, torch.bfloat16)


EVERY = [(optimizer, dtype) for optimizer in ON_CPU for dtype in dtypes_of(optimizer)]


def trained(case: Case, plan: Plan, device: CpuDevice | None = None) -> tuple[nn.Module, list[float], int, int]:
    """The model, its losses, steps of CPU Adam, and the peak."""
    model = case.build()
    losses = []
    torch.manual_seed(SEED)
    with carry_out(model, plan, case.workload, optimizer=case.make_optimizer, device=device) as training:
        for batches in case.steps(plan.micro_batches):
            for batch in batches:
                loss = case.loss(model, batch)
                loss.backward()
                losses.append(loss.item())
            training.step()
    return model, losses, training.num_cpu_adam_steps, training.peak_device_bytes


@some_quick(("optimizer", "dtype"), EVERY, quick=4, ids=str)
@settings(max_examples=2, phases=[Phase.explicit, Phase.generate])
@given(data=st.data())
def test_every_plan_equals_the_plain_loop_with_its_optimizer(
    optimizer: Optimizer, dtype: torch.dtype, data: st.DataObject
) -> None:
    case = case_of(optimizer, dtype)
    plan, _ = data.draw(plans(case.workload, optimizers=st.just(optimizer)))
    plain = case.plain_with(plan.micro_batches, plan.max_gradient_norm)
    model, losses, _, _ = trained(case, plan)
    assert losses == plain.losses
    assert differences(model, plain.weights[-1]) == []
    assert differences(model, plain.weights[0]) != []


@some_quick(("optimizer", "dtype"), EVERY, quick=5, ids=str)
def test_memory_is_what_was_said(optimizer: Optimizer, dtype: torch.dtype) -> None:
    """Half offloaded, some step is on the host; all persistent, the peak is the guaranteed one."""
    case = case_of(optimizer, dtype)
    chunks = len(build_layout(case.workload.parameters, num_blocks=2, chunk_bytes=60_000).chunks)
    for n_persist in (chunks // 2, chunks):
        plan = Plan(
            workload_id=case.workload.identity,
            chunk_bytes=60_000,
            n_persist=n_persist,
            n_buffer=0 if n_persist == chunks else 8,
            optimizer=optimizer,
        )
        guaranteed = guaranteed_device_peak(compile_schedule(plan, case.workload)).size_bytes
        _, _, num_cpu_steps, measured = trained(case, plan, CpuDevice(guaranteed))
        assert measured <= guaranteed
        assert (num_cpu_steps > 0) == (n_persist < chunks)
    assert measured / guaranteed == pytest.approx(1, rel=5e-3)


SHAPES = (
    st.lists(st.integers(1, 40), min_size=0, max_size=3).map(tuple)
    | st.integers(LEAST_QUANTIZED_SCALARS - 2, LEAST_QUANTIZED_SCALARS + 600).map(lambda count: (count,))
    | st.sampled_from([(64, 64), (3, 50, 70), (1, 5000)])
)


@pytest.mark.parametrize("optimizer", ON_CPU)
@settings(max_examples=12)
@given(shape=SHAPES)
def test_state_is_what_the_library_keeps(optimizer: Optimizer, shape: tuple[int, ...]) -> None:
    """Oracle: the tensors of a real optimizer after a step."""
    dtype = DType.BFLOAT16 if optimizer is Optimizer.ADAMW_BF16 else DType.FLOAT32
    weight = nn.Parameter(torch.randn(shape).to(getattr(torch, dtype)))
    weight.grad = torch.randn_like(weight)
    made = named_optimizer(optimizer)([{"params": [weight]}])
    made.step()
    kept = [value for value in made.state[weight].values() if isinstance(value, torch.Tensor)]
    found = sum(tensor.numel() * tensor.element_size() for tensor in kept)
    assert state_bytes([(dtype, shape)], optimizer) == found
    assert is_quantized((dtype, shape), optimizer) == any(tensor.dtype is torch.uint8 for tensor in kept)


@settings(max_examples=15)
@given(shape=SHAPES)
def test_adafactor_makes_what_was_said_on_the_way(shape: tuple[int, ...]) -> None:
    """Oracle: the ledger's peak of one step."""
    device = CpuDevice()
    weight = nn.Parameter(torch.randn(shape))
    weight.grad = torch.randn(shape)
    made = named_optimizer(Optimizer.ADAFACTOR)([{"params": [weight]}])
    made.step()
    ledger = device.ledger
    ledger.adopt([weight, weight.grad, *made.state[weight].values()])
    before = ledger.watched_bytes
    ledger.reset_watched_peak()
    with ledger.metering():
        made.step()
    found = ledger.watched_peak_bytes - before
    assert found == temporary_bytes((DType.FLOAT32, shape), Optimizer.ADAFACTOR)


@pytest.mark.parametrize("optimizer", ON_CPU)
def test_steps_on_the_host_make_what_was_said_on_the_way(optimizer: Optimizer) -> None:
    """Oracle: every allocation of a step, those within operators too, as torch's profiler sees them."""
    dtype = DType.BFLOAT16 if optimizer is Optimizer.ADAMW_BF16 else DType.FLOAT32
    for shape in ((300, 100), (LEAST_QUANTIZED_SCALARS - 1,)):
        weight = nn.Parameter(torch.randn(shape).to(getattr(torch, dtype)))
        weight.grad = torch.randn_like(weight)
        made = named_optimizer(optimizer)([{"params": [weight]}])
        made.step()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            made.step()
        level = found = 0
        events = (event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]")
        for event in sorted(events, key=lambda event: event.start_ns()):
            level += event.nbytes()
            found = max(found, level)
        # Scalars on their way to Python besides.
        assert 0 <= found - host_temporary_bytes((dtype, shape), optimizer) <= 64


# -- checkpoints -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [Optimizer.ADAMW_8BIT, Optimizer.LION, Optimizer.ADAMW_BF16, Optimizer.ADAFACTOR])
def test_a_training_goes_on_under_another_plan(optimizer: Optimizer, tmp_path: Path) -> None:
    """Interrupted after a step, as if it had not been; 8-bit states share their maps again."""
    case = case_of(optimizer, torch.bfloat16)
    before, after = (
        plan_for(case.workload).model_copy(update={"optimizer": optimizer, **knobs})
        for knobs in ({}, {"n_persist": 0, "chunk_bytes": 50_000, "n_buffer": 12})
    )
    model = case.build()
    with carry_out(model, before, case.workload, optimizer=case.make_optimizer) as training:
        case.loss(model, case.batches[0]).backward()
        training.step()
        training.save(tmp_path)
    resumed = case.build()
    with carry_out(resumed, after, case.workload, optimizer=case.make_optimizer) as training:
        training.resume(tmp_path)
        for batch in case.batches[1:]:
            case.loss(resumed, batch).backward()
            training.step()
        maps = [
            {state["qmap1"].data_ptr() for state in stepper.optimizer.state.values() if "qmap1" in state}
            for stepper, _, _ in training._placed.optimizers.steppers()
        ]
    assert differences(resumed, case.plain.weights[-1]) == []
    assert max(map(len, maps)) == (1 if optimizer is Optimizer.ADAMW_8BIT else 0)


@pytest.mark.parametrize("optimizer", [Optimizer.ADAMW_8BIT, Optimizer.ADAMW])
def test_steps_of_bitsandbytes_take_turns_on_the_cpu(optimizer: Optimizer) -> None:
    """Its kernels are wrong beside themselves; those of torch may run side by side."""
    running, most, both = 0, 0, Barrier(2)

    def stepped() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        with suppress(BrokenBarrierError):
            both.wait(0.1 if optimizer.is_of_bitsandbytes else 30)  # of two at once, each sees the other
        running -= 1

    steppers = []
    for _ in range(2):
        weight = nn.Parameter(torch.zeros(8))
        options = StepOptions([ParameterGroup((weight,), {})], {})
        stepper = ChunkOptimizer([weight], [weight], options, named_optimizer(optimizer))
        stepper.optimizer.step = stepped
        steppers.append(stepper)
    threads = [Thread(target=stepper.step, args=([torch.zeros(8)],)) for stepper in steppers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == (1 if optimizer.is_of_bitsandbytes else 2)


@pytest.mark.parametrize("optimizer", [Optimizer.ADAMW_8BIT, Optimizer.SGD])
def test_state_in_torchs_form_goes_on(optimizer: Optimizer) -> None:
    """A state_dict of one plan is loaded under another, with the weights of the same moment."""
    case = case_of(optimizer, torch.float32)
    plan = plan_for(case.workload).model_copy(update={"optimizer": optimizer})
    model = case.build()
    with carry_out(model, plan, case.workload, optimizer=case.make_optimizer) as training:
        case.loss(model, case.batches[0]).backward()
        training.step()
        state = training.optimizer.state_dict()
    after = plan.model_copy(update={"n_persist": 0, "chunk_bytes": 50_000, "n_buffer": 12})
    with carry_out(model, after, case.workload, optimizer=case.make_optimizer) as training:
        training.optimizer.load_state_dict(state)
        for batch in case.batches[1:]:
            case.loss(model, batch).backward()
            training.step()
    assert differences(model, case.plain.weights[-1]) == []


# -- refusals --------------------------------------------------------------------------------------------------------


@pytest.fixture
def plain_case() -> Case:
    return cases()["hand-written, unused parameters"]


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (Optimizer.PAGED_ADAMW_8BIT, "paged-adamw-8bit pages .* but the device is cpu. Choose adamw-8bit"),
        (Optimizer.ADAMW_BF16, "adamw-bf16 keeps bfloat16 moments .* are float32. Choose adamw, or"),
    ],
)
def test_what_cannot_run_here_is_refused_by_name(plain_case: Case, optimizer: Optimizer, message: str) -> None:
    model = plain_case.build()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    plan = plan_for(plain_case.workload).model_copy(update={"optimizer": optimizer})
    with pytest.raises(PlanError, match=message):
        carry_out(model, plan, plain_case.workload)
    assert differences(model, weights) == []


def test_an_absent_library_is_named(plain_case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    plan = plan_for(plain_case.workload).model_copy(update={"optimizer": Optimizer.LION})
    with pytest.raises(PlanError, match=r"lion is one of bitsandbytes.*\(pip install 'bitsandbytes>="):
        carry_out(plain_case.build(), plan, plain_case.workload)


def test_another_optimizer_than_the_plan_accounts_for_is_refused(plain_case: Case) -> None:
    model = plain_case.build()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    plan = plan_for(plain_case.workload).model_copy(update={"optimizer": Optimizer.SGD})
    with pytest.raises(PlanError, match=r"accounts for the optimizer sgd, but optimizer= makes AdamW.*Optimizer\.SGD"):
        carry_out(model, plan, plain_case.workload, optimizer=plain_case.make_optimizer)
    assert differences(model, weights) == []


def test_weights_that_do_not_lie_in_one_row_are_refused() -> None:
    """bitsandbytes would step a copy, and the weight would stay as it was."""
    from protwin.runtime import trace

    model = hand_written()
    layer = model.stack[0].up
    layer.weight = nn.Parameter(layer.weight.detach().t().contiguous().t())
    case = cases()["hand-written, unused parameters"]
    classes = case.batches[0]["classes"]
    workload = trace(
        model, case.batches[0]["points"], loss=lambda out, _: nn.functional.cross_entropy(out, classes), repeats=0
    )
    plan = plan_for(workload).model_copy(update={"optimizer": Optimizer.ADAMW_8BIT})
    with pytest.raises(PlanError, match=r"stack\.0\.up\.weight .* has strides .* bitsandbytes steps contiguous"):
        carry_out(model, plan, workload)
