"""A model without memory, filled chunk by chunk from files: the bits of one that was loaded first, and less memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

from protwin.runtime import CpuDevice, Training, carry_out, parameters_on_meta, training_of
from protwin.runtime.chunks.saved_weights import SavedWeights
from protwin.runtime.model.strides import in_memory_order
from protwin.shared import FileError, Plan, PlanError, ProtwinError
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.layout.layout import build_layout
from protwin.shared.schema.schedule import Memory
from tests.proof_size import some_quick
from tests.runtime.equality import FAST_FOLDER, random_plans
from tests.runtime.models import SEED, Case, cases, differences, held, llama
from tests.runtime.saved_models import HostPeak, on_meta, save
from tests.runtime.watchdog import lanes_alive

NAMES = (
    "gpt2 with dropout, tied",
    "llama, tied",
    "llama, frozen prologue and blocks",
    "llama in bfloat16",
    "hand-written, partly narrow",
    "hand-written, batch statistics",
)


def begun(case: Case, model: nn.Module, plan: Plan, folder: Path, disk: str | None = None) -> Training:
    return carry_out(
        model,
        plan,
        case.workload,
        optimizer=case.make_optimizer,
        parameter_groups=case.groups(model),
        device=CpuDevice(),
        weights=folder,
        disk_folder=disk,
    )


def trained(case: Case, model: nn.Module, plan: Plan, folder: Path) -> list[float]:
    losses = []
    with TemporaryDirectory(dir=FAST_FOLDER) as disk, begun(case, model, plan, folder, disk) as training:
        torch.manual_seed(SEED)
        for batches in case.steps(plan.micro_batches):
            for batch in held(case, batches):
                loss = case.loss(model, batch)
                loss.backward()
                losses.append(loss.item())
            training.step()
    return losses


@some_quick("name", NAMES, quick=2)
def test_the_bits_are_those_of_a_model_that_was_loaded(name: str, tmp_path: Path) -> None:
    """Whatever the plan: chunks persistent, host-stepped, offloaded, on the disk, with masters and micro-batches."""
    case = cases()[name]
    save(case.build(), tmp_path, dtype=torch.float32)
    for plan in random_plans(case.workload, 2, 5):
        model = on_meta(case.build())
        before = list(model.parameters())
        losses = trained(case, model, plan, tmp_path)
        plain = case.plain_with(plan.micro_batches, plan.max_gradient_norm)
        assert losses == plain.losses
        assert differences(model, plain.weights[-1]) == []
        assert all(one is other for one, other in zip(before, model.parameters(), strict=True))


def test_a_stretch_that_is_read_one_scalar_off_is_noticed(tmp_path: Path) -> None:
    case = cases()["hand-written, partly narrow"]
    save(case.build(), tmp_path)
    read = SavedWeights.read

    def shifted(self: SavedWeights, *arguments: Any) -> None:
        read(self, *arguments)
        arguments[-1].copy_(arguments[-1].roll(1))

    with mock.patch.object(SavedWeights, "read", shifted):
        assert trained(case, on_meta(case.build()), random_plans(case.workload, 1, 5)[0], tmp_path) != case.plain.losses


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_element_types_are_converted_as_torch_does(dtype: torch.dtype, tmp_path: Path) -> None:
    case = cases()["llama"]
    kept = save(case.build(), tmp_path, dtype=dtype)
    model = on_meta(case.build())
    with begun(case, model, random_plans(case.workload, 1, 1)[0], tmp_path, str(tmp_path)):
        pass
    assert differences(model, {name: kept[name].to(torch.float32) for name in model.state_dict()}) == []


@given(data=st.data())
def test_a_stretch_is_what_lies_there_in_memory(data: st.DataObject) -> None:
    """Of any shape, any order of dimensions and any stretch."""
    shape = data.draw(st.lists(st.integers(0, 5), max_size=3))
    order = data.draw(st.permutations(range(len(shape))))
    values = torch.randn([shape[dim] for dim in order], dtype=torch.float64)
    like = values.permute(sorted(range(len(order)), key=order.__getitem__))
    first = data.draw(st.integers(0, like.numel()))
    last = data.draw(st.integers(first, like.numel()))
    with TemporaryDirectory(dir=FAST_FOLDER) as folder:
        save_file({"w": like.contiguous()}, Path(folder) / "model.safetensors")
        saved = SavedWeights(Path(folder))
        place = torch.full((last - first,), torch.nan)
        saved.read(saved.tensors["w"], like, slice(first, last), place)
    assert torch.equal(place, in_memory_order(values.float())[first:last])


# -- memory ----------------------------------------------------------------------------------------------------------


def start_peak(case: Case, plan: Plan, folder: Path, *, loads_first: bool) -> tuple[int, int]:
    """The most bytes while training begins, and what is held then."""
    model = on_meta(case.build())
    with HostPeak() as memory:
        if loads_first:
            for file in folder.glob("*.safetensors"):
                values = {name: value.clone() for name, value in load_file(file).items()}
                model.load_state_dict(values, strict=False, assign=True)
            del values
            training = carry_out(model, plan, case.workload, disk_folder=folder)
        else:
            training = begun(case, model, plan, folder, str(folder))
        peak_bytes, held_bytes = memory.peak_bytes, memory.bytes
    training.close()
    return peak_bytes, held_bytes


@some_quick("is_on_disk", [False, True], quick=1)
def test_at_no_time_is_there_more_than_what_stays_and_one_chunk(is_on_disk: bool, tmp_path: Path) -> None:
    """A model that is loaded first lies there whole, which shows where it is on the disk afterwards.

    Buffers are copied, so that a training that cannot begin leaves them as they were.
    """
    case = Case(lambda: llama(num_layers=10), cases()["llama"].batches)
    save(case.build(), tmp_path)
    layout = build_layout(case.workload.parameters, num_blocks=case.workload.num_blocks, chunk_bytes=9_000)
    num_chunks = len(layout.chunks)
    on_disk: dict[str, Any] = {"n_disk_state": num_chunks, "n_disk": num_chunks, "n_staging": 2} if is_on_disk else {}
    plan = Plan(
        workload_id=case.workload.identity,
        chunk_bytes=9_000,
        n_persist=0,
        n_buffer=layout.min_buffers(0),
        micro_batches=1 if is_on_disk else 2,
        **on_disk,
    )
    chunk_bytes = max(chunk.size_bytes for chunk in layout.chunks)
    schedule = compile_schedule(plan, case.workload, layout)
    planned_bytes = schedule.static_bytes(Memory.PINNED_HOST) + schedule.static_bytes(Memory.HOST)
    peak_bytes, held_bytes = start_peak(case, plan, tmp_path, loads_first=False)
    copied_bytes = 2 * sum(buffer.untyped_storage().nbytes() for buffer in case.build().buffers())
    assert peak_bytes <= held_bytes + chunk_bytes + copied_bytes
    assert peak_bytes <= 1.005 * planned_bytes + chunk_bytes
    if is_on_disk:
        peak_bytes, _ = start_peak(case, plan, tmp_path, loads_first=True)
        assert peak_bytes > 1.005 * planned_bytes + chunk_bytes


# -- what is refused -------------------------------------------------------------------------------------------------


def _rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    values = load_file(folder / "model-1.safetensors")
    change(values)
    save_file(values, folder / "model-1.safetensors")


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (
        lambda folder: _rewrite(folder, lambda values: values.pop("lm_head.weight")),
        "they lack lm_head.weight",
    ),
    "unexpected": (
        lambda folder: _rewrite(folder, lambda values: values.update(more=torch.zeros(1))),
        "they have more besides",
    ),
    "shape": (
        lambda folder: _rewrite(folder, lambda values: values.update({"lm_head.weight": torch.zeros(3, 2)})),
        r"lm_head.weight is \[3, 2\] in them and \[64, 32\] in the model",
    ),
    "whole numbers": (
        lambda folder: _rewrite(folder, lambda values: values.update({"lm_head.weight": torch.zeros(64, 32).char()})),
        "lm_head.weight is I8 in them and float32 in the model",
    ),
    "twice": (
        lambda folder: save_file({"lm_head.weight": torch.zeros(64, 32)}, folder / "model-2.safetensors"),
        "lm_head.weight is in .*model-1.safetensors and in .*model-2.safetensors",
    ),
    "damaged": (
        lambda folder: (folder / "model-2.safetensors").write_bytes(b"\0" * 40),
        "model-2.safetensors cannot be read",
    ),
    "no file": (lambda folder: (folder / "model-2.safetensors").unlink(), "lacks model-2.safetensors"),
    "no folder": (lambda folder: folder.rename(folder.with_name("other")), "is no folder"),
}


def is_untouched(model: nn.Module) -> bool:
    return (
        all(parameter.is_meta for parameter in model.parameters())
        and training_of(model) is None
        and lanes_alive() == []
    )


@pytest.mark.parametrize("fault", FAULTS)
def test_files_of_another_model_are_refused_before_anything_moves(fault: str, tmp_path: Path) -> None:
    case, folder = cases()["llama"], tmp_path / "weights"
    folder.mkdir()
    save(case.build(), folder)
    FAULTS[fault][0](folder)
    model = on_meta(case.build())
    with pytest.raises(FileError, match=FAULTS[fault][1]):
        begun(case, model, random_plans(case.workload, 1, 1)[0], folder, str(tmp_path))
    assert is_untouched(model)


def test_two_values_of_one_tied_weight_are_refused(tmp_path: Path) -> None:
    case = cases()["llama, tied"]
    kept = save(case.build(), tmp_path)
    head = kept["model.embed_tokens.weight"].clone()
    for is_equal in (True, False):
        head[-1, -1] += 0 if is_equal else 1
        _rewrite(tmp_path, lambda values: values.update({"lm_head.weight": head}))
        model = on_meta(case.build())
        plan = random_plans(case.workload, 1, 1)[0]
        if is_equal:
            begun(case, model, plan, tmp_path, str(tmp_path)).close()
        else:
            with pytest.raises(FileError, match=r"model.embed_tokens.weight and lm_head.weight differ"):
                begun(case, model, plan, tmp_path, str(tmp_path))
            assert is_untouched(model)


def _with_meta_buffer(model: nn.Module) -> object:
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq.to("meta")
    return None


def _thawed(model: nn.Module) -> object:
    model.lm_head.weight = nn.Parameter(torch.zeros(64, 32))
    return None


MODELS: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "buffer": (_with_meta_buffer, "buffer model.rotary_emb.inv_freq is on the meta device and no file has it"),
    "real": (_thawed, "parameter lm_head.weight has values, and .* has others for it"),
    "hook": (
        lambda model: model.lm_head.weight.register_hook(lambda gradient: gradient),
        "lm_head.weight is on the meta device and has hooks",
    ),
    "weakly held": (lambda model: weakref.ref(model.lm_head.weight), "weak references to it"),
}


@pytest.mark.parametrize("kind", MODELS)
def test_models_that_cannot_be_filled_are_refused_before_anything_moves(kind: str, tmp_path: Path) -> None:
    case = cases()["llama"]
    save(case.build(), tmp_path)
    model = on_meta(case.build())
    kept = MODELS[kind][0](model)
    before = [(parameter, parameter.is_meta) for parameter in model.parameters()]
    with pytest.raises(PlanError, match=MODELS[kind][1]):
        begun(case, model, random_plans(case.workload, 1, 1)[0], tmp_path, str(tmp_path))
    assert all(
        one is other and one.is_meta == was for one, (other, was) in zip(model.parameters(), before, strict=True)
    )
    assert training_of(model) is None
    del kept


def test_values_have_to_come_from_somewhere_and_from_one_place(tmp_path: Path) -> None:
    case = cases()["llama"]
    save(case.build(), tmp_path)
    plan = random_plans(case.workload, 1, 1)[0]
    for model, options, message in (
        (
            on_meta(case.build()),
            {"device": CpuDevice()},
            "embed_tokens.weight is on the meta device and has no v",
        ),
        (on_meta(case.build()), {"weights": tmp_path}, "every parameter is on the meta device. Pass device="),
        (case.build(), {"weights": tmp_path}, "every parameter of the model has values already"),
        (on_meta(case.build()), {"device": CpuDevice(), "weights": 3}, "weights is a int; it must be the path"),
    ):
        with pytest.raises(PlanError, match=message):
            carry_out(model, plan, case.workload, disk_folder=tmp_path, **options)


def test_a_start_that_fails_later_leaves_the_model_without_memory(tmp_path: Path) -> None:
    """Buffers included; whichever chunk it fails at."""
    case = cases()["hand-written, batch statistics"]
    save(case.build(), tmp_path)
    plan = random_plans(case.workload, 1, 1)[0]
    read = SavedWeights.read
    for at in (0, 9, 30):
        model, number = on_meta(case.build()), iter(range(1000))

        def failing(self: SavedWeights, *arguments: Any, at: int = at, number: Any = number) -> None:
            if next(number) == at:
                raise FileError("the disk is gone")
            read(self, *arguments)

        with mock.patch.object(SavedWeights, "read", failing), pytest.raises(ProtwinError, match="the disk is gone"):
            begun(case, model, plan, tmp_path, str(tmp_path))
        assert is_untouched(model)
        assert all((buffer == 3).all() for name, buffer in model.named_buffers())


def test_modules_are_made_without_parameters_memory_and_with_their_buffers() -> None:
    with HostPeak() as memory:
        with parameters_on_meta():
            model = llama(tie_word_embeddings=True)
        assert memory.bytes < 1000
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.model.rotary_emb.inv_freq, llama().model.rotary_emb.inv_freq)
    assert not nn.Linear(2, 2).weight.is_meta
