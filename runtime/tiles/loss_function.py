"""What a loss needs of logits, tile by tile over tokens: all logits together never exist.

[Note: Gradients formed in forward]
A mean or a sum over tokens has one incoming gradient, which scales all others.  Its gradients can be formed while
forward has a tile's logits at hand, and be scaled in backward: the head's product runs once per tile, not twice.  Where
the incoming gradient differs by token, or where half precision needs its loss scaled *before* gradients are formed,
backward computes each tile's logits again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch

from ...shared.basics.errors import ScheduleError
from .passes import in_passes

_SCALED_AT_ONCE: Final = 2**24
"""Elements of a gradient that are widened at once."""
TileFunction = Callable[[torch.Tensor, Sequence[torch.Tensor], Sequence[torch.Tensor]], torch.Tensor]
"""From a tile's hidden states (tokens, hidden), its part of tensors by token, and the weights: what the tile gives."""


_FROM_LOSS_TO_TILES: Final = 8
"""Operations between a loss and its tiles, at most: divisions and sums."""


@dataclass(frozen=True, slots=True)
class TiledWork:
    """One function of hidden states that treats each token by itself."""

    run: TileFunction
    num_tiles: int
    adds_up: bool
    """Whether results of tiles are scalars that add up; else they have one row for each token, and are joined."""
    forms_gradients: bool = False
    """Whether gradients are formed in forward (see [Note: Gradients formed in forward]); only of what adds up."""


def tiled(
    work: TiledWork, hidden: torch.Tensor, by_token: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]
) -> torch.Tensor:
    """``work.run`` over ``hidden`` (tokens, hidden), in at most ``work.num_tiles`` tiles of equal numbers of tokens.

    ``by_token`` have tokens as their first dim and get no gradient.  ``weights`` get one gradient each per backward,
    the sum over tiles, in their own element type: hooks on them fire once.  Random states and autocast of forward hold
    in a recomputation.  Backward runs once, and keeps no graph of itself.
    """
    result: torch.Tensor = _Tiled.apply(work, torch.is_grad_enabled(), len(by_token), hidden, *by_token, *weights)  # type: ignore[no-untyped-call]
    return result


def beneath_tiles(node: Any) -> list[Any]:
    """What a loop's variable holds of the graph of its loss; of a loss by tiles, what lies beneath the tiles.

    A number of tokens at most is held by the tiles themselves; it counts among a loop's losses.
    """
    found = node
    for _ in range(_FROM_LOSS_TO_TILES):
        if found is None:
            break
        if found.name() == f"{_Tiled.__name__}Backward":
            return [beneath for beneath, _ in found.next_functions if beneath is not None]
        found = next((earlier for earlier, _ in found.next_functions if earlier is not None), None)
    return [] if node is None else [node]


def spans(num_tokens: int, num_tiles: int) -> list[slice]:
    """Tiles of ``num_tokens``: as even as can be, none of them empty unless there are no tokens."""
    count = max(1, min(num_tiles, num_tokens))
    small, more = divmod(num_tokens, count)
    ends = [small * (tile + 1) + min(tile + 1, more) for tile in range(count)]
    return [slice(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]


class _Surroundings:
    """What an operation of forward depends on beside its tensors: autocast, and random states."""

    def __init__(self, device: torch.device) -> None:
        self._kind = device.type
        self._casts = torch.is_autocast_enabled(device.type)
        self._dtype = torch.get_autocast_dtype(device.type)
        self._host_state = torch.get_rng_state()
        self._device = device if device.type == "cuda" else None
        self._device_state = torch.cuda.get_rng_state(device) if self._device is not None else None

    def casting(self) -> Any:
        """As autocast was, without its memory of casts: that would keep one of each tile."""
        return torch.autocast(self._kind, dtype=self._dtype, enabled=self._casts, cache_enabled=False)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Within the block, random numbers are those that forward had."""
        with torch.random.fork_rng(devices=[] if self._device is None else [self._device]), self.casting():
            torch.set_rng_state(self._host_state)
            if self._device is not None and self._device_state is not None:
                torch.cuda.set_rng_state(self._device_state, self._device)
            yield


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, work: TiledWork, has_graph: bool, num_by_token: int, hidden: torch.Tensor, *others: torch.Tensor
    ) -> torch.Tensor:
        by_token, weights = others[:num_by_token], others[num_by_token:]
        needs = [ctx.needs_input_grad[3], *ctx.needs_input_grad[4 + num_by_token :]]
        ctx.work, ctx.num_by_token, ctx.needs, ctx.formed = work, num_by_token, needs, None
        tiles = spans(len(hidden), work.num_tiles)
        surroundings = ctx.surroundings = _Surroundings(hidden.device)
        if work.forms_gradients and has_graph and any(needs):
            sums = _Sums(hidden, weights, needs)
            with surroundings.casting():
                total = _added(sums.add(work, tile, hidden, by_token, None) for tile in in_passes(tiles))
            ctx.formed = sums
            return total
        if has_graph:
            ctx.save_for_backward(hidden, *others)
        with surroundings.casting():
            results = (work.run(hidden[tile], [of[tile] for of in by_token], weights) for tile in in_passes(tiles))
            return _added(results) if work.adds_up else torch.cat(list(results))

    @staticmethod
    def backward(ctx: Any, *incoming: torch.Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise ScheduleError(
                "backward of a loss by tiles keeps a graph of itself (create_graph=True), to be differentiated again, "
                "but the logits are gone. Call loss.backward() alone, or train with loss_tiles 1."
            )
        (upstream,) = incoming
        if ctx.work.forms_gradients:
            formed, ctx.formed = ctx.formed, None
            if formed is None:
                raise ScheduleError(
                    "backward of a loss by tiles runs for the second time, but the gradients that forward formed have "
                    "been given away. Add the losses up and call backward() once."
                )
            # Held by nobody else from here on, so that a parameter takes its gradient as it is.
            grads = formed.scaled(upstream, ctx.work.num_tiles)
        else:
            grads = _recomputed(ctx, upstream)
        return (None, None, None, grads[0], *[None] * ctx.num_by_token, *grads[1:])


def _recomputed(ctx: Any, upstream: torch.Tensor) -> list[torch.Tensor | None]:
    """Gradients of hidden states and weights from logits that are computed again."""
    hidden, *others = ctx.saved_tensors
    by_token, weights = others[: ctx.num_by_token], others[ctx.num_by_token :]
    sums = _Sums(hidden, weights, ctx.needs)
    with ctx.surroundings.again():
        for tile in in_passes(spans(len(hidden), ctx.work.num_tiles)):
            sums.add(ctx.work, tile, hidden, by_token, upstream if ctx.work.adds_up else upstream[tile])
    return sums.gradients


class _Sums:
    """Gradients as tiles add to them: of hidden states in one tensor, of each weight in one."""

    def __init__(self, hidden: torch.Tensor, weights: Sequence[torch.Tensor], needs: Sequence[bool]) -> None:
        self._weights = [
            weight.detach().requires_grad_(needed) for weight, needed in zip(weights, needs[1:], strict=True)
        ]
        self._needs_hidden = needs[0]
        self._hidden = torch.zeros_like(hidden) if needs[0] and not len(hidden) else None
        self._sums: list[torch.Tensor | None] = [None] * len(weights)

    def add(
        self,
        work: TiledWork,
        tile: slice,
        hidden: torch.Tensor,
        by_token: Sequence[torch.Tensor],
        upstream: torch.Tensor | None,
    ) -> torch.Tensor:
        """Add one tile's gradients; gives its result, without a graph."""
        part = hidden[tile].detach().requires_grad_(self._needs_hidden)
        with torch.enable_grad():
            result = work.run(part, [of[tile] for of in by_token], self._weights)
        if not result.requires_grad:
            return result.detach()
        asked = [part] if self._needs_hidden else []
        asked += [weight for weight in self._weights if weight.requires_grad]
        given = None if upstream is None else upstream.to(result.dtype)
        found = list(torch.autograd.grad(result, asked, given, allow_unused=True))
        if self._needs_hidden:
            self._note_hidden(hidden, tile, found.pop(0))
        for place in reversed([place for place, weight in enumerate(self._weights) if weight.requires_grad]):
            # One at a time: a gradient that has been added is held by nobody.
            gradient, had = found.pop(), self._sums[place]
            if gradient is not None:
                self._sums[place] = gradient if had is None else had.add_(gradient)
            del gradient
        return result.detach()

    def _note_hidden(self, hidden: torch.Tensor, tile: slice, gradient: torch.Tensor | None) -> None:
        if tile == slice(0, len(hidden)):
            self._hidden = gradient
            return
        if self._hidden is None:
            self._hidden = torch.empty_like(hidden)
        self._hidden[tile] = 0 if gradient is None else gradient

    @property
    def gradients(self) -> list[torch.Tensor | None]:
        """Of the hidden states, and of each weight; given away."""
        found, self._sums, hidden, self._hidden = self._sums, [], self._hidden, None
        return [hidden, *found]

    def scaled(self, upstream: torch.Tensor, num_tiles: int) -> list[torch.Tensor | None]:
        """``gradients`` times the incoming one, in place; that of the hidden states tile by tile."""
        with torch.no_grad():
            if self._hidden is not None:
                for tile in in_passes(spans(len(self._hidden), num_tiles)):
                    _scale(self._hidden[tile], upstream)
            for gradient in self._sums:
                for begin in range(0, 0 if gradient is None else gradient.numel(), _SCALED_AT_ONCE):
                    assert gradient is not None
                    _scale(gradient.view(-1)[begin : begin + _SCALED_AT_ONCE], upstream)
        return self.gradients


def _scale(gradient: torch.Tensor, factor: torch.Tensor) -> None:
    """Multiply in place by a factor of another type, rounding once: a product with a rounded factor would be biased."""
    if gradient.dtype == factor.dtype:
        gradient.mul_(factor)
    else:
        gradient.copy_(gradient.to(factor.dtype) * factor)


def _added(results: Iterable[torch.Tensor]) -> torch.Tensor:
    """The sum, in the order of tiles."""
    total: torch.Tensor | None = None
    for result in results:
        total = result.clone() if total is None else total.add_(result)
    assert total is not None, "there is at least one tile"
    return total
