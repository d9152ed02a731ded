"""A normalization of an MLP's output, which runs in the MLP's tiles.

[Note: What follows an MLP]
Recomputation of a checkpointed block ends with the last tensor that is saved for its backward.  A normalization behind
the MLP saves its input: tiles would run a second time to make it, and a third time in their own backward.  So an MLP
that is followed by a normalization gives a stand-in (``deferred_hidden.py``), and the normalization runs MLP and
itself, tile by tile.  Nothing behind the two saves anything, and tiles run twice in all.  If anybody else asks for what
the MLP gives, it runs in tiles by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn

from .deferred_hidden import DeferredHidden, NotOneTensorError, Scope, Surroundings, are_hidden, defer, has_hooks
from .mlp import TiledModule
from .mlp_token_wise import why_not_token_wise

_NAMES: Final = frozenset(
    ("post_feedforward_layernorm", "post_mlp_layernorm", "post_feedforward_norm", "post_ffn_norm")
)
"""What models call a normalization of an MLP's output, in lower case."""
_DENSE: Final = ("Linear", "Conv1D")
"""Names of classes of parts with parameters: no tokens are sent to one part or another."""


def follower_of(parent: nn.Module, mlp: nn.Module) -> nn.Module | None:
    """The normalization of ``mlp``'s output within ``parent``; None if there is none, or it is not token-wise.

    An MLP of experts may give more than one tensor, and has none.
    """
    parts = list(mlp.modules())
    is_dense = all(type(part).__name__ in _DENSE for part in parts if part._parameters)
    is_dense = is_dense and not any(isinstance(part, nn.ModuleList) for part in parts)
    found = [(name, module) for name, module in parent.named_children() if name.lower() in _NAMES]
    if not is_dense or len(found) != 1:
        return None
    ((name, norm),) = found
    return norm if why_not_token_wise(norm, name, may_draw=False) is None else None


class FollowedMlp:
    """``mlp`` and the ``norm`` of its output: see [Note: What follows an MLP]."""

    def __init__(self, name: str, mlp: nn.Module, norm: nn.Module, num_tiles: int) -> None:
        self._name, self._mlp, self._norm = name, mlp, norm
        self._mlp_alone = mlp.forward
        self._norm_alone = norm.forward
        self._in_tiles = TiledModule(name, mlp, mlp.forward, num_tiles)
        self._both = TiledModule(name, nn.ModuleList([mlp, norm]), self._run_both, num_tiles)
        self._scope = Scope(is_open=False)

    def _run_both(self, hidden: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self._norm_alone(self._mlp_alone(hidden))
        return found

    def mlp_forward(self, *args: Any, **kwargs: Any) -> Any:
        """That of the MLP: a stand-in, unless somebody sees what it gives."""
        if kwargs or len(args) != 1 or not are_hidden(args[0]) or has_hooks(self._mlp) or has_hooks(self._norm):
            return self._in_tiles.run(*args, **kwargs)
        self._scope = Scope(what=f"the output of {self._name}", where="its block", knob="mlp_tiles")
        try:
            return defer(self._mlp, self._mlp_alone, args[0], self._scope, whole=self._in_tiles.run)
        except NotOneTensorError:
            return self._in_tiles.run(*args)

    def norm_forward(self, *args: Any, **kwargs: Any) -> Any:
        """That of the normalization: both, of the MLP's input, if it is given the stand-in."""
        given = args[0] if len(args) == 1 and not kwargs else None
        if isinstance(given, DeferredHidden) and given.scope is self._scope and given.is_first:
            self._scope.is_open = given.is_whole_for(Surroundings.of(given.base.device.type))
            if not self._scope.is_open:
                return self._both.run(given.base)
        return self._norm_alone(*args, **kwargs)


def forwards_of(
    name: str, mlp: nn.Module, norm: nn.Module | None, num_tiles: int
) -> list[tuple[nn.Module, Callable[..., Any]]]:
    """Modules with the forward that each has in tiles."""
    if norm is None:
        return [(mlp, TiledModule(name, mlp, mlp.forward, num_tiles).run)]
    both = FollowedMlp(name, mlp, norm, num_tiles)
    return [(mlp, both.mlp_forward), (norm, both.norm_forward)]
