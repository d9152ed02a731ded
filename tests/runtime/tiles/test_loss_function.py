"""A loss by tiles has the value and the gradients of the whole one, and hooks fire once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from protwin.runtime.tiles.head_function import head_function
from protwin.runtime.tiles.loss_function import spans
from protwin.runtime.tiles.loss_logits import DeferredLogits, TiledHead, WholeLogitsError
from protwin.shared.basics.errors import ScheduleError
from tests.proof_size import examples

WIDTH, WORDS = 6, 11
TOLERANCE = 1e-6
"""Of float32 sums of a few hundred terms in another order, relative to the largest gradient: some roundings of 6e-8."""
LossOf = Callable[[Any, torch.Tensor], torch.Tensor]


def deferred(head: nn.Module, hidden: torch.Tensor, num_tiles: int) -> DeferredLogits:
    run, weights = head_function(head, head.forward)
    return DeferredLogits(TiledHead(run, weights, WORDS, num_tiles, lambda: None), hidden)


def linear(seed: int = 0, *, bias: bool = True) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(WIDTH, WORDS, bias=bias)


def given_tokens(seed: int, *shape: int, ignored: float = 0.3) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(*shape, WIDTH, generator=generator)
    labels = torch.randint(WORDS, shape, generator=generator)
    return hidden, labels.masked_fill(torch.rand(shape, generator=generator) < ignored, -100)


def gradients(loss: torch.Tensor, *tensors: torch.Tensor) -> list[torch.Tensor]:
    for tensor in tensors:
        tensor.grad = None
    loss.backward()  # type: ignore[no-untyped-call]
    return [torch.zeros_like(tensor) if tensor.grad is None else tensor.grad.clone() for tensor in tensors]


def far(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    """The largest difference of gradients, relative to the largest gradient of its tensor."""
    return max(
        float((one - other).abs().max() / other.abs().max().clamp(min=1e-30))
        for one, other in zip(found, wanted, strict=True)
    )


def scaled(logits: Any) -> Any:
    return logits.float() / 3.0 * 1.5


def capped(logits: Any) -> Any:
    return torch.tanh(logits / 2.0) * 2.0


def cut(logits: Any) -> Any:
    return logits[..., : WORDS - 1].contiguous()


def as_it_is(logits: Any) -> Any:
    return logits


STEPS = (as_it_is, scaled, capped)


@st.composite
def losses(draw: st.DrawFn) -> LossOf:
    """What a model may compute of its logits (batch, length, words)."""
    steps = draw(st.lists(st.sampled_from(STEPS), max_size=2))
    reduction = draw(st.sampled_from(["mean", "sum", "none"]))
    smoothing = draw(st.sampled_from([0.0, 0.2]))
    shifts, has_bias, has_z_loss = draw(st.booleans()), draw(st.booleans()), draw(st.booleans())
    factor = draw(st.sampled_from([1.0, 3.0]))
    bias = torch.linspace(-1, 1, WORDS)

    def loss(logits: Any, labels: torch.Tensor) -> torch.Tensor:
        for step in steps:
            logits = step(logits)
        if has_bias:
            logits = logits + bias
        if shifts:
            logits, labels = logits[..., :-1, :], labels[..., 1:]
        flat, wanted = logits.reshape(-1, WORDS), labels.reshape(-1)
        found = functional.cross_entropy(flat, wanted, reduction=reduction, label_smoothing=smoothing)
        if reduction == "none":
            # Weights that differ by token, which a mean in place of a sum would not survive.
            found = (found * torch.linspace(0.1, 2.0, len(wanted))).sum()
        if has_z_loss:
            found = found + 0.1 * logits.logsumexp(dim=-1).pow(2).mean()
        return found * factor

    return loss


@settings(max_examples=examples(120, 40), deadline=None)
@given(
    loss=losses(),
    num_tiles=st.integers(1, 7) | st.just(50),
    shape=st.tuples(st.integers(1, 3), st.integers(2, 9)),
    trains=st.sampled_from([(True, True), (True, False), (False, True)]),
    seed=st.integers(0, 99),
)
def test_a_loss_by_tiles_is_the_whole_one(
    loss: LossOf, num_tiles: int, shape: tuple[int, int], trains: tuple[bool, bool], seed: int
) -> None:
    head = linear(seed).requires_grad_(trains[1])
    hidden, labels = given_tokens(seed, *shape, ignored=0.2)
    labels[0, 1] = 0  # one label at least counts
    # Not contiguous: batch and length have changed places.
    hidden = hidden.transpose(0, 1).contiguous().transpose(0, 1).requires_grad_(trains[0])
    trained = [tensor for tensor in (hidden, *head.parameters()) if tensor.requires_grad]
    wanted = loss(head(hidden), labels)
    whole = gradients(wanted, *trained)
    found = loss(deferred(head, hidden, num_tiles), labels)
    tiles = gradients(found, *trained)
    torch.testing.assert_close(found, wanted, rtol=TOLERANCE, atol=1e-7)
    largest = max(float(gradient.abs().max()) for gradient in whole)
    for one, other in zip(tiles, whole, strict=True):
        assert float((one - other).abs().max()) <= 2 * TOLERANCE * max(largest, 1e-3)


def by_tile(head: nn.Module, hidden: torch.Tensor, labels: torch.Tensor, num_tiles: int) -> list[torch.Tensor]:
    """The mean of each tile: what wrong variants make their loss of."""
    return [functional.cross_entropy(head(hidden[tile]), labels[tile]) for tile in spans(len(hidden), num_tiles)]


def test_wrong_variants_are_seen() -> None:
    """The mean of the means of tiles, and a sum over tiles divided by their number, are other losses."""
    head, (hidden, labels) = linear(), given_tokens(3, 10)
    labels[:4] = -100
    labels[4:] = labels[4:].clamp(min=0)
    labels[4] = -100
    hidden.requires_grad_()
    trained = [hidden, *head.parameters()]
    whole = gradients(functional.cross_entropy(head(hidden), labels), *trained)
    assert far(gradients(functional.cross_entropy(deferred(head, hidden, 3), labels), *trained), whole) <= TOLERANCE  # type: ignore[arg-type]
    counted = [tile for tile in by_tile(head, hidden, labels, 3) if not tile.isnan()]
    assert far(gradients(torch.stack(counted).mean(), *trained), whole) > 0.01
    total = functional.cross_entropy(head(hidden), labels, reduction="sum")
    assert far(gradients(total / (labels >= 0).sum() / 3, *trained), whole) > 0.5


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_hooks_of_a_weight_fire_once_for_all_tiles(reduction: str) -> None:
    """Whether gradients are formed in forward or computed again; and the gradient adds to the earlier one."""
    head, (hidden, labels) = linear(), given_tokens(1, 12)
    fired: list[str] = []
    head.weight.register_hook(lambda _: fired.append("gradient"))
    head.weight.register_post_accumulate_grad_hook(lambda _: fired.append("final"))
    head.register_forward_hook(lambda *_: fired.append("forward"))
    (hidden.requires_grad_() * 2).register_hook(lambda _: fired.append("unused"))

    def once() -> None:
        functional.cross_entropy(deferred(head, hidden, 4), labels, reduction=reduction).sum().backward()  # type: ignore[arg-type, no-untyped-call]

    once()
    assert fired == ["gradient", "final"]
    first = head.weight.grad
    assert first is not None
    earlier = first.clone()
    once()
    assert fired == ["gradient", "final"] * 2
    assert head.weight.grad is first, "the gradient that was there has been added to"
    torch.testing.assert_close(first, 2 * earlier)
    # The wrong variant: a backward for each tile fires them for each.
    fired.clear()
    for tile in spans(12, 4):
        functional.cross_entropy(head(hidden[tile]), labels[tile]).backward()
    assert fired.count("final") == 4


def test_a_tile_without_labels_adds_nothing_and_none_at_all_are_as_in_torch() -> None:
    head, (hidden, labels) = linear(), given_tokens(2, 9, ignored=0.0)
    hidden.requires_grad_()
    trained = [hidden, *head.parameters()]
    for ignored in (slice(0, 3), slice(6, 9), slice(0, 9)):
        here = labels.clone()
        here[ignored] = -100
        wanted = functional.cross_entropy(head(hidden), here)
        found = functional.cross_entropy(deferred(head, hidden, 3), here)  # type: ignore[arg-type]
        torch.testing.assert_close(found, wanted, equal_nan=True)
        whole, tiles = gradients(wanted, *trained), gradients(found, *trained)
        torch.testing.assert_close(tiles, whole, equal_nan=True, rtol=1e-5, atol=1e-7)


def test_tiles_are_even_and_none_is_empty() -> None:
    for tokens in range(1, 20):
        for tiles in (*range(1, 9), 100):
            found = spans(tokens, tiles)
            sizes = [tile.stop - tile.start for tile in found]
            assert sum(sizes) == tokens
            assert [0, *[tile.stop for tile in found[:-1]]] == [tile.start for tile in found]
            assert min(sizes) >= 1
            assert max(sizes) - min(sizes) <= 1
            assert len(found) == min(tiles, tokens)


class WithDropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dropout, self.linear = nn.Dropout(0.5), linear(bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.linear(self.dropout(hidden))
        return result


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_a_head_that_drops_drops_the_same_again(reduction: str) -> None:
    head, (hidden, labels) = WithDropout(), given_tokens(5, 10, ignored=0.0)
    hidden.requires_grad_()
    torch.manual_seed(7)
    parts = [functional.cross_entropy(head(hidden[t]), labels[t], reduction="none") for t in spans(10, 3)]
    wanted = torch.cat(parts).sum()
    whole, after = gradients(wanted, hidden, head.linear.weight), torch.rand(1)
    torch.manual_seed(7)
    found = functional.cross_entropy(deferred(head, hidden, 3), labels, reduction=reduction).sum()  # type: ignore[arg-type]
    torch.testing.assert_close(found, wanted)
    assert far(gradients(found, hidden, head.linear.weight), whole) <= TOLERANCE
    assert torch.equal(torch.rand(1), after), "a recomputation leaves random states as they were"


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_autocast_casts_in_backward_as_in_forward(reduction: str) -> None:
    head, (hidden, labels) = linear(), given_tokens(6, 16, ignored=0.0)
    hidden.requires_grad_()

    def run(logits_of: Callable[[], Any]) -> list[torch.Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = functional.cross_entropy(logits_of().float(), labels, reduction=reduction).sum()
        return [found.detach(), *gradients(found, hidden, head.weight)]

    whole, tiles = run(lambda: head(hidden)), run(lambda: deferred(head, hidden, 1))
    assert all(torch.equal(one, other) for one, other in zip(tiles, whole, strict=True)), "one tile: the same bits"
    # A weight's gradient of bfloat16 products is rounded once per tile: 2**-8 of the largest.
    assert far(run(lambda: deferred(head, hidden, 3)), whole) < 2**-7


def test_weights_of_bfloat16_have_a_loss_of_float32() -> None:
    head, (hidden, labels) = linear().bfloat16(), given_tokens(6, 16)
    logits = deferred(head, hidden.bfloat16(), 4)
    assert logits.dtype is torch.bfloat16
    found = functional.cross_entropy(logits.float(), labels)
    assert found.dtype is torch.float32
    wanted = functional.cross_entropy(head(hidden.bfloat16()).float(), labels)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0)
    # A factor that bfloat16 does not hold is not rounded to it: all gradients would be off the same way.
    factor = 1.0037
    (plain,), (times,) = gradients(found, head.weight), gradients(_again(head, hidden, labels) * factor, head.weight)
    assert torch.equal(times, (plain.float() * factor).bfloat16())
    assert not torch.equal(times, plain * torch.tensor(factor).bfloat16()), "the wrong variant"


def _again(head: nn.Module, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = functional.cross_entropy(deferred(head, hidden.bfloat16(), 4).float(), labels)
    return found


def test_half_precision_forms_gradients_of_the_scaled_loss() -> None:
    """Formed in forward they would be formed before they are scaled, and vanish."""
    tokens = 2**17
    head, (hidden, labels) = linear(bias=False).half(), given_tokens(8, tokens, ignored=0.0)
    hidden = hidden.half().requires_grad_()
    scale = 2.0**14
    found = functional.cross_entropy(deferred(head, hidden, 4).float(), labels)
    tiles = gradients(found * scale, hidden)[0].double() / scale
    exact_head, exact = linear(bias=False).double(), hidden.detach().double().requires_grad_()
    with torch.no_grad():
        exact_head.weight.copy_(head.weight)
    whole = gradients(functional.cross_entropy(exact_head(exact), labels), exact)[0]
    assert float((tiles - whole).norm() / whole.norm()) < 2e-3, "some roundings of 2**-11"
    formed = gradients(functional.cross_entropy(head(hidden).float(), labels), hidden)[0].double()
    assert float((formed - whole).norm() / whole.norm()) > 4e-3, "the wrong variant: scaled afterwards"


@pytest.mark.parametrize(
    ("use", "named"),
    [
        (lambda logits, labels: logits.softmax(0).sum(), "Tensor.softmax"),
        (lambda logits, labels: functional.log_softmax(logits, -1).sum(), "log_softmax"),
        (lambda logits, labels: logits.transpose(0, 1), "Tensor.transpose"),
        (lambda logits, labels: logits.view(-1, 3), "last dim is not the vocabulary"),
        (lambda logits, labels: logits + torch.ones(len(labels), 1), r"add with a tensor of shape \[8, 1\]"),
        (lambda logits, labels: logits[labels > 0], "an index"),
        (lambda logits, labels: logits[..., 0], "the logits of one word"),
        (lambda logits, labels: torch.cat([logits, logits]), "cat"),
        (lambda logits, labels: functional.cross_entropy(logits, labels, torch.ones(WORDS)), "weights of classes"),
        (lambda logits, labels: functional.cross_entropy(logits, torch.ones(8, WORDS)), "probabilities"),
        (lambda logits, labels: functional.mse_loss(logits, logits), "mse_loss"),
    ],
)
def test_what_needs_whole_logits_is_refused_by_name(use: LossOf, named: str) -> None:
    hidden, labels = given_tokens(0, 8, ignored=0.0)
    with pytest.raises(WholeLogitsError, match=f"needs whole logits: it uses .*{named}"):
        use(deferred(linear(), hidden, 2), labels)


def test_a_second_backward_and_a_graph_of_backward_are_refused() -> None:
    head, (hidden, labels) = linear(), given_tokens(0, 8)
    loss = functional.cross_entropy(deferred(head, hidden, 2), labels)  # type: ignore[arg-type]
    loss.backward(retain_graph=True)
    with pytest.raises(ScheduleError, match="for the second time"):
        loss.backward()
    other = functional.cross_entropy(deferred(head, hidden, 2), labels)  # type: ignore[arg-type]
    with pytest.raises(ScheduleError, match="create_graph=True"):
        torch.autograd.grad(other, head.weight, create_graph=True)


def test_without_gradients_nothing_is_formed() -> None:
    head, (hidden, labels) = linear(), given_tokens(0, 8)
    with torch.no_grad():
        found = functional.cross_entropy(deferred(head, hidden, 3), labels)  # type: ignore[arg-type]
    assert not found.requires_grad
    torch.testing.assert_close(found, functional.cross_entropy(head(hidden), labels).detach())
    frozen = functional.cross_entropy(deferred(linear().requires_grad_(False), hidden, 3), labels)  # type: ignore[arg-type]
    assert not frozen.requires_grad
