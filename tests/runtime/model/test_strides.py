"""Parameters that are not contiguous: the same kernels, and so the same bits, as in the plain loop."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn

from protwin.runtime import carry_out, trace
from protwin.runtime.chunks import chunk as chunks
from protwin.runtime.model.strides import contiguous_strides, in_memory_order, is_dense, strided
from protwin.runtime.optimizers import device_steps
from protwin.shared.basics.errors import PlanError, WorkloadError
from protwin.shared.schema.plan import Plan
from tests.runtime.equality import first, miscounted, trained
from tests.runtime.models import SEED, Case, differences, three_groups
from tests.runtime.resuming import kept, mixed, offloaded, other_weights, start, train
from tests.strategies.plans import plans

STEPS = 2


class Mixer(nn.Module):
    """A convolution in channels_last, a pointwise one, and a product with a transposed weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)
        self.point = nn.Conv2d(width, width, 1)
        self.to(memory_format=torch.channels_last)
        self.turned = nn.Parameter((torch.randn(width, 3 * width) / width).t())
        self.cube = nn.Parameter((torch.randn(3, 4, width) / 4).permute(2, 0, 1))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """(batch, width, height, width of the image) in and out."""
        mixed = self.point(torch.relu(self.conv(images)))
        scores = nn.functional.linear(mixed.mean(dim=(2, 3)), self.turned)
        scale = torch.einsum("bcs,csk->bc", scores.view(len(images), -1, 3), self.cube)
        return images + mixed * scale[:, :, None, None]


class Images(nn.Module):
    """No layout of its own is asked of the images: weights alone decide."""

    def __init__(self, *, width: int = 16, num_layers: int = 3) -> None:
        super().__init__()
        self.entry = nn.Conv2d(3, width, 3, padding=1)
        self.stack = nn.Sequential(*(Mixer(width) for _ in range(num_layers)))
        self.exit = nn.Parameter((torch.randn(width, 5) / width).t())

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        """(batch, 3, height, width) to (batch, 5)."""
        return nn.functional.linear(self.stack(self.entry(points)).mean(dim=(2, 3)), self.exit)


def images(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(SEED)
    return Images().to(dtype)


@cache
def case_of(dtype: torch.dtype = torch.float32) -> Case:
    generator = torch.Generator().manual_seed(1)
    batches = [
        {
            "points": torch.randn(4, 3, 12, 12, generator=generator).to(dtype),
            "classes": torch.randint(0, 5, (4,), generator=generator),
        }
        for _ in range(STEPS)
    ]
    return Case(partial(images, dtype), batches, groups=three_groups, has_loss=False)


def strides_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: parameter.stride() for name, parameter in model.named_parameters()}


@settings(max_examples=4, phases=[Phase.explicit, Phase.generate])
@given(data=st.data())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_random_plans_equal_the_plain_loop(dtype: torch.dtype, data: st.DataObject) -> None:
    case = case_of(dtype)
    plan = data.draw(plans(case.workload).map(first))
    outcome = trained(case, plan)
    assert outcome.losses == case.plain_with(plan.micro_batches, plan.max_gradient_norm).losses
    assert outcome.different == []
    assert miscounted(case, plan, outcome) == []


def test_contiguous_chunks_would_run_other_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong variant, even with every chunk persistent."""
    case = case_of()
    plan = kept(case.workload)
    outcome = trained(case, plan)
    assert (outcome.num_gathers, outcome.different) == (0, [])
    monkeypatch.setattr(chunks, "strided", lambda flat, like: flat.view(like.shape))
    assert trained(case, plan).different != []


@pytest.mark.parametrize("make_plan", [kept, offloaded])
def test_strides_stay_from_the_first_step_to_after_close(make_plan: Callable[..., Plan]) -> None:
    case = case_of()
    model, plain = case.build(), case.build()
    before = strides_of(model)
    assert sum(p.stride() != contiguous_strides(p.shape) for p in plain.parameters()) == 13
    with start(case, model, make_plan(case.workload)) as training:
        train(case, model, training, 0, STEPS)
        assert strides_of(model) == before
        state = training.state_dict()
        with training.evaluation():
            evaluated = model(case.batches[0]["points"])
    assert {name: value.stride() for name, value in state.items()} == before == strides_of(model)
    plain.load_state_dict(case.plain.weights[-1])
    expected = plain(case.batches[0]["points"])
    assert torch.equal(model(case.batches[0]["points"]), expected)
    assert torch.equal(evaluated, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("saved", "resumed"), [(kept, offloaded), (offloaded, mixed), (mixed, kept)])
def test_checkpoints_carry_over_between_plans(
    saved: Callable[..., Plan],
    resumed: Callable[..., Plan],
    dtype: torch.dtype,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Narrow persistent parameters are stepped in pieces of 300 scalars, which end within rows."""
    monkeypatch.setattr(device_steps, "PIECE_SCALARS", 300)
    case = case_of(dtype)
    model = case.build()
    with start(case, model, saved(case.workload)) as training:
        train(case, model, training, 0, 1)
        training.save(tmp_path)
    model = other_weights(case.build())
    with start(case, model, resumed(case.workload)) as training:
        training.resume(tmp_path)
        train(case, model, training, 1, STEPS)
    assert differences(model, case.plain.weights[-1]) == []
    assert strides_of(model) == strides_of(case.build())


def with_slice(model: nn.Module) -> None:
    model.stack[1].turned = nn.Parameter(torch.randn(48, 40)[:, :16])


def with_expanded(model: nn.Module) -> None:
    model.stack[1].turned = nn.Parameter(torch.randn(16).expand(48, 16))


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("change", [with_slice, with_expanded])
def test_what_cannot_be_kept_is_refused_by_name(change: Callable[[nn.Module], None], device: str) -> None:
    case, model = case_of(), images().to(device)
    with torch.device(device):
        change(model)
    message = r"parameter stack.1.turned has shape \(48, 16\) and strides .*nn.Parameter\(x.contiguous\(\)\)"
    with pytest.raises(WorkloadError, match=message):
        trace(model, case.batches[0]["points"], loss=lambda output, _: output.sum(), repeats=0)


def test_a_workload_of_other_strides_is_refused() -> None:
    case, model = case_of(), images()
    workload = case.workload
    model.stack[1].conv.to(memory_format=torch.contiguous_format)
    with pytest.raises(PlanError, match="buffers or strides differ"):
        carry_out(model, kept(workload), workload)
    model = images()
    with_slice(model)
    with pytest.raises(PlanError, match="strides"):
        carry_out(model, kept(workload), workload)


def test_a_trace_without_memory_meets_the_same_strides() -> None:
    """What is traced follows from strides: a product with a contiguous copy would take more memory."""
    case, points = case_of(), case_of().batches[0]["points"]
    fake = trace(images().to("meta"), points, loss=lambda output, _: output.sum(), repeats=0)
    real = trace(images(), points, loss=lambda output, _: output.sum(), repeats=0)
    assert fake.model_hash == real.model_hash == case.workload.model_hash
    assert fake.profiles == real.profiles


@given(sizes=st.lists(st.integers(0, 4), max_size=4), data=st.data())
def test_dense_strides_are_those_that_fill_a_stretch_of_memory(sizes: list[int], data: st.DataObject) -> None:
    """Against brute force, over all strides up to a size, and torch's own way of keeping strides."""
    strides = tuple(data.draw(st.integers(0, 12)) for _ in sizes)
    places = {sum(i * s for i, s in zip(index, strides, strict=True)) for index in _indices(sizes)}
    number = torch.Size(sizes).numel()
    assert is_dense(sizes, strides) == (places == set(range(number)))
    order = data.draw(st.permutations(range(len(sizes))))
    tensor = torch.arange(number).view(sizes).permute(order)
    assert is_dense(tensor.shape, tensor.stride())
    flat = in_memory_order(tensor.clone())
    assert torch.equal(strided(flat, tensor), tensor)
    assert contiguous_strides(sizes) == torch.empty(sizes).stride()


def _indices(sizes: list[int]) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = [()]
    for size in sizes:
        found = [(*index, place) for index in found for place in range(size)]
    return found
