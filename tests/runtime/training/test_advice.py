"""What a model or a loop does that no schedule can follow is refused in words that say what to do."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from protwin.runtime import Training, carry_out, trace, training_of
from protwin.shared.basics.errors import PlanError, ProtwinError, ScheduleError, WorkloadError
from protwin.shared.layout.layout import build_layout
from protwin.shared.schema.plan import ActivationMode, Plan
from tests.runtime.watchdog import ends_in_time, lanes_alive

POINTS = torch.linspace(-1, 1, 30).view(6, 5)


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(torch.tanh(self.up(hidden)))


class Net(nn.Module):
    """Blocks in a row; the loss is its own."""

    def __init__(self, make_block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.entry = nn.Linear(5, 16)
        self.layers = nn.ModuleList(make_block() for _ in range(4))
        self.exit = nn.Linear(16, 1)

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        hidden = self.entry(points)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.exit(hidden).square().mean()


def plan_of(model: nn.Module, batch: torch.Tensor = POINTS, **knobs: Any) -> tuple[Plan, Any]:
    workload = trace(model, batch, repeats=0)
    layout = build_layout(workload.parameters, num_blocks=workload.num_blocks, chunk_bytes=2_500)
    plan = Plan(
        workload_id=workload.identity, chunk_bytes=2_500, n_persist=0, n_buffer=layout.min_buffers(0) + 1, **knobs
    )
    return plan, workload


def start(model: nn.Module, **settings: Any) -> Training:
    return carry_out(model, *plan_of(model), **settings)


def check_goes_on(model: Net, training: Training) -> None:
    """The mistake is given up, and nothing is lost."""
    plain = type(model)()
    optimizer = torch.optim.AdamW(plain.parameters(), fused=True)
    training.skip_step()
    for _ in range(2):
        model(POINTS).backward()
        training.step()
        plain(POINTS).backward()
        optimizer.step()
        optimizer.zero_grad()
    training.close()
    state = plain.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


# -- the model -------------------------------------------------------------------------------------------------------


class KeepsAside(Block):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.aside = (out := super().forward(hidden)).square().mean()
        return out


class ReturnsIt(Block):
    def forward(self, hidden: torch.Tensor) -> Any:
        out = super().forward(hidden)
        return out, out.square().mean()


class WithAuxiliaryLoss(Net):
    def forward(self, points: torch.Tensor) -> torch.Tensor:
        hidden, asides = self.entry(points), []
        for layer in self.layers:
            hidden = layer(hidden)
            if isinstance(hidden, tuple):
                hidden, aside = hidden
                asides.append(aside)
            else:
                asides.append(layer.aside)
        return self.exit(hidden).square().mean() + sum(asides)


def test_an_auxiliary_loss_on_an_attribute_and_what_the_advice_comes_to() -> None:
    with pytest.raises(ScheduleError, match=r"enters block layers\.3 by another way.*attribute.*return it"):
        trace(WithAuxiliaryLoss(KeepsAside), POINTS, repeats=0)
    model, plain = WithAuxiliaryLoss(ReturnsIt), WithAuxiliaryLoss(ReturnsIt)
    modes = (ActivationMode.SWAP, ActivationMode.CHECKPOINT, ActivationMode.KEEP, ActivationMode.CHECKPOINT)
    knobs: dict[str, Any] = {"n_swap": 1, "n_checkpoint": 2, "activation_modes": modes}
    optimizer = torch.optim.AdamW(plain.parameters(), fused=True)
    with ends_in_time(), carry_out(model, *plan_of(model, **knobs)) as training:
        for _ in range(3):
            loss, expected = model(POINTS), plain(POINTS)
            assert loss.item() == expected.item()
            loss.backward()
            expected.backward()
            training.step()
            optimizer.step()
            optimizer.zero_grad()


class Detaches(Net):
    def forward(self, points: torch.Tensor) -> torch.Tensor:
        hidden = self.entry(points)
        for place, layer in enumerate(self.layers):
            hidden = layer(hidden.detach() if place == 2 else hidden)
        return self.exit(hidden).square().mean()


def test_gradients_that_end_between_blocks_and_what_the_advice_comes_to() -> None:
    with pytest.raises(ScheduleError, match=r"block layers\.1.*x\.detach\(\).*requires_grad_\(False\)"):
        trace(Detaches(), POINTS, repeats=0)
    model = Detaches()
    for part in (model.entry, model.layers[0], model.layers[1]):
        part.requires_grad_(False)
    with ends_in_time(), start(model) as training:
        model(POINTS).backward()
        training.step()


class Differentiates(Block):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.own(hidden)
        out = super().forward(hidden)
        (slope,) = torch.autograd.grad(out.sum(), hidden, create_graph=True)
        return out + slope

    def own(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


class DifferentiatesItsOwn(Differentiates):
    def own(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.view_as(hidden)


class DifferentiatesOutside(Net):
    def forward(self, points: torch.Tensor) -> torch.Tensor:
        hidden = self.entry(points)
        for layer in self.layers:
            hidden = layer(hidden)
        hidden = hidden.view_as(hidden)
        energy = torch.tanh(self.exit(hidden)).sum()
        (slope,) = torch.autograd.grad(energy, hidden, create_graph=True)
        return energy + slope.square().sum()


def test_gradients_within_a_block_and_what_the_advice_comes_to() -> None:
    for block in (Differentiates, DifferentiatesItsOwn):
        with pytest.raises(ScheduleError, match=r"while forward still runs.*x = x\.view_as\(x\)"):
            trace(Net(block), POINTS, repeats=0)
    model = DifferentiatesOutside()
    with ends_in_time():
        check_goes_on(model, start(model))


class Sparse(Block):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 16, sparse=True)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden) + self.table(torch.arange(6))


def test_sparse_gradients() -> None:
    with pytest.raises(WorkloadError, match=r"sparse tensor.*sparse=False"):
        trace(Net(Sparse), POINTS, repeats=0)


class Skips(Net):
    def forward(self, points: torch.Tensor) -> torch.Tensor:
        return self.exit(self.layers[1](self.entry(points))).square().mean()


class Repeats(Net):
    def forward(self, points: torch.Tensor) -> torch.Tensor:
        hidden = self.entry(points)
        for layer in self.layers:
            hidden = layer(layer(hidden))
        return self.exit(hidden).square().mean()


def test_blocks_that_are_skipped_or_run_twice() -> None:
    with pytest.raises(ScheduleError, match=r"the same blocks in the same order.*LayerDrop.*as often as.*blocks="):
        trace(Skips(), POINTS, repeats=0)
    assert trace(Repeats(), POINTS, repeats=0).num_blocks == 8


def test_layers_without_parts_are_named_in_the_advice() -> None:
    model = Net(partial(nn.Linear, 16, 16))
    with pytest.raises(WorkloadError, match=r"layers, the largest, has members of Linear.*blocks='layers'"):
        trace(model, POINTS, repeats=0)
    assert trace(model, POINTS, repeats=0, blocks="layers").num_blocks == 4
    with pytest.raises(WorkloadError, match=r"no ModuleList, ModuleDict or Sequential.*blocks=\['path'.*none"):
        trace(nn.Linear(5, 1), POINTS, repeats=0)


# -- the loop --------------------------------------------------------------------------------------------------------


def penalty_on_parameters(model: nn.Module) -> None:
    loss = model(POINTS)
    slopes = torch.autograd.grad(loss, list(model.exit.parameters()), create_graph=True)
    (loss + sum(slope.square().sum() for slope in slopes)).backward()


def penalty_on_inputs(model: nn.Module) -> None:
    points = POINTS.clone().requires_grad_()
    loss = model(points)
    (slope,) = torch.autograd.grad(loss, points, create_graph=True)
    (loss + slope.square().sum()).backward()


@pytest.mark.parametrize("attempt", [penalty_on_parameters, penalty_on_inputs])
def test_gradients_of_gradients(attempt: Callable[[nn.Module], None]) -> None:
    model = Net()
    with ends_in_time():
        training = start(model)
        with pytest.raises(ScheduleError, match=r"create_graph=True.*penalties"):
            attempt(model)
        check_goes_on(model, training)


@pytest.mark.parametrize(
    "attempt",
    [
        lambda model: torch.func.grad(lambda p: torch.func.functional_call(model, p, (POINTS,)))(
            dict(model.named_parameters())
        ),
        lambda model: torch.vmap(model)(POINTS),
    ],
)
def test_transforms(attempt: Callable[[nn.Module], Any]) -> None:
    model = Net()
    with ends_in_time():
        training = start(model)
        with pytest.raises(ScheduleError, match=r"transform of torch\.func.*loss\.backward\(\)"):
            attempt(model)
        with pytest.raises(ScheduleError, match=r"transform of torch\.func"), training.evaluation():
            attempt(model)
        check_goes_on(model, training)


def test_backward_after_close() -> None:
    model = Net()
    with ends_in_time(), start(model) as training:
        loss = model(POINTS)
        training.skip_step()
        later = model(POINTS)
    for of in (loss, later):
        with pytest.raises(ScheduleError, match=r"training was closed.*before close\(\)"):
            of.backward()
    model(POINTS).backward()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda groups: torch.optim.LBFGS(groups), r"LBFGS calls the model again.*AdamW or SGD"),
        (lambda groups: torch.optim.Muon(groups, lr=1e-3), r"Muon only supports 2D.*Every chunk has one optimizer"),
        (lambda groups: torch.optim.SparseAdam(groups), r"SparseAdam takes sparse gradients alone"),
        (lambda groups: None, r"made NoneType in the place of a torch\.optim\.Optimizer.*functools\.partial"),
        (lambda: None, r"could not make an optimizer.*functools\.partial"),
        ("adamw", r"could not make an optimizer.*functools\.partial"),
    ],
)
def test_optimizers_that_cannot_step_chunks(make: Any, message: str) -> None:
    model = Net()
    with ends_in_time(), pytest.raises(PlanError, match=message):
        start(model, optimizer=make)
    model(POINTS).backward()


# -- a training that nobody holds ------------------------------------------------------------------------------------


def test_a_training_that_was_lost_is_found_by_its_model() -> None:
    model = Net()
    with ends_in_time():
        start(model)
        gc.collect()
        for attempt in (lambda: model.layers[3].up.weight.sum(), lambda: start(model)):
            with pytest.raises(ProtwinError, match=r"protwin\.runtime\.training_of\(model\)"):
                attempt()
        training = training_of(model)
        assert training is not None
        model(POINTS).backward()
        training.step()
        check_goes_on_from_here(model, training)
    assert training_of(model) is None


def check_goes_on_from_here(model: Net, training: Training) -> None:
    training.close()
    plain = Net()
    plain(POINTS).backward()
    torch.optim.AdamW(plain.parameters(), fused=True).step()
    state = plain.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_a_training_that_is_dropped_with_its_model_says_so_and_ends_its_threads() -> None:
    def lose() -> None:
        model = Net()
        training = start(model)
        model(POINTS).backward()
        training.step()

    def collected() -> None:
        lose()
        gc.collect()

    gc.collect()
    with pytest.warns(ResourceWarning, match=r"dropped with its model.*close\(\)"):
        collected()
    for _ in range(1200):
        if not lanes_alive():
            break
        time.sleep(0.05)
    assert lanes_alive() == []


# -- lists that a block changes --------------------------------------------------------------------------------------


class Appends(Block):
    def forward(self, hidden: torch.Tensor, seen: list[torch.Tensor], counts: dict[str, Any]) -> torch.Tensor:
        out = super().forward(hidden) + 0.1 * len(seen) * hidden
        seen.append(out.detach())
        counts["of"].append(len(counts["of"]))
        # Saved behind what was appended: recomputation comes by.
        return torch.sin(out * (1.0 + 0.01 * counts["of"][-1]))


class WithLists(Net):
    def __init__(self) -> None:
        super().__init__(Appends)
        self.lengths: list[tuple[int, int]] = []

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        hidden = self.entry(points)
        seen: list[torch.Tensor] = []
        counts: dict[str, Any] = {"of": []}
        for place, layer in enumerate(self.layers):
            hidden = layer(hidden, seen, counts) if place % 2 else layer(hidden, counts=counts, seen=seen)
        self.seen, self.counts = seen, counts
        return self.exit(hidden).square().mean()


@pytest.mark.parametrize("mode", [ActivationMode.CHECKPOINT, ActivationMode.KEEP, ActivationMode.SWAP])
def test_blocks_that_append_to_what_they_are_given(mode: ActivationMode) -> None:
    """Recomputation finds the lists as forward found them, and leaves them alone."""
    model, plain = WithLists(), WithLists()
    number = "n_swap" if mode is ActivationMode.SWAP else "n_checkpoint"
    knobs: dict[str, Any] = {"activation_modes": (mode,) * 4} | ({} if mode is ActivationMode.KEEP else {number: 4})
    optimizer = torch.optim.AdamW(plain.parameters(), fused=True)
    with ends_in_time(), carry_out(model, *plan_of(model, **knobs)) as training:
        for _ in range(3):
            loss, expected = model(POINTS), plain(POINTS)
            assert loss.item() == expected.item()
            loss.backward()
            expected.backward()
            assert len(model.seen) == len(model.counts["of"]) == 4
            training.step()
            optimizer.step()
            optimizer.zero_grad()
    state = plain.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_without_lists_of_their_own_recomputation_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong variant."""
    from protwin.runtime.hooks import section_walker as walk

    monkeypatch.setattr(walk, "containers_as_they_are", lambda value: value)
    with pytest.raises(AssertionError):
        test_blocks_that_append_to_what_they_are_given(ActivationMode.CHECKPOINT)
