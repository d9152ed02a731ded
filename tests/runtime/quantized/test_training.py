"""A packed base under a plan: PEFT's adapters beside bitsandbytes' layers, trained to the bits of the plain loop."""

from __future__ import annotations

import gc
from collections.abc import Callable
from itertools import product
from pathlib import Path

import bitsandbytes as bnb
import peft
import pytest
import torch
from torch import nn

from protwin.runtime import CpuDevice, carry_out, trace
from protwin.runtime.devices import watching_mode
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.layout.layout import layout_of
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.workload import Workload
from protwin.shared.verify.guaranteed_peak import guaranteed_device_peak
from tests.proof_size import some_quick
from tests.runtime.accounts import BAR, MIXTURES, error_frac, measured_peak_bytes, plan_of
from tests.runtime.eager_lanes import eager_peak
from tests.runtime.equality import miscounted, offloaded_chunks, random_plans, trained
from tests.runtime.models import Case, differences, llama
from tests.runtime.quantized.models import packed_blocks, quantized_cases, quiet_peft
from tests.runtime.resuming import check_resumption, kept, mixed, offloaded, on_disk

NAMES = tuple(quantized_cases())


STATES = ("weight_absmax", "weight_code", "weight_nested_absmax", "weight_nested_code", "weight_offset", "weight_scale")
"""Ends of the names of tensors without which a packed weight is of no use."""

LOSS_BYTES = 4
"""Of the last step's loss, which the loop holds when the forward of the last block takes the most."""


def check(case: Case, plan: Plan) -> None:
    guaranteed_bytes = guaranteed_device_peak(compile_schedule(plan, case.workload)).size_bytes
    outcome = trained(case, plan, CpuDevice(guaranteed_bytes + LOSS_BYTES))
    assert outcome.losses == case.plain_with(plan.micro_batches, plan.max_gradient_norm).losses
    assert outcome.different == []
    assert miscounted(case, plan, outcome) == []


@some_quick(
    ("name", "mixture"),
    product(NAMES, ["kept", "checkpointed", "mixed"]),
    quick=[("nf4, double", "mixed")],
)
def test_a_base_that_is_offloaded_chunk_by_chunk_trains_adapters_to_the_bits_of_the_resident_one(
    name: str, mixture: str
) -> None:
    case = quantized_cases()[name]
    plan = plan_of(case, mixture, "offloaded")
    assert len(offloaded_chunks(case.workload, plan)) > 4
    check(case, plan)


@pytest.mark.filterwarnings("ignore:Generating overly large repr")
@some_quick(("name", "seed"), [(name, seed) for name in NAMES for seed in range(5)], quick=2)
def test_random_plans_equal_the_plain_loop(name: str, seed: int) -> None:
    case = quantized_cases()[name]
    for plan in random_plans(case.workload, 2, seed=seed):
        check(case, plan)


@some_quick(
    ("name", "mixture", "residency"),
    product(NAMES, MIXTURES, ["persistent", "offloaded", "mixed"]),
    quick=[
        ("nf4, double", "kept", "offloaded"),
        ("nf4, double", "mixed inputs", "mixed"),
        ("nf4, double, in bfloat16", "swapped", "offloaded"),
        ("int8", "mixed", "offloaded"),
    ],
)
def test_the_peak_is_the_account(name: str, mixture: str, residency: str) -> None:
    case = quantized_cases()[name]
    plan = plan_of(case, mixture, residency)
    accounted = eager_peak(compile_schedule(plan, case.workload))
    assert error_frac(measured_peak_bytes(case, plan), accounted) == pytest.approx(0, abs=BAR)


def test_an_account_without_unpacked_weights_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong variant: a trace that sees the product with a packed weight as one operation."""
    case = quantized_cases()["nf4"]
    spelled_out = case.workload.profiles[0].forward
    assert any("dequantize_4bit" in operation.name for operation in spelled_out.operations)
    monkeypatch.setattr(watching_mode, "parts_of", lambda _: None)
    hidden = trace(case.build(), case.batches[0], repeats=0)
    assert not any("dequantize_4bit" in operation.name for operation in hidden.profiles[0].forward.operations)
    assert hidden.profiles[0].forward.peak_bytes < spelled_out.peak_bytes


@some_quick("name", NAMES, quick=["nf4, double", "int8"])
def test_what_travels_is_packed_and_brings_its_state_along(name: str) -> None:
    """Bytes of the base, by bitsandbytes' own account of the model, lie in frozen chunks beside the adapters."""
    case = quantized_cases()[name]
    model = case.build()
    packed_bytes = sum(
        tensor.numel() * tensor.element_size()
        for name, tensor in model.state_dict().items()
        if not name.endswith(("weight_format", "bitsandbytes__nf4", "bitsandbytes__fp4"))
    )
    offsets_bytes = 4 * sum(
        module.weight.quant_state.offset is not None
        for module in model.modules()
        if isinstance(module, bnb.nn.Linear4bit)
    )
    workload = case.workload
    assert sum(p.size_bytes for p in workload.parameters) == packed_bytes + offsets_bytes
    layout = layout_of(workload, 9_000)
    needed_by = {
        workload.parameters[placed.index].name: [chunk.id in step for step in layout.needed]
        for chunk in layout.chunks
        for placed in chunk.parameters
    }
    states = [name for name in needed_by if name.endswith(STATES)]
    assert states
    for name in states:
        assert needed_by[name] == needed_by[f"{name.rpartition('.')[0]}.weight"], "a state travels with its weight"
    outcome = trained(case, plan_of(case, "kept", "offloaded"))
    per_step = outcome.to_device_bytes / len(case.batches)
    padded = sum(chunk.size_bytes for chunk in layout.chunks)
    assert padded <= per_step <= 2 * padded, "at most one gather for each pass"


def test_scalars_are_counted_as_the_model_has_them() -> None:
    plain, workload = quantized_cases()["nf4, double"].build(), quantized_cases()["nf4, double"].workload
    maps = [module for module in plain.modules() if isinstance(module, bnb.nn.Linear4bit)]
    others = sum(p.numel() for p in plain.parameters() if not isinstance(p, bnb.nn.Params4bit))
    assert workload.num_parameters == others + sum(m.in_features * m.out_features for m in maps)
    told = {p.quantized.words for p in workload.parameters if p.quantized is not None}
    assert told == {"nf4, double quantized"}


# -- left as found ---------------------------------------------------------------------------------------------------


def parts(model: nn.Module) -> list[object]:
    """What the modules of a model are made of, by class and by which objects are one."""
    found: list[object] = []
    for name, module in model.named_modules():
        found.append((name, type(module), [(n, type(p), id(p)) for n, p in module._parameters.items()]))
        if isinstance(module, bnb.nn.Linear4bit):
            state = module.weight.quant_state
            nested = None if state.state2 is None else (type(state.state2.absmax), id(state.state2.code))
            found.append((state is module.quant_state, type(state.absmax), nested))
        if isinstance(module, bnb.nn.Linear8bitLt):
            found.append((type(module.state.CB), type(module.state.SCB), module.weight.CB is None))
    return found


@pytest.mark.parametrize("name", ["nf4, double", "int8"])
def test_the_model_is_as_bitsandbytes_made_it_afterwards(name: str) -> None:
    case = quantized_cases()[name]
    model, keys = case.build(), list(case.build().state_dict())
    case.loss(model, case.batches[0])  # of 8 bits, the state is made by the first forward
    before = parts(model)
    workload = trace(model, case.batches[0], repeats=0)
    assert parts(model) == before
    with carry_out(model, plan_of(case, "mixed", "offloaded"), workload, optimizer=case.make_optimizer) as training:
        assert parts(model) != before
        case.loss(model, case.batches[0]).backward()
        training.step()
    assert parts(model) == before
    assert list(model.state_dict()) == keys
    loss = case.loss(model, case.batches[1])
    loss.backward()
    assert loss.item() == case.plain.losses[1]


@pytest.mark.parametrize("name", ["nf4, double", "int8"])
def test_a_training_that_is_given_up_gives_the_base_back(name: str) -> None:
    case = quantized_cases()[name]
    model = case.build()
    expected = {key: value.clone() for key, value in model.state_dict().items()}
    device = CpuDevice()
    plan = plan_of(case, "swapped", "offloaded")
    with carry_out(model, plan, case.workload, optimizer=case.make_optimizer, device=device):
        case.loss(model, case.batches[0])  # and no step
    assert differences(model, expected) == []
    del model
    gc.collect()
    assert device.ledger.named_bytes == device.ledger.watched_bytes == 0


# -- saving ----------------------------------------------------------------------------------------------------------


@some_quick(("name", "after"), product(NAMES, [kept, mixed]), quick=[("nf4, double", mixed), ("int8", kept)])
def test_a_training_resumes_under_another_plan(name: str, after: Callable[[Workload], Plan], tmp_path: Path) -> None:
    case = quantized_cases()[name]
    check_resumption(case, offloaded(case.workload), after(case.workload), tmp_path)


def test_a_base_on_the_disk_trains_and_resumes(tmp_path: Path) -> None:
    case = quantized_cases()["nf4, double"]
    folder = tmp_path / "disk"
    folder.mkdir()
    check_resumption(case, on_disk(case.workload), on_disk(case.workload), tmp_path / "saved", disk_folder=folder)


def test_saved_adapters_load_in_peft_beside_the_packed_base(tmp_path: Path) -> None:
    case = quantized_cases()["nf4, double"]
    model = case.build()
    with carry_out(model, offloaded(case.workload), case.workload, optimizer=case.make_optimizer) as training:
        for batch in case.batches:
            case.loss(model, batch).backward()
            training.step()
    model.save_pretrained(tmp_path)
    with quiet_peft():
        loaded = peft.PeftModel.from_pretrained(packed_blocks(llama(num_layers=3), "nf4", double=True), tmp_path)
    trained_here = {name: p for name, p in model.named_parameters() if p.requires_grad}
    there = dict(loaded.named_parameters())
    assert trained_here
    assert all(torch.equal(there[name], parameter) for name, parameter in trained_here.items())
    # Neither drops anything out; for evaluation bitsandbytes may pack anew, which it cannot do with rows this short.
    assert torch.equal(case.loss(loaded.train(), case.batches[0]), case.loss(model.train(), case.batches[0]))
