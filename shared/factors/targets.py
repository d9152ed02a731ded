"""Which linear maps are factorised where nobody names them, and what a name means: one rule, with and without torch."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Final

from ..basics.errors import WorkloadError
from ..basics.suggestions import did_you_mean

_ROUTERS: Final = ("gate", "router", "classifier")
"""What maps are called that choose experts: their few outputs are scores, and no features."""


def is_named(path: str, target: str) -> bool:
    """Whether ``target`` is the path, the end of it, or a pattern of either."""
    return (
        path == target or path.endswith(f".{target}") or fnmatchcase(path, target) or fnmatchcase(path, f"*.{target}")
    )


def is_default(path: str, shape: tuple[int, ...]) -> bool:
    """Whether a linear map of a block is factorised unless maps are named: no router, and none of one direction."""
    return path.rpartition(".")[2] not in _ROUTERS and (len(shape) != 2 or min(shape) > 1)


def no_such_map(target: str, paths: Iterable[str]) -> WorkloadError:
    """That nothing is called ``target``, with what there is; ``paths``: of all linear maps, in order."""
    ends = dict.fromkeys(path.rpartition(".")[2] for path in paths)
    return WorkloadError(f"no linear map is called {target!r}, which is to be factorised. {did_you_mean(target, ends)}")
