"""Whether a module is token-wise, found out by running it on made-up values.

[Note: Values in little memory]
A module may have weights that are on no device, or billions of them.  It is tried with others: every weight is a view
of one short random vector whose strides overlap, so that all rows differ and the whole takes little memory: next to
none for a matrix, and as much as one of them for many matrices.

Many of the tokens are equal.  A mixture of experts sends these to the same experts, so that one whose experts have room
for some tokens of all leaves some out, and others where a tile has fewer.

A packed map is tried as the plain one that it stands for: kernels of packed maps read their scales from a state of
their own, which holds the model's, not made-up ones.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final, cast

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from ...shared.basics.errors import ScheduleError
from ..quantized.layers import quantized_layers
from .mlp import TiledModule
from .recorded_outputs import recording

_EQUAL: Final = 80
_OTHERS: Final = 16
"""Tokens that are tried: equal ones, and others behind them."""
_TILES: Final = 3
_TOLERANCE: Final = 1e-3
"""Relative to the largest output.  Kernels add in another order for another number of tokens, in float32."""
_ERRORS: Final = (RuntimeError, ValueError, TypeError, IndexError, AssertionError, AttributeError, NotImplementedError)

_Given = tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]


def why_not_token_wise(
    module: nn.Module, name: str, *, widths: Sequence[int] = (), may_draw: bool = True
) -> str | None:
    """Why ``module`` cannot run in tiles of tokens; None if it can.  Nothing of it is changed.

    ``widths``: numbers of features that it may be given, beside those that its weights suggest; a module without
    weights is tried with these alone.  ``may_draw``: whether it may use random numbers in training.
    """
    norm = next((path for path, part in module.named_modules() if isinstance(part, _BatchNorm)), None)
    if norm is not None:
        return f"it mixes tokens: {name}.{norm} normalizes over all of them"
    if next(module.parameters(), None) is None and not widths:
        return "it has no weights"
    return _Trial(module, name, widths).verdict(may_draw=may_draw)


class _Trial:
    """One module on made-up values."""

    def __init__(self, module: nn.Module, name: str, widths: Sequence[int]) -> None:
        self._module, self._name, self._widths = module, name, widths
        self._generator = torch.Generator().manual_seed(0)
        self._packed = [layer for layer in quantized_layers(module) if not layer.quantization.type.is_grouped]
        self._plain = {id(layer.module): self._made(torch.empty(layer.shape, device="meta")) for layer in self._packed}
        """The maps that packed ones stand for, by these."""
        self._values = {key: self._made(parameter) for key, parameter in module.named_parameters()}
        self._buffers = {key: self._made(buffer) for key, buffer in module.named_buffers()}

    def verdict(self, *, may_draw: bool) -> str | None:
        """As ``why_not_token_wise``."""
        given = self._given()
        if isinstance(given, str):
            return given
        tensors = pytree.tree_leaves((given, self._buffers))
        before = [tensor.clone() for tensor in tensors]
        try:
            if not may_draw and not _are_close(*(self._whole(given, training=True, seed=seed) for seed in (0, 1))):
                return "it draws random numbers"
            for training in (True, False) if may_draw else (True,):
                whole, tiled = self._whole(given, training), self._tiled(given, training)
                if any(not torch.equal(a, b) for a, b in zip(before, tensors, strict=True)):
                    return "it changes its input or a buffer of its own whenever it runs"
                if _are_close(whole, tiled):
                    return None
                if training and _are_close(whole, self._whole(given, training, seed=1)):
                    break  # no random numbers: the tiles make the difference
        except ScheduleError as error:
            return str(error)
        except _ERRORS as error:
            return f"it could not be tried on a part of the tokens: {type(error).__name__}: {_first_line(error)}"
        return "it mixes tokens: its output for some tokens depends on which others are there"

    def _made(self, like: torch.Tensor) -> torch.Tensor:
        """Values as [Note: Values in little memory] has them."""
        if not like.is_floating_point():
            return torch.zeros(like.shape, dtype=like.dtype)
        # Kernels for groups of matrices insist on dense ones, each of which begins at a round address.
        matrix = [1, 3] if like.dim() < 3 else [like.shape[-1], 1]
        strides = [*([16] * (like.dim() - 2)), *matrix[-like.dim() :]] if like.dim() else []
        length = 1 + sum(stride * max(0, size - 1) for stride, size in zip(strides, like.shape, strict=True))
        values = torch.randn(length, generator=self._generator)
        fan_in: int = max(1, min(like.shape[-2:], default=1))
        made = (values / math.sqrt(fan_in)).as_strided(like.shape, strides)
        # A gain of a normalization is about 1, as it is in a model.
        return made if like.dim() > 1 else made.contiguous() + 1

    def _given(self) -> _Given | str:
        """Arguments that the module accepts: of how many features, the shapes of its weights suggest."""
        num_given, names = _required(self._module.forward)
        error: BaseException | None = None
        shapes = [*(value.shape for value in (*self._plain.values(), *self._values.values())), self._widths]
        sizes = dict.fromkeys(size for shape in shapes for size in reversed(shape) if size > 1)
        for lead in ((1, _EQUAL + _OTHERS), (_EQUAL + _OTHERS,)):
            for size in sizes:
                args = tuple(self._tokens(lead, size) for _ in range(num_given))
                given = args, {name: self._tokens(lead, size) for name in names}
                try:
                    self._whole(given, training=False)
                except _ERRORS as raised:
                    error = error or raised
                    continue
                return given
        return f"it could not be tried on its own: {type(error).__name__}: {_first_line(error)}"

    def _tokens(self, lead: tuple[int, ...], size: int) -> torch.Tensor:
        tokens = torch.randn(1 + _OTHERS, size, generator=self._generator)
        return torch.cat([tokens[:1].expand(_EQUAL, size), tokens[1:]]).reshape(*lead, size)

    def _whole(self, given: _Given, training: bool, seed: int = 0) -> Any:
        with self._as_tried(training, seed), recording(self._module) as recorded:
            return self._forward(*given[0], **given[1]), [output for _, output in recorded]

    def _tiled(self, given: _Given, training: bool) -> Any:
        tiled = TiledModule(self._name, self._module, self._forward, _TILES)
        with self._as_tried(training, 0):
            result, recorded = tiled.run_recorded(*given)
            return result, [output for _, output in recorded]

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        return torch.func.functional_call(self._module, {**self._values, **self._buffers}, args, kwargs)

    @contextmanager
    def _as_tried(self, training: bool, seed: int) -> Iterator[None]:
        modes = [(part, part.training) for part in self._module.modules()]
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(torch.random.fork_rng(devices=[]))
            for kind in ("cpu", "cuda"):
                stack.enter_context(torch.autocast(kind, enabled=False))
            torch.manual_seed(seed)
            for layer in self._packed:
                stack.enter_context(_plainly(layer.module, self._plain[id(layer.module)]))
            for part, _ in modes:
                part.training = training
            try:
                yield
            finally:
                for part, before in modes:
                    part.training = before


@contextmanager
def _plainly(module: nn.Module, weight: torch.Tensor) -> Iterator[None]:
    """Within the block, the linear map ``module`` has ``weight``."""
    own = module.__dict__.get("forward")
    module.__dict__["forward"] = lambda x: nn.functional.linear(x, weight, cast(torch.Tensor | None, module.bias))
    try:
        yield
    finally:
        del module.__dict__["forward"]
        if own is not None:
            module.__dict__["forward"] = own


def _required(forward: Callable[..., Any]) -> tuple[int, list[str]]:
    """How many arguments a forward insists on by place, and which by name."""
    asked = [p for p in inspect.signature(forward).parameters.values() if p.default is p.empty]
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [p.name for p in asked if p.kind is p.KEYWORD_ONLY]
    return max(1, sum(p.kind in by_place for p in asked)), names


def _are_close(whole: Any, tiled: Any) -> bool:
    leaves, others = pytree.tree_leaves(whole), pytree.tree_leaves(tiled)
    if len(leaves) != len(others):
        return False
    for one, other in zip(leaves, others, strict=True):
        if not isinstance(one, torch.Tensor):
            continue
        if one.shape != other.shape:
            return False
        if one.is_floating_point():
            scale = float(one.abs().max()) if one.numel() else 0.0
            if not torch.allclose(one, other, rtol=_TOLERANCE, atol=_TOLERANCE * scale, equal_nan=True):
                return False
        elif not torch.equal(one, other):
            return False
    return True


def _first_line(error: BaseException | None) -> str:
    return str(error).strip().split("\n", 1)[0][:200]
