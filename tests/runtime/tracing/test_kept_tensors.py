"""Tensors that modules keep from one iteration to the next, beside parameters and buffers, are in every account."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from itertools import product

import pytest
import torch
from torch import nn
from torch.nn.utils import spectral_norm

from protwin.runtime import trace
from protwin.runtime.model.kept_tensors import attributes_as_found, kept_tensors
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.schema.workload import Workload
from protwin.shared.verify.guaranteed_peak import guaranteed_device_peak
from tests.proof_size import some_quick
from tests.runtime.accounts import MIXTURES, error_frac, measured_peak_bytes, plan_of
from tests.runtime.eager_lanes import eager_peak
from tests.runtime.models import SEED, Case, HandWritten, point_batches

WIDTH = 24
BAR = 0.02


class Keeping(nn.Module):
    """A residual block that keeps tensors in every way that a module can."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.table = torch.ones(WIDTH, 50)
        self.rows = [torch.ones(300), (torch.ones(200), self.table)]
        self.by_shape: dict[torch.Size, torch.Tensor] = {}
        self.last: torch.Tensor | None = None
        captured = torch.ones(700)
        self.up.register_forward_hook(lambda module, args, output: output + 1e-3 * captured.mean())

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(batch, width) in and out."""
        if hidden.shape not in self.by_shape:
            self.by_shape[hidden.shape] = torch.ones(100 * hidden.shape[0])
        scale = self.table.mean() + self.rows[0].mean() + self.by_shape[hidden.shape].mean()
        made = torch.tanh(self.up(hidden)) * scale
        self.last = made.detach().repeat(1, 3)
        return hidden + made


def keeping(num_layers: int = 4) -> HandWritten:
    torch.manual_seed(SEED)
    model = HandWritten(num_layers=0, width=WIDTH)
    model.stack = nn.Sequential(*(Keeping() for _ in range(num_layers)))
    return model


def normed(num_layers: int = 4) -> HandWritten:
    """Hooks compute the weight anew for each forward, and keep it in an attribute."""
    torch.manual_seed(SEED)
    model = HandWritten(num_layers=num_layers, width=40)
    for layer in model.stack:
        spectral_norm(layer.up)
        spectral_norm(layer.down)
    return model


@lru_cache
def case_of(build: Callable[[], nn.Module]) -> Case:
    return Case(build, point_batches(6), has_loss=False)


def alive_storages() -> dict[int, int]:
    gc.collect()
    found = [tensor for tensor in gc.get_objects() if issubclass(type(tensor), torch.Tensor)]
    storages = [tensor.untyped_storage() for tensor in found if tensor.layout is torch.strided and not tensor.is_meta]
    return {storage._cdata: storage.nbytes() for storage in storages}


def kept_by_plain_training(build: Callable[[], nn.Module], batch: dict[str, torch.Tensor]) -> int:
    """Bytes that are alive after plain iterations and were not before, parameters and buffers left out."""
    before = alive_storages()
    model = build()
    for _ in range(2):
        nn.functional.cross_entropy(model(batch["points"]), batch["classes"]).backward()
        model.zero_grad()
    own = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    return sum(size for key, size in alive_storages().items() if key not in own and key not in before)


def without_kept(workload: Workload, model: nn.Module) -> Workload:
    """The wrong variant: buffers and the batch alone are resident."""
    batch_bytes = 4 * 6 * 5
    buffers_bytes = sum(buffer.nbytes for buffer in model.buffers())
    return workload.model_copy(update={"resident_bytes": batch_bytes + buffers_bytes})


@pytest.mark.parametrize("build", [keeping, normed])
def test_what_plain_training_keeps_is_resident(build: Callable[[], nn.Module]) -> None:
    """Also of a weight that is computed anew: a recomputation leaves none, with a graph that nobody runs backward."""
    case = case_of(build)
    forgetful = without_kept(case.workload, case.build())
    labels_bytes, losses_bytes = 6 * 8, 4 * 4
    kept_bytes = case.workload.resident_bytes - forgetful.resident_bytes - labels_bytes - losses_bytes
    assert kept_bytes == kept_by_plain_training(build, dict(case.batches[0]))


@some_quick(
    ("residency", "mixture", "build"), product(["persistent", "offloaded"], MIXTURES, [keeping, normed]), quick=5
)
def test_the_account_holds_what_modules_keep(build: Callable[[], nn.Module], mixture: str, residency: str) -> None:
    case = case_of(build)
    plan = plan_of(case, mixture, residency, micro_batches=2)
    measured_bytes = measured_peak_bytes(case, plan)
    schedule = compile_schedule(plan, case.workload)
    assert measured_bytes <= guaranteed_device_peak(schedule).size_bytes
    assert abs(error_frac(measured_bytes, eager_peak(schedule))) <= BAR
    forgetful = compile_schedule(plan, without_kept(case.workload, case.build()))
    assert error_frac(measured_bytes, eager_peak(forgetful)) > 5 * BAR


class Fake(nn.Module):
    """Makes its loss itself, so that it needs no batch but points."""

    def __init__(self, build: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.inner = build()

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        """(batch, 5) to a scalar."""
        loss: torch.Tensor = self.inner(points).square().mean()
        return loss


@some_quick("build", [partial(keeping, 5), partial(normed, 5)], quick=1)
def test_fake_tensors_show_what_real_ones_do(build: Callable[[], nn.Module]) -> None:
    """Also where few blocks stand for many, and where a cache has been filled at another shape before."""
    with torch.device("meta"):
        model = Fake(build)
    if isinstance(model.inner.stack[0], Keeping):
        for layer in model.inner.stack:
            layer.up._forward_hooks.clear()  # what a closure captured stays on the meta device
    traced = [trace(model, torch.empty(size, 5, device="meta"), repeats=0) for size in (8, 6)][1]
    with torch.device("cpu"):
        real = Fake(build)
    if isinstance(real.inner.stack[0], Keeping):
        for layer in real.inner.stack:
            layer.up._forward_hooks.clear()
    assert traced.resident_bytes == trace(real, torch.ones(6, 5), repeats=0).resident_bytes
    assert traced.resident_bytes > 10_000


def test_a_model_that_keeps_more_and_more_is_warned_of() -> None:
    class Growing(HandWritten):
        def forward(self, points: torch.Tensor) -> torch.Tensor:
            self.__dict__.setdefault("seen", []).append(points.clone())
            return super().forward(points)

    with pytest.warns(UserWarning, match=r"Growing keeps 240 B more on the device after every iteration"):
        trace(Growing(), torch.ones(12, 5), loss=lambda output, _: output.sum(), repeats=0)


def test_attributes_are_put_back_and_parameters_are_nobodys_cache() -> None:
    model = keeping(1)
    block = model.stack[0]
    block.again = [block.up.weight, {"itself": model.entry}]
    found = {tensor.numel() for tensor in kept_tensors(model.modules())}
    assert found == {WIDTH * 50, 300, 200}
    rows, by_shape = block.rows, block.by_shape
    with attributes_as_found(model):
        model(torch.ones(2, 5))
        block.rows.append(torch.ones(1))
        block.new = torch.ones(1)
    assert (block.rows, block.by_shape, block.last) == (rows, {}, None)
    assert block.by_shape is by_shape
    assert len(rows) == 2
    assert not hasattr(block, "new")


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    yield
    gc.collect()
