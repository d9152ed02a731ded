"""Outputs of parts of a module that somebody records by hooks, such as the logits of a router.

Models of transformers collect them so, for auxiliary losses.  A hook that ran in every tile would see as many outputs
as there are tiles, without a graph, and those of recomputed tiles besides.  So parts run without their hooks in a tile;
what they give is an output of the tiles, and the hooks see it once, whole.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from torch import nn

from ...shared.basics.errors import ScheduleError

_RECORDER: Final = "transformers.utils.output_capturing"
"""The module whose hooks read nothing but the output."""
Recorded = list[tuple[nn.Module, Any]]


def check_hooks(module: nn.Module, name: str) -> None:
    """Raise ScheduleError if a part of ``module`` has hooks that would run once for every tile."""
    for path, part in module.named_modules():
        if part is module:
            continue
        hooks = [*part._forward_pre_hooks.values(), *part._backward_hooks.values(), *part._backward_pre_hooks.values()]
        hooks += [hook for hook in part._forward_hooks.values() if not _is_recorder(hook)]
        if hooks:
            raise ScheduleError(
                f"{name}.{path} has a hook, which would run once for every tile of tokens. Remove it, or put it on "
                f"{name}, or train with mlp_tiles = 1."
            )


@contextmanager
def recording(module: nn.Module) -> Iterator[Recorded]:
    """Within the block, parts of ``module`` run without hooks; gives what those that had any return, in order."""
    found: Recorded = []

    def note(part: nn.Module, _: Any, output: Any) -> None:
        found.append((part, output))

    hooked = [(part, part._forward_hooks) for part in module.modules() if part is not module and part._forward_hooks]
    for part, _ in hooked:
        part._forward_hooks = OrderedDict[int, Callable[..., Any]]()
        part.register_forward_hook(note)
    try:
        yield found
    finally:
        for part, hooks in hooked:
            part._forward_hooks = hooks


def tell_hooks(recorded: Recorded) -> None:
    """Let the hooks of parts see what these returned over all tokens."""
    for part, output in recorded:
        for hook in part._forward_hooks.values():
            hook(part, (), output)


def _is_recorder(hook: Callable[..., Any]) -> bool:
    return getattr(hook, "__module__", None) == _RECORDER
