"""The final norm runs by tiles with the loss, and whole wherever anybody but the head wants what it gives."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from protwin.runtime import trace
from protwin.runtime.model.blocks import find_blocks
from protwin.runtime.tiles import deferred_hidden
from protwin.runtime.tiles.deferred_hidden import DeferredHidden
from protwin.runtime.tiles.loss_installing import final_of_loss, tiled_loss
from protwin.runtime.tracing import tracing
from protwin.shared.basics.errors import ScheduleError
from protwin.shared.schema.workload import Workload
from tests.runtime.tiles.test_loss_models import BUILDERS, LONG, bart, batch, built, gpt2, llama

Watch = Callable[[Any], None]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[DeferredHidden]:
    """Stand-ins, in the order in which they are made."""
    own = deferred_hidden._made
    found: list[DeferredHidden] = []

    def note(*args: Any) -> Any:
        found.append(own(*args))
        return found[-1]

    monkeypatch.setattr(deferred_hidden, "_made", note)
    return found


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


class Model(nn.Module):
    """One that does something with its final norm's output, ahead of its head or behind it."""

    def __init__(self, ahead: Watch = lambda _: None, behind: Watch = lambda _: None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.layers = nn.Embedding(50, 8), nn.ModuleList(Block() for _ in range(2))
        self.norm, self.project, self.head = nn.LayerNorm(8), nn.Linear(8, 6), nn.Linear(6, 50, bias=False)
        self.ahead, self.behind = ahead, behind
        self.extra: Any = None
        self.before: Callable[[torch.Tensor], Any] = lambda _: None
        self.around: Any = nullcontext()

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, Any]:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        with self.around:
            hidden = self.project(self.norm(x)) * 1.5
        self.before(x)
        self.ahead(hidden)
        logits = self.head(hidden[:, :-1, :]).float()
        loss = functional.cross_entropy(logits.view(-1, 50), labels[:, 1:].reshape(-1)) if labels is not None else None
        self.behind(hidden)
        return {"loss": loss, "hidden": None, "logits": logits} | (self.extra(hidden) if self.extra else {})


TOKENS = torch.randint(50, (3, 7), generator=torch.Generator().manual_seed(0))


def ran(model: nn.Module, num_tiles: int) -> tuple[Any, dict[str, torch.Tensor]]:
    """Its output, and all gradients of the loss and of what else it gives."""
    with tiled_loss(model, num_tiles, final_of_loss(model, find_blocks(model, "layers"), num_tiles)):
        output = model(TOKENS, labels=TOKENS)
        loss = output["loss"] if output["hidden"] is None else output["loss"] + output["hidden"].square().sum()
        loss.backward()
    return output, {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def are_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, gradient in one.items():
        torch.testing.assert_close(other[name], gradient, rtol=1e-5, atol=1e-6 * float(gradient.abs().max()))


@pytest.mark.parametrize("num_tiles", [2, 3, 7, 99])
def test_what_stands_before_the_head_runs_by_tiles(num_tiles: int, made: list[DeferredHidden]) -> None:
    _, wanted = ran(Model(), 1)
    model, fired = Model(), []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: fired.append(name))
    _, found = ran(model, num_tiles)
    are_equal(wanted, found)
    assert len(made) == 4  # norm, projection, factor, slice
    assert all(one.if_computed() is None for one in made)
    assert sorted(fired) == sorted(found), "one event for each parameter"


@pytest.mark.parametrize("build", BUILDERS, ids=lambda build: build.__name__)
@pytest.mark.filterwarnings("default")  # transformers' own
def test_norms_of_families_are_found(build: Callable[[], nn.Module], made: list[DeferredHidden]) -> None:
    model = built(build)
    with tiled_loss(model, 2, final_of_loss(model, find_blocks(model), 2)):
        model(**batch()).loss.backward()
    assert bool(made) is (build is not bart), "bart's decoder has no norm behind its last block"
    assert all(one.if_computed() is None for one in made)


def hooked(seen: list[torch.Tensor]) -> Watch:
    def hook(hidden: torch.Tensor) -> None:
        hidden.register_hook(lambda gradient: seen.append(gradient.clone()))

    return hook


def test_whatever_else_is_done_with_it_makes_it_real(made: list[DeferredHidden]) -> None:
    for number, use in enumerate(
        (
            lambda hidden: {"hidden": hidden},
            lambda hidden: {"hidden": hidden.sin()},
            lambda hidden: {"hidden": hidden[..., 0]},
            lambda hidden: {"hidden": torch.cat([hidden, hidden])},
            lambda hidden: {"hidden": functional.linear(hidden, torch.ones(2, 6))},
        )
    ):
        whole, tiled = Model(), Model()
        whole.extra = tiled.extra = use
        wanted, gradients = ran(whole, 1)
        found, by_tiles = ran(tiled, 3)
        torch.testing.assert_close(found["hidden"], wanted["hidden"], rtol=0, atol=0)
        assert type(found["hidden"]) is torch.Tensor, number
        are_equal(gradients, by_tiles)
    seen: list[list[torch.Tensor]] = [[], []]
    runs = [ran(Model(ahead=hooked(of)), tiles)[1] for of, tiles in zip(seen, (1, 3), strict=True)]
    are_equal(*runs)
    torch.testing.assert_close(seen[1][0], seen[0][0]), "a hook sees all of its gradient"


def test_hooks_of_modules_and_hidden_states_that_are_asked_for(made: list[DeferredHidden]) -> None:
    model, outputs = Model(), []
    model.norm.register_forward_hook(lambda *args: outputs.append(args[-1]))
    _, found = ran(model, 3)
    assert type(outputs[0]) is torch.Tensor
    assert len(made) == 3 or not isinstance(made[0].base, DeferredHidden)
    are_equal(ran(Model(), 1)[1], found)
    made.clear()
    family = built(llama)
    whole = family(**batch(), output_hidden_states=True).hidden_states
    with tiled_loss(family, 3, final_of_loss(family, find_blocks(family), 3)):
        given = family(**batch(), output_hidden_states=True).hidden_states
        assert not made
        assert all(torch.equal(one, other) for one, other in zip(given, whole, strict=True))
        family(**batch())
        assert made


def test_a_graph_that_the_model_does_not_want_is_not_made() -> None:
    for tiles in (1, 3):
        model = Model()
        model.around = torch.no_grad()
        found = ran(model, tiles)[1]
        assert set(found) == {"head.weight"}, "the norm runs without a graph: the head alone is trained"


class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.expand(3, 7, 6)


def test_what_would_be_another_gradient_is_refused() -> None:
    model = Model()
    model.extra = lambda hidden: {"hidden": Own.apply(hidden)}
    with pytest.raises(ScheduleError, match="was used where it could not be seen"):
        ran(model, 3)
    model, kept = Model(), []
    model.behind = kept.append
    ran(model, 3)
    with pytest.raises(ScheduleError, match="looked at when the model's forward has ended"):
        kept[0].sum()
    assert kept[0].shape == (3, 7, 6)
    model = Model()
    model.before = lambda x: x.data.add_(1)
    ran(model, 1)
    model.before = lambda x: x.detach().add_(1)
    with pytest.raises(ScheduleError, match="changed in place"):
        ran(model, 3)


def test_its_copies_never_exist_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    def traced() -> Workload:
        return trace(built(llama).bfloat16(), LONG, repeats=0, loss_tiles=(8,))

    norm_within = traced().loss_tilings[0]
    monkeypatch.setattr(tracing, "final_of_loss", lambda *_: None)
    norm_whole = traced().loss_tilings[0]
    numbers = 256 * 32  # of the hidden states
    saved = norm_whole.epilogue_forward.peak_bytes - norm_within.epilogue_forward.peak_bytes
    assert saved >= numbers * 4, "its float32 copy"
    kept = norm_whole.epilogue_forward.net_bytes - norm_within.epilogue_forward.net_bytes
    assert kept >= numbers * 4, "from forward to backward"


def test_a_dropout_behind_the_norm_runs_whole(made: list[DeferredHidden]) -> None:
    model = Model()
    model.project = nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 6))
    model.train()
    torch.manual_seed(3)
    _, wanted = ran(model, 1)
    model.zero_grad()
    torch.manual_seed(3)
    _, found = ran(model, 3)
    are_equal(wanted, found)
    assert made, "the norm gave a stand-in, which the dropout made real"


def test_gpt2_flattens_its_hidden_states(made: list[DeferredHidden]) -> None:
    model = built(gpt2)
    with tiled_loss(model, 2, final_of_loss(model, find_blocks(model), 2)):
        model(**batch()).loss.backward()
    assert [one.if_computed() for one in made] == [None] * len(made)


def test_autocast_keeps_no_cast_without_a_graph() -> None:
    """What a stand-in is asked for casts weights, which are used again when it is made real.

    Newer releases of torch keep no such casts by themselves; in older ones the gradient would be missing.
    """

    def gradient(tiles: int) -> torch.Tensor:
        model = Model()
        model.extra = lambda hidden: {"hidden": hidden.sin().float()}
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = ran(model, tiles)[1]
        return found["project.weight"]

    whole = gradient(1)
    assert float((gradient(3) - whole).norm() / whole.norm()) < 2**-6
